"""Samples a token from a row of logits: temperature, top-k, top-p, min-p, and random numbers that
depend only on (seed, position).

With top-k, the token is sampled from k candidates. Without top-k, it is sampled from the whole
vocabulary, and the filters are one threshold per row. Scaled logits are (logit - max) /
temperature, and weights are their exponentials: the likeliest token has weight 1. `peaks` are the
maxima of the rows. A token is chosen as the largest sum of scaled logit and Gumbel noise
(Gumbel-max trick), which gives each token the probability of the softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps

import mlx.core as mx

from holdfast.wire.requests import SamplingParams
from holdfast.worker.engine.backend import SamplingKind, in_use

GREEDY_BELOW = 1e-5  # below this temperature, fp32 cannot show a difference from greedy sampling
# Higher temperatures are lowered to this one. They would sample the same tokens, but
# 1 / temperature must not underflow to 0, because -inf * 0 is NaN.
HOTTEST = 1e30
BLOCK = 128  # tokens per block: first a block is sampled, by its summed weight, then a token in it
SEARCH_BLOCK = 32  # tokens per block: only the blocks with the largest maxima are searched
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def fused_on_gpus(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """On a GPU, fuse a function of elementwise operations into one kernel with bit-identical
    results.

    On a CPU, the function is not compiled: that takes seconds and needs a C++ compiler.
    """
    fused = mx.compile(function, shapeless=True)

    @wraps(function)
    def call(*arrays: mx.array) -> mx.array:
        return fused(*arrays) if in_use().fuses_operations else function(*arrays)

    return call


def sampling_kind(params: SamplingParams, *, vocab_size: int) -> SamplingKind:
    """The kind of a row. The number of candidates is a power of two, so that few kinds exist."""
    if params.temperature < GREEDY_BELOW or params.top_k == 1 or params.top_p <= 0.0:
        return SamplingKind(greedy=True)
    nucleus = params.top_p < 1.0
    if 0 < params.top_k < vocab_size:
        return SamplingKind(
            candidates=min(vocab_size, max(32, 1 << (params.top_k - 1).bit_length())),
            nucleus=nucleus,
        )
    return SamplingKind(nucleus=nucleus)


def random_key(*, seed: int, position: int) -> tuple[int, int]:
    """The two words of a token's random key: a 64-bit mix of the seed (any int) and the position."""
    mixed = _mix_bits((_mix_bits(seed & _WORD) + position * _GOLDEN) & _WORD)
    return mixed >> 32, mixed & 0xFFFFFFFF


def sample_tokens(
    logits: mx.array,
    *,
    kind: SamplingKind,
    params: Sequence[SamplingParams],
    keys: Sequence[tuple[int, int]],
    peaks: mx.array,
) -> mx.array:
    """Sample one token per row: uint32 [rows]. All rows are of this kind. Lazy.

    logits: fp32 [rows, vocab]. peaks: fp32 [rows], the rows' maxima. Exactly k tokens pass top-k:
    if the last ones are equally likely, those with the lowest ids. Without top-k, if several
    equally likely tokens are at the edge of top-p, all pass.
    """
    if kind.greedy:
        return mx.argmax(logits, axis=-1)
    key_words = mx.array(list(keys), dtype=mx.uint32)
    inverse_temperature = _as_column([1.0 / min(p.temperature, HOTTEST) for p in params])
    if kind.candidates:
        values, ids = largest(logits, count=kind.candidates)
        return _sample_candidate(
            _scaled(values, peaks[:, None], inverse_temperature),
            ids=ids,
            params=params,
            keys=key_words,
        )
    weights = _weights(logits, peaks[:, None], inverse_temperature)
    threshold = _threshold(weights, nucleus=kind.nucleus, params=params)
    if threshold is not None:
        weights = _at_least(weights, threshold)
    return _sample_weighted(weights, keys=key_words)


def largest(values: mx.array, *, count: int) -> tuple[mx.array, mx.array]:
    """The `count` largest entries of each row, largest first, equal ones by rising column. Lazy.

    values: fp32 [rows, columns], count ≤ columns. Returns the entries, fp32, and their columns,
    uint32, both [rows, count]. All of these entries are in the `count` blocks with the largest
    maxima, so only these blocks are searched, unless they are a large part of the row.
    """
    if count * SEARCH_BLOCK * 2 > values.shape[-1]:
        return _largest_of(values, count=count)
    blocks = _in_blocks(values, size=SEARCH_BLOCK, fill=-mx.inf)
    chosen_blocks = _largest_of(mx.max(blocks, axis=-1), count=count)[1]
    chosen_blocks = mx.sort(chosen_blocks, axis=-1)
    entries, flat_index = _largest_of(
        mx.flatten(mx.take_along_axis(blocks, chosen_blocks[:, :, None], axis=1), 1), count=count
    )
    return entries, mx.take_along_axis(
        chosen_blocks, flat_index // SEARCH_BLOCK, axis=-1
    ) * SEARCH_BLOCK + flat_index % SEARCH_BLOCK


def _largest_of(values: mx.array, *, count: int) -> tuple[mx.array, mx.array]:
    """As `largest`, by searching whole rows: sorted if `count` is a large part of them, otherwise
    partitioned first.
    """
    if count * 4 > values.shape[-1]:
        columns = mx.argsort(-values, axis=-1)[:, :count]
        return mx.take_along_axis(values, columns, axis=-1), columns
    candidate_columns = mx.sort(mx.argpartition(-values, count - 1, axis=-1)[:, :count], axis=-1)
    entries, columns = _largest_of(
        mx.take_along_axis(values, candidate_columns, axis=-1), count=count
    )
    return entries, mx.take_along_axis(candidate_columns, columns, axis=-1)


def _mix_bits(word: int) -> int:
    # The finalizer of SplitMix64 (Steele, Lea, Flood 2014): a bijection, so different words have
    # different keys.
    word = (word + _GOLDEN) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def _as_column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]


def _sample_candidate(
    scaled: mx.array, *, ids: mx.array, params: Sequence[SamplingParams], keys: mx.array
) -> mx.array:
    # Top-p is applied after top-k: it is a share of the weight of the candidates that top-k leaves.
    # A candidate's random number depends on its id, not on its rank, so that rounding which swaps
    # two nearly equal candidates does not change which one wins.
    candidates = ids.shape[-1]
    rank = mx.arange(candidates, dtype=mx.int32)[None, :]
    is_kept = rank < mx.array([[min(p.top_k, candidates)] for p in params], dtype=mx.int32)
    if any(p.top_p < 1.0 for p in params):
        weights = _candidate_weights(is_kept, scaled)
        cumulated_weights = mx.cumsum(weights, axis=-1)
        # above 1, so that rounding of the sum excludes no candidate of rows without top-p
        top_p = _as_column([p.top_p if p.top_p < 1.0 else 2.0 for p in params])
        is_kept = _in_nucleus(
            is_kept, rank, weights, cumulated_weights, top_p, cumulated_weights[:, -1:]
        )
    if any(p.min_p > 0.0 for p in params):
        is_kept = _passes_min_p(is_kept, scaled, _as_column([min(p.min_p, 1.0) for p in params]))
    winner = mx.argmax(
        _noisy_logits(is_kept, scaled, _gumbel(keys, numbers=ids)), axis=-1, keepdims=True
    )
    return mx.take_along_axis(ids, winner, axis=-1)[:, 0]


def _threshold(
    weights: mx.array, *, nucleus: bool, params: Sequence[SamplingParams]
) -> mx.array | None:
    """The weight that a token needs to pass top-p and min-p, fp32 [rows, 1]; None: all pass."""
    min_p_threshold = (
        _as_column([min(p.min_p, 1.0) for p in params])
        if any(p.min_p > 0.0 for p in params)
        else None
    )
    if not nucleus:
        return min_p_threshold
    threshold = nucleus_threshold(weights, top_p=_as_column([p.top_p for p in params]))
    return threshold if min_p_threshold is None else mx.maximum(threshold, min_p_threshold)


def nucleus_threshold(weights: mx.array, *, top_p: mx.array) -> mx.array:
    """The smallest weight in the nucleus (the tokens that pass top-p), float32 [rows, 1].

    Lazy. weights: float32 [rows, vocabulary], exp of the scaled logits minus their maximum. top_p:
    float32 [rows, 1].
    """
    # The nucleus ends at the heaviest token that, together with all heavier tokens, weighs enough.
    # Finding it by bisection is twice as fast on a CPU, but takes 150 operations; on a CPU, numpy
    # handles large vocabularies anyway.
    rising = mx.sort(weights, axis=-1)
    with_heavier = mx.cumsum(rising, axis=-1, reverse=True)
    return mx.max(
        _weights_in_nucleus(rising, with_heavier, with_heavier[:, :1], top_p),
        axis=-1,
        keepdims=True,
    )


@fused_on_gpus
def _weights_in_nucleus(
    rising: mx.array, with_heavier: mx.array, total: mx.array, top_p: mx.array
) -> mx.array:
    """The weights that, together with all heavier ones, weigh at least top_p of the total; else 0."""
    return mx.where(with_heavier >= top_p * total, rising, 0.0)


@fused_on_gpus
def _scaled(logits: mx.array, peaks: mx.array, inverse_temperature: mx.array) -> mx.array:
    return (logits - peaks) * inverse_temperature


@fused_on_gpus
def _weights(logits: mx.array, peaks: mx.array, inverse_temperature: mx.array) -> mx.array:
    return mx.exp((logits - peaks) * inverse_temperature)


@fused_on_gpus
def _at_least(weights: mx.array, threshold: mx.array) -> mx.array:
    return mx.where(weights >= threshold, weights, 0.0)


@fused_on_gpus
def _candidate_weights(is_kept: mx.array, scaled: mx.array) -> mx.array:
    return mx.where(is_kept, mx.exp(scaled), 0.0)


@fused_on_gpus
def _in_nucleus(
    is_kept: mx.array,
    rank: mx.array,
    weights: mx.array,
    cumulated: mx.array,
    top_p: mx.array,
    total: mx.array,
) -> mx.array:
    """Which candidates also pass top-p: those whose likelier ones weigh less than top_p; at least
    the likeliest.
    """
    return is_kept & ((cumulated - weights < top_p * total) | (rank == 0))


@fused_on_gpus
def _passes_min_p(is_kept: mx.array, scaled: mx.array, min_p: mx.array) -> mx.array:
    return is_kept & (mx.exp(scaled) >= min_p)


@fused_on_gpus
def _noisy_logits(is_kept: mx.array, scaled: mx.array, noise: mx.array) -> mx.array:
    return mx.where(is_kept, scaled, -mx.inf) + noise


@fused_on_gpus
def _noisy_weights(weights: mx.array, noise: mx.array) -> mx.array:
    return mx.log(weights) + noise


def _in_blocks(values: mx.array, *, size: int, fill: float) -> mx.array:
    """Pad rows with `fill` to a multiple of the block size, and reshape to [rows, blocks, size]."""
    rows, columns = values.shape
    padding = -columns % size
    if padding:
        values = mx.concatenate(
            [values, mx.full((rows, padding), fill, dtype=values.dtype)], axis=-1
        )
    return values.reshape(rows, -1, size)


def _sample_weighted(weights: mx.array, *, keys: mx.array) -> mx.array:
    # Gumbel-max twice: choose a block by its summed weight, then a token in it. The distribution is
    # the same as over the whole vocabulary, but this takes only vocab / 128 + 128 random numbers. A
    # weight of 0 becomes -inf in both choices, so no filtered token can win.
    rows = weights.shape[0]
    blocks = _in_blocks(weights, size=BLOCK, fill=0.0)
    count = blocks.shape[1]
    noise = _gumbel(keys, numbers=mx.arange(count + BLOCK, dtype=mx.uint32)[None, :])
    block = mx.argmax(_noisy_weights(mx.sum(blocks, axis=-1), noise[:, :count]), axis=-1)
    inner = mx.take_along_axis(blocks, block[:, None, None], axis=1).reshape(rows, BLOCK)
    offset = mx.argmax(_noisy_weights(inner, noise[:, count:]), axis=-1)
    return block * BLOCK + offset


def _gumbel(keys: mx.array, *, numbers: mx.array) -> mx.array:
    # One Gumbel-distributed random number for each row's key and each entry of `numbers`, uint32.
    # A hash instead of mx.random: only the required numbers are computed, and a seed gives the same
    # numbers with every version of MLX.
    return _gumbel_of(keys[:, :1], keys[:, 1:], numbers)


@fused_on_gpus
def _gumbel_of(first_words: mx.array, second_words: mx.array, numbers: mx.array) -> mx.array:
    hashed = _scramble((numbers * mx.array(0x9E3779B1, dtype=mx.uint32)) ^ first_words)
    hashed = _scramble(hashed ^ second_words)
    # log1p keeps the resolution of small numbers, which decide the result. A number of 0 would give
    # inf (and NaN for a filtered token, which has -inf), and 1 would give -inf.
    uniform = mx.clip(hashed.astype(mx.float32) * 2.0**-32, 1e-10, 1.0 - 2.0**-24)
    return -mx.log(-mx.log1p(-uniform))


def _scramble(words: mx.array) -> mx.array:
    # The finalizer of MurmurHash3 (Appleby): every input bit affects every output bit.
    words = (words ^ (words >> 16)) * mx.array(0x85EBCA6B, dtype=mx.uint32)
    words = (words ^ (words >> 13)) * mx.array(0xC2B2AE35, dtype=mx.uint32)
    return words ^ (words >> 16)
