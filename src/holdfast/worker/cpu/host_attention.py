"""Attention in numpy on all cores, for Linux without a GPU, where MLX lacks a fused kernel and its
softmax uses one core.

Most of the prefill time of a long prompt goes into exponentials, which MLX computes one at a time.
numpy uses vector instructions and releases the interpreter lock, so the heads of all spans are
distributed over threads, in blocks that fit in a core's cache. On 4 cores, this is 7 to 15 times as
fast as mx.fast (docs/lab-log.md).

A span is the new tokens of one sequence; parts are adjoining keys and values that it attends to. Rows
are queries, columns are keys. A key head is a head of keys and values that several query heads share.
Sinks are scores, one per head, that take part in the softmax without a value.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from holdfast.machine.cores import usable_cores
from holdfast.worker.cpu.blas import AVX512_CORES, blas_of_numpy, current_blas
from holdfast.worker.cpu.kernels import products
from holdfast.worker.engine.backend import AttentionSpan

_BLOCK_SCORES = 1 << 18  # 1 MiB of float32: a core's share of the cache
_LEAST_BLOCK_ROWS = 64  # if there are enough: the keys are read once for all rows of a block
# up to this many multiplications, OpenBLAS does not copy the matrices into packed form first
_UNPACKED_MULTIPLICATIONS = 1_000_000
_LEAST_KEY_STEP = 200  # keys per product; with fewer, the overhead of numpy calls is too large
_MOST_UNPACKED_ROWS = 32  # with more rows, packing the matrices pays
SCORES_WORTH_IT = 1 << 15  # with fewer, waiting for MLX and waking threads costs the time saved

_Array: TypeAlias = npt.NDArray[np.float32]
_Mask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Block:
    """A piece of attention work: queries [rows, head_dim], adjoining parts of keys and values
    [columns, …], and an array for the result [rows, value_dim].

    If a block has several heads, they are an additional first dimension of all arrays.
    """

    queries: _Array
    parts: Sequence[tuple[_Array, _Array]]
    result: _Array

    @property
    def columns(self) -> int:
        return sum(keys.shape[-2] for keys, _ in self.parts)

    def parts_of_head(self, head: int, columns: slice) -> list[tuple[_Array, _Array]]:
        """Parts of the keys and values of one key head, for these columns."""
        parts = []
        first_column = 0
        for keys, values in self.parts:
            low = max(columns.start - first_column, 0)
            high = min(columns.stop - first_column, keys.shape[1])
            if low < high:
                parts.append((keys[head, low:high], values[head, low:high]))
            first_column += keys.shape[1]
        return parts


def attend_one(queries: mx.array, parts: Sequence[tuple[mx.array, mx.array]]) -> mx.array:
    """Attention of one query per head, as two matrix products per key head.

    queries: scaled, [1, heads, 1, head_dim]. parts: adjoining keys and values, [1, kv_heads,
    tokens, head_dim].

    The heads that share a key head are the rows of one product, so that BLAS packs the keys once:
    on the CPU, this is 1.4 to 2.2 times as fast as mx.fast, which packs them for every head. The
    softmax is computed in float32, so the result is as exact as that of mx.fast. In bf16, it would
    change logits by 2 % of the effect of one changed context token.
    """
    heads = queries.shape[1]
    kv_heads = parts[0][0].shape[1]
    grouped = queries.reshape(1, kv_heads, heads // kv_heads, queries.shape[3])
    scores = [grouped @ keys.swapaxes(-1, -2) for keys, _ in parts]
    if len(parts) == 1:
        attended = mx.softmax(scores[0], axis=-1, precise=True) @ parts[0][1]
    else:
        weights = mx.softmax(mx.concatenate(scores, axis=-1), axis=-1, precise=True)
        part_weights = mx.split(
            weights, list(itertools.accumulate(part.shape[3] for part in scores[:-1])), axis=-1
        )
        sums = [weight @ values for weight, (_, values) in zip(part_weights, parts, strict=True)]
        attended = sum(sums[1:], start=sums[0])
    return attended.reshape(1, heads, 1, attended.shape[3])


def pays(spans: Sequence[AttentionSpan], *, host_scores: int) -> bool:
    """Whether `attend` is faster than MLX. It is faster in prefill only: decoding is limited by
    memory bandwidth, not by exponentials.

    host_scores: the number of attention scores from which `attend` is to be used: SCORES_WORTH_IT,
    except in tests.
    """
    if sys.platform != "linux" or all(span.tokens == 1 for span in spans):
        return False
    return sum(span.scores for span in spans) >= host_scores


def attend(spans: Sequence[AttentionSpan], *, sinks: mx.array | None) -> list[mx.array]:
    """Causal attention of each span over its own keys, computed in float32.

    Returns [1, heads, tokens, value_dim] for each span, in the type of the queries. Evaluates the
    arrays of the spans. sinks: [heads], a score per head that takes part in the softmax without a
    value; None: no sinks. A query's result depends only on its own keys, except for rounding:
    products with a different number of rows add in a different order.
    """
    float_arrays = [
        [_as_float32(array) for array in (span.queries, *itertools.chain(*span.parts))]
        for span in spans
    ]
    mx.eval(float_arrays, *([] if sinks is None else [sinks]))
    float_sinks = None if sinks is None else np.array(sinks.astype(mx.float32))
    work = []
    for span, arrays in zip(spans, float_arrays, strict=True):
        # views, which are released before the next append
        queries, *pairs = (np.array(array, copy=False)[0] for array in arrays)
        work.append(HostSpan(queries, list(zip(pairs[::2], pairs[1::2], strict=True)), span.window))
    return [
        mx.array(result[None]).astype(span.queries.dtype)
        for result, span in zip(attend_in_numpy(work, sinks=float_sinks), spans, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class HostSpan:
    """As `AttentionSpan`, in numpy: queries [heads, tokens, head_dim], keys [kv_heads, tokens,
    head_dim], values […, value_dim].
    """

    queries: _Array
    parts: Sequence[tuple[_Array, _Array]]
    window: int | None


def attend_in_numpy(spans: Sequence[HostSpan], *, sinks: _Array | None) -> list[_Array]:
    """As `attend`, for numpy arrays. Returns [heads, tokens, value_dim] for each span."""
    results = []
    work: list[Callable[[], None]] = []
    for span in spans:
        dimension = span.parts[0][1].shape[2]
        results.append(np.empty((*span.queries.shape[:2], dimension), np.float32))
        block = _Block(span.queries, span.parts, results[-1])
        work.extend(_divide(block, window=span.window, sinks=sinks))
    _run_all(work)
    return results


def _as_float32(array: mx.array) -> mx.array:
    return array if array.dtype == mx.float32 else array.astype(mx.float32)


def _divide(
    heads: _Block, *, window: int | None, sinks: _Array | None
) -> Iterator[Callable[[], None]]:
    """Split the attention of one span into pieces that write separate parts of the result. A piece is
    some rows of one head; if there are few rows, it is all rows of several heads that share keys.
    """
    tokens = heads.queries.shape[1]
    all_columns = heads.columns
    kv_heads = len(heads.parts[0][0])
    group_heads = len(heads.queries) // kv_heads  # heads that share a key head
    piece_heads = max(
        1, min(group_heads, _LEAST_BLOCK_ROWS // tokens, len(heads.queries) // threads_to_use())
    )
    # pieces of equal length: a short piece would take nearly as long, since BLAS packs all keys
    rows = -(-tokens // max(1, tokens // max(_LEAST_BLOCK_ROWS, _BLOCK_SCORES // all_columns)))
    first_heads = itertools.chain(
        *(
            range(head, head + group_heads, piece_heads)
            for head in range(0, len(heads.queries), group_heads)
        )
    )
    for first_head, start in itertools.product(first_heads, range(0, tokens, rows)):
        piece_rows = slice(start, min(start + rows, tokens))
        heads_of_piece = slice(
            first_head,
            min(first_head + piece_heads, (first_head // group_heads + 1) * group_heads),
        )
        # the columns that at least one row of the piece sees
        columns = slice(
            0 if window is None else max(0, all_columns - tokens + start + 1 - window),
            all_columns - tokens + piece_rows.stop,
        )
        queries = heads.queries[heads_of_piece, piece_rows]
        result = heads.result[heads_of_piece, piece_rows]
        # a piece of several heads has all of their rows, so the reshaped result is a view
        queries = queries.reshape(-1, queries.shape[2]) if piece_heads > 1 else queries[0]
        result = result.reshape(-1, result.shape[2]) if piece_heads > 1 else result[0]
        block = _Block(queries, heads.parts_of_head(first_head // group_heads, columns), result)
        hidden = _hidden_columns(piece_rows.stop - start, block.columns, window)
        yield partial(
            _attend_block,
            block,
            hidden=hidden,
            sinks=None
            if sinks is None
            else np.repeat(sinks[heads_of_piece], piece_rows.stop - start)[:, None],
        )


@lru_cache(maxsize=8)
def _hidden_columns(rows: int, columns: int, window: int | None) -> _Mask | None:
    """A mask of the columns that each row must not see: bool [rows, n], for the last n columns. The
    rows are at the positions of the last columns. None if every row sees all columns.
    """
    if window is not None and columns > window:
        position_of_row = np.arange(columns - rows, columns)[:, None]
        column = np.arange(columns)[None]
        return (column > position_of_row) | (column <= position_of_row - window)
    return None if rows == 1 else np.triu(np.ones((rows, rows), bool), 1)


def _attend_block(block: _Block, *, hidden: _Mask | None, sinks: _Array | None) -> None:
    """Compute one block and write its result.

    hidden: the mask of `_hidden_columns` for the rows of one head. sinks: [rows, 1].
    """
    scores = _scratch_scores(len(block.queries), block.columns)
    # the column at which each part ends
    ends = list(itertools.accumulate(len(keys) for keys, _ in block.parts))
    key_step = _key_step(block.queries)
    for end, (keys, _) in zip(ends, block.parts, strict=True):
        _score(
            block.queries,
            keys,
            out=scores[:, end - len(keys) : end],
            key_step=key_step,
        )
    if hidden is not None:
        by_head = scores.reshape(-1, len(hidden), block.columns)
        np.copyto(by_head[:, :, block.columns - hidden.shape[1] :], -np.inf, where=hidden)
    max_scores = scores.max(axis=1, keepdims=True)
    if sinks is not None:
        max_scores = np.maximum(max_scores, sinks)
    np.subtract(scores, max_scores, out=scores)
    weights = np.exp(scores, out=scores)
    weight_sums = weights.sum(axis=1, keepdims=True)
    if sinks is not None:
        weight_sums += np.exp(sinks - max_scores)
    values_with_ends = zip(ends, (values for _, values in block.parts), strict=True)
    attended = [
        _weighted_sums(weights[:, end - len(values) : end], values, key_step=key_step)
        for end, values in values_with_ends
    ]
    np.divide(sum(attended[1:], start=attended[0]), weight_sums, out=block.result)


def _key_step(queries: _Array) -> int:
    """The number of keys per matrix product that is fastest; 0: all keys in one product.

    For AVX-512, OpenBLAS has kernels for small products that do not pack the matrices (copy them into
    the order in which they are read). With few rows, packing would be most of the work.
    """
    if len(queries) > _MOST_UNPACKED_ROWS or not _has_small_product_kernels():
        return 0
    key_step = min(1024, _UNPACKED_MULTIPLICATIONS // queries.size)
    return key_step if key_step >= _LEAST_KEY_STEP else 0


def _score(queries: _Array, keys: _Array, *, out: _Array, key_step: int) -> None:
    """Write the products of queries and keys to `out`, [rows, columns]. key_step: `_key_step`."""
    if not key_step:
        np.matmul(queries, keys.T, out=out)
        return
    transposed = np.ascontiguousarray(queries.T)
    for start in range(0, len(keys), key_step):
        out[:, start : start + key_step] = (keys[start : start + key_step] @ transposed).T


def _weighted_sums(weights: _Array, values: _Array, *, key_step: int) -> _Array:
    """The weighted sums of the values, [rows, value_dim]. key_step: `_key_step`."""
    starts = range(0, len(values), key_step or len(values))
    total = weights[:, : starts.step] @ values[: starts.step]
    for start in starts[1:]:
        total += weights[:, start : start + key_step] @ values[start : start + key_step]
    return total


_scratch = threading.local()  # a buffer for the scores of one block, per thread


def _scratch_scores(rows: int, columns: int) -> _Array:
    """This thread's array for the scores of a block, with arbitrary content. The next call reuses it."""
    buffer: _Array | None = getattr(_scratch, "buffer", None)
    if buffer is None or buffer.size < rows * columns:
        buffer = _scratch.buffer = np.empty(max(_BLOCK_SCORES, rows * columns), np.float32)
    return buffer[: rows * columns].reshape(rows, columns)


_numpy_libraries = cache(blas_of_numpy)


@cache
def _has_small_product_kernels() -> bool:
    """Whether numpy's BLAS multiplies small matrices without packing them."""
    return any(library.core in AVX512_CORES for library in _numpy_libraries())


# With two models in one process, each would otherwise restore the thread limit that the other set.
_one_at_a_time = threading.Lock()


@cache
def threads_to_use() -> int:
    """The number of threads that MLX uses for products."""
    return current_blas().threads or usable_cores()


@cache
def _helping_threads() -> ThreadPoolExecutor | None:
    """The threads in addition to the calling one; None if there is only one core."""
    if threads_to_use() == 1:
        return None
    return ThreadPoolExecutor(threads_to_use() - 1, thread_name_prefix="attention")


@contextmanager
def _products_on_one_thread() -> Iterator[None]:
    """Limit numpy's products to one thread each within the block.

    Our threads already use all cores: products on several threads would wait for each other. The
    limit is set and undone each time, which takes a microsecond: when Holdfast is used as a
    library, other code in the process may use numpy. A BLAS that numpy and MLX share gets its limit
    from the shim (`products`), which also sets it for MLX's products.
    """
    previous = [(each, each.get()) for each in _numpy_libraries() if not each.is_behind_shim]
    is_behind_shim = len(previous) < len(_numpy_libraries())
    try:
        for library, _ in previous:
            library.set(1)
        with products.blas_on_one_thread() if is_behind_shim else nullcontext():
            yield
    finally:
        for library, threads in previous:
            library.set(threads)


def _run_all(work: Sequence[Callable[[], None]]) -> None:
    """Run all pieces of work, distributed over all threads. Raises the error of a failed piece."""
    pieces_left = iter(work)  # shared by the threads: each takes the next piece

    def run_pieces() -> None:
        with np.errstate(all="ignore"):  # NaN is detected in the logits
            for piece in pieces_left:
                piece()

    with _one_at_a_time, _products_on_one_thread():
        helper_count = min(len(work), threads_to_use()) - 1
        helpers = list(_start_helpers(run_pieces, helper_count))
        try:
            run_pieces()
        finally:
            wait(helpers)
    for helper in helpers:
        helper.result()


def _start_helpers(task: Callable[[], None], count: int) -> Iterator[Future[None]]:
    """Start a task on `count` threads; on fewer if the process has only one core or is ending."""
    pool = _helping_threads()
    if pool is None:
        return
    for _ in range(count):
        try:
            yield pool.submit(task)
        except RuntimeError:
            return  # the interpreter is shutting down; the calling thread does all the work
