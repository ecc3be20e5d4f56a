"""The views that models see as caches, compared with plain attention with plain masks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.worker.cpu.backend import CpuBackend
from holdfast.worker.cpu.host_attention import attend_one
from holdfast.worker.engine import code_attention, probe
from holdfast.worker.engine.probe import warnings_about_kernels
from holdfast.worker.engine.views import (
    GatherView,
    RowsView,
    SpanView,
    StateView,
    StepContext,
)
from holdfast.worker.kv.bits import BITS, KVBits
from holdfast.worker.kv.full import FullKV
from holdfast.worker.kv.kinds import Composite, ForeignState
from holdfast.worker.kv.layer import HeadsForm, LayerKV
from holdfast.worker.kv.quantized import QuantizedKV
from holdfast.worker.kv.quantized import wrong_over_slices as wrong_slices
from holdfast.worker.kv.recurrent import RecurrentState
from holdfast.worker.kv.window import WindowKV
from tests.fakes.tiny_models import kept_tiny

HEADS, KV_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 8, 6
SCALE = 0.3

windows = st.sampled_from([None, 1, 2, 5, 8])
chunk_lists = st.lists(st.sampled_from([1, 1, 1, 2, 4, 5, 6, 9, 17, 270]), min_size=1, max_size=6)


@dataclass(frozen=True)
class Story:
    """All queries, keys and values of one sequence, and the results of plain attention."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    expected: mx.array

    @staticmethod
    def of(
        tokens: int,
        *,
        window: int | None,
        sinks: mx.array | None,
        seed: int,
        key_dim: int = KEY_DIM,
        value_dim: int = VALUE_DIM,
    ) -> Story:
        shapes = ((HEADS, key_dim), (KV_HEADS, key_dim), (KV_HEADS, value_dim))
        keys = mx.random.split(mx.random.key(seed), 3)
        q, k, v = (
            mx.random.normal((1, heads, tokens, dim), key=keys[i])
            for i, (heads, dim) in enumerate(shapes)
        )
        distance = mx.arange(tokens)[:, None] - mx.arange(tokens)[None]
        mask = (distance >= 0) & (distance < (window or tokens + 1))
        expected = mx.fast.scaled_dot_product_attention(
            q, k, v, scale=SCALE, mask=mask, sinks=sinks
        )
        return Story(q, k, v, expected)


def narrower(one: int | None, other: int | None) -> int | None:
    return min((size for size in (one, other) if size is not None), default=None)


def fresh(window: int | None) -> LayerKV:
    return FullKV() if window is None else WindowKV(window)


def rows_of(part: mx.array) -> mx.array:
    return part.swapaxes(0, 2)


def assert_close(got: mx.array, expected: mx.array) -> None:
    assert got.shape == expected.shape
    assert float(mx.abs(got - expected).max()) < 2e-5


def some_sinks(wanted: bool) -> mx.array | None:
    return mx.random.normal((HEADS,), key=mx.random.key(9)) if wanted else None


def together(stories: Sequence[Story], parts: Sequence[slice], of: str) -> mx.array:
    """The queries, keys, values or results of these parts of the stories, as rows."""
    pairs = zip(stories, parts, strict=True)
    return mx.concatenate([rows_of(getattr(story, of)[:, :, part]) for story, part in pairs])


def plain_attention(
    queries: mx.array, keys: Any, values: Any, mask: Any, sinks: mx.array | None
) -> mx.array:
    """As mlx-lm's models call it: keys may do the attention themselves."""
    if isinstance(keys, mx.array):
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=SCALE, mask=mask, sinks=sinks
        )
    got: mx.array = keys.attend(queries, scale=SCALE, mask=mask, sinks=sinks)
    return got


@settings(max_examples=80)
@given(
    in_rows=st.booleans(),
    window=windows,
    asked=windows,
    chunks=chunk_lists,
    with_sinks=st.booleans(),
    way=st.sampled_from(["fused", "composed", "on the host"]),
    as_array=st.booleans(),
    settles=st.booleans(),
)
def test_a_sequence_in_chunks_equals_plain_attention(
    in_rows: bool,
    window: int | None,
    asked: int | None,
    chunks: list[int],
    with_sinks: bool,
    way: str,
    as_array: bool,
    settles: bool,
) -> None:
    sinks = some_sinks(with_sinks)
    story = Story.of(sum(chunks), window=narrower(window, asked), sinks=sinks, seed=len(chunks))
    layer = fresh(window)
    context = StepContext(
        backend=CpuBackend(host_scores=0 if way == "on the host" else 1 << 40),
        composes_attention=way != "fused",
    )
    for end, tokens in zip(itertools.accumulate(chunks), chunks, strict=True):
        part = slice(end - tokens, end)
        queries, keys, values, expected = (
            array[:, :, part] for array in (story.queries, story.keys, story.values, story.expected)
        )
        if in_rows:
            offset = mx.arange(part.start, part.stop)
            rows = RowsView([layer], tokens=[tokens], offset=offset, context=context)
            mask = rows.make_mask(1, window_size=asked)
            seen = rows.update_and_fetch(rows_of(keys), rows_of(values))
            got = rows_of(plain_attention(rows_of(queries), *seen, mask, sinks))
        else:
            span = SpanView(layer, context=context)
            assert span.offset == part.start
            mask = span.make_mask(tokens, return_array=as_array, window_size=asked)
            seen = span.update_and_fetch(keys, values)
            got = plain_attention(queries, *seen, mask, sinks)
        assert_close(got, expected)
        if settles:
            layer.trim()
            layer.freeze()


@settings(max_examples=30)
@given(
    lengths=st.one_of(
        st.lists(st.integers(1, 12), min_size=1, max_size=4),
        # more than MLX slices in one operation
        st.lists(st.integers(1, 2), min_size=9, max_size=23),
    ),
    window=windows,
    value_dim=st.sampled_from([VALUE_DIM, KEY_DIM]),
    composes=st.booleans(),
    data=st.data(),
)
def test_rows_of_several_sequences_do_not_see_each_other(
    lengths: list[int], window: int | None, value_dim: int, composes: bool, data: st.DataObject
) -> None:
    stories = [
        Story.of(length, window=window, sinks=None, seed=seed, value_dim=value_dim)
        for seed, length in enumerate(lengths)
    ]
    context = StepContext(composes_attention=composes)
    layers, read = [fresh(window) for _ in lengths], [0] * len(lengths)
    while left := [index for index, length in enumerate(lengths) if read[index] < length]:
        order = data.draw(st.permutations(left))
        chosen = order[: data.draw(st.integers(1, len(order)))]
        parts = []
        for index in chosen:
            end = data.draw(st.integers(read[index] + 1, lengths[index]))
            parts.append(slice(read[index], end))
            read[index] = end
        view = RowsView(
            [layers[index] for index in chosen],
            tokens=[part.stop - part.start for part in parts],
            offset=mx.array([0]),
            context=context,
        )
        queries, keys, values, expected = (
            together([stories[index] for index in chosen], parts, of)
            for of in ("queries", "keys", "values", "expected")
        )
        view.update_and_fetch(keys, values)
        assert_close(view.attend(queries, scale=SCALE, mask=None, sinks=None), expected)


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    window=windows,
    asked=windows,
    grouped=st.booleans(),
)
def test_gathered_copies_equal_each_sequence_alone(
    lengths: list[int], window: int | None, asked: int | None, grouped: bool
) -> None:
    seen = narrower(window, asked)
    stories = [
        Story.of(length + 1, window=seen, sinks=None, seed=seed)
        for seed, length in enumerate(lengths)
    ]
    layers = [fresh(window) for _ in lengths]
    for layer, story, length in zip(layers, stories, lengths, strict=True):
        layer.append(story.keys[:, :, :length], story.values[:, :, :length])
        layer.freeze()
    view = GatherView(layers, mask_dimensions=5 if grouped else 4)
    assert view.offset.tolist() == lengths
    mask = view.make_mask(1, window_size=asked)
    assert mask.ndim == (5 if grouped else 4)
    last = [slice(length, length + 1) for length in lengths]
    queries, keys, values, expected = (
        together(stories, last, of) for of in ("queries", "keys", "values", "expected")
    )
    keys, values = view.update_and_fetch(keys, values)
    mask = mask[:, 0] if grouped else mask
    assert_close(plain_attention(queries, keys, values, mask, None), expected)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_composed_attention_is_as_exact_as_the_fused_one(dtype: mx.Dtype, kv_heads: int) -> None:
    shapes = ((4, 1), (kv_heads, 50), (kv_heads, 50))
    keys = mx.random.split(mx.random.key(3), 3)
    q, k, v = (
        mx.random.normal((1, *shape, 16), key=keys[i]).astype(dtype)
        for i, shape in enumerate(shapes)
    )
    fused = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25).astype(mx.float32)
    for cuts in ([], [20], [1, 20, 49]):
        bounds = itertools.pairwise([0, *cuts, 50])
        composed = attend_one(
            q * 0.25, [(k[:, :, low:high], v[:, :, low:high]) for low, high in bounds]
        ).astype(mx.float32)
        assert float(mx.abs(fused - composed).max()) <= mx.finfo(dtype).eps * (1 + len(cuts))


@settings(max_examples=50)
@given(
    steps=st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=12), data=st.data()
)
def test_recurrent_states_follow_their_sequence_through_batches(
    steps: list[set[int]], data: st.DataObject
) -> None:
    states, expected = [RecurrentState(1) for _ in range(4)], [float(index) for index in range(4)]
    for index, state in enumerate(states):
        state[0] = mx.full((1, 2), float(index))
    for batch in steps:
        order = data.draw(st.permutations(sorted(batch)))
        view = StateView([states[index] for index in order])
        stack = view[0]
        assert stack is not None
        assert stack[:, 0].tolist() == [expected[index] for index in order]
        view[0] = stack * 2 + 1
        for index in order:
            expected[index] = expected[index] * 2 + 1
    for state, value in zip(states, expected, strict=True):
        held = state[0]
        assert held is not None
        assert held.tolist() == [[value, value]]


def test_an_unchanged_batch_gets_its_stack_back() -> None:
    states = [RecurrentState(1) for _ in range(2)]
    stack = mx.zeros((2, 3))
    StateView(states)[0] = stack
    assert StateView(states)[0] is stack
    assert StateView(states[::-1])[0] is not stack
    assert StateView(states[:1])[0] is not stack


def test_views_are_truthy_and_composites_indexed_by_part() -> None:
    pairs = [Composite((RecurrentState(1), FullKV())) for _ in range(2)]
    made = pairs[0].view(pairs, for_kv=_spans, for_recurrent=StateView)
    assert made
    assert isinstance(made[0], StateView)
    assert made[0]
    assert made[1] == 2


def test_a_kind_known_only_to_mlx_lm_cannot_be_laid_out() -> None:
    foreign = [ForeignState(object()), ForeignState(object())]
    with pytest.raises(TypeError, match="cannot be laid out for several sequences"):
        foreign[0].view(foreign, for_kv=_spans, for_recurrent=StateView)


def _spans(layers: Sequence[LayerKV]) -> int:
    return len(layers)


def faulty_over_slices(
    of_mlx: Callable[..., mx.array], at: int, *, refuses: bool
) -> Callable[..., mx.array]:
    """A function of MLX that is correct only if codes, scales and biases, arguments from `at` on,
    are contiguous. refuses: it rejects other arrays, as on CUDA; otherwise its results are wrong.
    """

    def compute(*arrays: mx.array, **more: Any) -> mx.array:
        mx.eval(arrays)
        if all(np.array(array, copy=False).flags.c_contiguous for array in arrays[at:]):
            return of_mlx(*arrays, **more)
        if refuses:
            raise RuntimeError("[QuantizedMatmul::eval_gpu] No implementation for problem shape")
        return of_mlx(*arrays, **more) + 1000

    return compute


@pytest.fixture
def own_check(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Repeat the checks of MLX's functions and discard their results; try attention itself over few
    keys only.
    """
    monkeypatch.setattr(probe, "KEYS", (100,))
    monkeypatch.setattr(probe, "QUERIES", (1,))
    for check in (wrong_slices, code_attention.is_right):
        check.cache_clear()
    yield
    for check in (wrong_slices, code_attention.is_right):
        check.cache_clear()


DIRECTLY = StepContext(composes_attention=False, reads_codes=True)
BY_DEQUANTIZING = StepContext(composes_attention=False, reads_codes=False)


def decoded(context: StepContext, *, bits: KVBits, value_dim: int, **more: Any) -> mx.array:
    """The results of the last tokens of three sequences of different lengths in one step."""
    sinks, asked, dtype = (more.get(name) for name in ("sinks", "asked", "dtype"))
    lengths = (5, 41, 300)
    stories = [
        Story.of(length, window=None, sinks=None, seed=length, key_dim=64, value_dim=value_dim)
        for length in lengths
    ]
    pairs = [
        tuple(array.astype(dtype or mx.float32) for array in (story.keys, story.values))
        for story in stories
    ]
    form = (HeadsForm.of_array(pairs[0][0]), HeadsForm.of_array(pairs[0][1]))
    layers = [QuantizedKV(BITS[bits], form=form, block_tokens=16) for _ in stories]
    for layer, (keys, values) in zip(layers, pairs, strict=True):
        for start, end in itertools.pairwise((0, keys.shape[2] // 3, keys.shape[2] - 1)):
            layer.freeze()
            layer.reserve(400)  # more than needed, so that the codes are slices of a buffer
            layer.append(keys[:, :, start:end], values[:, :, start:end])
    view = RowsView(layers, tokens=[1] * 3, offset=mx.array(lengths) - 1, context=context)
    keys, values, queries = (
        mx.concatenate([array[:, :, -1:] for array in arrays])
        for arrays in (*zip(*pairs, strict=True), [story.queries for story in stories])
    )
    mask = view.make_mask(1, window_size=asked)
    seen, _ = view.update_and_fetch(keys, values)
    got = seen.attend(queries.astype(keys.dtype), scale=0.125, mask=mask, sinks=sinks)
    assert got.dtype == keys.dtype
    return got.astype(mx.float32)


@pytest.mark.parametrize(
    ("bits", "value_dim", "asked", "with_sinks"),
    [
        ("8", 64, None, False),
        ("8", 96, 37, True),
        ("4", 64, 37, False),
        ("4", 96, None, True),
        ("8/4", 64, None, True),
        ("8/4", 96, 37, False),
    ],
)
def test_attention_over_codes_equals_attention_over_dequantized_kv(
    bits: KVBits, value_dim: int, asked: int | None, with_sinks: bool
) -> None:
    sinks = some_sinks(with_sinks)
    got, expected = (
        decoded(context, bits=bits, value_dim=value_dim, asked=asked, sinks=sinks)
        for context in (DIRECTLY, BY_DEQUANTIZING)
    )
    assert_close(got, expected)


def test_attention_over_codes_uses_float32_for_bf16_models() -> None:
    exact, got, dequantized = (
        decoded(context, bits="8", value_dim=64, dtype=dtype)
        for context, dtype in (
            (DIRECTLY, mx.float32),
            (DIRECTLY, mx.bfloat16),
            (BY_DEQUANTIZING, mx.bfloat16),
        )
    )
    assert rms(got - exact) <= 1.1 * rms(dequantized - exact)


def test_a_prompt_in_the_step_does_not_dequantize_decoding_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stories = [
        Story.of(length, window=None, sinks=None, seed=length, key_dim=64, value_dim=64)
        for length in (90, 300, 41)
    ]
    new_tokens = (1, 25, 1)

    def step(asked: Sequence[int]) -> list[mx.array]:
        layers, parts = [], []
        for at in asked:
            story, tokens = stories[at], new_tokens[at]
            form = (HeadsForm.of_array(story.keys), HeadsForm.of_array(story.values))
            layer = QuantizedKV((8, 8), form=form, block_tokens=16)
            layer.append(story.keys[:, :, :-tokens], story.values[:, :, :-tokens])
            layers.append(layer)
            parts.append(
                [
                    rows_of(array[:, :, -tokens:])
                    for array in (story.keys, story.values, story.queries)
                ]
            )
        tokens_of = [new_tokens[at] for at in asked]
        rows = sum(tokens_of)
        view = RowsView(layers, tokens=tokens_of, offset=mx.zeros(rows), context=StepContext())
        keys, values, queries = map(mx.concatenate, zip(*parts, strict=True))
        mask = view.make_mask(1)
        view.update_and_fetch(keys, values)
        got = view.attend(queries, scale=SCALE, mask=mask, sinks=None)
        return list(mx.split(got, list(itertools.accumulate(tokens_of[:-1]))))

    alone = [step([at])[0] for at in range(3)]
    cut = QuantizedKV.attention_ranges
    dequantizing: list[int] = []

    def recorded(layer: QuantizedKV, tokens: int, window: int | None) -> Any:
        dequantizing.append(tokens)
        return cut(layer, tokens, window)

    monkeypatch.setattr(QuantizedKV, "attention_ranges", recorded)
    for got, expected in zip(step([0, 1, 2]), alone, strict=True):
        assert_close(got, expected)
    assert dequantizing == [25]


def rms(array: mx.array) -> float:
    return float(mx.sqrt(mx.square(array).mean()))


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize(
    ("name", "at", "bits", "context"),
    [("dequantize", 0, "8", BY_DEQUANTIZING), ("quantized_matmul", 1, "4", DIRECTLY)],
)
def test_slices_are_copied_where_mlx_is_wrong_over_them_or_refuses_them(
    refuses: bool,
    name: str,
    at: int,
    bits: KVBits,
    context: StepContext,
    monkeypatch: pytest.MonkeyPatch,
    own_check: None,
) -> None:
    expected = decoded(context, bits=bits, value_dim=64)
    assert wrong_slices() == frozenset()
    monkeypatch.setattr(mx, name, faulty_over_slices(getattr(mx, name), at, refuses=refuses))
    if not refuses:
        assert rms(decoded(context, bits=bits, value_dim=64) - expected) > 1
    for check in (wrong_slices, code_attention.is_right):
        check.cache_clear()
    assert wrong_slices() == {f"mx.{name}"}
    assert code_attention.is_right()
    assert_close(decoded(context, bits=bits, value_dim=64), expected)
    (warning,) = warnings_about_kernels(kept_tiny("llama"), force=True)
    assert f"Why: mx.{name} is wrong over slices of an array or refuses them" in warning


def test_a_refused_attention_call_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "KEYS", (200,))
    monkeypatch.setattr(probe, "QUERIES", (1,))
    of_mlx = mx.fast.scaled_dot_product_attention

    def refusing(queries: mx.array, keys: mx.array, *rest: Any, **more: Any) -> mx.array:
        if keys.shape[2] > 100:
            raise RuntimeError("no such kernel\nsecond line")
        return of_mlx(queries, keys, *rest, **more)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", refusing)
    (warning,) = warnings_about_kernels(kept_tiny("llama"), force=True)
    assert "fails (no such kernel)" in warning
