"""MLX's float32 matrix products on Linux CPUs: a shim before a BLAS, with a kernel for few rows.

The shim (products.c) has the functions that MLX calls. It is loaded before MLX and passes the
calls on, so that any BLAS can compute them, also one whose functions have other names. It computes
products of few rows itself, of which decode steps consist.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.worker.cpu.kernels.build import Kernel, is_on, kernel

FEW_ROWS = "few_rows"  # as HOLDFAST_KERNELS lists the kernel; the shim is called "products"
# constants of CBLAS
_ROW_MAJOR = 101
_NOT_TRANSPOSED = 111
_TRANSPOSED = 112

Floats: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Blas:
    """Functions of a BLAS with the interface of CBLAS.

    get_threads, set_threads: get and set its thread count; None if it cannot be set. takes_64_bits:
    whether sizes and strides are 64-bit integers.
    """

    sgemm: Any
    dgemm: Any
    cgemm: Any
    get_threads: Any
    set_threads: Any
    takes_64_bits: bool


def unavailable() -> str:
    """Why the shim is unavailable; empty if it is available."""
    return _shim().reason


def library() -> ctypes.CDLL:
    """The compiled products.c. Requires that `unavailable` is empty."""
    compiled = _shim().library
    assert compiled is not None
    return compiled


@cache
def _shim() -> Kernel:
    return kernel("products")  # only one per process: MLX cannot be made to call another one later


def few_rows() -> int:
    """Products of up to this many rows are computed by the kernel; 0: it is turned off.

    Depends on the CPU. Requires that `unavailable` is empty.
    """
    return int(library().holdfast_most_rows()) if is_on(FEW_ROWS) else 0


def put_before_mlx(blas: Blas, *, threads: int) -> str:
    """Let MLX, which must not have been imported yet, call `blas` through the shim.

    Returns the file of the shim; empty if its results differ from numpy's on this machine, in
    which case nothing changes. Requires that `unavailable` is empty.
    """
    use(blas, threads=threads, most_rows=few_rows())
    if not _agrees_with_numpy():
        return ""
    file = library()._name
    # its symbols now take precedence over those of libraries that are loaded later
    ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)
    return file


def use(blas: Blas, *, threads: int, most_rows: int) -> None:
    """Let the shim pass products on to `blas`, except those of up to `most_rows` rows."""
    product_functions = (blas.sgemm, blas.dgemm, blas.cgemm)
    thread_functions = (blas.get_threads, blas.set_threads)
    library().holdfast_use_blas(
        *(ctypes.cast(each, ctypes.c_void_p) for each in (*product_functions, *thread_functions)),
        ctypes.c_int(blas.takes_64_bits),
        ctypes.c_int(threads),
        ctypes.c_int(most_rows),
    )


@contextmanager
def blas_on_one_thread() -> Iterator[None]:
    """Within the block, the BLAS behind the shim computes each product on the calling thread.
    Blocks of several threads may overlap. Requires that `unavailable` is empty.
    """
    library().holdfast_begin_one_thread()
    try:
        yield
    finally:
        library().holdfast_end_one_thread()


def linear(inputs: Floats, weights: Floats, bias: Floats | None = None) -> Floats:
    """A linear layer, by the call with which MLX computes it through the shim.

    inputs: [rows, n], weights: [outputs, n], both with adjoining columns. bias: [rows, outputs].
    Returns [rows, outputs].
    """
    return _multiply(inputs, weights, len(weights), _TRANSPOSED, bias)


def product(inputs: Floats, matrix: Floats, bias: Floats | None = None) -> Floats:
    """As `linear`, but with a matrix [n, outputs]: the values in the attention of a step."""
    return _multiply(inputs, matrix, matrix.shape[1], _NOT_TRANSPOSED, bias)


def _multiply(
    inputs: Floats, matrix: Floats, outputs: int, transposition: int, bias: Floats | None
) -> Floats:
    """Call the shim. transposition: CBLAS's constant for `matrix`."""
    rows, inner = inputs.shape
    # without a bias, the factor of the result (beta) is 0, and BLAS must ignore what is in it: NaN
    # would show if it did not
    result = np.full((rows, outputs), np.nan, np.float32) if bias is None else bias.copy()
    library().cblas_sgemm(
        *map(ctypes.c_int, (_ROW_MAJOR, _NOT_TRANSPOSED, transposition, rows, outputs, inner)),
        ctypes.c_float(1),
        ctypes.c_void_p(inputs.ctypes.data),
        ctypes.c_int(inputs.strides[0] // inputs.itemsize),
        ctypes.c_void_p(matrix.ctypes.data),
        ctypes.c_int(matrix.strides[0] // matrix.itemsize),
        ctypes.c_float(bias is not None),
        ctypes.c_void_p(result.ctypes.data),
        ctypes.c_int(outputs),
    )
    return result


def linear_in_numpy(inputs: Floats, weights: Floats, bias: Floats | None = None) -> Floats:
    """As `linear`, but in numpy."""
    product: Floats = inputs @ weights.T
    return product if bias is None else product + bias


def _agrees_with_numpy() -> bool:
    """Compare the shim with numpy on small random matrices: takes about a millisecond."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((77, 131), np.float32)
    for rows in range(1, 40):
        inputs = rng.standard_normal((rows, 131), np.float32)
        expected = linear_in_numpy(inputs, weights)
        for computed in (linear(inputs, weights), product(inputs, np.ascontiguousarray(weights.T))):
            if not np.allclose(computed, expected, rtol=1e-4, atol=1e-4):
                return False
    return True
