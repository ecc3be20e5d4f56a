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
from holdfast.worker.kernels.decode_attention import NATIVE_BITS, Bits, Buffer, Run
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
    if queries.dtype != mx.float32 or decode_attention.unavailable():
        return False
    is_quantized = any(_bits(layer) != (NATIVE_BITS, NATIVE_BITS) for layer in layers)
    if not is_quantized and sum(seen) * queries.shape[1] < least_scores:
        return False
    if not all(layer.has_buffers for layer in layers):
        return False
    keys, values = layers[0].form()
    return keys.dtype == values.dtype == "float32" and decode_attention.supports(
        heads=queries.shape[1],
        kv_heads=keys.heads,
        key_dimension=keys.dimension,
        value_dimension=values.dimension,
        is_quantized=is_quantized,
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
    keys, values = layers[0].form()
    buffers: dict[int, Buffer] = {}
    rows = []
    for layer, runs in zip(layers, stored, strict=True):
        row = []
        for arrays, start, end in runs:
            key = id(arrays[0])
            if key not in buffers:
                buffers[key] = _buffer(arrays, _bits(layer), kv_heads=keys.heads)
            row.append(Run(buffers[key], start, end))
        rows.append(row)
    attended = decode_attention.attend(
        np.array(queries, copy=False)[:, :, 0],
        rows,
        kv_heads=keys.heads,
        value_dimension=values.dimension,
        sinks=np.array(extra[0]) if extra else None,
        threads=threads_to_use(),
    )
    return mx.array(attended[:, :, None])


def _bits(layer: LayerKV) -> tuple[Bits, Bits]:
    """Bits of the keys and of the values in the quantized runs of a layer."""
    return layer.bits, layer.bits


def _buffer(stored: Sequence[mx.array], bits: tuple[Bits, Bits], *, kv_heads: int) -> Buffer:
    """The buffer of stored keys and values, which are evaluated and row-contiguous.

    bits: of keys and of values in the quantized runs of the layer; runs of one or two arrays are
    not quantized.
    """
    views = [np.array(array, copy=False) for array in stored]  # released before the next append
    assert all(view.flags.c_contiguous for view in views), "a buffer is not row-contiguous"
    capacity = views[0].shape[2]
    of_keys = [view.ctypes.data for view in views]
    is_whole = views[0].shape[1] == 2 * kv_heads  # the heads of the keys, then those of the values
    if is_whole:
        of_values = [view.ctypes.data + view.nbytes // 2 for view in views]
    else:
        half = len(views) // 2
        of_keys, of_values = of_keys[:half], of_keys[half:]
    if len(of_keys) == 1:
        return Buffer(keys=of_keys[0], values=of_values[0], capacity=capacity)
    return Buffer(
        keys=of_keys[0],
        values=of_values[0],
        capacity=capacity,
        key_bits=bits[0],
        value_bits=bits[1],
        key_scales=of_keys[1],
        key_biases=of_keys[2],
        value_scales=of_values[1],
        value_biases=of_values[2],
    )
