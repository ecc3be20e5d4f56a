"""Equality one where some sequences are constrained: they and plain ones in the same batch draw the
same as alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from holdfast.wire.commands import ThinkingBudget
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.layouts import SoloRunner
from tests.fakes.architectures import probed
from tests.fakes.caching_worker import open_sequences
from tests.fakes.interleaving import FP32_TOLERANCE, SAMPLINGS, Played, play, random_sequences
from tests.fakes.slow import slow
from tests.fakes.tiny_grammars import END, SCHEMA, json_grammar, text_of, tiny_constraints
from tests.fakes.tiny_models import VOCAB_SIZE, kept_tiny

LETTERS = 'start: /[a-z]+/ "." \n'
THOUGHT = "start: /[a-z]*/ <[261]> /[0-9]*/\n"
CONSTRAINTS: tuple[Mapping[str, Any], ...] = (
    {"grammar": LETTERS},
    {},
    {"grammar": json_grammar(SCHEMA)},
    {"grammar": THOUGHT, "thinking_budget": ThinkingBudget(tokens=2, end_token_ids=(261,))},
    {"thinking_budget": ThinkingBudget(tokens=3, end_token_ids=(7, 8))},
    {},
)


def a_mix(rng: random.Random) -> list[Played]:
    """Each constraint meets each way of drawing, over the calls."""
    sequences = random_sequences(rng, vocab_size=VOCAB_SIZE, count=6, longest_prompt=20)
    shift = rng.randrange(len(SAMPLINGS))
    for index, each in enumerate(sequences):
        each.constraints, each.sampling = (
            CONSTRAINTS[index],
            SAMPLINGS[(index + shift) % len(SAMPLINGS)],
        )
    return sequences


def alone(engine: Engine, each: Played, *, constraints: Mapping[str, Any] | None = None) -> Played:
    again = replace(
        each,
        constraints=each.constraints if constraints is None else constraints,
        joins_at=0, read=0, planned=0, tokens=[], logprobs=[], is_open=False, is_done=False,
    )  # fmt: skip
    play(engine, [again], random.Random(0), depth=0)
    return again


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("llama", 0),
        ("llama", 1),
        ("qwen3_next", 1),
        *slow(
            ("gemma2", 0),
            ("llama4", 1),
            ("deepseek_v41", 0),
            ("qwen3_next", 0),
            ("gemma2", 1),
            ("llama4", 0),
            ("deepseek_v41", 1),
        ),
    ],
)
def test_constrained_and_plain_sequences_draw_the_same_as_alone(name: str, depth: int) -> None:
    rng = random.Random(f"{name} {depth}")
    engine = Engine(probed(name), vocab_size=VOCAB_SIZE, constraints=tiny_constraints())
    together = a_mix(rng)
    play(engine, together, rng, depth=depth)
    for each in together:
        by_itself = alone(engine, each)
        assert each.tokens == by_itself.tokens
        for scored, expected in zip(each.logprobs, by_itself.logprobs, strict=True):
            assert scored.logprob == pytest.approx(expected.logprob, abs=FP32_TOLERANCE)
    assert {chr(token) for token in together[0].tokens if token != END} <= set(
        "abcdefghijklmnopqrstuvwxyz."
    )
    assert '{"kind":"'.startswith(text_of(together[2].tokens)[:9])
    assert 261 in together[3].tokens[:3] or len(together[3].tokens) < 3
    assert together[4].tokens[3:5] == [7, 8][: max(0, len(together[4].tokens) - 3)]
    assert open_sequences(engine) == 0


def test_in_the_solo_layout_too() -> None:
    rng = random.Random("solo")
    engine = Engine(
        SoloRunner(kept_tiny("llama"), None), vocab_size=VOCAB_SIZE, constraints=tiny_constraints()
    )
    together = a_mix(rng)
    play(engine, together, rng, depth=1)
    assert [each.tokens for each in together] == [alone(engine, each).tokens for each in together]


def test_an_unused_budget_does_not_change_the_answer() -> None:
    engine = Engine(probed("llama"), vocab_size=VOCAB_SIZE, constraints=tiny_constraints())
    for sampling in SAMPLINGS:
        plain = Played(
            prompt=(5, 6, 7, 8), wanted_tokens=12, leaves_after=12, joins_at=0, sampling=sampling
        )
        budget = ThinkingBudget(tokens=12, end_token_ids=(260, 261))
        assert (
            alone(engine, plain, constraints={"thinking_budget": budget}).tokens
            == alone(engine, plain).tokens
        )


def test_log_probabilities_are_those_before_the_mask() -> None:
    engine = Engine(probed("llama"), vocab_size=VOCAB_SIZE, constraints=tiny_constraints())
    free = Played(prompt=(1, 2, 3), wanted_tokens=1, leaves_after=1, joins_at=0)
    masked, plain = alone(engine, free, constraints={"grammar": LETTERS}), alone(engine, free)
    assert masked.tokens != plain.tokens
    assert masked.logprobs[0].top == plain.logprobs[0].top
    assert masked.logprobs[0].logprob < 0
