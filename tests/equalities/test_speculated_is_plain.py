"""Equality four: drafts never change an answer. The drafts here mix right and wrong tokens, so that
some are accepted completely, some partially, some not.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import msgspec
import pytest

from holdfast.wire.commands import ThinkingBudget
from holdfast.worker.cpu import host_decoder
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.layouts import SoloRunner
from holdfast.worker.engine.probe import choose_layout
from holdfast.worker.kv.bits import KVBits
from tests.fakes import distributions
from tests.fakes.architectures import probed
from tests.fakes.caching_worker import open_sequences
from tests.fakes.interleaving import (
    FP32_TOLERANCE,
    SAMPLINGS,
    Played,
    assert_as_alone,
    play,
    random_sequences,
)
from tests.fakes.slow import slow
from tests.fakes.tiny_grammars import SCHEMA, json_grammar, tiny_constraints
from tests.fakes.tiny_models import VOCAB_SIZE, kept_tiny, make_tiny

CONSTRAINTS: tuple[Mapping[str, Any], ...] = (
    {"grammar": json_grammar(SCHEMA)},
    {"grammar": json_grammar(SCHEMA)},
    {"grammar": 'start: /[a-z]+/ "." \n'},
    {
        "grammar": "start: /[a-z]*/ <[261]> /[0-9]*/\n",
        "thinking_budget": ThinkingBudget(tokens=5, end_token_ids=(261,)),
    },
    {"thinking_budget": ThinkingBudget(tokens=4, end_token_ids=(7, 8))},
    {},
)


def some_sequences(name: str, *, longest_prompt: int = 40, wanted: int = 20) -> list[Played]:
    rng = random.Random(name)
    sequences = random_sequences(
        rng, vocab_size=VOCAB_SIZE, count=len(SAMPLINGS), longest_prompt=longest_prompt
    )
    for each, sampling in zip(sequences, SAMPLINGS, strict=True):
        each.sampling = sampling
        each.wanted_tokens = each.leaves_after = rng.randint(wanted // 2, wanted)
    return sequences


def again(each: Played, **changes: Any) -> Played:
    return replace(
        each, read=0, planned=0, tokens=[], logprobs=[], is_open=False, is_done=False, **changes
    )


def assert_the_same(
    engine: Engine,
    sequences: list[Played],
    *,
    depth: int,
    kv_bits: KVBits = "native",
    block_tokens: int | None = None,
) -> list[Played]:
    """Play the sequences without drafts and with drafts."""
    rng = random.Random(depth)
    play(engine, sequences, rng, depth=depth, kv_bits=kv_bits, block_tokens=block_tokens)
    speculated = [again(each, plain=tuple(each.tokens)) for each in sequences]
    play(engine, speculated, rng, depth=depth, kv_bits=kv_bits, block_tokens=block_tokens)
    for each, plain in zip(speculated, sequences, strict=True):
        assert each.tokens == plain.tokens
        for scored, expected in zip(each.logprobs, plain.logprobs, strict=True):
            assert scored.token_id == expected.token_id
            assert scored.logprob == pytest.approx(expected.logprob, abs=FP32_TOLERANCE)
    assert open_sequences(engine) == 0
    return speculated


def assert_some_rejected(speculated: list[Played]) -> None:
    accepted = sum(each.accepted for each in speculated)
    drafted = sum(each.drafted for each in speculated)
    assert 0 < accepted < drafted


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("llama", 1),
        ("gemma3_text", 1),
        ("deepseek_v3", 0),
        *slow(("llama", 0)),
        *slow(("gpt_oss", 0), ("gemma2", 1), ("llama4", 1), ("qwen3_moe", 0), ("cohere2", 1)),
    ],
)
def test_an_answer_does_not_depend_on_drafts(name: str, depth: int) -> None:
    engine = Engine(probed(name), vocab_size=VOCAB_SIZE)
    assert_some_rejected(assert_the_same(engine, some_sequences(name), depth=depth))


@pytest.mark.skipif(bool(host_decoder.unavailable()), reason=host_decoder.unavailable())
@pytest.mark.parametrize(("name", "kv_bits"), [("llama", "native"), ("qwen3", "8/4")])
def test_drafts_change_nothing_where_forward_passes_bypass_mlx(name: str, kv_bits: KVBits) -> None:
    model = make_tiny(name, head_dim=64)
    host_decoder.attach(model, mx.float32)
    assert host_decoder.decoder_of(model) is not None
    runner = choose_layout(model, vocab_size=VOCAB_SIZE)
    engine = Engine(runner, vocab_size=VOCAB_SIZE)
    form = engine.measure_costs().form
    assert form is not None
    runner.set_form(form)
    sequences = some_sequences(f"{name} without MLX")
    assert_some_rejected(assert_the_same(engine, sequences, depth=0, kv_bits=kv_bits))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("penalties", 400),
        *slow(*((name, distributions.ANSWERS) for name in distributions.SAMPLINGS)),
    ],
)
def test_sampled_tokens_follow_the_models_distribution(name: str, count: int) -> None:
    """A chi-square test on the first three tokens of many answers, most of which follow drafts."""
    engine = Engine(probed("llama"), vocab_size=VOCAB_SIZE)
    sampling = msgspec.structs.replace(distributions.PLAIN, **distributions.SAMPLINGS[name])
    rng = random.Random(f"chi-square {name}")
    outcomes: list[tuple[int, ...]] = []
    accepted = 0
    for first_seed in range(0, count, 200):
        answers = [
            Played(
                prompt=distributions.PROMPT,
                wanted_tokens=4,
                leaves_after=4,
                joins_at=0,
                sampling=msgspec.structs.replace(sampling, seed=seed),
                plain=tuple(rng.choices(distributions.ALLOWED, k=4)),
            )
            for seed in range(first_seed, first_seed + 200)
        ]
        play(engine, answers, rng, depth=0)
        outcomes += [tuple(each.tokens[:3]) for each in answers]
        accepted += sum(each.accepted for each in answers)
    assert accepted > count // 8
    chances = distributions.chances_of_outcomes(kept_tiny("llama"), sampling)
    distributions.assert_drawn_from(chances, outcomes)


def test_greedy_answers_are_those_of_the_model_alone() -> None:
    engine = Engine(probed("llama"), vocab_size=VOCAB_SIZE)
    sequences = [replace(each, sampling=SAMPLINGS[0]) for each in some_sequences("greedy")]
    for each in assert_the_same(engine, sequences, depth=1):
        assert_as_alone(kept_tiny("llama"), each, tolerance=FP32_TOLERANCE)


@pytest.mark.parametrize(
    ("name", "depth"), [("qwen3_next", 0), ("mamba2", 1), *slow(("qwen3_next", 1), ("mamba2", 0))]
)
def test_states_that_cannot_drop_tokens_recompute_accepted_ones(name: str, depth: int) -> None:
    engine = Engine(probed(name), vocab_size=VOCAB_SIZE)
    assert engine.recomputes_accepted
    assert_some_rejected(assert_the_same(engine, some_sequences(name), depth=depth))


def test_mlx_lms_own_caches_get_no_drafts() -> None:
    engine = Engine(SoloRunner(kept_tiny("llama"), None), vocab_size=VOCAB_SIZE)
    speculated = assert_the_same(engine, some_sequences("solo", wanted=6), depth=0)
    assert sum(each.drafted for each in speculated) == 0


@pytest.mark.parametrize(("kv_bits", "depth"), [("8/4", 1), *slow(("8", 0))])
def test_drafts_change_nothing_with_quantized_kv(kv_bits: KVBits, depth: int) -> None:
    """Prompts that end shortly before a block, so that drafts reach its end."""
    runner = choose_layout(make_tiny("llama", head_dim=64), vocab_size=VOCAB_SIZE)
    engine = Engine(runner, vocab_size=VOCAB_SIZE)
    form = engine.measure_costs().form
    assert form is not None
    runner.set_form(form)
    rng = random.Random(kv_bits)
    sequences = some_sequences(f"llama {kv_bits}", wanted=30)[:3]
    for each in sequences:
        each.prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(235, 256)))
    assert_some_rejected(assert_the_same(engine, sequences, depth=depth, kv_bits=kv_bits))


@pytest.mark.parametrize(
    ("name", "depth"), [("llama", 1), *slow(("llama", 0), ("gemma2", 0), ("gemma3_text", 1))]
)
def test_drafts_change_nothing_with_grammars_and_thinking_budgets(name: str, depth: int) -> None:
    engine = Engine(probed(name), vocab_size=VOCAB_SIZE, constraints=tiny_constraints())
    sequences = some_sequences(f"{name} constrained", wanted=40)
    for each, constraints in zip(sequences, CONSTRAINTS, strict=True):
        each.constraints = constraints
    assert_some_rejected(assert_the_same(engine, sequences, depth=depth))


def test_tokens_forced_by_a_grammar_are_free_drafts() -> None:
    engine = Engine(probed("llama"), vocab_size=VOCAB_SIZE, constraints=tiny_constraints())
    each = replace(some_sequences("forced", wanted=30)[0], constraints=CONSTRAINTS[0], joins_at=0)
    (speculated,) = assert_the_same(engine, [each], depth=0)
    assert speculated.accepted >= len('{"kind":"')
