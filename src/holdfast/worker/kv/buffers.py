"""Arrays that live state is made of: room for tokens, copies, and what arrays look like.

Keys and values that look alike are stored in one buffer, [1, 2 * kv_heads, capacity, head_dim], the
heads of the keys first: the rows of a step then need one write for each sequence instead of two.
Others (most of MLA) have a buffer each. A tuple of one array or of two is called stored; a pair is
always keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from holdfast.worker.kv.form import ArrayForm, HeadsForm


def are_alike(keys: mx.array, values: mx.array) -> bool:
    """Whether keys and values are stored in one buffer."""
    return keys.shape == values.shape and keys.dtype == values.dtype


def moved(
    old: Sequence[mx.array], like: Sequence[mx.array], *, capacity: int, start: int, end: int
) -> tuple[mx.array, ...]:
    """New buffers for `capacity` tokens, with tokens start to end of the old ones in front.

    like: what they are shaped for, stored or a pair.
    """
    halves = 2 if len(like) == 2 and are_alike(*like) else 1
    buffers = tuple(
        mx.zeros((1, halves * each.shape[1], capacity, each.shape[3]), each.dtype)
        for each in like[: len(like) // halves]
    )
    if end > start:
        for buffer, before in zip(buffers, old, strict=True):
            buffer[:, :, : end - start] = before[:, :, start:end]
    return buffers


def write(buffers: Sequence[mx.array], arrays: Sequence[mx.array], *, start: int) -> None:
    """Put tokens into buffers from token `start` on, in place. arrays: stored or a pair."""
    end = start + arrays[0].shape[2]
    if len(arrays) == len(buffers):
        for buffer, array in zip(buffers, arrays, strict=True):
            buffer[:, :, start:end] = array
        return
    (buffer,) = buffers
    keys, values = arrays
    heads = keys.shape[1]
    buffer[:, :heads, start:end] = keys
    buffer[:, heads:, start:end] = values


def pair_of(
    stored: Sequence[mx.array], *, start: int = 0, end: int | None = None
) -> tuple[mx.array, mx.array]:
    """Keys and values of tokens start to end; copies nothing."""
    if len(stored) == 2:
        keys, values = stored
        return keys[:, :, start:end], values[:, :, start:end]
    (both,) = stored
    heads = both.shape[1] // 2
    return both[:, :heads, start:end], both[:, heads:, start:end]


def joined(runs: Sequence[Sequence[mx.array]], *, capacity: int = 0) -> tuple[mx.array, ...]:
    """Runs of tokens, stored or as pairs, one after the other, in buffers of their own where there
    are several runs.

    capacity: tokens that the buffers have room for; what the runs do not fill is zero.
    """
    unused = capacity - sum(run[0].shape[2] for run in runs)
    return tuple(
        mx.concatenate([*same, *_zeros(same[0], unused)], axis=2)
        for same in zip(*runs, strict=True)
    )


def _zeros(like: mx.array, tokens: int) -> list[mx.array]:
    if tokens <= 0:
        return []
    return [mx.zeros((1, like.shape[1], tokens, like.shape[3]), like.dtype)]


def copied(array: mx.array) -> mx.array:
    """A bit-exact copy with a buffer of its own; `mx.contiguous` shares the buffer where a slice
    happens to be contiguous.
    """
    return array * mx.ones((), array.dtype)


def array_form(array: mx.array) -> ArrayForm:
    """Type and shape of an array."""
    return ArrayForm(str(array.dtype).removeprefix("mlx.core."), tuple(array.shape))


def heads_form(array: mx.array, *, most_tokens: int | None = None) -> HeadsForm:
    """The form of keys or values, [1, kv_heads, tokens, head_dim], of any number of tokens or of
    `most_tokens` at most.
    """
    return HeadsForm(array.shape[1], array.shape[3], array_form(array).dtype, most_tokens)
