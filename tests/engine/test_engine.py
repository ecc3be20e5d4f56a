"""The engine on real tiny models: draws, scores, failures, preemption, in-place growth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from holdfast.engine.engine import Engine
from holdfast.engine.plan import Span, SpanResult, StepPlan
from holdfast.engine.probe import choose_layout
from holdfast.messages import SamplingParams, SequenceRequest
from tests.fakes.tiny_models import VOCAB_SIZE, kept_tiny, make_tiny

PROMPT = (5, 17, 3, 99, 42, 7, 250, 11)


def engine_of(name: str, *, model: Any = None) -> Engine:
    loaded = model if model is not None else kept_tiny(name)
    return Engine(choose_layout(loaded, vocab_size=VOCAB_SIZE).runner, vocab_size=VOCAB_SIZE)


def a_request(request_id: str = "a", **changes: Any) -> SequenceRequest:
    fields: dict[str, Any] = {"prompt_token_ids": PROMPT, "max_tokens": 64, "sampling": SamplingParams(temperature=0.0, seed=1)}
    return SequenceRequest(request_id=request_id, **{**fields, **changes})


def step(engine: Engine, *spans: Span) -> list[SpanResult]:
    return list(engine.collect(engine.dispatch(StepPlan(spans=spans))).spans)


def draw(engine: Engine, request: SequenceRequest, count: int, *, generated: tuple[int, ...] = ()) -> Iterator[SpanResult]:
    """Open the request, read what is known, and draw `count` tokens."""
    known = len(request.prompt_token_ids) + len(generated)
    engine.open(request, generated=generated, capacity_tokens=known + count)
    yield step(engine, Span(request_id=request.request_id, start=0, tokens=known, draws=True))[0]
    for position in range(known, known + count - 1):
        yield step(engine, Span(request_id=request.request_id, start=position, tokens=1, draws=True))[0]
    engine.close(request.request_id)


def tokens_of(results: Iterator[SpanResult]) -> list[int]:
    return [token for result in results for token in result.token_ids]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "llama4"])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0, seed=0),
        SamplingParams(temperature=1.0, seed=7),
        SamplingParams(
            temperature=0.9, top_p=0.9, top_k=40, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, seed=3
        ),
    ],
    ids=["greedy", "plain", "everything"],
)
def test_a_preempted_sequence_goes_on_as_if_nothing_had_happened(name: str, sampling: SamplingParams) -> None:
    engine = engine_of(name)
    request = a_request(sampling=sampling)
    whole = tokens_of(draw(engine, request, 8))
    again = whole[:3] + tokens_of(draw(engine, request, 5, generated=tuple(whole[:3])))
    assert again == whole


def test_prompt_scores_are_the_models_log_probabilities_however_the_prompt_is_cut() -> None:
    engine, model = engine_of("qwen3"), kept_tiny("qwen3")
    logits = model(mx.array([PROMPT]))[0].astype(mx.float32)
    expected = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()
    request = a_request(want_prompt_logprobs=True, want_logprobs=True, top_logprobs=2)
    engine.open(request, capacity_tokens=20)
    scored = [
        entry
        for start, tokens in ((0, 3), (3, 1), (4, 4))
        for result in step(engine, Span(request_id="a", start=start, tokens=tokens, draws=start == 4))
        for entry in result.prompt_logprobs
    ]
    assert [entry.token_id for entry in scored] == list(PROMPT[1:])
    for position, entry in enumerate(scored):
        assert math.isclose(entry.logprob, expected[position][entry.token_id], abs_tol=1e-4)
        assert entry.top[0][1] == pytest.approx(max(expected[position]), abs=1e-4)
        assert len(entry.top) == 2


def test_a_row_that_is_not_a_number_ends_alone() -> None:
    model = make_tiny("llama", tie_word_embeddings=False)  # tied, the poison would reach every logit
    engine = engine_of("llama", model=model)
    embedding = model.model.embed_tokens
    poisoned = mx.array(embedding.weight)
    poisoned[13] = math.nan
    embedding.weight = poisoned
    engine.open(a_request("sick", prompt_token_ids=(1, 13, 2)), capacity_tokens=8)
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


def test_growth_within_the_reserved_capacity_allocates_no_new_kv() -> None:
    engine = engine_of("llama")
    engine.open(a_request(), capacity_tokens=64)
    step(engine, Span(request_id="a", start=0, tokens=len(PROMPT), draws=True))
    before = engine.statistics().live_bytes
    for position in range(len(PROMPT), 63):
        step(engine, Span(request_id="a", start=position, tokens=1, draws=True))
    assert engine.statistics().live_bytes == before
    assert before == 64 * engine.measure_costs().bytes_per_token


def test_a_window_keeps_a_bounded_buffer_however_long_the_sequence() -> None:
    engine = engine_of("gemma3_text")
    costs = engine.measure_costs()
    engine.open(a_request(), capacity_tokens=700)
    step(engine, Span(request_id="a", start=0, tokens=len(PROMPT), draws=True))
    for position in range(len(PROMPT), 700):
        step(engine, Span(request_id="a", start=position, tokens=1, draws=True))
    assert engine.statistics().live_bytes == 700 * costs.bytes_per_token + costs.fixed_bytes


def test_costs_tell_growing_bytes_from_fixed_ones() -> None:
    llama, hybrid, recurrent = (engine_of(name).measure_costs() for name in ("llama", "qwen3_next", "mamba2"))
    assert (llama.bytes_per_token > 0, llama.fixed_bytes) == (True, 0)
    assert hybrid.bytes_per_token > 0
    assert hybrid.fixed_bytes > 0
    assert (recurrent.bytes_per_token, recurrent.fixed_bytes > 0) == (0, True)
