"""Arrays that live state is made of: room for tokens, copies, and what arrays look like."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from holdfast.worker.kv.form import ArrayForm, HeadsForm


def moved(old: Sequence[mx.array], like: Sequence[mx.array], *, capacity: int, start: int, end: int) -> tuple[mx.array, ...]:
    """New buffers for `capacity` tokens, shaped like these arrays, with tokens start to end of the old ones in front."""
    buffers = tuple(mx.zeros((1, each.shape[1], capacity, each.shape[3]), each.dtype) for each in like)
    if end > start:
        for buffer, before in zip(buffers, old, strict=True):
            buffer[:, :, : end - start] = before[:, :, start:end]
    return buffers


def write(buffers: Sequence[mx.array], arrays: Sequence[mx.array], *, start: int) -> None:
    """Put tokens into buffers from token `start` on, in place."""
    for buffer, array in zip(buffers, arrays, strict=True):
        buffer[:, :, start : start + array.shape[2]] = array


def joined(runs: Sequence[tuple[mx.array, mx.array]], *, capacity: int = 0) -> tuple[mx.array, mx.array]:
    """Keys and values of runs of tokens, one after the other, in buffers of their own where there are several runs.

    capacity: tokens that the buffers have room for; what the runs do not fill is zero.
    """
    unused = capacity - sum(keys.shape[2] for keys, _ in runs)
    keys, values = (mx.concatenate([*same, *_zeros(same[0], unused)], axis=2) for same in zip(*runs, strict=True))
    return keys, values


def _zeros(like: mx.array, tokens: int) -> list[mx.array]:
    if tokens <= 0:
        return []
    return [mx.zeros((1, like.shape[1], tokens, like.shape[3]), like.dtype)]


def copied(array: mx.array) -> mx.array:
    """A bit-exact copy with a buffer of its own; `mx.contiguous` shares the buffer where a slice happens to be contiguous."""
    return array * mx.ones((), array.dtype)


def array_form(array: mx.array) -> ArrayForm:
    """Type and shape of an array."""
    return ArrayForm(str(array.dtype).removeprefix("mlx.core."), tuple(array.shape))


def heads_form(array: mx.array, *, most_tokens: int | None = None) -> HeadsForm:
    """The form of keys or values, [1, kv_heads, tokens, head_dim], of any number of tokens or of `most_tokens` at most."""
    return HeadsForm(array.shape[1], array.shape[3], array_form(array).dtype, most_tokens)
