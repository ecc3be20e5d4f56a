"""Products with weights in their stored form, packed or in 16 bits: packed_products.h.

Packed weights are quantized codes, several in each integer. MLX multiplies by a stand-in: an array that
begins with a random key and the addresses of the stored weights, and has the shape of the float32
weights, but not their memory. The shim (`products`) recognizes the key.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.worker.cpu.kernels import products
from holdfast.worker.cpu.kernels.build import turned_off

NAME = "packed_products"  # as HOLDFAST_KERNELS lists it
BITS = (8, 4)
GROUP_SIZES = (32, 64, 128)
INPUTS_MULTIPLE = 32
MOST_ROWS = 64  # with more rows, it pays to convert the weights and leave the product to BLAS

# formats of weights and scales, numbered as in packed_products.h; bfloat16, which numpy does not have,
# comes as its bits
_FORMATS = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(np.uint16): 2}
_CODES = {8: 3, 4: 4}
_KEY_BYTES = 16

Floats: TypeAlias = npt.NDArray[np.float32]


class PackedStruct(ctypes.Structure):
    """`Packed` in packed_products.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weights", "scales", "biases")),
        *(
            (name, ctypes.c_int32)
            for name in ("outputs", "inputs", "group", "format", "scale_format")
        ),
    ]


class _StandIn(ctypes.Structure):
    _fields_ = [("key", ctypes.c_uint8 * _KEY_BYTES), ("weights", PackedStruct)]


def unavailable() -> str:
    """Why the kernel is unavailable; empty if it is available."""
    return products.unavailable() or turned_off(NAME)


@cache
def prepare() -> bytes:
    """Prepare the shim for packed weights. Returns the first bytes of every stand-in: random, so
    that no model's weights begin with them.
    """
    key = os.urandom(_KEY_BYTES)
    products.library().holdfast_set_key(key)
    products.library().holdfast_set_most_packed_rows(MOST_ROWS)
    return key


class PackedWeights:
    """The weights of one layer: 16-bit floats, or codes as `mx.quantize` returns them in its affine
    mode. Requires that `unavailable` is empty.
    """

    def __init__(
        self,
        weights: npt.NDArray[Any],
        scales: npt.NDArray[Any] | None = None,
        biases: npt.NDArray[Any] | None = None,
        *,
        bits: int = 16,
        group_size: int = 0,
    ) -> None:
        """weights: [outputs, inputs] in float16, or in bfloat16 (as uint16); or [outputs, inputs ×
        bits / 32] in uint32, which have scales and biases: [outputs, inputs / group_size], in
        float32, float16, or bfloat16. The owner of the arrays leaves them unchanged.
        """
        arrays = [array for array in (weights, scales, biases) if array is not None]
        assert all(array.flags.c_contiguous for array in arrays), "weights are not row-contiguous"
        self.outputs = len(weights)
        self.inputs = weights.shape[1] * weights.itemsize * 8 // bits
        assert self.inputs % INPUTS_MULTIPLE == 0
        if scales is not None and biases is not None:
            assert scales.dtype == biases.dtype
            assert bits in BITS
            assert group_size in GROUP_SIZES
            assert scales.shape == biases.shape == (self.outputs, self.inputs // group_size)
        self._arrays = arrays  # keeps their memory alive: `struct` has their addresses
        self.struct = PackedStruct(
            *(None if array is None else array.ctypes.data for array in (weights, scales, biases)),
            self.outputs,
            self.inputs,
            group_size,
            _FORMATS[weights.dtype] if scales is None else _CODES[bits],
            0 if scales is None else _FORMATS[scales.dtype],
        )

    def stand_in(self) -> npt.NDArray[np.uint32]:
        """The first numbers of a stand-in for these weights: if MLX multiplies by the transposed
        matrix [outputs, inputs] that begins with them, the shim multiplies by these weights. Keep
        this object alive as long as the matrix.
        """
        key = (ctypes.c_uint8 * _KEY_BYTES)(*prepare())
        return np.frombuffer(bytes(_StandIn(key, self.struct)), np.uint32)

    def multiply(self, x: Floats, *, start: int = 0, end: int | None = None) -> Floats:
        """x Wᵀ, for the outputs `start` to `end`. Returns [rows, end - start].

        x: [rows, inputs], row-contiguous. A row gets the same bits alone and together with others
        if there are at most MOST_ROWS.
        """
        end = self.outputs if end is None else end
        assert 0 <= start <= end <= self.outputs
        assert x.shape[1] == self.inputs
        assert x.flags.c_contiguous
        assert x.dtype == np.float32
        prepare()
        result = np.empty((len(x), end - start), np.float32)
        if not products.library().holdfast_multiply_packed(
            ctypes.byref(self.struct),
            *map(ctypes.c_int, (start, end, len(x))),
            ctypes.c_float(1),
            ctypes.c_void_p(x.ctypes.data),
            ctypes.c_int64(self.inputs),
            ctypes.c_float(0),
            ctypes.c_void_p(result.ctypes.data),
            ctypes.c_int64(end - start),
        ):
            raise MemoryError("there is not enough memory for a product with packed weights")
        return result
