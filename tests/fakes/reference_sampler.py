"""The definition of sampling, one row at a time in plain numpy and float64, for the tests of the
device's sampler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from holdfast.wire.requests import SamplingParams

Floats = npt.NDArray[np.float64]
CHUNK = 2_000  # rows drawn at a time, where a distribution is counted


def edited_logits(
    logits: Floats, *, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]
) -> Floats:
    """Logit bias, repetition, presence and frequency, token by token."""
    edited = logits.astype(np.float64).copy()
    for token_id, bias in params.logit_bias.items():
        edited[token_id] = edited[token_id] + bias if bias > -100 else -np.inf
    for token_id in set(prompt) | set(generated):
        if edited[token_id] > 0:
            edited[token_id] /= params.repetition_penalty
        else:
            edited[token_id] *= params.repetition_penalty
    for token_id in set(generated):
        edited[token_id] -= params.presence_penalty + params.frequency_penalty * list(
            generated
        ).count(token_id)
    return edited


def log_probabilities(logits: Floats) -> Floats:
    """The logarithm of the softmax."""
    with np.errstate(divide="ignore"):
        return np.asarray(logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))


def probabilities(logits: Floats, *, params: SamplingParams, tie: float = 4e-5) -> Floats:
    """The distribution from which a row of edited logits is drawn.

    Tokens within `tie` (nats) of a filter's edge are kept.
    """
    if params.temperature < 1e-5 or params.top_k == 1 or params.top_p <= 0:
        return np.asarray(np.eye(len(logits))[int(np.argmax(logits))])
    scaled = (logits - logits.max()) / params.temperature
    weights = np.exp(scaled)
    ordered = np.sort(weights)[::-1]
    edge = 0.0
    if 0 < params.top_k < len(logits):
        ordered = ordered[: params.top_k]
        edge = ordered[-1]
    if params.top_p < 1:
        before = np.cumsum(ordered) - ordered
        edge = max(edge, ordered[max(1, int((before < params.top_p * ordered.sum()).sum())) - 1])
    edge = max(edge, min(params.min_p, 1.0))
    kept = np.where(weights >= edge * np.exp(-tie), weights, 0.0)
    return np.asarray(kept / kept.sum())


def assert_counts_fit(counts: npt.NDArray[np.int64], expected: npt.NDArray[np.float64]) -> None:
    """Compare each token's frequency with its probability; impossible tokens must not occur."""
    assert counts[expected == 0].sum() == 0
    draws = counts.sum()
    common = expected * draws >= 10
    observed = np.append(counts[common], counts[~common].sum())
    hoped = np.append(expected[common], expected[~common].sum()) * draws
    observed, hoped = observed[hoped > 0], hoped[hoped > 0]
    freedom = max(1, len(hoped) - 1)
    statistic = float(((observed - hoped) ** 2 / hoped).sum())
    # Wilson and Hilferty: the cube root of chi-square over its degrees of freedom is nearly normal.
    # 4 deviations: 1 in 30,000.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3
