"""Live state of each kind, compared with plain lists of tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.engine import mlx_lm_hooks
from holdfast.worker.kv.full import FullKV
from holdfast.worker.kv.kinds import Composite, ForeignState, fresh_layer
from holdfast.worker.kv.live import LiveState
from holdfast.worker.kv.recurrent import RecurrentState
from holdfast.worker.kv.window import WINDOW_SLACK_TOKENS, ChunkKV, WindowKV

CHUNKS = st.lists(
    st.one_of(st.integers(1, 9), st.sampled_from([63, 255, 256, 257, 300])), min_size=1, max_size=8
)
WINDOWS = st.sampled_from([1, 2, 3, 8, 64, 257])


def numbered(start: int, count: int) -> tuple[mx.array, mx.array]:
    """Keys that contain their token's number, and values that contain its negative."""
    keys = mx.broadcast_to(
        mx.arange(start, start + count, dtype=mx.float32).reshape(1, 1, count, 1), (1, 2, count, 3)
    )
    return keys, -keys


def numbers(pair: tuple[mx.array, mx.array]) -> list[int]:
    keys, values = pair
    assert bool(mx.all(keys == -values))
    assert bool(mx.all(keys == keys[:, :1, :, :1]))
    found: list[int] = keys[0, 0, :, 0].astype(mx.int32).tolist()  # type: ignore[assignment]
    return found


@given(window=WINDOWS, chunks=CHUNKS, trims=st.lists(st.booleans(), min_size=8, max_size=8))
def test_a_window_equals_a_list_of_all_tokens(
    window: int, chunks: list[int], trims: list[bool]
) -> None:
    kept, read = WindowKV(window), 0
    for added, does_trim in zip(chunks, trims, strict=False):
        kept.append(*numbered(read, added))
        read += added
        visible_to_the_chunk = min(read, added + window - 1)
        assert kept.tokens == read
        assert kept.kept_tokens() >= visible_to_the_chunk
        assert numbers(kept.last(visible_to_the_chunk)) == list(
            range(read - visible_to_the_chunk, read)
        )
        if does_trim:
            kept.trim()
        assert numbers(kept.copy_out(0, read)) == list(range(max(0, read - window + 1), read))


@given(window=WINDOWS, chunks=CHUNKS)
def test_a_trimmed_window_takes_only_its_fixed_bytes(window: int, chunks: list[int]) -> None:
    kept, read = WindowKV(window), 0
    for added in chunks:
        kept.append(*numbered(read, added))
        kept.trim()
        read += added
        assert sum(array.nbytes for array in kept.arrays()) == kept.fixed_bytes()
    assert (kept.bytes_per_token(), kept.fixed_bytes()) == (
        0,
        2 * 2 * 3 * 4 * (window + WINDOW_SLACK_TOKENS),
    )


@given(window=WINDOWS, before=st.integers(1, 600), after=CHUNKS)
def test_a_restored_window_continues_like_the_original(
    window: int, before: int, after: list[int]
) -> None:
    first, second = WindowKV(window), WindowKV(window)
    first.append(*numbered(0, before))
    second.restore(iter(first.copy_out(0, before)), first.layout(), end=before)
    read = before
    for added in after:
        for each in (first, second):
            each.append(*numbered(read, added))
        read += added
        seen = min(read, added + window - 1)
        assert numbers(second.last(seen)) == numbers(first.last(seen))
    assert second.tokens == first.tokens


@given(chunk=WINDOWS, chunks=CHUNKS, trims=st.lists(st.booleans(), min_size=8, max_size=8))
def test_a_chunk_equals_a_list_of_all_tokens(
    chunk: int, chunks: list[int], trims: list[bool]
) -> None:
    kept, read = ChunkKV(chunk), 0
    for added, does_trim in zip(chunks, trims, strict=False):
        visible_to_the_span = read % chunk + added
        kept.append(*numbered(read, added))
        read += added
        assert numbers(kept.last(visible_to_the_span)) == list(
            range(read - visible_to_the_span, read)
        )
        if does_trim:
            kept.trim()
            assert sum(array.nbytes for array in kept.arrays()) == kept.fixed_bytes()
        assert kept.visible_before_next() == read % chunk
        current = range((read - 1) // chunk * chunk, read)
        copied = kept.copy_out(0, read)
        assert numbers((copied[0], copied[1])) == list(current)
        assert [each.of(read).shape for each in kept.form()] == [each.shape for each in copied]


@given(chunk=WINDOWS, before=st.integers(1, 600), after=CHUNKS)
def test_a_restored_chunk_continues_like_the_original(
    chunk: int, before: int, after: list[int]
) -> None:
    first, second = ChunkKV(chunk), ChunkKV(chunk)
    first.append(*numbered(0, before))
    second.restore(iter(first.copy_out(0, before)), first.layout(), end=before)
    read = before
    for added in after:
        seen = read % chunk + added
        for each in (first, second):
            each.append(*numbered(read, added))
        read += added
        assert numbers(second.last(seen)) == numbers(first.last(seen))
    assert second.tokens == first.tokens


@given(chunks=CHUNKS, reserved=st.integers(0, 700), grows=st.integers(0, 1500))
def test_full_memory_keeps_every_token_in_the_capacity_reserved(
    chunks: list[int], reserved: int, grows: int
) -> None:
    kept, read = FullKV(), 0
    kept.reserve(reserved)
    for index, added in enumerate(chunks):
        if index == 1:
            kept.reserve(grows)
        kept.append(*numbered(read, added))
        read += added
        assert numbers(kept.last(read)) == list(range(read))
        assert sum(array.nbytes for array in kept.arrays()) >= kept.bytes_per_token() * max(
            read, reserved
        )
    assert numbers(kept.copy_out(1, read)) == list(range(1, read))
    assert kept.bytes_per_token() == 2 * 2 * 3 * 4


@given(
    window=st.one_of(st.none(), WINDOWS),
    chunks=CHUNKS,
    proposed=st.integers(1, 20),
    dropped=st.integers(0, 20),
)
def test_dropped_tokens_leave_no_trace(
    window: int | None, chunks: list[int], proposed: int, dropped: int
) -> None:
    """As with speculation: drafted rows are read in one span, and some of them turn out wrong."""
    kept = FullKV() if window is None else WindowKV(window)
    for added in chunks:
        kept.append(*numbered(kept.tokens, added))
        kept.trim()
    read = sum(chunks)
    kept.append(*numbered(read + 1000, proposed))
    kept.trim()
    dropped = min(dropped, proposed)
    assert kept.can_rewind(dropped)
    kept.rewind(dropped)
    right = read + proposed - dropped
    kept.append(*numbered(right, 3))
    assert kept.tokens == right + 3
    seen = 3 if window is None else min(3, window + 2)
    assert numbers(kept.last(seen)) == list(range(right + 3 - seen, right + 3))
    rejected = [*range(read + 1000, read + 1000 + proposed - dropped)]
    story = [*range(read), *rejected, *range(right, right + 3)]
    visible = right + 3 if window is None else min(right + 3, window + 2)
    assert numbers(kept.last(visible)) == story[len(story) - visible :]


def test_a_window_rewinds_no_further_than_its_slack() -> None:
    kept = WindowKV(8)
    kept.append(*numbered(0, 5))
    assert kept.can_rewind(5)
    assert not kept.can_rewind(6)
    kept.append(*numbered(5, 100))
    assert kept.can_rewind(100)
    kept.append(*numbered(105, 400))
    kept.trim()
    assert not kept.can_rewind(1)
    with pytest.raises(AssertionError, match="WindowKV cannot drop 1 tokens"):
        kept.rewind(1)


def test_a_recurrent_state_rewinds_only_to_a_checkpoint() -> None:
    state = RecurrentState(1)
    state[0] = mx.zeros((1, 4))
    checkpoint, layout = state.copy_out(0, 3), state.layout()
    state[0] = mx.ones((1, 4))
    assert state.can_rewind(0)
    assert not state.can_rewind(1)
    assert not LiveState([Composite((FullKV(), state))], 3).can_rewind(2)
    state.restore(iter(checkpoint), layout, end=3)
    held = state[0]
    assert held is not None
    assert held.tolist() == [[0.0] * 4]


def test_copies_do_not_change_with_the_live_buffers() -> None:
    full, window = FullKV(), WindowKV(4)
    for kept in (full, window):
        kept.reserve(32)
        kept.append(*numbered(0, 5))
    copies = full.copy_out(0, 5), window.copy_out(0, 5)
    mx.eval(copies, list(full.arrays()), list(window.arrays()))
    for kept in (full, window):
        kept.append(*numbered(100, 3))
        mx.eval(list(kept.arrays()))
    assert [numbers(pair) for pair in copies] == [[0, 1, 2, 3, 4], [2, 3, 4]]


def test_a_row_of_a_stack_reads_like_a_single_state() -> None:
    stack = mx.arange(12.0).reshape(3, 4)
    state = RecurrentState(2)
    state.set_row(1, stack, 2)
    assert state[0] is None
    read = state[1]
    assert read is not None
    assert read.tolist() == [[8.0, 9.0, 10.0, 11.0]]
    assert state.fixed_bytes() == stack.nbytes // 3
    assert state.layout().filled == (1,)
    state[1] = read
    assert state.stacked(1)[1] is None


@pytest.mark.parametrize("way", ["copied", "trimmed"])
def test_copies_and_trimmed_state_do_not_retain_their_chunk(way: str) -> None:
    def read_a_chunk() -> Any:
        state = RecurrentState(1)
        state[0] = (mx.zeros((1, 4096, 64)) + 1)[:, -3:]
        mx.eval(list(state.arrays()))
        kept: Any = state.copy_out(0, 4096) if way == "copied" else state
        if way == "trimmed":
            state.trim()
        mx.eval(kept if way == "copied" else list(state.arrays()))
        return kept

    mx.synchronize()
    before = mx.get_active_memory()
    kept = read_a_chunk()
    assert mx.get_active_memory() - before < 16 * 1024
    del kept


def test_mlx_lms_caches_are_distinguished_by_kind() -> None:
    mlx_lm_hooks.prepare()
    from mlx_lm.models import cache

    kinds = [
        fresh_layer(cache.KVCache()),
        fresh_layer(cache.RotatingKVCache(max_size=9, keep=0)),
        fresh_layer(cache.RotatingKVCache(max_size=9, keep=4)),
        fresh_layer(cache.ArraysCache(size=3)),
        fresh_layer(cache.CacheList(cache.ArraysCache(size=1), cache.KVCache())),
        fresh_layer(cache.CacheList(cache.KVCache(), cache.ChunkedKVCache(8))),
    ]
    assert [type(kind) for kind in kinds] == [
        FullKV,
        WindowKV,
        ForeignState,
        RecurrentState,
        Composite,
        Composite,
    ]
    assert [any(leaf.is_foreign for leaf in kind.leaves()) for kind in kinds] == [
        False,
        False,
        True,
        False,
        False,
        False,
    ]
    assert [type(leaf) for leaf in kinds[5].leaves()] == [FullKV, ChunkKV]
    assert isinstance(kinds[1], WindowKV)
    assert kinds[1].window == 9


def test_an_empty_foreign_state_takes_no_bytes() -> None:
    mlx_lm_hooks.prepare()
    from mlx_lm.models import cache

    state = ForeignState(cache.CacheList(cache.KVCache(), cache.RotatingKVCache(max_size=4)))
    assert not list(state.arrays())
    assert (state.bytes_per_token(), state.fixed_bytes()) == (0, 0)


def test_foreign_state_distinguishes_growing_from_fixed_bytes() -> None:
    mlx_lm_hooks.prepare()
    from mlx_lm.models import cache

    growing, rotating, arrays = (
        cache.KVCache(),
        cache.RotatingKVCache(max_size=4),
        cache.ArraysCache(size=2),
    )
    for kept in (growing, rotating):
        kept.update_and_fetch(*numbered(0, 3))
    arrays[1] = mx.zeros((1, 10))
    state = ForeignState(cache.CacheList(growing, rotating, arrays))
    per_token = 2 * 2 * 3 * 4
    assert (state.bytes_per_token(), state.fixed_bytes()) == (per_token, 4 * per_token + 40)
