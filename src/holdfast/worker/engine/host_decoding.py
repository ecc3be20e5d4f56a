"""Attention of decoding sequences by the C kernel, for Linux without a GPU.

A step waits for MLX once per layer, calls the kernel on the buffers in place, and continues in MLX.
The wait costs 20 to 40 µs, so it only pays when there are many scores. Frozen parts that several
sequences hold are read once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from holdfast.worker.engine.host_attention import threads_to_use
from holdfast.worker.kernels import decode_attention
from holdfast.worker.kernels.decode_attention import Buffer, Run
from holdfast.worker.kv.layer import LayerKV

SCORES_WORTH_IT = 1 << 14  # with fewer, waiting for MLX costs the time saved


def description() -> str:
    """What computes the attention of decode steps on this device, and why."""
    if mx.default_device() != mx.Device(mx.cpu):
        return "MLX's fused kernel"
    reason = decode_attention.unavailable()
    return f"MLX: {reason}" if reason else "the C kernel from some 2,000 tokens on, MLX below"


def pays(
    layers: Sequence[LayerKV], seen: Sequence[int], queries: mx.array, *, least_scores: int
) -> bool:
    """Whether `attend` can compute this and is faster than MLX.

    seen: how many positions each sequence's query sees. queries: [rows, heads, 1, head_dim].
    """
    if sum(seen) * queries.shape[1] < least_scores or queries.dtype != mx.float32:
        return False
    pair = layers[0].last(0)
    return (
        pair[0].dtype == pair[1].dtype == mx.float32
        and decode_attention.supports(
            heads=queries.shape[1],
            kv_heads=pair[0].shape[1],
            key_dimension=pair[0].shape[3],
            value_dimension=pair[1].shape[3],
        )
        and not decode_attention.unavailable()
    )


def attend(
    layers: Sequence[LayerKV], seen: Sequence[int], queries: mx.array, *, sinks: mx.array | None
) -> mx.array:
    """Attention of one query per sequence over the last `seen` positions of each. Requires `pays`.

    queries: scaled, [rows, heads, 1, head_dim]. sinks: [heads]. Returns [rows, heads, 1,
    value_dim]. Evaluates the queries and the states.
    """
    stored = [list(layer.stored(count)) for layer, count in zip(layers, seen, strict=True)]
    extra = [] if sinks is None else [sinks.astype(mx.float32)]
    mx.eval(queries, extra, [arrays for runs in stored for arrays, _, _ in runs])
    keys, values = layers[0].last(0)
    buffers: dict[int, Buffer] = {}
    rows = []
    for runs in stored:
        row = []
        for arrays, start, end in runs:
            key = id(arrays[0])
            if key not in buffers:
                buffers[key] = _buffer(arrays, kv_heads=keys.shape[1])
            row.append(Run(buffers[key], start, end))
        rows.append(row)
    attended = decode_attention.attend(
        np.array(queries, copy=False)[:, :, 0],
        rows,
        kv_heads=keys.shape[1],
        value_dimension=values.shape[3],
        sinks=np.array(extra[0]) if extra else None,
        threads=threads_to_use(),
    )
    return mx.array(attended[:, :, None])


def _buffer(stored: Sequence[mx.array], *, kv_heads: int) -> Buffer:
    """The buffer of stored keys and values, which are evaluated and row-contiguous."""
    views = [np.array(array, copy=False) for array in stored]  # released before the next append
    assert all(view.flags.c_contiguous for view in views), "a buffer is not row-contiguous"
    first = views[0]
    capacity = first.shape[2]
    halfway = kv_heads * capacity * first.shape[3] * first.itemsize
    return Buffer(
        keys=first.ctypes.data,
        values=views[1].ctypes.data if len(views) == 2 else first.ctypes.data + halfway,
        capacity=capacity,
    )
