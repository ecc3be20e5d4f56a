"""Attention of decoding rows over float32 or quantized keys and values: the kernel and its twin.

The kernel (decode_attention.c) reads each run of tokens once for all rows that hold it. `attend` is
its binding; `attend_in_numpy` computes the same, and the tests compare the two.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.worker.kernels.build import kernel

_LANES = 16  # head dimensions must be a multiple of this
_QUANTIZED_LANES = 32  # and of this if keys and values are quantized
_MOST_QUANTIZED_DIMENSION = 640
_MOST_HEADS_PER_KEY_HEAD = 64
_CHUNK_TOKENS = 2048  # at most this many tokens are one piece of work
_TOKENS_PER_THREAD = 2048  # key heads × tokens that are worth waking a thread
_FAILURES = {1: "there is not enough memory", 2: "the shapes or bits are not supported"}

Floats: TypeAlias = npt.NDArray[np.float32]
Bits: TypeAlias = Literal[32, 8, 4]
NATIVE_BITS: Bits = 32  # not quantized: float32


def group_of(dimension: int) -> int:
    """How many dimensions share a scale and a bias in quantized keys or values of this head size:
    64, or 32 if the size is not a multiple of 64.
    """
    return 32 if dimension % 64 else 64


@dataclass(frozen=True, slots=True)
class Quantized:
    """Quantized keys or values as `mx.quantize` returns them, scales in float16.

    codes: [heads, tokens, dimension × bits / 32]. scales, biases: [heads, tokens, groups].
    """

    codes: npt.NDArray[np.uint32]
    scales: npt.NDArray[np.float16]
    biases: npt.NDArray[np.float16]
    bits: Bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Keys and values of one layer for `capacity` tokens, by the addresses of their first bytes.

    Each array is row-contiguous: [kv_heads, capacity, …]. key_bits, value_bits: both 32 for float32,
    and then there are no scales and biases; or both quantized, to 8 or 4 bits each. The owner of the
    arrays keeps them alive and unchanged during the call.
    """

    keys: int
    values: int
    capacity: int
    key_bits: Bits = NATIVE_BITS
    value_bits: Bits = NATIVE_BITS
    key_scales: int = 0
    key_biases: int = 0
    value_scales: int = 0
    value_biases: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens `start` to `end` of a buffer. Runs of equal buffers are read once for all rows."""

    buffer: Buffer
    start: int
    end: int


_RUN = np.dtype(
    [(name, np.uint64) for name in ("keys", "values")]
    + [(f"{of}_{what}", np.uint64) for of in ("key", "value") for what in ("scales", "biases")]
    + [("capacity", np.int64)]
    + [(name, np.int32) for name in ("tokens", "key_bits", "value_bits", "first_row", "rows")],
    align=True,
)


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("queries", "out", "sinks", "runs", "row_ids")),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("rows", "heads", "kv_heads", "key_dimension", "value_dimension"),
                *("run_count", "chunk_tokens", "threads"),
            )
        ),
    ]


@cache
def unavailable() -> str:
    """Why `attend` cannot be called; empty if it can."""
    found = kernel("decode_attention")
    if found.library is None:
        return found.reason
    return "" if _agrees_with_numpy() else "it disagrees with numpy on this machine"


def supports(
    *, heads: int, kv_heads: int, key_dimension: int, value_dimension: int, is_quantized: bool
) -> bool:
    """Whether the kernel supports attention of these shapes."""
    unit = _QUANTIZED_LANES if is_quantized else _LANES
    return (
        heads % kv_heads == 0
        and heads // kv_heads <= _MOST_HEADS_PER_KEY_HEAD
        and key_dimension % unit == 0
        and value_dimension % unit == 0
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

    queries: scaled, [rows, heads, dimension]. rows: the runs of each row, at least one token each.
    sinks: [heads], a score per head that takes weight and has no value. Returns [rows, heads,
    value_dimension]. Requires `supports` and not `unavailable`. Releases the interpreter lock.
    """
    queries = np.ascontiguousarray(queries)
    table, row_ids = _table(rows, key_dimension=queries.shape[2], value_dimension=value_dimension)
    tokens = int(table["tokens"].sum())
    out = np.empty((*queries.shape[:2], value_dimension), np.float32)
    call = _Call(
        queries.ctypes.data,
        out.ctypes.data,
        None if sinks is None else sinks.ctypes.data,
        table.ctypes.data,
        row_ids.ctypes.data,
        len(queries),
        queries.shape[1],
        kv_heads,
        queries.shape[2],
        value_dimension,
        len(table),
        _CHUNK_TOKENS,
        min(threads, max(1, kv_heads * tokens // _TOKENS_PER_THREAD)),
    )
    library = kernel("decode_attention").library
    assert library is not None
    failed = library.decode_attention(ctypes.byref(call))
    if failed:
        raise RuntimeError(f"the attention kernel failed: {_FAILURES.get(failed, failed)}")
    return out


def _table(
    rows: Sequence[Sequence[Run]], *, key_dimension: int, value_dimension: int
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int32]]:
    """The kernel's runs, each with the rows that hold it, and the row ids they refer to.

    If rows hold a different number of tokens of a buffer, the run is cut where a row's part ends.
    """
    holders: dict[tuple[Buffer, int], list[tuple[int, int]]] = defaultdict(list)
    for row, runs in enumerate(rows):
        for run in runs:
            holders[run.buffer, run.start].append((run.end, row))
    entries = []
    row_ids: list[int] = []
    for (buffer, start), ends in holders.items():
        ends.sort()
        for at, (end, _) in enumerate(ends):
            if end > start:
                held_by = [row for _, row in ends[at:]]
                entry = _entry(buffer, start, end, key_dimension, value_dimension)
                entries.append((*entry, len(row_ids), len(held_by)))
                row_ids += held_by
                start = end
    return np.array(entries, _RUN), np.array(row_ids, np.int32)


def _entry(
    buffer: Buffer, start: int, end: int, key_dimension: int, value_dimension: int
) -> tuple[int, ...]:
    scale_bytes = 2
    of_keys = start * (key_dimension // group_of(key_dimension)) * scale_bytes
    of_values = start * (value_dimension // group_of(value_dimension)) * scale_bytes
    return (
        buffer.keys + start * key_dimension * buffer.key_bits // 8,
        buffer.values + start * value_dimension * buffer.value_bits // 8,
        *(
            address and address + skipped
            for address, skipped in (
                (buffer.key_scales, of_keys),
                (buffer.key_biases, of_keys),
                (buffer.value_scales, of_values),
                (buffer.value_biases, of_values),
            )
        ),
        buffer.capacity,
        end - start,
        buffer.key_bits,
        buffer.value_bits,
    )


def attend_in_numpy(
    queries: Floats,
    rows: Sequence[Sequence[tuple[Floats | Quantized, Floats | Quantized]]],
    *,
    sinks: Floats | None = None,
) -> Floats:
    """As `attend`, from arrays: keys and values of each run, [kv_heads, tokens, …]."""
    return np.stack(
        [_row_in_numpy(query, runs, sinks) for query, runs in zip(queries, rows, strict=True)]
    )


def _row_in_numpy(
    query: Floats,
    runs: Sequence[tuple[Floats | Quantized, Floats | Quantized]],
    sinks: Floats | None,
) -> Floats:
    keys = np.concatenate([_dequantized(run[0]) for run in runs], axis=1)
    values = np.concatenate([_dequantized(run[1]) for run in runs], axis=1)
    grouped = query.reshape(len(keys), -1, query.shape[1])
    scores = grouped @ keys.swapaxes(1, 2)  # [kv_heads, heads per key head, tokens]
    top = scores.max(axis=2, keepdims=True)
    by_group = None if sinks is None else sinks.reshape(*scores.shape[:2], 1)
    if by_group is not None:
        top = np.maximum(top, by_group)
    weights = np.exp(scores - top)
    total = weights.sum(axis=2, keepdims=True)
    if by_group is not None:
        total += np.exp(by_group - top)
    attended: Floats = weights @ values / total
    return attended.reshape(len(query), values.shape[2])


def _dequantized(array: Floats | Quantized) -> Floats:
    if not isinstance(array, Quantized):
        return array
    codes = array.codes.view(np.uint8)
    if array.bits == 4:  # the lower half of a byte first
        codes = np.stack([codes & 15, codes >> 4], axis=-1)
    by_group = codes.reshape(*array.scales.shape, -1)
    scales = array.scales[..., None].astype(np.float32)
    biases = array.biases[..., None].astype(np.float32)
    return (by_group * scales + biases).reshape(*array.scales.shape[:2], -1)


def _agrees_with_numpy() -> bool:
    """Compare the compiled kernel with numpy on small random arrays: takes about a millisecond."""
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, 2, 300, 64), np.float32)
    queries = rng.standard_normal((2, 4, 64), np.float32)
    buffer = Buffer(keys=keys.ctypes.data, values=values.ctypes.data, capacity=300)
    ends = (300, 77)
    got = attend(queries, [[Run(buffer, 0, end)] for end in ends], kv_heads=2, value_dimension=64)
    wanted = attend_in_numpy(queries, [[(keys[:, :end], values[:, :end])] for end in ends])
    return bool(np.allclose(got, wanted, rtol=1e-4, atol=1e-5))
