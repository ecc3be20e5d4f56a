"""Attention of one query over quantized keys and values with MLX, for decode steps on GPUs.

`mx.quantized_matmul` reads the quantized numbers (codes) directly, so a step reads a half or a
quarter of the bytes of keys and values in bf16. Scores and weights are computed in float32:
rounding them to bf16 would change the result more than 8-bit keys do.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import mlx.core as mx

from holdfast.worker.engine.host_decoding import bits_of
from holdfast.worker.kernels.decode_attention import Bits
from holdfast.worker.kv.layer import LayerKV
from holdfast.worker.kv.quantized import fit_for


def attend(layer: LayerKV, seen: int, queries: mx.array, *, sinks: mx.array | None) -> mx.array:
    """Attention of one query per head over the last `seen` positions of a quantized layer. Lazy.

    queries: scaled, [1, heads, 1, head_dim]. sinks: [heads]. Returns [1, heads, 1, value_dim].
    """
    heads = queries.shape[1]
    keys, values = layer.form()
    grouped = queries.astype(mx.float32).reshape(1, keys.heads, -1, keys.dimension)
    runs = [_pair(arrays, keys.heads, low, high) for arrays, low, high in layer.stored(seen)]
    key_bits, value_bits = bits_of(layer)
    scores = [_product(grouped, of_keys, key_bits, transpose=True) for of_keys, _ in runs]
    ends = list(itertools.accumulate(part.shape[3] for part in scores))
    if sinks is not None:
        scores.append(sinks.astype(mx.float32).reshape(1, keys.heads, -1, 1))
    weights = mx.softmax(mx.concatenate(scores, axis=-1), axis=-1)
    terms = [
        _product(weight, of_values, value_bits, transpose=False)
        for weight, (_, of_values) in zip(mx.split(weights, ends, axis=-1), runs, strict=False)
    ]
    attended = sum(terms[1:], start=terms[0])
    return attended.reshape(1, heads, 1, values.dimension).astype(queries.dtype)


def _pair(
    stored: Sequence[mx.array], kv_heads: int, low: int, high: int
) -> tuple[list[mx.array], list[mx.array]]:
    """The arrays of the keys and the arrays of the values of tokens `low` to `high`."""
    arrays = [array[:, :, low:high] for array in stored]
    if arrays[0].shape[1] == 2 * kv_heads:  # the heads of the keys, then those of the values
        return [array[:, :kv_heads] for array in arrays], [array[:, kv_heads:] for array in arrays]
    half = len(arrays) // 2
    return arrays[:half], arrays[half:]


def _product(
    left: mx.array, stored: Sequence[mx.array], bits: Bits, *, transpose: bool
) -> mx.array:
    """The product with stored keys (transposed) or values: one array, or codes, scales, biases."""
    if len(stored) == 1:
        (array,) = stored
        array = array.astype(left.dtype)
        return left @ (array.swapaxes(-1, -2) if transpose else array)
    codes, scales, biases = fit_for("mx.quantized_matmul", stored)
    return mx.quantized_matmul(
        left,
        codes,
        scales.astype(left.dtype),
        biases.astype(left.dtype),
        transpose=transpose,
        group_size=codes.shape[3] * 32 // bits // scales.shape[3],
        bits=bits,
    )
