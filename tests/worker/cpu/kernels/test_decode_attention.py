"""Attention of decoding rows, in C and in numpy, against its definition."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.worker.cpu.kernels import decode_attention
from holdfast.worker.cpu.kernels.decode_attention import (
    Bits,
    Buffer,
    Floats,
    Quantized,
    Run,
    Stored,
    attend,
    attend_in_numpy,
    dequantize,
)
from holdfast.worker.kv.quantized import group_size_of
from tests.fakes.fewer_instructions import assert_passes, folder_of_kernels

needs_kernel = pytest.mark.skipif(
    bool(decode_attention.unavailable()), reason=decode_attention.unavailable()
)
both_ways = pytest.mark.parametrize(
    "compute", [pytest.param(attend, marks=needs_kernel), attend_in_numpy]
)
Compute: TypeAlias = Callable[..., Floats]

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
ALL_BITS: list[tuple[Bits, Bits]] = [NATIVE, (8, 8), (4, 4), (8, 4), (5, 4), (8, 5)]


def quantized(array: Floats, bits: Bits) -> Quantized:
    group = group_size_of(array.shape[2])
    codes, scales, biases = mx.quantize(mx.array(array), group_size=group, bits=bits)
    halves = [np.array(each.astype(mx.float16)) for each in (scales, biases)]
    return Quantized(np.array(codes), halves[0], halves[1], bits)


def random_buffer(
    rng: np.random.Generator, shape: Shape, bits: tuple[Bits, Bits], *, tokens: int = CAPACITY
) -> Buffer:
    keys, values = (
        rng.standard_normal((shape.kv_heads, tokens, size), np.float32)
        for size in (shape.key_dimension, shape.value_dimension)
    )
    if bits == NATIVE:
        return Buffer(keys, values)
    return Buffer(quantized(keys, bits[0]), quantized(values, bits[1]))


def by_definition(
    queries: Floats, rows: Sequence[Sequence[Run]], *, sinks: Floats | None = None
) -> Floats:
    """The result of each row's queries from dequantized keys and values."""
    return np.stack([row_of(query, runs, sinks) for query, runs in zip(queries, rows, strict=True)])


def row_of(query: Floats, runs: Sequence[Run], sinks: Floats | None) -> Floats:
    keys, values = (
        np.concatenate([dequantized(of)[:, run.start : run.end] for run, of in each], axis=1)
        for each in (
            [(run, run.buffer.keys) for run in runs],
            [(run, run.buffer.values) for run in runs],
        )
    )
    grouped = query.reshape(len(keys), -1, query.shape[1])
    scores = grouped @ keys.swapaxes(1, 2)  # [kv_heads, heads per key head, tokens]
    if sinks is not None:
        scores = np.concatenate([scores, sinks.reshape(*scores.shape[:2], 1)], axis=2)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    return (weights[:, :, : keys.shape[1]] @ values).reshape(len(query), values.shape[2])


def dequantized(stored: Stored) -> Floats:
    if not isinstance(stored, Quantized):
        return stored
    codes, scales, biases = map(mx.array, (stored.codes, stored.scales, stored.biases))
    group = group_size_of(stored.codes.shape[2] * 32 // stored.bits)
    array = mx.dequantize(
        codes,
        scales.astype(mx.float32),
        biases.astype(mx.float32),
        group_size=group,
        bits=stored.bits,
    )
    return np.array(array)


def queries_of(rng: np.random.Generator, rows: int, shape: Shape) -> Floats:
    scale = 3 / np.sqrt(shape.key_dimension)
    queries = rng.standard_normal((rows, shape.heads, shape.key_dimension), np.float32) * scale
    return queries.astype(np.float32)


spans = st.tuples(
    st.integers(0, 2), st.sampled_from([0, 0, 0, 5, 130]), st.sampled_from([1, 16, 127, 300, 570])
)


@both_ways
@settings(max_examples=20)
@given(
    shape=st.sampled_from(SHAPES + SMALL_GROUP_SHAPES + ODD_SHAPES),
    bits=st.sampled_from(ALL_BITS),
    rows=st.lists(
        st.lists(spans, min_size=1, max_size=3, unique_by=lambda span: span[:2]),
        min_size=1,
        max_size=9,
    ),
    has_sinks=st.booleans(),
    threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 9),
)
def test_rows_with_common_and_own_runs_match_the_definition(
    compute: Compute,
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
    kept = [random_buffer(rng, shape, bits) for _ in range(3)]
    queries = queries_of(rng, len(rows), shape)
    sinks = rng.standard_normal(shape.heads).astype(np.float32) if has_sinks else None
    shared_runs = [
        [Run(kept[at], start, start + count) for at, start, count in row] for row in rows
    ]
    if compute is attend:
        compute = partial(attend, threads=threads)
    got = compute(
        queries,
        shared_runs,
        kv_heads=shape.kv_heads,
        value_dimension=shape.value_dimension,
        sinks=sinks,
    )
    expected = by_definition(queries, shared_runs, sinks=sinks)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


@both_ways
@pytest.mark.parametrize("bits", ALL_BITS)
def test_a_shared_run_gives_each_row_its_result_alone(
    compute: Compute, bits: tuple[Bits, Bits]
) -> None:
    rng = np.random.default_rng(3)
    shape = SHAPES[0]
    rounding = 1e-6 if compute is attend else 1e-5  # BLAS adds in another order if rows are added
    shared = random_buffer(rng, shape, bits)
    own = [random_buffer(rng, shape, bits, tokens=9) for _ in range(40)]
    queries = queries_of(rng, 40, shape)
    rows = [[Run(shared, 0, 650), Run(each, 0, 9)] for each in own]
    together = compute(queries, rows, kv_heads=2, value_dimension=64)
    some = slice(None, None, 13)
    for query, row, got in zip(queries[some], rows[some], together[some], strict=True):
        alone = compute(query[None], [row], kv_heads=2, value_dimension=64)[0]
        np.testing.assert_allclose(got, alone, rtol=1e-6, atol=rounding)


@both_ways
def test_native_and_quantized_runs_are_mixed(compute: Compute) -> None:
    rng = np.random.default_rng(5)
    shape = SHAPES[1]
    kept = [random_buffer(rng, shape, bits) for bits in ALL_BITS]
    rows = [[Run(each, 0, 300), Run(other, 7, 650)] for each, other in itertools.pairwise(kept)]
    queries = queries_of(rng, len(rows), shape)
    got = compute(queries, rows, kv_heads=shape.kv_heads, value_dimension=shape.value_dimension)
    np.testing.assert_allclose(got, by_definition(queries, rows), rtol=2e-5, atol=2e-5)


@both_ways
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("place", ["keys", "values"])
def test_non_finite_values_reach_the_result(compute: Compute, poison: float, place: str) -> None:
    rng = np.random.default_rng(0)
    kept = random_buffer(rng, SHAPES[0], NATIVE)
    getattr(kept, place)[1, 500, 7] = poison
    queries = queries_of(rng, 1, SHAPES[0])
    got = compute(queries, [[Run(kept, 0, 600)]], kv_heads=2, value_dimension=64)
    assert np.isfinite(got[0, :4]).all()  # the heads of the other key head
    assert not np.isfinite(got[0, 4:]).all()


@needs_kernel
@pytest.mark.parametrize(
    ("bits", "dimension"), [(8, 32), (8, 576), (5, 64), (5, 96), (4, 96), (4, 128)]
)
def test_runs_are_dequantized_and_joined(bits: Bits, dimension: int) -> None:
    rng = np.random.default_rng(dimension)
    shape = Shape(3, 3, dimension, dimension)
    first, second = (random_buffer(rng, shape, (bits, bits)).keys for _ in range(2))
    assert isinstance(first, Quantized) and isinstance(second, Quantized)
    plain = dequantized(first), dequantized(second)
    wanted = np.concatenate([plain[0][:, 3:130], plain[1][:, :1], plain[0][:, 400:]], axis=1)
    got = np.empty_like(wanted)
    dequantize([(first, 3, 130), (second, 0, 1), (first, 400, 700)], got)
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


@needs_kernel
def test_several_threads_may_call_it_concurrently() -> None:
    rng = np.random.default_rng(1)
    kept = random_buffer(rng, SHAPES[1], NATIVE)
    queries = queries_of(rng, 4, SHAPES[1])
    rows = [[Run(kept, 0, 700)]] * 4
    expected = by_definition(queries, rows)

    def ask(_: int) -> float:
        got = attend(queries, rows, kv_heads=4, value_dimension=128, threads=3)
        return float(np.abs(got - expected).max())

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(ask, range(40))) < 1e-5


@needs_kernel
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
@pytest.mark.slow
@pytest.mark.parametrize("less", ["-mno-avx512f", "-mno-avx"])
def test_processors_with_shorter_vectors_get_the_same_results(
    less: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    folder = folder_of_kernels(pytestconfig, otherwise=tmp_path)
    assert_passes(__file__, less=less, folder=folder)


def test_unsupported_shapes_are_known() -> None:
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


@needs_kernel
def test_an_unsupported_call_is_an_error() -> None:
    rng = np.random.default_rng(0)
    buffer = random_buffer(rng, SHAPES[0], (8, 4))
    only_keys = Buffer(buffer.keys, random_buffer(rng, SHAPES[0], NATIVE).values)
    for heads, of in ((3, buffer), (8, only_keys)):
        queries = np.zeros((1, heads, 64), np.float32)
        with pytest.raises(RuntimeError, match="shapes or bits are not supported"):
            attend(queries, [[Run(of, 0, 9)]], kv_heads=2, value_dimension=64)
