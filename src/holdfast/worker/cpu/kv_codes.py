"""Dequantizes keys and values on a CPU: with the C kernel, which is several times as fast as MLX, or,
for 5 bits, in MLX operations that take a quarter of the time of `mx.dequantize`.

Keys and values may have different forms and bits: pairs here are for keys and for values. Codes are
quantized numbers, stored with a scale and a bias per group. A run is a range of adjoining tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from holdfast.worker.cpu.kernels.decode_attention import Quantized, can_dequantize
from holdfast.worker.cpu.kernels.decode_attention import dequantize as dequantize_by_kernel
from holdfast.worker.cpu.kernels.five_bits import FIELDS_OF_FIVE_BITS
from holdfast.worker.kv.bits import Bits
from holdfast.worker.kv.layer import DTYPES, HeadsForm, StoredRun, keys_and_values
from holdfast.worker.kv.quantized import ARRAYS_OF_CODES, dequantized


def dequantize(
    runs: Sequence[StoredRun], forms: tuple[HeadsForm, HeadsForm], bits: tuple[Bits, Bits]
) -> list[tuple[mx.array, mx.array]] | None:
    """Dequantize adjoining runs of codes of keys and values. Evaluates the codes.

    Returns adjoining keys and values; None if MLX is to compute them.
    """
    if all(
        form.dtype == "float32" and form.dimension and can_dequantize(form.dimension)
        for form in forms
    ):
        return [_by_kernel(runs, forms, bits)]
    if 5 in bits:
        return [_by_mlx(run, DTYPES[forms[0].dtype], bits) for run in runs]
    return None


def _by_kernel(
    runs: Sequence[StoredRun], forms: tuple[HeadsForm, HeadsForm], bits: tuple[Bits, Bits]
) -> tuple[mx.array, mx.array]:
    """Keys and values of all runs, by the C kernel."""
    mx.eval([arrays for arrays, _, _ in runs])
    tokens = sum(end - start for _, start, end in runs)
    # the first of the three arrays (codes, scales, biases) of keys, and then that of values
    first_arrays = range(0, len(runs[0][0]), ARRAYS_OF_CODES)
    dequantized_arrays = []
    for form, first, code_bits in zip(forms, first_arrays, bits, strict=False):
        codes = [
            (_as_numpy(arrays[first : first + ARRAYS_OF_CODES], code_bits), start, end)
            for arrays, start, end in runs
        ]
        heads = len(codes[0][0].codes)
        array = mx.zeros((1, heads, tokens, form.dimension))
        mx.eval(array)
        dequantize_by_kernel(codes, np.array(array, copy=False)[0])  # writes to the array's memory
        dequantized_arrays.append(array)
    return keys_and_values(dequantized_arrays)


def _as_numpy(arrays: Sequence[mx.array], bits: Bits) -> Quantized:
    """Views of evaluated codes, scales and biases. Release them before the next append."""
    codes, scales, biases = (np.array(array, copy=False)[0] for array in arrays)
    assert codes.flags.c_contiguous, "a buffer is not row-contiguous"
    return Quantized(codes, scales, biases, bits)


def _by_mlx(run: StoredRun, dtype: mx.Dtype, bits: tuple[Bits, Bits]) -> tuple[mx.array, mx.array]:
    """Keys and values of a run, in MLX operations. Lazy."""
    arrays, start, end = run
    cut_arrays = [array[:, :, start:end] for array in arrays]
    first_arrays = range(0, len(cut_arrays), ARRAYS_OF_CODES)
    codes = [cut_arrays[first : first + ARRAYS_OF_CODES] for first in first_arrays]
    return keys_and_values(
        [
            dequantized_five(each, dtype=dtype)
            if code_bits == 5
            else dequantized(each, bits=code_bits, dtype=dtype)
            for each, code_bits in zip(codes, bits, strict=False)
        ]
    )


def dequantized_five(arrays: Sequence[mx.array], *, dtype: mx.Dtype) -> mx.array:
    """As `dequantized`, for 5 bits. Lazy."""
    codes, scales, biases = arrays
    if not codes.shape[-1]:  # the index of sparse attention has keys, no values
        return mx.zeros(codes.shape, dtype)
    scales, biases = scales.astype(dtype), biases.astype(dtype)
    groups = _codes_of_five_bits(codes).reshape(*scales.shape, -1).astype(dtype)
    return (groups * scales[..., None] + biases[..., None]).reshape(*scales.shape[:-1], -1)


def _codes_of_five_bits(packed: mx.array) -> mx.array:
    """Unpack codes of 5 bits to one code per byte, [1, heads, tokens, dimension]. Lazy.

    `mx.dequantize` lacks a fast loop for 5 bits on CPUs. Five bytes hold eight codes, the first one
    in the lowest bits; they are spread over the eight bytes of an integer (`FIELDS_OF_FIVE_BITS`).
    """
    bytes_of_codes = packed.view(mx.uint8)
    *rows, byte_count = bytes_of_codes.shape
    five_bytes = bytes_of_codes.reshape(*rows, byte_count // 5, 5)
    codes = mx.pad(five_bytes, [(0, 0)] * len(rows) + [(0, 0), (0, 3)]).view(mx.uint64)
    for step in FIELDS_OF_FIVE_BITS:
        stay_mask, shift_mask, shift = (mx.array(number, mx.uint64) for number in step)
        codes = (codes & stay_mask) | ((codes & shift_mask) << shift)
    return codes.view(mx.uint8).reshape(*rows, byte_count * 8 // 5)
