"""Attention of one query over quantized keys and values with MLX, for decode steps on GPUs.

`mx.quantized_matmul` reads the quantized numbers (codes) directly, so a step reads a half or a
quarter of the bytes of keys and values in bf16. Scores and weights are computed in float32:
rounding them to bf16 would change the result more than 8-bit keys do.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from holdfast.worker.kv.layer import LayerKV
from holdfast.worker.kv.quantized import copied_if_needed, dequantized, quantized

LENGTHS = (300, 1_500, 5_000)

logger = logging.getLogger("holdfast.worker")


def attend(
    layer: LayerKV, seen_tokens: int, queries: mx.array, *, sinks: mx.array | None
) -> mx.array:
    """Attention of one query per head over the last `seen_tokens` positions of a quantized layer.
    Lazy.

    queries: scaled, [1, heads, 1, head_dim]. sinks: [heads]. Returns [1, heads, 1, value_dim].
    """
    heads = queries.shape[1]
    keys, values = layer.form()  # shapes and types, before they were quantized
    grouped = queries.astype(mx.float32).reshape(1, keys.heads, -1, keys.dimension)
    arrays_of_runs = [
        _keys_and_values_of_run(arrays, keys.heads, low, high)
        for arrays, low, high in layer.stored(seen_tokens)
    ]
    assert layer.bits is not None
    key_bits, value_bits = layer.bits
    scores = [_product(grouped, of_keys, key_bits, transpose=True) for of_keys, _ in arrays_of_runs]
    run_ends = list(itertools.accumulate(part.shape[3] for part in scores))
    if sinks is not None:
        scores.append(sinks.astype(mx.float32).reshape(1, keys.heads, -1, 1))
    weights = mx.softmax(mx.concatenate(scores, axis=-1), axis=-1)
    outputs = [
        _product(weight, of_values, value_bits, transpose=False)
        for weight, (_, of_values) in zip(
            mx.split(weights, run_ends, axis=-1), arrays_of_runs, strict=False
        )
    ]
    attended = sum(outputs[1:], start=outputs[0])
    return attended.reshape(1, heads, 1, values.dimension).astype(queries.dtype)


@cache
def is_right() -> bool:
    """Whether this device multiplies with codes as with the dequantized numbers, also for long
    contexts: some versions of MLX do not (mlx#4201, mlx#4250). Takes some milliseconds once.
    """
    try:
        return all(map(_is_right_for, LENGTHS))
    except (RuntimeError, ValueError, TypeError):  # of an unsupported operation
        logger.exception("MLX cannot multiply with quantized keys and values on this device")
        return False


def _is_right_for(tokens: int) -> bool:
    """Whether products with codes are right for keys and values of this many tokens."""
    array = mx.random.normal((1, 2, tokens, 96), key=mx.random.key(tokens))
    queries = mx.random.normal((1, 2, 4, 96), key=mx.random.key(0))
    weights = mx.softmax(mx.random.normal((1, 2, 4, tokens), key=mx.random.key(1)), axis=-1)
    for dimension, bits in itertools.product((64, 96), (8, 5, 4)):
        arrays = quantized(array[..., :dimension], bits)
        dequantized_array = dequantized(arrays, bits=bits, dtype=mx.float32)
        for factor, transpose in ((queries[..., :dimension], True), (weights, False)):
            expected = _product(factor, [dequantized_array], bits, transpose=transpose)
            got = _product(factor, arrays, bits, transpose=transpose)
            # TF32 has ten bits of precision
            if not mx.allclose(got, expected, rtol=1e-2, atol=2e-2).item():
                return False
    return True


def _keys_and_values_of_run(
    buffers: Sequence[mx.array], kv_heads: int, low: int, high: int
) -> tuple[list[mx.array], list[mx.array]]:
    """The arrays of the keys, and those of the values, of tokens `low` to `high` of these buffers:
    one array each, or codes, scales and biases.
    """
    arrays = [array[:, :, low:high] for array in buffers]
    if arrays[0].shape[1] == 2 * kv_heads:  # the heads of the keys, then those of the values
        return [array[:, :kv_heads] for array in arrays], [array[:, kv_heads:] for array in arrays]
    half = len(arrays) // 2
    return arrays[:half], arrays[half:]


def _product(
    factor: mx.array, stored: Sequence[mx.array], bits: int, *, transpose: bool
) -> mx.array:
    """The product with stored keys (transposed) or values: one array, or codes, scales, biases."""
    if len(stored) == 1:
        (array,) = stored
        array = array.astype(factor.dtype)
        return factor @ (array.swapaxes(-1, -2) if transpose else array)
    codes, scales, biases = copied_if_needed("mx.quantized_matmul", stored)
    return mx.quantized_matmul(
        factor,
        codes,
        scales.astype(factor.dtype),
        biases.astype(factor.dtype),
        transpose=transpose,
        group_size=codes.shape[3] * 32 // bits // scales.shape[3],
        bits=bits,
    )
