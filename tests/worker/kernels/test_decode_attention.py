"""The attention kernel against its numpy twin."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.kernels import decode_attention
from holdfast.worker.kernels.decode_attention import (
    Bits,
    Buffer,
    Floats,
    Quantized,
    Run,
    attend,
    attend_in_numpy,
    group_of,
)

pytestmark = pytest.mark.skipif(
    bool(decode_attention.unavailable()), reason=decode_attention.unavailable()
)

CAPACITY = 700


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    key_dimension: int
    value_dimension: int


SHAPES = [
    Shape(8, 2, 64, 64),
    Shape(4, 4, 128, 128),
    Shape(12, 1, 192, 128),
    Shape(64, 1, 64, 64),
    Shape(2, 1, 576, 512),
]
SMALL_GROUP_SHAPES = [Shape(6, 3, 96, 96), Shape(4, 2, 32, 64), Shape(4, 1, 128, 160)]
ODD_SHAPES = [Shape(6, 2, 16, 48), Shape(3, 3, 80, 80)]
NATIVE: tuple[Bits, Bits] = (32, 32)
ALL_BITS: list[tuple[Bits, Bits]] = [NATIVE, (8, 8), (4, 4), (8, 4), (4, 8)]


def quantized(array: Floats, bits: Bits) -> Quantized:
    group = group_of(array.shape[2])
    codes, scales, biases = mx.quantize(mx.array(array), group_size=group, bits=bits)
    halves = [np.array(each.astype(mx.float16)) for each in (scales, biases)]
    return Quantized(np.array(codes), *halves, bits)


class Kept:
    """Random keys and values, as arrays and as a buffer of the kernel."""

    def __init__(self, rng: np.random.Generator, shape: Shape, bits: tuple[Bits, Bits]) -> None:
        sizes = (shape.key_dimension, shape.value_dimension)
        self.arrays: list[Floats | Quantized] = []
        for size, each in zip(sizes, bits, strict=True):
            array = rng.standard_normal((shape.kv_heads, CAPACITY, size), np.float32)
            self.arrays.append(array if each == 32 else quantized(array, each))
        keys, values = self.arrays
        if isinstance(keys, Quantized) and isinstance(values, Quantized):
            self.buffer = Buffer(
                keys=keys.codes.ctypes.data,
                values=values.codes.ctypes.data,
                capacity=CAPACITY,
                key_bits=keys.bits,
                value_bits=values.bits,
                key_scales=keys.scales.ctypes.data,
                key_biases=keys.biases.ctypes.data,
                value_scales=values.scales.ctypes.data,
                value_biases=values.biases.ctypes.data,
            )
        else:
            assert isinstance(keys, np.ndarray)
            assert isinstance(values, np.ndarray)
            self.buffer = Buffer(
                keys=keys.ctypes.data, values=values.ctypes.data, capacity=CAPACITY
            )

    def cut(self, start: int, end: int) -> tuple[Floats | Quantized, Floats | Quantized]:
        keys, values = (
            Quantized(
                *(array[:, start:end] for array in (each.codes, each.scales, each.biases)),
                each.bits,
            )
            if isinstance(each, Quantized)
            else each[:, start:end]
            for each in self.arrays
        )
        return keys, values


def queries_of(rng: np.random.Generator, rows: int, shape: Shape) -> Floats:
    scale = 3 / np.sqrt(shape.key_dimension)
    queries = rng.standard_normal((rows, shape.heads, shape.key_dimension), np.float32) * scale
    return queries.astype(np.float32)


spans = st.tuples(
    st.integers(0, 2), st.sampled_from([0, 0, 0, 5, 130]), st.sampled_from([1, 16, 127, 300, 570])
)


@given(
    shape=st.sampled_from(SHAPES + SMALL_GROUP_SHAPES + ODD_SHAPES),
    bits=st.sampled_from(ALL_BITS),
    rows=st.lists(st.lists(spans, min_size=1, max_size=3), min_size=1, max_size=9),
    has_sinks=st.booleans(),
    threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 9),
)
def test_rows_with_common_and_own_runs_get_what_numpy_computes(
    shape: Shape,
    bits: tuple[Bits, Bits],
    rows: list[list[tuple[int, int, int]]],
    has_sinks: bool,
    threads: int,
    seed: int,
) -> None:
    if shape in ODD_SHAPES:
        bits = NATIVE
    rng = np.random.default_rng(seed)
    kept = [Kept(rng, shape, bits) for _ in range(3)]
    queries = queries_of(rng, len(rows), shape)
    sinks = rng.standard_normal(shape.heads).astype(np.float32) if has_sinks else None
    got = attend(
        queries,
        [[Run(kept[at].buffer, start, start + count) for at, start, count in row] for row in rows],
        kv_heads=shape.kv_heads,
        value_dimension=shape.value_dimension,
        sinks=sinks,
        threads=threads,
    )
    expected = attend_in_numpy(
        queries,
        [[kept[at].cut(start, start + count) for at, start, count in row] for row in rows],
        sinks=sinks,
    )
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_a_shared_run_gives_each_row_what_it_gets_alone(bits: tuple[Bits, Bits]) -> None:
    rng = np.random.default_rng(3)
    shape = SHAPES[0]
    shared, *own = (Kept(rng, shape, bits) for _ in range(41))
    queries = queries_of(rng, 40, shape)
    rows = [[Run(shared.buffer, 0, 650), Run(kept.buffer, 0, 9)] for kept in own]
    together = attend(queries, rows, kv_heads=2, value_dimension=64)
    for query, row, got in zip(queries, rows, together, strict=True):
        alone = attend(query[None], [row], kv_heads=2, value_dimension=64)[0]
        np.testing.assert_allclose(got, alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_values_that_are_not_finite_reach_the_result(poison: float, place: int) -> None:
    rng = np.random.default_rng(0)
    kept = Kept(rng, SHAPES[0], NATIVE)
    array = kept.arrays[place]
    assert isinstance(array, np.ndarray)
    array[1, 500, 7] = poison
    got = attend(
        queries_of(rng, 1, SHAPES[0]),
        [[Run(kept.buffer, 0, 600)]],
        kv_heads=2,
        value_dimension=64,
    )
    assert np.isfinite(got[0, :4]).all()  # the heads of the other key head
    assert not np.isfinite(got[0, 4:]).all()


def test_threads_of_a_process_call_it_at_the_same_time() -> None:
    rng = np.random.default_rng(1)
    kept = Kept(rng, SHAPES[1], NATIVE)
    queries = queries_of(rng, 4, SHAPES[1])
    rows = [[Run(kept.buffer, 0, 700)]] * 4
    expected = attend_in_numpy(queries, [[kept.cut(0, 700)]] * 4)

    def ask(_: int) -> float:
        got = attend(queries, rows, kv_heads=4, value_dimension=128, threads=3)
        return float(np.abs(got - expected).max())

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(ask, range(200))) < 1e-5


def test_what_it_does_not_support_is_known() -> None:
    def supports(**changes: int) -> tuple[bool, bool]:
        sizes = {"heads": 8, "kv_heads": 2, "key_dimension": 64, "value_dimension": 64, **changes}
        native, of_codes = (
            decode_attention.supports(**sizes, is_quantized=each) for each in (False, True)
        )
        return native, of_codes

    assert supports() == (True, True)
    assert supports(key_dimension=96) == (True, True)
    assert supports(key_dimension=80) == (True, False)
    assert supports(key_dimension=704) == (True, False)
    assert supports(value_dimension=24) == (False, False)
    assert supports(kv_heads=3) == (False, False)


def test_an_unsupported_call_is_an_error() -> None:
    buffer = Kept(np.random.default_rng(0), SHAPES[0], (8, 4)).buffer
    only_keys = dataclasses.replace(buffer, value_bits=32)
    for heads, of in ((3, buffer), (8, only_keys)):
        queries = np.zeros((1, heads, 64), np.float32)
        with pytest.raises(RuntimeError, match="shapes or bits are not supported"):
            attend(queries, [[Run(of, 0, 9)]], kv_heads=2, value_dimension=64)
