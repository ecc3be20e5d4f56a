"""The engine on real tiny models: draws, scores, failures, preemption, in-place growth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from holdfast.errors import NoEmbeddings
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.requests import Pooling, SamplingParams, TokenIds
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.layouts import SoloRunner
from holdfast.worker.engine.plan import Span, SpanResult, StepPlan
from holdfast.worker.engine.probe import choose_layout
from tests.fakes.architectures import probed
from tests.fakes.live_state import live_bytes
from tests.fakes.slow import slow
from tests.fakes.tiny_models import VOCAB_SIZE, kept_tiny, make_tiny

PROMPT = (5, 17, 3, 99, 42, 7, 250, 11)


def engine_of(name: str, *, model: Any = None) -> Engine:
    runner = probed(name) if model is None else choose_layout(model, vocab_size=VOCAB_SIZE)
    return Engine(runner, vocab_size=VOCAB_SIZE)


def a_request(request_id: str = "a", **changes: Any) -> SequenceRequest:
    fields: dict[str, Any] = {
        "prompt_token_ids": TokenIds.of(PROMPT),
        "max_tokens": 64,
        "sampling": SamplingParams(temperature=0.0, seed=1),
    }
    return SequenceRequest(request_id=request_id, **{**fields, **changes})


def step(engine: Engine, *spans: Span) -> list[SpanResult]:
    return list(engine.collect(engine.dispatch(StepPlan(spans=spans))))


def draw(
    engine: Engine, request: SequenceRequest, count: int, *, generated: tuple[int, ...] = ()
) -> Iterator[SpanResult]:
    """Open the request, prefill known tokens, and draw `count` tokens."""
    known = len(request.prompt_token_ids) + len(generated)
    engine.open(request, generated=generated, capacity_tokens=known + count)
    yield step(engine, Span(request_id=request.request_id, start=0, tokens=known, draws=True))[0]
    for position in range(known, known + count - 1):
        yield step(
            engine, Span(request_id=request.request_id, start=position, tokens=1, draws=True)
        )[0]
    engine.close(request.request_id)


def tokens_of(results: Iterator[SpanResult]) -> list[int]:
    return [token for result in results for token in result.token_ids]


GREEDY = SamplingParams(temperature=0.0, seed=0)
PLAIN = SamplingParams(temperature=1.0, seed=7)
EVERYTHING = SamplingParams(
    temperature=0.9,
    top_p=0.9,
    top_k=40,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    seed=3,
)


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("llama", GREEDY),
        ("llama", PLAIN),
        ("llama", EVERYTHING),
        ("gemma3_text", EVERYTHING),
        ("qwen3_next", PLAIN),
        ("llama4", EVERYTHING),
        *slow(*((name, GREEDY) for name in ("gemma3_text", "qwen3_next", "llama4"))),
        *slow(("gemma3_text", PLAIN), ("qwen3_next", EVERYTHING), ("llama4", PLAIN)),
    ],
)
def test_a_preempted_sequence_continues_unchanged(name: str, sampling: SamplingParams) -> None:
    engine = engine_of(name)
    request = a_request(sampling=sampling)
    whole = tokens_of(draw(engine, request, 8))
    again = whole[:3] + tokens_of(draw(engine, request, 5, generated=tuple(whole[:3])))
    assert again == whole


@pytest.mark.parametrize(
    "name",
    ["llama", "gemma3_text", "qwen3_next", "falcon_h1", "llama4", *slow("qwen3", "gemma2")],
)
def test_prompt_scores_are_the_models_log_probabilities_for_any_chunks(
    name: str,
) -> None:
    engine, model = engine_of(name), kept_tiny(name)
    prompt = PROMPT * 3  # longer than the windows
    logits = model(mx.array([prompt]))[0].astype(mx.float32)
    expected = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()
    engine.open(
        a_request(prompt_token_ids=TokenIds.of(prompt), want_prompt_logprobs=True, top_logprobs=2),
        capacity_tokens=32,
    )
    scored = [
        entry
        for start, tokens in ((0, 3), (3, 1), (4, 9), (13, 11))
        for result in step(
            engine, Span(request_id="a", start=start, tokens=tokens, draws=start == 13)
        )
        for entry in result.prompt_logprobs
    ]
    assert [entry.token_id for entry in scored] == list(prompt[1:])
    for position, entry in enumerate(scored):
        assert math.isclose(entry.logprob, expected[position][entry.token_id], abs_tol=1e-3)
        assert entry.top[0][1] == pytest.approx(max(expected[position]), abs=1e-3)
        assert len(entry.top) == 2


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "llama4"])
def test_closed_sequences_do_not_affect_reused_names(name: str) -> None:
    engine, sampling = engine_of(name), SamplingParams(temperature=1.0, seed=7)
    other = a_request(prompt_token_ids=TokenIds.of(PROMPT[::-1]), sampling=sampling)
    expected = tokens_of(draw(engine, other, 4))
    engine.open(a_request(sampling=sampling), capacity_tokens=32)
    first = engine.dispatch(StepPlan(spans=(Span(request_id="a", start=0, tokens=8, draws=True),)))
    second = engine.dispatch(StepPlan(spans=(Span(request_id="a", start=8, tokens=1, draws=True),)))
    engine.close("a")
    engine.open(other, capacity_tokens=32)
    engine.collect(first)
    third = engine.dispatch(StepPlan(spans=(Span(request_id="a", start=0, tokens=8, draws=True),)))
    engine.collect(second)
    got = list(engine.collect(third)[0].token_ids)
    for position in range(8, 11):
        got.extend(
            step(engine, Span(request_id="a", start=position, tokens=1, draws=True))[0].token_ids
        )
    assert got == expected


@pytest.mark.parametrize("name", ["llama", "qwen3_next", *slow("gemma3_text")])
def test_sequences_reopened_after_a_failed_layout_continue_unchanged(
    name: str,
) -> None:
    model = make_tiny(name)
    engine = engine_of(name, model=model)
    well, sick = a_request("well"), a_request("sick", prompt_token_ids=TokenIds.of((1, 13, 2)))
    expected = tokens_of(draw(engine, well, 5))
    engine.open(well, capacity_tokens=32)
    got = list(step(engine, Span(request_id="well", start=0, tokens=8, draws=True))[0].token_ids)
    engine.open(sick, capacity_tokens=32)
    break_on_a_token(model, 13)
    under_way = engine.dispatch(
        StepPlan(spans=(Span(request_id="well", start=8, tokens=1, draws=True),))
    )
    with pytest.raises(RuntimeError, match="token 13"):
        engine.dispatch(
            StepPlan(
                spans=(
                    Span(request_id="well", start=9, tokens=1, draws=True),
                    Span(request_id="sick", start=0, tokens=3, draws=True),
                )
            )
        )
    got.extend(engine.collect(under_way)[0].token_ids)
    engine.abandon_pending()
    engine.close("sick")
    engine.close("well")
    assert got + tokens_of(draw(engine, well, 3, generated=tuple(got))) == expected


def break_on_a_token(model: Any, token: int) -> None:
    plain = type(model)

    def call(self: Any, ids: mx.array, cache: Any = None) -> mx.array:
        if ids.size > 1 and token in ids.reshape(-1).tolist():
            raise RuntimeError(f"token {token} cannot be read")
        result: mx.array = plain.__call__(self, ids, cache=cache)
        return result

    model.__class__ = type(plain.__name__, (plain,), {"__call__": call})


def test_a_row_with_nan_ends_alone() -> None:
    # tied weights would spread the poison to every logit
    model = make_tiny("llama", tie_word_embeddings=False)
    engine = engine_of("llama", model=model)
    embedding = model.model.embed_tokens
    poisoned = mx.array(embedding.weight)
    poisoned[13] = math.nan
    embedding.weight = poisoned
    engine.open(a_request("sick", prompt_token_ids=TokenIds.of((1, 13, 2))), capacity_tokens=8)
    engine.open(a_request("well"), capacity_tokens=16)
    sick, well = step(
        engine,
        Span(request_id="sick", start=0, tokens=3, draws=True),
        Span(request_id="well", start=0, tokens=len(PROMPT), draws=True),
    )
    assert sick.failure
    assert not sick.token_ids
    assert not well.failure
    assert len(well.token_ids) == 1


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_an_embedding_with_nan_ends_alone(pooling: Pooling) -> None:
    model = make_tiny("llama", tie_word_embeddings=False)
    engine = engine_of("llama", model=model)
    poisoned = mx.array(model.model.embed_tokens.weight)
    poisoned[13] = math.nan
    model.model.embed_tokens.weight = poisoned
    engine.open(
        a_request("sick", prompt_token_ids=TokenIds.of((1, 13, 2)), pooling=pooling),
        capacity_tokens=8,
    )
    engine.open(
        a_request("well", prompt_token_ids=TokenIds.of(PROMPT), pooling=pooling), capacity_tokens=16
    )
    sick, well = step(
        engine,
        Span(request_id="sick", start=0, tokens=3, draws=False),
        Span(request_id="well", start=0, tokens=len(PROMPT), draws=False),
    )
    assert (bool(sick.failure), sick.embedding, well.failure) == (True, b"", "")
    assert len(well.embedding) == 4 * engine.embedding_dimensions == 4 * 64


def test_a_model_without_accessible_hidden_states_refuses_to_embed() -> None:
    engine = Engine(SoloRunner(make_tiny("llama"), None), vocab_size=VOCAB_SIZE)
    assert engine.embedding_dimensions == 0
    with pytest.raises(NoEmbeddings, match="gives no embeddings"):
        engine.open(a_request(pooling="mean"), capacity_tokens=8)


def test_growth_within_the_reserved_capacity_allocates_no_new_kv() -> None:
    engine = engine_of("llama")
    engine.open(a_request(), capacity_tokens=64)
    step(engine, Span(request_id="a", start=0, tokens=len(PROMPT), draws=True))
    before = live_bytes(engine)
    for position in range(len(PROMPT), 63):
        step(engine, Span(request_id="a", start=position, tokens=1, draws=True))
    assert live_bytes(engine) == before
    assert before == 64 * engine.measure_costs().bytes_per_token


def test_a_windows_buffer_stays_bounded_in_long_sequences() -> None:
    engine = engine_of("gemma3_text")
    costs = engine.measure_costs()
    engine.open(a_request(prompt_token_ids=TokenIds.of(PROMPT * 90)), capacity_tokens=720)
    for start in range(0, 700, 100):
        step(engine, Span(request_id="a", start=start, tokens=100, draws=False))
        assert live_bytes(engine) == 720 * costs.bytes_per_token + costs.fixed_bytes
    step(engine, Span(request_id="a", start=700, tokens=20, draws=True))
    assert live_bytes(engine) == 720 * costs.bytes_per_token + costs.fixed_bytes


def test_states_sharing_a_stack_are_counted_once() -> None:
    engine = engine_of("mamba2")
    costs = engine.measure_costs()
    names = "abc"
    for name in names:
        engine.open(a_request(name), capacity_tokens=32)
    step(engine, *(Span(request_id=name, start=0, tokens=8, draws=True) for name in names))
    step(engine, *(Span(request_id=name, start=8, tokens=1, draws=True) for name in names))
    assert live_bytes(engine) == 3 * costs.fixed_bytes


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", *slow("gemma2", "llama4")])
def test_memory_does_not_grow_while_a_pipelined_sequence_decodes(name: str) -> None:
    engine = engine_of(name)
    engine.open(
        a_request(sampling=SamplingParams(temperature=1.0, seed=1, frequency_penalty=0.5)),
        capacity_tokens=128,
    )
    pending = engine.dispatch(
        StepPlan(spans=(Span(request_id="a", start=0, tokens=8, draws=True),))
    )
    active = []
    for position in range(8, 88):
        following = engine.dispatch(
            StepPlan(spans=(Span(request_id="a", start=position, tokens=1, draws=True),))
        )
        engine.collect(pending)
        pending = following
        active.append(mx.get_active_memory())
    engine.collect(pending)
    assert max(active[40:]) - max(active[:40]) < 64 * 1024


def test_costs_distinguish_growing_from_fixed_bytes() -> None:
    llama, hybrid, recurrent = (
        engine_of(name).measure_costs() for name in ("llama", "qwen3_next", "mamba2")
    )
    assert (llama.bytes_per_token > 0, llama.fixed_bytes) == (True, 0)
    assert hybrid.bytes_per_token > 0
    assert hybrid.fixed_bytes > 0
    assert (recurrent.bytes_per_token, recurrent.fixed_bytes > 0) == (0, True)
