"""Products with stored weights, compared with numpy."""

from __future__ import annotations

import itertools
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.worker.cpu.blas import current_blas
from holdfast.worker.cpu.kernels import packed_products
from holdfast.worker.cpu.kernels.packed_products import (
    BITS,
    GROUP_SIZES,
    MOST_ROWS,
    Floats,
    PackedWeights,
)
from tests.fakes.fewer_instructions import assert_passes, folder_of_kernels

pytestmark = pytest.mark.skipif(
    bool(packed_products.unavailable() or current_blas().no_shim),
    reason=packed_products.unavailable() or current_blas().no_shim,
)
SCALES = (mx.float32, mx.float16, mx.bfloat16)
HALVES = (mx.float16, mx.bfloat16)


def stored(array: mx.array) -> npt.NDArray[Any]:
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def codes_of(
    outputs: int, inputs: int, *, bits: int, group_size: int, scales: mx.Dtype
) -> tuple[PackedWeights, Floats]:
    """Quantized weights and their float32 values."""
    weight = mx.random.normal((outputs, inputs), key=mx.random.key(0))
    codes, *both = mx.quantize(weight, group_size, bits)
    both = [array.astype(scales) for array in both]
    exact = [np.array(array.astype(mx.float32)) for array in both]
    packed = PackedWeights(np.array(codes), *map(stored, both), bits=bits, group_size=group_size)
    return packed, dequantized(np.array(codes), *exact, bits=bits)


def halves_of(outputs: int, inputs: int, dtype: mx.Dtype) -> tuple[PackedWeights, Floats]:
    weight = mx.random.normal((outputs, inputs), key=mx.random.key(0)).astype(dtype)
    return PackedWeights(stored(weight)), np.array(weight.astype(mx.float32))


def dequantized(codes: npt.NDArray[np.uint32], scales: Any, biases: Any, *, bits: int) -> Floats:
    """The kernel's format, spelled out in numpy."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    numbers = (codes[..., None] >> shifts & np.uint32((1 << bits) - 1)).astype(np.float32)
    grouped = numbers.reshape(*scales.shape, -1)
    weights: Floats = grouped * scales[..., None] + biases[..., None]
    return weights.reshape(len(codes), -1)


def normal(*shape: int) -> Floats:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def assert_product(packed: PackedWeights, weights: Floats, x: Floats) -> None:
    wanted = x.astype(np.float64) @ weights.astype(np.float64).T
    # the possible effect of float32 rounding, from the added numbers
    most = np.abs(x).astype(np.float64) @ np.abs(weights).astype(np.float64).T
    assert (np.abs(packed.multiply(x) - wanted) <= 2e-6 * most + 1e-30).all()


@settings(max_examples=60)
@given(
    rows=st.sampled_from([1, 2, 3, 4, 5, 7, 33, MOST_ROWS, MOST_ROWS + 1]),
    outputs=st.sampled_from([1, 7, 8, 64, 129, 600]),
    groups=st.integers(1, 17),
    bits=st.sampled_from(BITS),
    group_size=st.sampled_from(GROUP_SIZES),
    scales=st.sampled_from(SCALES),
)
def test_products_with_codes_match_numpy(
    rows: int, outputs: int, groups: int, bits: int, group_size: int, scales: mx.Dtype
) -> None:
    inputs = groups * group_size
    codes = codes_of(outputs, inputs, bits=bits, group_size=group_size, scales=scales)
    assert_product(*codes, normal(rows, inputs))


@settings(max_examples=40)
@given(
    rows=st.sampled_from([1, 2, 3, 8, 33, MOST_ROWS + 1]),
    outputs=st.sampled_from([1, 7, 8, 129, 600]),
    inputs=st.integers(1, 40).map(lambda each: 32 * each),
    dtype=st.sampled_from(HALVES),
)
def test_products_with_16_bit_weights_match_numpy(
    rows: int, outputs: int, inputs: int, dtype: mx.Dtype
) -> None:
    assert_product(*halves_of(outputs, inputs, dtype), normal(rows, inputs))


def test_every_16_bit_number_is_converted() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = np.where(np.isfinite(bits.view(np.float16)), bits, 0).astype(np.uint16)
    weights = bits.view(np.float16).reshape(-1, 32)
    one_of_32 = np.eye(32, dtype=np.float32)
    exact = weights.astype(np.float32)
    for rows in (1, 32):
        got = np.concatenate(
            [
                PackedWeights(weights).multiply(one_of_32[at : at + rows])
                for at in range(0, 32, rows)
            ]
        )
        assert np.array_equal(got, exact.T)


@pytest.mark.parametrize("scale", [1e-37, 1e-20, 1e20, 1e30])
@pytest.mark.parametrize("bits", BITS)
def test_inputs_of_any_size_keep_their_precision(bits: int, scale: float) -> None:
    packed, weights = codes_of(20, 256, bits=bits, group_size=64, scales=mx.float32)
    x = normal(3, 256)
    x[:, 64:128] *= scale  # one group only
    x[:, 5] = 0
    assert_product(packed, weights, x)


@pytest.mark.parametrize("bits", [*BITS, 16])
@pytest.mark.parametrize("group_size", [32, 64])
def test_a_row_gets_the_same_bits_alone_and_together(bits: int, group_size: int) -> None:
    if bits == 16:
        packed, _ = halves_of(100, 1280, mx.bfloat16)
    else:
        packed, _ = codes_of(100, 1280, bits=bits, group_size=group_size, scales=mx.bfloat16)
    x = normal(MOST_ROWS, 1280)
    together = packed.multiply(x)
    for row in range(MOST_ROWS):
        assert np.array_equal(packed.multiply(x[row : row + 1])[0], together[row])
    for rows in range(1, MOST_ROWS):
        assert np.array_equal(packed.multiply(x[:rows]), together[:rows])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
@pytest.mark.slow
@pytest.mark.parametrize("less", ["-mno-avx512f", "-mno-avx512vnni", "-mno-avx"])
def test_processors_with_fewer_instructions_get_the_same_results(
    less: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    folder = folder_of_kernels(pytestconfig, otherwise=tmp_path)
    assert_passes(__file__, less=less, folder=folder)


def test_only_selected_outputs_are_computed() -> None:
    packed, _ = codes_of(50, 192, bits=4, group_size=64, scales=mx.float16)
    for rows in (5, MOST_ROWS + 1):
        x = normal(rows, 192)
        some = packed.multiply(x, start=7, end=45)
        np.testing.assert_allclose(some, packed.multiply(x)[:, 7:45], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [32, 64])
def test_non_finite_values_reach_only_their_own_row(bits: int, group_size: int) -> None:
    packed, _ = codes_of(20, 192, bits=bits, group_size=group_size, scales=mx.float32)
    for rows, poison in itertools.product((1, 2, 5), (np.nan, np.inf, -np.inf)):
        x = normal(rows, 192)
        x[-1, 70] = poison
        got = packed.multiply(x)
        assert not np.isfinite(got[-1]).any()
        assert np.isfinite(got[:-1]).all()


def test_several_threads_may_call_it_concurrently() -> None:
    packed, _ = codes_of(700, 256, bits=4, group_size=64, scales=mx.bfloat16)
    few, many = normal(3, 256), normal(MOST_ROWS + 1, 256)
    wanted = [packed.multiply(x) for x in (few, many)]

    def ask(_: int) -> bool:
        return all(
            np.array_equal(packed.multiply(x), product)
            for x, product in zip((few, many), wanted, strict=True)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(30)))
