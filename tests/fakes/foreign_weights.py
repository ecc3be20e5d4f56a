"""Weights in the formats of other tools, written with numpy, each with the plain weights that it
represents.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Stored: TypeAlias = tuple[str, Array]
"""The dtype of a safetensors file, and an array of the same bytes."""
Quantize: TypeAlias = Callable[[Array], tuple[dict[str, Stored], Array]]
"""Returns the tensors that replace a weight, by the suffix of their names, and the plain weight
that they represent.
"""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# float32 is more precise than the scales of all formats here, so plain weights are exact
_NUMPY = {"F32": np.float32, "F16": np.float16, "U8": np.uint8, "I8": np.int8}
# values of E2M1, by code
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def _e4m3_values() -> Array:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    values = np.where(codes & 128, -magnitude, magnitude)
    values[(codes & 127) == 127] = np.nan
    return values.astype(np.float32)


E4M3 = _e4m3_values()


def _nearest(values: Array, levels: Array) -> Array:
    """The index of the level that is nearest to each value. Levels may be NaN."""
    known = np.flatnonzero(~np.isnan(levels))
    order = known[np.argsort(levels[known], kind="stable")]
    middles = (levels[order][1:] + levels[order][:-1]) / 2
    found: Array = order[np.searchsorted(middles, values)]
    return found


def to_e4m3(values: Array) -> Array:
    """Convert to FP8 (E4M3) codes."""
    return _nearest(values, E4M3).astype(np.uint8)


def to_bf16(values: Array) -> Array:
    """Convert to bfloat16: the upper halves of float32 numbers."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def stored(values: Array, dtype: str = "F32") -> Stored:
    """An array in the form of a safetensors file."""
    if dtype == "BF16":
        return dtype, to_bf16(values)
    return dtype, values.astype(_NUMPY[dtype]) if dtype in _NUMPY else values


def write_safetensors(file: Path, tensors: Mapping[str, Stored]) -> None:
    """Write a file of weights."""
    file.write_bytes(safetensors_bytes(tensors))


def safetensors_bytes(tensors: Mapping[str, Stored]) -> bytes:
    """The content of a file of weights."""
    header, content = {}, []
    end = 0
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [end, end + len(raw)],
        }
        content.append(raw)
        end += len(raw)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(content)


def _blocks(values: Array, rows: int, columns: int) -> Array:
    """The largest magnitude of each block, as a [blocks, blocks] array."""
    high, wide = values.shape
    padded = np.pad(np.abs(values), ((0, -high % rows), (0, -wide % columns)))
    shape = (padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    largest: Array = padded.reshape(shape).max(axis=(1, 3))
    return largest


def _spread(scales: Array, shape: tuple[int, ...], rows: int, columns: int) -> Array:
    whole = np.repeat(np.repeat(scales, rows, axis=0), columns, axis=1)
    return whole[: shape[0], : shape[1]]


def fp8_blocks(rows: int = 128, columns: int = 128, scale: str = "weight_scale_inv") -> Quantize:
    """FP8 with a scale for each block of a weight."""

    def quantize(weight: Array) -> tuple[dict[str, Stored], Array]:
        scales = (np.maximum(_blocks(weight, rows, columns), 1e-8) / 448).astype(np.float32)
        spread = _spread(scales, weight.shape, rows, columns)
        codes = to_e4m3(weight / spread)
        return {"weight": ("F8_E4M3", codes), scale: stored(scales)}, E4M3[codes] * spread

    return quantize


def fp8_powers(weight: Array) -> tuple[dict[str, Stored], Array]:
    """FP8 with a power of two for each block of 32 × 32."""
    exponents = np.ceil(np.log2(np.maximum(_blocks(weight, 32, 32), 1e-8) / 448)).astype(np.int32)
    spread = _spread(2.0**exponents, weight.shape, 32, 32)
    codes = to_e4m3(weight / spread)
    parts = {"weight": ("F8_E4M3", codes), "scale": ("F8_E8M0", (exponents + 127).astype(np.uint8))}
    return parts, (E4M3[codes] * spread).astype(np.float32)


def fp8_tensor(scale: str = "weight_scale", per_row: bool = False, dtype: str = "F32") -> Quantize:
    """FP8 with one scale for a weight, or one for each of its rows."""

    def quantize(weight: Array) -> tuple[dict[str, Stored], Array]:
        largest = np.abs(weight).max(axis=1, keepdims=True) if per_row else np.abs(weight).max()
        scales = np.asarray(largest / 448, np.float32)
        codes = to_e4m3(weight / scales)
        return {"weight": ("F8_E4M3", codes), scale: stored(scales, dtype)}, E4M3[codes] * scales

    return quantize


def bare_fp8(weight: Array) -> tuple[dict[str, Stored], Array]:
    """FP8 without a scale."""
    codes = to_e4m3(weight)
    return {"weight": ("F8_E4M3", codes)}, E4M3[codes]


def bare(dtype: str, kind: type[np.generic], factor: float = 100) -> Quantize:
    """Integers without a scale."""

    def quantize(weight: Array) -> tuple[dict[str, Stored], Array]:
        return {"weight": (dtype, np.round(weight * factor).astype(kind))}, weight

    return quantize


def int8_rows(scale: str = "weight_scale") -> Quantize:
    """Integers of 8 bits with a scale for each row."""

    def quantize(weight: Array) -> tuple[dict[str, Stored], Array]:
        scales = (np.abs(weight).max(axis=1, keepdims=True) / 127).astype(np.float32)
        codes = np.round(weight / scales).astype(np.int8)
        return {"weight": ("I8", codes), scale: stored(scales)}, codes * scales

    return quantize


def _groups(weight: Array, group_size: int, bits: int) -> tuple[Array, Array, Array]:
    """The codes, scales and zero points of an asymmetric quantization."""
    parts = weight.reshape(weight.shape[0], -1, group_size)
    low, high = parts.min(axis=2), parts.max(axis=2)
    scales = ((high - low) / (2**bits - 1)).astype(np.float16)
    zeros = np.clip(np.round(-low / scales), 0, 2**bits - 1).astype(np.int32)
    codes = np.round(parts / scales[..., None]) + zeros[..., None]
    return np.clip(codes, 0, 2**bits - 1).astype(np.int32), scales, zeros


def _packed(codes: Array, bits: int, order: tuple[int, ...]) -> Array:
    """Pack the last axis into 32-bit integers; position i gets the code of column order[i]."""
    count = 32 // bits
    parts = codes.reshape(*codes.shape[:-1], -1, count).astype(np.uint32)
    words = np.zeros(parts.shape[:-1], np.uint32)
    for place, column in enumerate(order[:count]):
        words |= parts[..., column] << np.uint32(bits * place)
    return words.view(np.int32)


def awq(group_size: int = 32, bits: int = 4) -> Quantize:
    """AutoAWQ's GEMM layout: the columns of [in, out] are interleaved."""
    order = _AWQ_ORDER if bits == 4 else tuple(range(8))

    def quantize(weight: Array) -> tuple[dict[str, Stored], Array]:
        codes, scales, zeros = _groups(weight, group_size, bits)
        plain = (codes - zeros[..., None]) * scales[..., None].astype(np.float32)
        across = codes.reshape(weight.shape).T
        tensors = {
            "qweight": ("I32", _packed(across, bits, order)),
            "qzeros": ("I32", _packed(zeros.T, bits, order)),
            "scales": stored(scales.T, "F16"),
        }
        return tensors, plain.reshape(weight.shape)

    return quantize


def gptq(group_size: int = 32, bits: int = 4, has_index: bool = True) -> Quantize:
    """AutoGPTQ's layout: the rows of [in, out] are packed, and zero points are stored minus one."""

    def quantize(weight: Array) -> tuple[dict[str, Stored], Array]:
        codes, scales, zeros = _groups(weight, group_size, bits)
        plain = (codes - zeros[..., None]) * scales[..., None].astype(np.float32)
        order = tuple(range(32 // bits))
        tensors = {
            "qweight": ("I32", _packed(codes.reshape(weight.shape), bits, order).T),
            "qzeros": ("I32", _packed((zeros.T - 1) & (2**bits - 1), bits, order)),
            "scales": stored(scales.T, "F16"),
        }
        if has_index:
            index = np.arange(weight.shape[1]) // group_size
            tensors["g_idx"] = ("I32", index.astype(np.int32))
        return tensors, plain.reshape(weight.shape)

    return quantize


def int_packed(group_size: int = 32, bits: int = 4) -> Quantize:
    """The `pack-quantized` form of compressed-tensors, symmetric."""

    def quantize(weight: Array) -> tuple[dict[str, Stored], Array]:
        half = 2 ** (bits - 1)
        parts = weight.reshape(weight.shape[0], -1, group_size)
        scales = (np.abs(parts).max(axis=2) / (half - 1)).astype(np.float32)
        codes = np.clip(np.round(parts / scales[..., None]), -half, half - 1).astype(np.int32)
        packed = _packed((codes + half).reshape(weight.shape), bits, tuple(range(32 // bits)))
        tensors = {
            "weight_packed": ("I32", packed),
            "weight_scale": stored(scales),
            "weight_shape": ("I64", np.array(weight.shape, np.int64)),
        }
        return tensors, (codes * scales[..., None]).reshape(weight.shape)

    return quantize


def _fp4_codes(parts: Array, scales: Array) -> tuple[Array, Array]:
    scaled = parts / scales[..., None]
    codes = _nearest(np.abs(scaled), _FP4)
    values = np.sign(scaled) * _FP4[codes] * scales[..., None]
    return (codes | np.where(scaled < 0, 8, 0)).astype(np.uint8), values.astype(np.float32)


def _fp4_bytes(codes: Array) -> Array:
    return (codes[..., ::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def mxfp4(packed: str = "weight_packed", scale: str = "weight_scale") -> Quantize:
    """FP4 with a power of two for each 32 numbers."""

    def quantize(weight: Array) -> tuple[dict[str, Stored], Array]:
        parts = weight.reshape(*weight.shape[:-1], -1, 32)
        largest = np.maximum(np.abs(parts).max(axis=-1), 1e-8)
        exponents = np.ceil(np.log2(largest / 6)).astype(np.int32)
        codes, values = _fp4_codes(parts, 2.0**exponents)
        tensors = {
            packed: ("U8", _fp4_bytes(codes.reshape(weight.shape))),
            scale: ("U8", (exponents + 127).astype(np.uint8)),
        }
        return tensors, values.reshape(weight.shape)

    return quantize


def nvfp4(packed: str, scale: str, whole: str, inverted: bool) -> Quantize:
    """FP4 with an FP8 scale for each 16 numbers, and a scale for the weight.

    inverted: whether the numbers are divided by the scale of the weight (compressed-tensors) or
    multiplied by it (ModelOpt).
    """

    def quantize(weight: Array) -> tuple[dict[str, Stored], Array]:
        factor = np.float32(np.abs(weight).max() / (6 * 448))
        parts = weight.reshape(weight.shape[0], -1, 16)
        scale_codes = to_e4m3(np.abs(parts).max(axis=2) / 6 / factor)
        scales = np.maximum(E4M3[scale_codes] * factor, 1e-12)
        codes, values = _fp4_codes(parts, scales)
        tensors = {
            packed: ("U8", _fp4_bytes(codes.reshape(weight.shape))),
            scale: ("F8_E4M3", scale_codes),
            whole: stored(np.array([1 / factor if inverted else factor], np.float32)),
        }
        return tensors, values.reshape(weight.shape)

    return quantize


def replaced(
    tensors: Mapping[str, Array], quantize: Quantize, *, is_quantized: Callable[[str], bool]
) -> tuple[dict[str, Stored], dict[str, Stored]]:
    """Quantize the weights whose names `is_quantized` accepts.

    Returns the tensors of the quantized model, and those of the equivalent plain model.
    """
    foreign: dict[str, Stored] = {}
    plain: dict[str, Stored] = {}
    for name, array in tensors.items():
        plain[name] = stored(array)
        if not (name.endswith(".weight") and is_quantized(name)):
            foreign[name] = plain[name]
            continue
        parts, stands_for = quantize(array)
        layer = name.removesuffix("weight")
        foreign |= {layer + end: each for end, each in parts.items()}
        plain[name] = stored(stands_for)
    return foreign, plain


def is_linear(name: str) -> bool:
    """Whether a tensor is the weight of a linear layer of a block, by the names of most families."""
    return "_proj" in name and name.endswith(".weight")
