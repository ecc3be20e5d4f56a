"""The distribution of the first tokens of sampled answers: as mlx-lm's model and the sampling
parameters define it, and a chi-square test of answers against it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from holdfast.wire.requests import SamplingParams

PROMPT = tuple(range(38, 46))
ALLOWED = (45, 70, 80, 90, 100)  # the first one is part of the prompt
ANSWERS = 800
# only these tokens are likely; tests of further parameters replace some of these
PLAIN = SamplingParams(temperature=0.3, logit_bias=dict.fromkeys(ALLOWED, 100.0), seed=0)
SAMPLINGS: dict[str, dict[str, float | int]] = {
    "temperature": {},
    "top-p": {"temperature": 0.5, "top_p": 0.85},
    "top-k": {"temperature": 0.5, "top_k": 3},
    "top-k and top-p": {"temperature": 0.6, "top_k": 4, "top_p": 0.9},
    "min-p": {"temperature": 0.6, "min_p": 0.2},
    "penalties": {
        "temperature": 0.5,
        # small, because it divides logits of more than 100
        "repetition_penalty": 1.003,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
    },
}


def chances_of_outcomes(model: Any, sampling: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of each sequence of three allowed tokens after the prompt."""
    outcomes: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for outcome, chance in outcomes.items():
            logits = model(mx.array([[*PROMPT, *outcome]]))[0, -1].astype(mx.float32)
            shares = _shares(np.array(logits, np.float64), outcome, sampling)
            for token in ALLOWED:
                if shares[token]:
                    longer[(*outcome, token)] = chance * shares[token]
        outcomes = longer
    return outcomes


def _shares(
    logits: npt.NDArray[np.float64], outcome: Sequence[int], sampling: SamplingParams
) -> npt.NDArray[np.float64]:
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    for token in {*PROMPT, *outcome}:
        penalty = sampling.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token, count in Counter(outcome).items():
        logits[token] -= sampling.presence_penalty + count * sampling.frequency_penalty
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    falling = np.argsort(-weights, kind="stable")
    if sampling.top_k:
        weights[falling[sampling.top_k :]] = 0.0
    heavier = np.cumsum(weights[falling]) - weights[falling]
    least = sampling.min_p * weights.max()
    weights[falling[heavier >= sampling.top_p * weights.sum()]] = 0.0
    weights[weights < least] = 0.0
    shares: npt.NDArray[np.float64] = weights / weights.sum()
    return shares


def assert_drawn_from(
    chances: dict[tuple[int, ...], float], outcomes: Sequence[tuple[int, ...]]
) -> None:
    """A chi-square test that fails for one in a thousand right distributions."""
    counts = Counter(outcomes)
    expected = {outcome: chance * len(outcomes) for outcome, chance in chances.items()}
    assert counts.keys() <= expected.keys()
    rare = {outcome for outcome, count in expected.items() if count < 5.0}
    cells = [(counts[outcome], expected[outcome]) for outcome in expected.keys() - rare]
    if rare:
        cells.append((sum(counts[each] for each in rare), sum(expected[each] for each in rare)))
    distance = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = len(cells) - 1
    assert freedom >= 5
    assert distance < freedom + 3.5 * math.sqrt(2.0 * freedom)
