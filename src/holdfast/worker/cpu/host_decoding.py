"""Attention of decoding sequences on the CPU, by the C kernel or by numpy.

Codes are quantized keys and values. A run is a range of adjoining tokens in one buffer.

A step waits for MLX once per layer, calls the kernel on MLX's buffers in place, and continues in
MLX. Without the kernel, numpy computes attention over quantized keys and values, and MLX attention
over unquantized ones. The wait costs 20 to 40 µs, so it only pays when there are many attention
scores. A prefix that several sequences share (frozen parts, see `FullKV`) is read once for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from holdfast.worker.cpu.host_attention import threads_to_use
from holdfast.worker.cpu.kernels import decode_attention
from holdfast.worker.cpu.kernels.decode_attention import (
    NATIVE_BITS,
    Bits,
    Buffer,
    Floats,
    Quantized,
    Run,
)
from holdfast.worker.kv.layer import LayerKV

SCORES_WORTH_IT = 1 << 14  # with fewer, waiting for MLX costs the time saved


def description() -> str:
    """What computes the attention of decode steps, and why."""
    reason = decode_attention.unavailable()
    if reason:
        return f"MLX, or numpy if keys and values are quantized. Why no C kernel: {reason}"
    return "the C kernel from some 2,000 tokens on, MLX below"


def pays(
    layers: Sequence[LayerKV], seen_tokens: Sequence[int], queries: mx.array, *, least_scores: int
) -> bool:
    """Whether `attend` supports this step and is faster than MLX.

    seen_tokens: how many positions each sequence's query sees. queries: [rows, heads, 1, head_dim].
    least_scores: the number of attention scores from which the wait for MLX is worth it.
    """
    has_codes = _have_codes(layers)  # which MLX would have to dequantize first
    if not has_codes and (
        decode_attention.unavailable() or sum(seen_tokens) * queries.shape[1] < least_scores
    ):
        return False
    if queries.dtype != mx.float32 or not all(layer.has_buffers for layer in layers):
        return False
    keys, values = layers[0].form()
    if not keys.dtype == values.dtype == "float32":
        return False
    return has_codes or _has_kernel(layers[0], queries.shape[1], is_quantized=False)


def attend(
    layers: Sequence[LayerKV],
    seen_tokens: Sequence[int],
    queries: mx.array,
    *,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of one query per sequence, over the last `seen_tokens` positions of each. Requires
    `pays`.

    queries: scaled, [rows, heads, 1, head_dim]. sinks: [heads]. Returns [rows, heads, 1,
    value_dim]. Evaluates the queries and the states.
    """
    float_sinks = [] if sinks is None else [sinks.astype(mx.float32)]
    mx.eval(queries, float_sinks)
    attended = attend_in_place(
        layers,
        seen_tokens,
        np.array(queries, copy=False)[:, :, 0],
        sinks=np.array(float_sinks[0]) if float_sinks else None,
    )
    return mx.array(attended[:, :, None])


def attend_in_place(
    layers: Sequence[LayerKV],
    seen_tokens: Sequence[int],
    queries: Floats,
    *,
    sinks: Floats | None = None,
) -> Floats:
    """As `attend`, for numpy arrays. queries: [rows, heads, head_dim], sinks: [heads]. Returns
    [rows, heads, value_dim]. Evaluates the states.
    """
    stored_runs = [
        list(layer.stored(count)) for layer, count in zip(layers, seen_tokens, strict=True)
    ]
    mx.eval([arrays for runs in stored_runs for arrays, _, _ in runs])
    keys, values = layers[0].form()
    # keyed by id() of the first array, so that sequences with the same arrays share one `Buffer`
    buffers: dict[int, Buffer] = {}
    runs_of_rows = []
    for layer, runs in zip(layers, stored_runs, strict=True):
        runs_of_row = []
        for arrays, start, end in runs:
            array_id = id(arrays[0])
            if array_id not in buffers:
                buffers[array_id] = _buffer(arrays, bits_of(layer), kv_heads=keys.heads)
            runs_of_row.append(Run(buffers[array_id], start, end))
        runs_of_rows.append(runs_of_row)
    compute = decode_attention.attend_in_numpy
    if _has_kernel(layers[0], queries.shape[1], is_quantized=_have_codes(layers)):
        compute = partial(decode_attention.attend, threads=threads_to_use())
    return compute(
        queries, runs_of_rows, kv_heads=keys.heads, value_dimension=values.dimension, sinks=sinks
    )


def _have_codes(layers: Sequence[LayerKV]) -> bool:
    """Whether a layer holds quantized keys and values."""
    return any(layer.bits for layer in layers)


def _has_kernel(layer: LayerKV, heads: int, *, is_quantized: bool) -> bool:
    """Whether the C kernel can compute this layer with this many query heads."""
    keys, values = layer.form()
    return not decode_attention.unavailable() and decode_attention.supports(
        heads=heads,
        kv_heads=keys.heads,
        key_dimension=keys.dimension,
        value_dimension=values.dimension,
        is_quantized=is_quantized,
    )


def bits_of(layer: LayerKV) -> tuple[Bits, Bits]:
    """Bits of the keys and of the values of the tokens that a layer holds quantized."""
    return layer.bits or (NATIVE_BITS, NATIVE_BITS)


def _buffer(stored: Sequence[mx.array], bits: tuple[Bits, Bits], *, kv_heads: int) -> Buffer:
    """The buffer of stored keys and values, which are evaluated and row-contiguous.

    stored: one array each for keys and values, or three (codes, scales, biases), unless they share
    arrays. bits: of the codes of keys and of values; unused if there are no codes.
    """
    # these views must be released before the next append to the buffers
    views: list[Any] = [np.array(array, copy=False)[0] for array in stored]
    assert all(view.flags.c_contiguous for view in views), "a buffer is not row-contiguous"
    if len(views[0]) == 2 * kv_heads:  # the heads of the keys, then those of the values
        views = [view[:kv_heads] for view in views] + [view[kv_heads:] for view in views]
    half = len(views) // 2
    if half == 1:
        return Buffer(*views)
    keys, values = (
        Quantized(codes, scales, biases, code_bits)
        for (codes, scales, biases), code_bits in zip(
            (views[:half], views[half:]), bits, strict=True
        )
    )
    return Buffer(keys, values)
