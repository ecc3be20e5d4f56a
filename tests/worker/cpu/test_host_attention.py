"""Attention by numpy, compared with MLX's plain attention with plain masks."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.cpu import host_attention
from holdfast.worker.cpu.blas import blas_of_numpy
from holdfast.worker.cpu.host_attention import SCORES_WORTH_IT
from holdfast.worker.engine.backend import AttentionSpan
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.probe import choose_layout
from holdfast.worker.kv.layer import joined
from tests.fakes import interleaving
from tests.fakes.caching_worker import greedy
from tests.fakes.tiny_models import VOCAB_SIZE, kept_tiny

KEY_DIM, VALUE_DIM = 8, 6


@dataclass(frozen=True)
class Shape:
    """One span: the last `tokens` of `held` positions are queries."""

    tokens: int
    held: int
    window: int | None


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    tokens = draw(st.sampled_from([1, 2, 3, 7, 33]))
    return Shape(
        tokens,
        tokens + draw(st.sampled_from([0, 1, 5, 40])),
        draw(st.sampled_from([None, 1, 2, 6, 34, 100])),
    )


@contextmanager
def blocks_of(scores: int, small_products: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_attention, "_BLOCK_SCORES", scores)
        patch.setattr(host_attention, "_LEAST_BLOCK_ROWS", 1 if scores == 1 else 64)
        patch.setattr(host_attention, "_has_small_product_kernels", lambda: small_products)
        patch.setattr(host_attention, "_LEAST_KEY_STEP", 1)
        patch.setattr(host_attention, "_UNPACKED_MULTIPLICATIONS", scores)
        yield


def in_parts(
    keys: mx.array, values: mx.array, cuts: Sequence[int]
) -> list[tuple[mx.array, mx.array]]:
    """Cut at these tokens."""
    bounds = itertools.pairwise(sorted({0, *(cut % keys.shape[2] for cut in cuts), keys.shape[2]}))
    return [(keys[:, :, low:high] + 0, values[:, :, low:high] + 0) for low, high in bounds]


def made(
    shape: Shape,
    *,
    heads: int,
    kv_heads: int,
    seed: int,
    dtype: mx.Dtype = mx.float32,
    cuts: Sequence[int] = (),
) -> AttentionSpan:
    keys = mx.random.split(mx.random.key(seed), 3)
    sizes = (
        (heads, shape.tokens, KEY_DIM),
        (kv_heads, shape.held, KEY_DIM),
        (kv_heads, shape.held, VALUE_DIM),
    )
    q, k, v = (
        mx.random.normal((1, *size), key=keys[i]).astype(dtype) for i, size in enumerate(sizes)
    )
    return AttentionSpan(queries=q, parts=in_parts(k, v, cuts), window=shape.window)


def plain(span: AttentionSpan, sinks: mx.array | None) -> mx.array:
    keys, values = joined(span.parts)
    held = keys.shape[2]
    distance = mx.arange(held - span.tokens, held)[:, None] - mx.arange(held)[None]
    mask = (distance >= 0) & (distance < (span.window or held + 1))
    return mx.fast.scaled_dot_product_attention(
        span.queries, keys, values, scale=1.0, mask=mask, sinks=sinks
    )


@given(
    wanted=st.lists(shapes(), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3), (6, 1)]),
    with_sinks=st.booleans(),
    block=st.sampled_from([1, 64, 300, 1 << 18]),
    small_products=st.booleans(),
    cuts=st.lists(st.integers(1, 60), max_size=4),
)
def test_every_span_equals_plain_attention(
    wanted: list[Shape],
    heads: tuple[int, int],
    with_sinks: bool,
    block: int,
    small_products: bool,
    cuts: list[int],
) -> None:
    spans = [
        made(shape, heads=heads[0], kv_heads=heads[1], seed=seed, cuts=cuts)
        for seed, shape in enumerate(wanted)
    ]
    sinks = mx.random.normal((heads[0],), key=mx.random.key(99)) if with_sinks else None
    with blocks_of(block, small_products):
        attended = host_attention.attend(spans, sinks=sinks)
    for span, got in zip(spans, attended, strict=True):
        expected = plain(span, sinks)
        assert got.shape == expected.shape
        assert float(mx.abs(got - expected).max()) < 1e-5


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_is_accepted_and_returned(dtype: mx.Dtype) -> None:
    span = made(Shape(20, 50, None), heads=4, kv_heads=2, seed=1, dtype=dtype, cuts=[13, 40])
    (got,) = host_attention.attend([span], sinks=None)
    assert got.dtype == dtype
    assert (
        float(mx.abs(got.astype(mx.float32) - plain(span, None).astype(mx.float32)).max())
        <= mx.finfo(dtype).eps * 2
    )


def test_parts_of_a_larger_buffer_are_read_in_place() -> None:
    whole = made(Shape(9, 90, None), heads=4, kv_heads=2, seed=2)
    ((keys, values),) = whole.parts
    part = AttentionSpan(
        queries=whole.queries, parts=[(keys[:, :, 30:70], values[:, :, 30:70])], window=None
    )
    (got,) = host_attention.attend([part], sinks=None)
    assert float(mx.abs(got - plain(part, None)).max()) < 1e-5


def test_a_nan_stays_within_its_span() -> None:
    spans = [made(Shape(5, 40, None), heads=4, kv_heads=2, seed=seed) for seed in range(3)]
    ((keys, values),) = spans[1].parts
    spans[1] = AttentionSpan(
        queries=spans[1].queries, parts=[(keys * float("nan"), values)], window=None
    )
    attended = host_attention.attend(spans, sinks=None)
    assert [bool(mx.isfinite(part).all()) for part in attended] == [True, False, True]


def test_a_failing_task_is_raised_and_later_spans_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    span = made(Shape(64, 64, None), heads=8, kv_heads=2, seed=3)
    with monkeypatch.context() as patch:
        patch.setattr(host_attention, "_hidden_columns", lambda rows, columns, window: "no mask")
        with pytest.raises((AttributeError, TypeError, ValueError)):
            host_attention.attend([span], sinks=None)
    (got,) = host_attention.attend([span], sinks=None)
    assert float(mx.abs(got - plain(span, None)).max()) < 1e-5


def test_work_is_done_even_if_the_interpreter_is_shutting_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = ThreadPoolExecutor(2)
    ended.shutdown()
    monkeypatch.setattr(host_attention, "_helping_threads", lambda: ended)
    span = made(Shape(64, 64, None), heads=8, kv_heads=2, seed=3)
    (got,) = host_attention.attend([span], sinks=None)
    assert float(mx.abs(got - plain(span, None)).max()) < 1e-5


def test_decoding_and_small_work_are_left_to_mlx() -> None:
    one = made(Shape(1, 5000, None), heads=16, kv_heads=2, seed=4)
    chunk = made(Shape(64, 512, None), heads=4, kv_heads=2, seed=5)
    little = made(Shape(4, 40, None), heads=4, kv_heads=2, seed=6)
    assert not host_attention.pays([one, one], host_scores=SCORES_WORTH_IT)
    assert not host_attention.pays([little], host_scores=SCORES_WORTH_IT)
    assert all(
        host_attention.pays(spans, host_scores=SCORES_WORTH_IT) for spans in ([chunk], [one, chunk])
    ) == (sys.platform == "linux")


@pytest.mark.skipif(
    sys.platform != "linux" or mx.default_device() != mx.Device(mx.cpu),
    reason="MLX has its own way there",
)
@pytest.mark.parametrize(
    ("name", "layout"), [("llama", "rows"), ("gpt_oss", "rows"), ("qwen3_next", "split")]
)
def test_engines_use_it_for_prefill_but_not_for_decoding(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def counting(spans: Sequence[AttentionSpan], **more: Any) -> list[mx.array]:
        asked.append(spans[0].tokens)
        return attend(spans, **more)

    attend = host_attention.attend
    runner = choose_layout(kept_tiny(name), vocab_size=VOCAB_SIZE)
    assert runner.name == layout
    engine = Engine(runner, vocab_size=VOCAB_SIZE)
    engine.open(greedy("a", range(1, 70), max_tokens=9), capacity_tokens=80)
    monkeypatch.setattr(host_attention, "attend", counting)
    monkeypatch.setattr(host_attention, "SCORES_WORTH_IT", 600)
    interleaving.step(engine, interleaving.span(0, 69))
    interleaving.step(engine, interleaving.span(69))
    assert asked
    assert set(asked) == {69}


@pytest.mark.skipif(sys.platform != "linux", reason="not used there")
def test_models_in_several_threads_keep_numpys_thread_counts() -> None:
    span = made(Shape(64, 300, None), heads=4, kv_heads=2, seed=7)
    expected = plain(span, None)
    mx.eval(span.queries, span.parts, expected)
    libraries = blas_of_numpy()
    assert libraries
    before = [library.get() for library in libraries]
    for library in libraries:
        library.set(2)

    def ask() -> float:
        worst = 0.0
        for _ in range(100):
            (got,) = host_attention.attend([span], sinks=None)
            worst = max(worst, float(mx.abs(got - expected).max()))
        mx.clear_streams()
        return worst

    with ThreadPoolExecutor(3) as pool:
        worst = [future.result() for future in [pool.submit(ask) for _ in range(3)]]
    after = [library.get() for library in libraries]
    for library, threads in zip(libraries, before, strict=True):
        library.set(threads)
    assert max(worst) < 1e-5
    assert after == [2] * len(libraries)
