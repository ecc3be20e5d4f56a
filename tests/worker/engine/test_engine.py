"""The engine on real tiny models: samples, scores, failures, preemption, in-place growth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from holdfast.errors import NoEmbeddings
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.layouts import SoloRunner
from holdfast.worker.engine.plan import SpanResult
from holdfast.worker.engine.probe import choose_layout
from tests.fakes.architectures import probed
from tests.fakes.caching_worker import live_bytes
from tests.fakes.interleaving import begin, span, step
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


def generate(
    engine: Engine, request: SequenceRequest, count: int, *, generated: tuple[int, ...] = ()
) -> Iterator[SpanResult]:
    """Open the request, prefill known tokens, and generate `count` tokens."""
    known = len(request.prompt_token_ids) + len(generated)
    engine.open(request, generated=generated, capacity_tokens=known + count)
    yield step(engine, span(0, known, name=request.request_id))[0]
    for position in range(known, known + count - 1):
        yield step(engine, span(position, name=request.request_id))[0]
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
        ("gemma3_text", EVERYTHING),
        ("qwen3_next", PLAIN),
        ("llama4", EVERYTHING),
        *slow(*((name, GREEDY) for name in ("gemma3_text", "qwen3_next", "llama4"))),
        *slow(*((name, PLAIN) for name in ("llama", "gemma3_text", "llama4"))),
        *slow(("llama", EVERYTHING), ("qwen3_next", EVERYTHING)),
    ],
)
def test_a_preempted_sequence_continues_unchanged(name: str, sampling: SamplingParams) -> None:
    engine = engine_of(name)
    request = a_request(sampling=sampling)
    whole = tokens_of(generate(engine, request, 8))
    again = whole[:3] + tokens_of(generate(engine, request, 5, generated=tuple(whole[:3])))
    assert again == whole


@pytest.mark.parametrize(
    "name",
    ["llama", "gemma3_text", "qwen3_next", "llama4", *slow("falcon_h1", "qwen3", "gemma2")],
)
def test_prompt_scores_are_the_models_log_probabilities_for_any_chunks(name: str) -> None:
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
        for result in step(engine, span(start, tokens, samples=start == 13))
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
    expected = tokens_of(generate(engine, other, 4))
    engine.open(a_request(sampling=sampling), capacity_tokens=32)
    first = begin(engine, span(0, 8))
    second = begin(engine, span(8))
    engine.close("a")
    engine.open(other, capacity_tokens=32)
    engine.collect(first)
    third = begin(engine, span(0, 8))
    engine.collect(second)
    got = list(engine.collect(third)[0].token_ids)
    for position in range(8, 11):
        got.extend(step(engine, span(position))[0].token_ids)
    assert got == expected


@pytest.mark.parametrize("name", ["llama", "qwen3_next", *slow("gemma3_text")])
def test_sequences_reopened_after_a_failed_layout_continue_unchanged(name: str) -> None:
    model = make_tiny(name)
    engine = engine_of(name, model=model)
    well, sick = a_request("well"), a_request("sick", prompt_token_ids=TokenIds.of((1, 13, 2)))
    expected = tokens_of(generate(engine, well, 5))
    engine.open(well, capacity_tokens=32)
    got = list(step(engine, span(0, 8, name="well"))[0].token_ids)
    engine.open(sick, capacity_tokens=32)
    break_on_a_token(model, 13)
    under_way = begin(engine, span(8, name="well"))
    with pytest.raises(RuntimeError, match="token 13"):
        begin(engine, span(9, name="well"), span(0, 3, name="sick"))
    got.extend(engine.collect(under_way)[0].token_ids)
    engine.abandon_pending()
    engine.close("sick")
    engine.close("well")
    assert got + tokens_of(generate(engine, well, 3, generated=tuple(got))) == expected


def break_on_a_token(model: Any, token: int) -> None:
    plain = type(model)

    def call(self: Any, ids: mx.array, cache: Any = None) -> mx.array:
        if ids.size > 1 and token in ids.reshape(-1).tolist():
            raise RuntimeError(f"token {token} cannot be read")
        result: mx.array = plain.__call__(self, ids, cache=cache)
        return result

    model.__class__ = type(plain.__name__, (plain,), {"__call__": call})


@pytest.mark.parametrize("pooling", ["", "mean", "last"])
def test_a_row_or_embedding_with_nan_ends_alone(pooling: Any) -> None:
    # tied weights would spread the poison to every logit
    model = make_tiny("llama", tie_word_embeddings=False)
    engine = engine_of("llama", model=model)
    embedding = model.model.embed_tokens
    poisoned = mx.array(embedding.weight)
    poisoned[13] = math.nan
    embedding.weight = poisoned
    prompts = {"sick": (1, 13, 2), "well": PROMPT}
    for name, prompt in prompts.items():
        request = a_request(name, prompt_token_ids=TokenIds.of(prompt), pooling=pooling or None)
        engine.open(request, capacity_tokens=16)
    samples = not pooling
    spans = [span(0, len(prompt), name=name, samples=samples) for name, prompt in prompts.items()]
    sick, well = step(engine, *spans)
    assert (bool(sick.failure), sick.token_ids, sick.embedding) == (True, (), b"")
    assert (well.failure, len(well.token_ids)) == ("", int(samples))
    assert len(well.embedding) == (0 if samples else 4 * engine.embedding_dimensions)


def test_a_model_without_accessible_hidden_states_refuses_to_embed() -> None:
    engine = Engine(SoloRunner(make_tiny("llama"), None), vocab_size=VOCAB_SIZE)
    assert engine.embedding_dimensions == 0
    with pytest.raises(NoEmbeddings, match="gives no embeddings"):
        engine.open(a_request(pooling="mean"), capacity_tokens=8)


def test_growth_within_the_reserved_capacity_allocates_no_new_kv() -> None:
    engine = engine_of("llama")
    engine.open(a_request(), capacity_tokens=64)
    step(engine, span(0, len(PROMPT)))
    before = live_bytes(engine)
    for position in range(len(PROMPT), 63):
        step(engine, span(position))
    assert live_bytes(engine) == before
    assert before == 64 * engine.measure_costs().bytes_per_token


def test_a_windows_buffer_stays_bounded_in_long_sequences() -> None:
    engine = engine_of("gemma3_text")
    costs = engine.measure_costs()
    engine.open(a_request(prompt_token_ids=TokenIds.of(PROMPT * 90)), capacity_tokens=720)
    for start in range(0, 700, 100):
        step(engine, span(start, 100, samples=False))
        assert live_bytes(engine) == 720 * costs.bytes_per_token + costs.fixed_bytes
    step(engine, span(700, 20))
    assert live_bytes(engine) == 720 * costs.bytes_per_token + costs.fixed_bytes


def test_states_sharing_a_stack_are_counted_once() -> None:
    engine = engine_of("mamba2")
    costs = engine.measure_costs()
    names = "abc"
    for name in names:
        engine.open(a_request(name), capacity_tokens=32)
    step(engine, *(span(0, 8, name=name) for name in names))
    step(engine, *(span(8, name=name) for name in names))
    assert live_bytes(engine) == 3 * costs.fixed_bytes


@pytest.mark.parametrize("name", ["llama", "qwen3_next", *slow("gemma3_text", "gemma2", "llama4")])
def test_memory_does_not_grow_while_a_pipelined_sequence_decodes(name: str) -> None:
    engine = engine_of(name)
    engine.open(
        a_request(sampling=SamplingParams(temperature=1.0, seed=1, frequency_penalty=0.5)),
        capacity_tokens=128,
    )
    pending = begin(engine, span(0, 8))
    active = []
    for position in range(8, 58):
        following = begin(engine, span(position))
        engine.collect(pending)
        pending = following
        active.append(mx.get_active_memory())
    engine.collect(pending)
    assert max(active[25:]) - max(active[:25]) < 64 * 1024


def test_costs_distinguish_growing_from_fixed_bytes() -> None:
    llama, hybrid, recurrent = (
        engine_of(name).measure_costs() for name in ("llama", "qwen3_next", "mamba2")
    )
    assert (llama.bytes_per_token > 0, llama.fixed_bytes) == (True, 0)
    assert hybrid.bytes_per_token > 0
    assert hybrid.fixed_bytes > 0
    assert (recurrent.bytes_per_token, recurrent.fixed_bytes > 0) == (0, True)
