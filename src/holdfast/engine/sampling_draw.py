"""How a token is drawn from a row of logits: temperature, top-k, top-p, min-p, random numbers that belong to (seed, position).

All is done on weights e = exp((logit - max) / temperature), so that the likeliest token has weight 1. Each filter becomes one
threshold per row: a token stays if its weight reaches it. Tokens that tie at the edge all stay, and the outcome never depends on
which rows lie beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from holdfast.messages import SamplingParams

HOTTEST = 1e30  # hotter changes nothing, and 1 / temperature must not underflow: -inf * 0 is NaN
GREEDY_BELOW = 1e-5  # temperatures under this differ from greedy by less than fp32 can show
BLOCK = 128  # tokens whose weights are summed before the draw; also the unit in which the largest entries are searched
SORT_UP_TO = 8192  # sorting a row of this size costs less than bisecting it (CPU: 0.5 ms against 0.7 ms)
BISECTIONS = 24  # 32 / 2**24 = 2e-6: about the spacing of fp32 logits
BISECTED_NATS = 32.0  # 262144 tokens under exp(-32) together weigh 3e-9, less than 1 - top_p can be in fp32
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class DrawKind:
    """What a row asks of the draw. Rows of one kind are drawn together, and always by the same operations."""

    greedy: bool
    columns: int = 0  # sorted columns that hold the row's top-k; 0: no top-k
    nucleus: bool = False


def draw_kind(params: SamplingParams, *, vocab_size: int) -> DrawKind:
    """The kind of a row. Top-k sizes are rounded up to powers of two, so that few kinds exist."""
    if params.temperature < GREEDY_BELOW or params.top_k == 1 or params.top_p <= 0.0:
        return DrawKind(greedy=True)
    nucleus = params.top_p < 1.0
    if 0 < params.top_k < vocab_size:
        return DrawKind(greedy=False, columns=min(vocab_size, max(64, 1 << (params.top_k - 1).bit_length())), nucleus=nucleus)
    if nucleus and vocab_size <= SORT_UP_TO:
        return DrawKind(greedy=False, columns=vocab_size, nucleus=True)
    return DrawKind(greedy=False, nucleus=nucleus)


def draw_key(*, seed: int, position: int) -> tuple[int, int]:
    """The two words of the random key of one draw: a 64-bit mix of any int seed and the token's position."""
    mixed = _mix((_mix(seed & _WORD) + position * _GOLDEN) & _WORD)
    return mixed >> 32, mixed & 0xFFFFFFFF


def draw(
    logits: mx.array, *, kind: DrawKind, params: Sequence[SamplingParams], keys: Sequence[tuple[int, int]], peaks: mx.array
) -> mx.array:
    """Draw one token per row. Lazy.

    logits: fp32 [rows, vocab]; peaks: fp32 [rows], their maxima. All rows are of `kind`. Returns uint32 [rows].
    """
    if kind.greedy:
        return mx.argmax(logits, axis=-1)
    weights = mx.exp((logits - peaks[:, None]) * _column([1.0 / min(p.temperature, HOTTEST) for p in params]))
    threshold = _threshold(weights, kind=kind, params=params)
    if threshold is not None:
        weights = mx.where(weights >= threshold, weights, 0.0)
    return _draw_weighted(weights, keys=keys)


def largest(values: mx.array, *, count: int) -> tuple[mx.array, mx.array]:
    """The `count` largest entries of each row, largest first, with their columns. Lazy.

    values: fp32 [rows, columns], count ≤ columns. Returns fp32 and uint32 [rows, count].
    The `count` largest lie in the `count` blocks with the largest maxima, so only those are sorted.
    """
    rows, columns = values.shape
    if count * BLOCK * 2 > columns:
        order = mx.argsort(-values, axis=-1)[:, :count]
        return mx.take_along_axis(values, order, axis=-1), order.astype(mx.uint32)
    blocks = _in_blocks(values, fill=-mx.inf)
    chosen = mx.argpartition(-mx.max(blocks, axis=-1), count - 1, axis=-1)[:, :count]
    chosen = mx.sort(chosen, axis=-1)  # equal entries keep the order of their columns
    candidates = mx.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(rows, count * BLOCK)
    order = mx.argsort(-candidates, axis=-1)[:, :count]
    block = mx.take_along_axis(chosen, order // BLOCK, axis=-1)
    return mx.take_along_axis(candidates, order, axis=-1), (block * BLOCK + order % BLOCK).astype(mx.uint32)


def _mix(word: int) -> int:
    # The finalizer of SplitMix64 (Steele, Lea, Flood 2014): a bijection, so equal keys need equal words.
    word = (word + _GOLDEN) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]


def _threshold(weights: mx.array, *, kind: DrawKind, params: Sequence[SamplingParams]) -> mx.array | None:
    threshold = None
    if kind.columns:
        threshold = _sorted_threshold(weights, columns=kind.columns, params=params)
    elif kind.nucleus:
        threshold = _bisected_threshold(weights, top_p=_column([p.top_p for p in params]))
    if any(p.min_p > 0.0 for p in params):
        floor = _column([min(p.min_p, 1.0) for p in params])  # the likeliest token weighs 1
        threshold = floor if threshold is None else mx.maximum(threshold, floor)
    return threshold


def _sorted_threshold(weights: mx.array, *, columns: int, params: Sequence[SamplingParams]) -> mx.array:
    # Top-p is relative to what top-k leaves, as when the two are applied one after the other.
    ordered = _largest_values(weights, count=columns)
    top_k = mx.array([[p.top_k if 0 < p.top_k < columns else columns] for p in params], dtype=mx.int32)
    by_rank = mx.take_along_axis(ordered, top_k - 1, axis=-1)
    if all(p.top_p >= 1.0 for p in params):
        return by_rank
    top_p = _column([p.top_p for p in params])
    inside = mx.arange(columns, dtype=mx.int32)[None, :] < top_k
    cumulated = mx.cumsum(mx.where(inside, ordered, 0.0), axis=-1)
    needed = inside & ((cumulated - ordered) < top_p * cumulated[:, -1:])
    last = mx.maximum(mx.sum(needed.astype(mx.int32), axis=-1, keepdims=True) - 1, 0)
    return mx.where(top_p < 1.0, mx.take_along_axis(ordered, last, axis=-1), by_rank)


def _largest_values(weights: mx.array, *, count: int) -> mx.array:
    if count * BLOCK * 2 <= weights.shape[-1]:
        return largest(weights, count=count)[0]
    found = weights if count == weights.shape[-1] else mx.topk(weights, count, axis=-1)
    return -mx.sort(-found, axis=-1)


def _bisected_threshold(weights: mx.array, *, top_p: mx.array) -> mx.array:
    # A sort of 152K fp32 takes 12 ms per row on CPU, 24 masked sums 4 to 5 ms. The mass at or above `low` is never under the
    # aim; tokens that the last interval cannot tell apart differ by 2e-6 nats and stay together.
    aim = top_p * mx.sum(weights, axis=-1, keepdims=True)
    low = mx.full(aim.shape, -BISECTED_NATS)
    width = BISECTED_NATS
    for _ in range(BISECTIONS):
        width /= 2
        middle = low + width
        reached = mx.sum((weights >= mx.exp(middle)) * weights, axis=-1, keepdims=True) >= aim
        low = mx.where(reached, middle, low)
    # The likeliest token's own weight, 1, lies beyond the last middle: rows that need no more than it end just under it.
    return mx.exp(low)


def _in_blocks(values: mx.array, *, fill: float) -> mx.array:
    rows, columns = values.shape
    missing = -columns % BLOCK
    if missing:
        values = mx.concatenate([values, mx.full((rows, missing), fill, dtype=values.dtype)], axis=-1)
    return values.reshape(rows, -1, BLOCK)


def _draw_weighted(weights: mx.array, *, keys: Sequence[tuple[int, int]]) -> mx.array:
    # Gumbel-max twice: a block by its summed weight, then a token in it. Same distribution as over the whole vocabulary, but with
    # vocab / 128 + 128 random numbers instead of vocab. A weight of 0 is -inf in both, so no filtered token can win.
    rows = weights.shape[0]
    blocks = _in_blocks(weights, fill=0.0)
    count = blocks.shape[1]
    noise = _gumbel(mx.array(list(keys), dtype=mx.uint32), count=count + BLOCK)
    block = mx.argmax(mx.log(mx.sum(blocks, axis=-1)) + noise[:, :count], axis=-1)
    inner = mx.take_along_axis(blocks, block[:, None, None], axis=1).reshape(rows, BLOCK)
    offset = mx.argmax(mx.log(inner) + noise[:, count:], axis=-1)
    return block * BLOCK + offset


def _gumbel(keys: mx.array, *, count: int) -> mx.array:
    def one_row(key: mx.array) -> mx.array:
        return mx.random.uniform(shape=(count,), key=key)

    uniform: mx.array = mx.vmap(one_row)(keys)
    # log1p keeps the resolution of small numbers, and those decide. A 0 would give inf, and NaN at a filtered token's -inf.
    return -mx.log(-mx.log1p(-mx.maximum(uniform, 1e-10)))
