"""Attention of decoding sequences (rows) over float32 or quantized KV, in C and in numpy.

A run is a range of adjoining tokens in one buffer; rows share runs of a common prefix. Both versions
read each run once for all rows that share it. `attend` calls the C kernel (decode_attention.c).
`attend_in_numpy` computes the same, for machines without a C compiler. Codes are quantized numbers.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from holdfast.worker.cpu.kernels.build import kernel
from holdfast.worker.cpu.kernels.five_bits import FIELDS_OF_FIVE_BITS

# limits of the kernel: head dimensions must be multiples of these, for float32 and quantized KV
_LANES = 16
_QUANTIZED_LANES = 32
_MOST_QUANTIZED_DIMENSION = 640
_MOST_HEADS_PER_KEY_HEAD = 64
CHUNK_TOKENS = 2048  # at most this many tokens are one piece of work
_TOKENS_PER_THREAD = 2048  # key heads × tokens from which waking another thread is worth it
# codes that numpy converts in one call: as float32, they fit in the L2 cache
_TILE_CODES = 1 << 17
_LEAST_TILE_TOKENS = 64  # with fewer, the overhead of numpy calls is too large
_NO_SCORE = -3e38  # below every score: the maximum of no scores
_FAILURES = {1: "there is not enough memory", 2: "the shapes or bits are not supported"}

Floats: TypeAlias = npt.NDArray[np.float32]
BufferId = TypeVar("BufferId", bound=Hashable)
Bits: TypeAlias = Literal[32, 8, 5, 4]
NATIVE_BITS: Literal[32] = 32  # not quantized: float32


@dataclass(frozen=True, slots=True)
class Quantized:
    """Quantized keys or values as `mx.quantize` returns them, scales in float16.

    codes: [heads, tokens, dimension × bits / 32]. scales, biases: [heads, tokens, groups].
    """

    codes: npt.NDArray[np.uint32]
    scales: npt.NDArray[np.float16]
    biases: npt.NDArray[np.float16]
    bits: Bits


Stored: TypeAlias = Floats | Quantized


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Keys and values of one layer, [kv_heads, capacity, …], each array row-contiguous.

    Either both keys and values are quantized, each to 8, 5 or 4 bits, or neither. The arrays must
    not change while attention is computed.
    """

    keys: Stored
    values: Stored


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens `start` to `end` of a buffer. Rows share tokens if they share the buffer object."""

    buffer: Buffer
    start: int
    end: int


# an entry of the kernel's table of runs: `Run` in decode_attention.h
RUN = np.dtype(
    [(name, np.uint64) for name in ("keys", "values")]
    + [(f"{of}_{part}", np.uint64) for of in ("key", "value") for part in ("scales", "biases")]
    + [("capacity", np.int64)]
    + [(name, np.int32) for name in ("tokens", "key_bits", "value_bits", "first_row", "rows")],
    align=True,
)


class _Call(ctypes.Structure):
    """`AttentionCall` in decode_attention.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("queries", "out", "sinks", "runs", "row_ids")),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("rows", "heads", "kv_heads", "key_dimension", "value_dimension"),
                *("run_count", "chunk_tokens", "threads"),
            )
        ),
        ("share_out", ctypes.c_void_p),  # NULL: the kernel's own threads
    ]


@cache
def unavailable() -> str:
    """Why `attend` cannot be called; empty if it can."""
    attention = kernel("decode_attention")
    if attention.library is None:
        return attention.reason
    return "" if _agrees_with_numpy() else "it disagrees with numpy on this machine"


def supports(
    *, heads: int, kv_heads: int, key_dimension: int, value_dimension: int, is_quantized: bool
) -> bool:
    """Whether the kernel supports attention of these shapes."""
    lanes = _QUANTIZED_LANES if is_quantized else _LANES
    return (
        heads % kv_heads == 0
        and heads // kv_heads <= _MOST_HEADS_PER_KEY_HEAD
        and key_dimension % lanes == 0
        and value_dimension % lanes == 0
        and (not is_quantized or max(key_dimension, value_dimension) <= _MOST_QUANTIZED_DIMENSION)
    )


def attend(
    queries: Floats,
    rows: Sequence[Sequence[Run]],
    *,
    kv_heads: int,
    value_dimension: int,
    sinks: Floats | None = None,
    threads: int = 1,
) -> Floats:
    """Attention of one query per head and row over the row's runs.

    queries: scaled, [rows, heads, dimension]. rows: the runs of each row, with at least one token
    per run and no token twice. sinks: [heads], for each head a score that takes part in the softmax
    without a value. Returns [rows, heads, value_dimension]. Requires that `supports` is true and
    `unavailable` is empty. Releases the interpreter lock.
    """
    queries = np.ascontiguousarray(queries)
    runs, row_ids = _table(rows)
    tokens = int(runs["tokens"].sum())
    out = np.empty((*queries.shape[:2], value_dimension), np.float32)
    call = _Call(
        queries.ctypes.data,
        out.ctypes.data,
        None if sinks is None else sinks.ctypes.data,
        runs.ctypes.data,
        row_ids.ctypes.data,
        len(queries),
        queries.shape[1],
        kv_heads,
        queries.shape[2],
        value_dimension,
        len(runs),
        CHUNK_TOKENS,
        min(threads, max(1, kv_heads * tokens // _TOKENS_PER_THREAD)),
    )
    library = kernel("decode_attention").library
    assert library is not None
    failure = library.decode_attention(ctypes.byref(call))
    if failure:
        raise RuntimeError(f"the attention kernel failed: {_FAILURES.get(failure, failure)}")
    return out


def can_dequantize(dimension: int) -> bool:
    """Whether `dequantize` can be called for heads of this size, which can be quantized."""
    return dimension <= _MOST_QUANTIZED_DIMENSION and not unavailable()


def dequantize(runs: Sequence[tuple[Quantized, int, int]], out: Floats) -> None:
    """Write tokens `start` to `end` of each (codes, start, end) to `out` as float32, one run after
    the other.

    out: [heads, tokens, dimension], row-contiguous. All runs have the same shape except for their
    tokens. Requires `can_dequantize`. Releases the interpreter lock.
    """
    library = kernel("decode_attention").library
    assert library is not None
    assert out.flags.c_contiguous, "the result is not row-contiguous"
    heads, _, dimension = out.shape
    written_tokens = 0
    for stored, start, end in runs:
        failure = library.dequantize(
            *map(ctypes.c_void_p, (*_addresses(stored, start), _address(out, written_tokens))),
            ctypes.c_int64(stored.codes.shape[1]),
            ctypes.c_int64(out.shape[1]),
            *(heads, end - start, dimension, stored.bits),
        )
        if failure:
            raise RuntimeError(f"the kernel cannot dequantize: {_FAILURES.get(failure, failure)}")
        written_tokens += end - start


def shared_runs(
    rows: Sequence[Sequence[tuple[BufferId, int, int]]],
) -> Iterator[tuple[BufferId, int, int, list[int]]]:
    """Yield each run of tokens once, as (buffer, start, end), with the indices of the rows that attend
    to it.

    rows: for each row, the runs that it attends to. If rows attend to different numbers of tokens of a
    buffer, the run is cut where a row's part ends.
    """
    # (end, row) of all runs that begin at one token of a buffer
    ends_of_runs: dict[tuple[BufferId, int], list[tuple[int, int]]] = defaultdict(list)
    for row, runs in enumerate(rows):
        for buffer, start, end in runs:
            ends_of_runs[buffer, start].append((end, row))
    for (buffer, start), ends in ends_of_runs.items():
        ends.sort()
        for at, (end, _) in enumerate(ends):
            if end > start:
                yield buffer, start, end, [row for _, row in ends[at:]]
                start = end


def _shared_runs(rows: Sequence[Sequence[Run]]) -> Iterator[tuple[Run, list[int]]]:
    """As `shared_runs`, for runs as objects."""
    plain = [[(run.buffer, run.start, run.end) for run in runs] for runs in rows]
    for buffer, start, end, rows_of_run in shared_runs(plain):
        yield Run(buffer, start, end), rows_of_run


# -- in C


def _table(rows: Sequence[Sequence[Run]]) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int32]]:
    """The table of runs for the kernel, and the array of row ids to which its entries refer."""
    entries = []
    row_ids: list[int] = []
    for run, rows_of_run in _shared_runs(rows):
        entries.append((*_entry(run), len(row_ids), len(rows_of_run)))
        row_ids += rows_of_run
    return np.array(entries, RUN), np.array(row_ids, np.int32)


def _entry(run: Run) -> tuple[int, ...]:
    """The fields of a run in the table, except those for its rows."""
    keys, *key_scales = _addresses(run.buffer.keys, run.start)
    values, *value_scales = _addresses(run.buffer.values, run.start)
    return (
        keys,
        values,
        *key_scales,
        *value_scales,
        _codes(run.buffer.keys).shape[1],
        run.end - run.start,
        _bits(run.buffer.keys),
        _bits(run.buffer.values),
    )


def _addresses(stored: Stored, start: int) -> tuple[int, int, int]:
    """The addresses of the codes, scales and biases of token `start`. If keys or values are not
    quantized: their address, and twice 0.
    """
    if not isinstance(stored, Quantized):
        return _address(stored, start), 0, 0
    return (
        _address(stored.codes, start),
        _address(stored.scales, start),
        _address(stored.biases, start),
    )


def _address(array: npt.NDArray[Any], start: int) -> int:
    """The address of token `start` of the first head, in an array [heads, tokens, …]."""
    return array.ctypes.data + start * array.strides[1]


def _codes(stored: Stored) -> npt.NDArray[Any]:
    return stored.codes if isinstance(stored, Quantized) else stored


def _bits(stored: Stored) -> Bits:
    return stored.bits if isinstance(stored, Quantized) else NATIVE_BITS


# -- in numpy
#
# As in the kernel, codes are converted to float tile by tile, and scales and biases are applied to
# the scores and to the weights, never to the codes. All arrays have an axis of key heads first.


def attend_in_numpy(
    queries: Floats,
    rows: Sequence[Sequence[Run]],
    *,
    kv_heads: int,
    value_dimension: int,
    sinks: Floats | None = None,
) -> Floats:
    """Compute the same as `attend`, but slower, and for all head sizes that can be quantized.

    The softmax is computed run by run: each new maximum rescales what was summed before.
    """
    row_count, heads, key_dimension = queries.shape
    # [kv_heads, rows, heads per key head, dimension]
    grouped = queries.reshape(row_count, kv_heads, -1, key_dimension).swapaxes(0, 1)
    sizes = grouped.shape[:3]
    out = np.zeros((*sizes, value_dimension), np.float32)
    max_score = np.full((*sizes, 1), _NO_SCORE, np.float32)
    weight_sum = np.zeros((*sizes, 1), np.float32)
    if sinks is not None:
        max_score[:] = sinks.reshape(kv_heads, 1, -1, 1)
        weight_sum[:] = 1
    with np.errstate(all="ignore"):  # NaN is detected in the logits
        for run, rows_of_run in _shared_runs(rows):
            queries_of_run = grouped[:, rows_of_run]
            run_values, run_max, run_sum = _attend_run(
                queries_of_run.reshape(kv_heads, -1, key_dimension), run
            )
            shape = (*queries_of_run.shape[:3], -1)
            old_max = max_score[:, rows_of_run]
            new_max = np.maximum(old_max, run_max.reshape(shape))
            old_factor = np.exp(old_max - new_max)
            run_factor = np.exp(run_max.reshape(shape) - new_max)
            max_score[:, rows_of_run] = new_max
            weight_sum[:, rows_of_run] = (
                weight_sum[:, rows_of_run] * old_factor + run_sum.reshape(shape) * run_factor
            )
            out[:, rows_of_run] = (
                out[:, rows_of_run] * old_factor + run_values.reshape(shape) * run_factor
            )
        out /= weight_sum
    return out.swapaxes(0, 1).reshape(row_count, heads, value_dimension)


def _attend_run(queries: Floats, run: Run) -> tuple[Floats, Floats, Floats]:
    """The weighted sum of the values of a run, the largest score and the sum of the weights.

    queries: [kv_heads, rows, dimension]. Returns […, value_dimension], […, 1], […, 1].
    """
    keys, values = run.buffer.keys, run.buffer.values
    scores: Floats
    if isinstance(keys, Quantized):
        scores = _scores(queries, keys, run.start, run.end)
    else:
        scores = queries @ keys[:, run.start : run.end].swapaxes(1, 2)
    max_score: Floats = scores.max(axis=2, keepdims=True)
    scores -= max_score
    weights = np.exp(scores, out=scores)
    weight_sum: Floats = weights.sum(axis=2, keepdims=True)
    if isinstance(values, Quantized):
        return _weighted_sums(weights, values, run.start, run.end), max_score, weight_sum
    return weights @ values[:, run.start : run.end], max_score, weight_sum


def _scores(queries: Floats, keys: Quantized, start: int, end: int) -> Floats:
    """Compute the attention scores of quantized keys, without dequantizing them. Returns
    [kv_heads, rows, tokens].

    Each group of dimensions adds scale × (query · codes) + bias × (sum of the query).
    """
    groups = keys.scales.shape[2]
    grouped = queries.reshape(*queries.shape[:2], groups, -1)
    query_sums: Floats = grouped.sum(axis=3)
    if keys.bits == 4:  # in the order of `_tiles`: even dimensions of a group first, then odd ones
        grouped = np.concatenate([grouped[..., ::2], grouped[..., 1::2]], axis=3)
    biases = keys.biases[:, start:end].astype(np.float32).swapaxes(1, 2)
    scales = keys.scales[:, start:end].astype(np.float32).swapaxes(1, 2)
    transposed = np.ascontiguousarray(grouped.transpose(2, 0, 3, 1))
    scores = np.zeros((*queries.shape[:2], end - start), np.float32)
    for low, high, codes in _tiles(keys, start, end):
        for group in range(groups):
            product = (codes[:, :, group] @ transposed[group]).swapaxes(1, 2)  # BLAS packs less
            scores[:, :, low:high] += product * scales[:, None, group, low:high]
            scores[:, :, low:high] += (
                query_sums[:, :, group, None] * biases[:, None, group, low:high]
            )
    return scores


def _weighted_sums(weights: Floats, values: Quantized, start: int, end: int) -> Floats:
    """Sum quantized values, each multiplied by its attention weight, without dequantizing them.
    Returns [kv_heads, rows, dimension].

    A group of dimensions of the result is (weights × scales) · codes + weights · biases.
    """
    groups = values.scales.shape[2]
    biases: Floats = weights @ values.biases[:, start:end].astype(np.float32)
    scales = values.scales[:, start:end].astype(np.float32).swapaxes(1, 2)
    group_size = values.codes.shape[2] * 32 // values.bits // groups
    out = np.zeros((*weights.shape[:2], groups, group_size), np.float32)
    for low, high, codes in _tiles(values, start, end):
        for group in range(groups):
            scaled = weights[:, :, low:high] * scales[:, None, group, low:high]
            out[:, :, group] += scaled @ codes[:, :, group]
    if values.bits == 4:
        out = _in_dimension_order(out)
    out += biases[..., None]
    return out.reshape(*weights.shape[:2], -1)


def _in_dimension_order(halves: Floats) -> Floats:
    """Put the last axis in order, which has the even dimensions first, then the odd ones."""
    pairs = halves.reshape(*halves.shape[:-1], 2, -1)
    return pairs.swapaxes(-1, -2).reshape(halves.shape)


def _tiles(stored: Quantized, start: int, end: int) -> Iterator[tuple[int, int, Floats]]:
    """Convert the codes of tokens `start` to `end` to floats, tile by tile. Yields the range of
    tokens of each tile, relative to `start`, and its codes, [heads, tokens, groups, dimensions of a
    group]. Each tile overwrites the previous one.

    With 4 bits, the even dimensions of a group come first, and then the odd ones.
    """
    heads, _, groups = stored.scales.shape
    codes = stored.codes.view(np.uint8)[:, start:end].reshape(heads, end - start, groups, -1)
    group_size = codes.shape[3] * 8 // stored.bits
    tile_tokens = max(_LEAST_TILE_TOKENS, _TILE_CODES // (heads * groups * group_size))
    buffer = np.empty((heads, min(tile_tokens, end - start), groups, group_size), np.float32)
    for low in range(0, end - start, tile_tokens):
        high = min(low + tile_tokens, end - start)
        tile = buffer[:, : high - low]
        packed = codes[:, low:high]
        if stored.bits == 4:
            halves = (packed & 15, packed >> 4)
            tile[:] = np.concatenate(halves, axis=-1)  # joining bytes is faster than joining floats
        elif stored.bits == 5:
            tile[:] = _bytes_of_five_bits(packed).reshape(tile.shape)
        else:
            tile[:] = packed
        yield low, high, tile


def _bytes_of_five_bits(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Unpack codes of 5 bits to one code per byte. Five bytes hold eight codes, the first one in
    the lowest bits; they are spread over the eight bytes of an integer (`FIELDS_OF_FIVE_BITS`).
    """
    count = packed.size // 5
    padded = np.empty(packed.size + 8, np.uint8)  # the last integer is read beyond its five bytes
    padded[:-8] = packed.reshape(-1)
    overlapping = np.lib.stride_tricks.as_strided(padded[:8].view(np.uint64), (count,), (5,))
    codes = overlapping & np.uint64(0xFFFFFFFFFF)
    shifted = np.empty_like(codes)
    for stay_mask, shift_mask, shift in (map(np.uint64, step) for step in FIELDS_OF_FIVE_BITS):
        np.bitwise_and(codes, shift_mask, out=shifted)
        np.left_shift(shifted, shift, out=shifted)
        codes &= stay_mask
        codes |= shifted
    return codes.view(np.uint8)


def _agrees_with_numpy() -> bool:
    """Compare the compiled kernel with numpy on small random arrays: takes about a millisecond."""
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, 2, 300, 64), np.float32)
    queries = rng.standard_normal((2, 4, 64), np.float32)
    buffers = [
        Buffer(keys, values),
        Buffer(_random_codes(rng, 8), _random_codes(rng, 8)),
        Buffer(_random_codes(rng, 5), _random_codes(rng, 4)),
    ]
    return all(
        _attends_like_numpy(queries, [[Run(buffer, 0, end)] for end in (300, 77)])
        for buffer in buffers
    ) and all(_dequantizes_like_numpy(buffer.values) for buffer in buffers[1:])


def _random_codes(rng: np.random.Generator, bits: Bits) -> Quantized:
    codes = rng.integers(0, 1 << 32, (2, 300, 2 * bits), np.uint32)
    scales, biases = (rng.standard_normal((2, 2, 300, 1)) / (1 << bits)).astype(np.float16)
    return Quantized(codes, scales, biases, bits)


def _attends_like_numpy(queries: Floats, rows: Sequence[Sequence[Run]]) -> bool:
    attended = attend(queries, rows, kv_heads=2, value_dimension=64)
    expected = attend_in_numpy(queries, rows, kv_heads=2, value_dimension=64)
    return bool(np.allclose(attended, expected, rtol=1e-4, atol=1e-4))


def _dequantizes_like_numpy(stored: Stored) -> bool:
    """Whether the kernel dequantizes a few tokens, which fit in one tile, as numpy does."""
    assert isinstance(stored, Quantized)
    ((start, end, codes),) = _tiles(stored, 0, stored.codes.shape[1])
    codes = _in_dimension_order(codes) if stored.bits == 4 else codes
    expected = codes * stored.scales[..., None] + stored.biases[..., None]
    expected = expected.reshape(*expected.shape[:2], -1)
    dequantized = np.empty_like(expected)
    dequantize([(stored, start, end)], dequantized)
    return bool(np.allclose(dequantized, expected, rtol=1e-5, atol=1e-5))
