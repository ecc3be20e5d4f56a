"""The views that models see as caches, against plain attention with plain masks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.worker.engine.views import (
    GatherView,
    RowsView,
    SpanView,
    StateView,
    StepContext,
    attend_one,
)
from holdfast.worker.kv.full import FullKV
from holdfast.worker.kv.kinds import Composite, ForeignState
from holdfast.worker.kv.layer import LayerKV
from holdfast.worker.kv.recurrent import RecurrentState
from holdfast.worker.kv.window import WindowKV

HEADS, KV_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 8, 6
SCALE = 0.3

windows = st.sampled_from([None, 1, 2, 5, 8])
ways = st.sampled_from(["fused", "composed", "on the host"])
chunk_lists = st.lists(st.sampled_from([1, 1, 1, 2, 4, 5, 6, 9, 17, 270]), min_size=1, max_size=6)


@dataclass(frozen=True)
class Story:
    """All queries, keys and values of one sequence, and what plain attention makes of them."""

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
        value_dim: int = VALUE_DIM,
    ) -> Story:
        shapes = ((HEADS, KEY_DIM), (KV_HEADS, KEY_DIM), (KV_HEADS, value_dim))
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


@given(
    window=windows,
    asked=windows,
    chunks=chunk_lists,
    with_sinks=st.booleans(),
    way=ways,
    settles=st.booleans(),
)
def test_rows_attend_as_plain_attention_does(
    window: int | None,
    asked: int | None,
    chunks: list[int],
    with_sinks: bool,
    way: str,
    settles: bool,
) -> None:
    sinks = some_sinks(with_sinks)
    story = Story.of(sum(chunks), window=narrower(window, asked), sinks=sinks, seed=len(chunks))
    layer, start = fresh(window), 0
    for tokens in chunks:
        part = slice(start, start + tokens)
        context = StepContext(
            composes_attention=way != "fused", host_scores=0 if way == "on the host" else 1 << 40
        )
        view = RowsView(
            [layer], tokens=[tokens], offset=mx.arange(start, start + tokens), context=context
        )
        mask = view.make_mask(1, window_size=asked)
        keys, _ = view.update_and_fetch(
            rows_of(story.keys[:, :, part]), rows_of(story.values[:, :, part])
        )
        got = keys.attend(rows_of(story.queries[:, :, part]), scale=SCALE, mask=mask, sinks=sinks)
        assert_close(rows_of(got), story.expected[:, :, part])
        start += tokens
        if settles:
            layer.trim()
            layer.freeze()


@settings(max_examples=30)
@given(
    lengths=st.one_of(
        st.lists(st.integers(1, 12), min_size=1, max_size=4),
        # more than MLX cuts off in one operation
        st.lists(st.integers(1, 2), min_size=9, max_size=23),
    ),
    window=windows,
    value_dim=st.sampled_from([VALUE_DIM, KEY_DIM]),
    composes=st.booleans(),
    data=st.data(),
)
def test_the_rows_of_several_sequences_do_not_see_each_other(
    lengths: list[int], window: int | None, value_dim: int, composes: bool, data: st.DataObject
) -> None:
    stories = [
        Story.of(length, window=window, sinks=None, seed=seed, value_dim=value_dim)
        for seed, length in enumerate(lengths)
    ]
    context = StepContext(composes_attention=composes)
    layers, read = [fresh(window) for _ in lengths], [0] * len(lengths)
    while any(done < length for done, length in zip(read, lengths, strict=True)):
        left = [index for index, length in enumerate(lengths) if read[index] < length]
        chosen = data.draw(
            st.permutations(left).flatmap(
                lambda order: st.integers(1, len(order)).map(lambda n: order[:n])
            )
        )
        tokens = [data.draw(st.integers(1, lengths[index] - read[index])) for index in chosen]
        parts = [
            slice(read[index], read[index] + count)
            for index, count in zip(chosen, tokens, strict=True)
        ]
        view = RowsView(
            [layers[index] for index in chosen],
            tokens=tokens,
            offset=mx.array([0]),
            context=context,
        )
        view.update_and_fetch(
            mx.concatenate(
                [
                    rows_of(stories[index].keys[:, :, part])
                    for index, part in zip(chosen, parts, strict=True)
                ]
            ),
            mx.concatenate(
                [
                    rows_of(stories[index].values[:, :, part])
                    for index, part in zip(chosen, parts, strict=True)
                ]
            ),
        )
        queries = [
            rows_of(stories[index].queries[:, :, part])
            for index, part in zip(chosen, parts, strict=True)
        ]
        got = view.attend(mx.concatenate(queries), scale=SCALE, mask=None, sinks=None)
        expected = [
            rows_of(stories[index].expected[:, :, part])
            for index, part in zip(chosen, parts, strict=True)
        ]
        assert_close(got, mx.concatenate(expected))
        for index, count in zip(chosen, tokens, strict=True):
            read[index] += count


@settings(max_examples=50)
@given(window=windows, asked=windows, chunks=chunk_lists, as_array=st.booleans())
def test_a_span_of_its_own_gets_keys_and_a_mask_that_fit(
    window: int | None, asked: int | None, chunks: list[int], as_array: bool
) -> None:
    story = Story.of(sum(chunks), window=narrower(window, asked), sinks=None, seed=len(chunks))
    layer, start = fresh(window), 0
    for tokens in chunks:
        part = slice(start, start + tokens)
        view = SpanView(layer, context=StepContext(composes_attention=False))
        assert view.offset == start
        mask = view.make_mask(tokens, return_array=as_array, window_size=asked)
        assert not as_array or tokens == 1 or isinstance(mask, mx.array)
        keys, values = view.update_and_fetch(story.keys[:, :, part], story.values[:, :, part])
        got = mx.fast.scaled_dot_product_attention(
            story.queries[:, :, part], keys, values, scale=SCALE, mask=mask
        )
        assert_close(got, story.expected[:, :, part])
        start += tokens


@settings(max_examples=50)
@given(window=windows, asked=windows, chunks=chunk_lists, with_sinks=st.booleans(), way=ways)
def test_a_span_of_its_own_attends_as_plain_attention_does(
    window: int | None, asked: int | None, chunks: list[int], with_sinks: bool, way: str
) -> None:
    sinks = some_sinks(with_sinks)
    story = Story.of(sum(chunks), window=narrower(window, asked), sinks=sinks, seed=len(chunks))
    layer, start = fresh(window), 0
    for tokens in chunks:
        part = slice(start, start + tokens)
        context = StepContext(
            composes_attention=way != "fused", host_scores=0 if way == "on the host" else 1 << 40
        )
        view = SpanView(layer, context=context)
        mask = view.make_mask(tokens, window_size=asked)
        keys, values = view.update_and_fetch(story.keys[:, :, part], story.values[:, :, part])
        queries = story.queries[:, :, part]
        got = (
            mx.fast.scaled_dot_product_attention(
                queries, keys, values, scale=SCALE, mask=mask, sinks=sinks
            )
            if isinstance(keys, mx.array)
            else keys.attend(queries, scale=SCALE, mask=mask, sinks=sinks)
        )
        assert_close(got, story.expected[:, :, part])
        start += tokens
        layer.freeze()


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    window=windows,
    asked=windows,
    grouped=st.booleans(),
)
def test_gathered_copies_attend_as_each_sequence_alone(
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
    keys, values = view.update_and_fetch(
        mx.concatenate([story.keys[:, :, at] for story, at in zip(stories, last, strict=True)]),
        mx.concatenate([story.values[:, :, at] for story, at in zip(stories, last, strict=True)]),
    )
    queries = mx.concatenate(
        [story.queries[:, :, at] for story, at in zip(stories, last, strict=True)]
    )
    got = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=SCALE, mask=mask[:, 0] if grouped else mask
    )
    assert_close(
        got,
        mx.concatenate([story.expected[:, :, at] for story, at in zip(stories, last, strict=True)]),
    )


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
def test_recurrent_states_follow_their_sequence_whatever_batch_they_are_in(
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


def test_an_unchanged_batch_gets_its_stack_back_as_it_is() -> None:
    states = [RecurrentState(1) for _ in range(2)]
    stack = mx.zeros((2, 3))
    StateView(states)[0] = stack
    assert StateView(states)[0] is stack
    assert StateView(states[::-1])[0] is not stack
    assert StateView(states[:1])[0] is not stack


def test_views_are_never_falsy_and_composites_are_indexed_by_part() -> None:
    pairs = [Composite((RecurrentState(1), FullKV())) for _ in range(2)]
    made = pairs[0].view(pairs, for_kv=_spans, for_recurrent=StateView)
    assert made
    assert isinstance(made[0], StateView)
    assert made[0]
    assert made[1] == 2


def test_a_kind_that_only_mlx_lm_knows_cannot_be_laid_out() -> None:
    foreign = [ForeignState(object()), ForeignState(object())]
    with pytest.raises(TypeError, match="cannot be laid out for several sequences"):
        foreign[0].view(foreign, for_kv=_spans, for_recurrent=StateView)


def _spans(layers: Sequence[LayerKV]) -> int:
    return len(layers)
