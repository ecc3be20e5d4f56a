"""Samples and scores tokens in numpy. This is faster than MLX for large vocabularies on a CPU,
where the logits are in host memory anyway. Rows with top-k, greedy rows and small vocabularies are
sampled by `token_sampling` (see `sampling_pays`).

On a CPU, MLX computes exponentials one at a time, 13 ns each, and top-p takes 21 passes over the
vocabulary. Here the vocabulary is divided into groups, and the largest logit of a group bounds the
weights of its tokens. If these bounds decide which tokens are in the nucleus (the tokens that pass
top-p), exponentials are computed for a few groups only; otherwise for all tokens (0.5 ns each, with
vector instructions), but few tokens are sorted. The edge of the nucleus is the smallest weight in
it. A weight is a probability that is not normalized: the likeliest token has weight 1.

Tokens are sampled by Gumbel-max: the largest sum of logarithmic weight and random noise wins. As in
`token_sampling`, first a block of BLOCK adjoining tokens wins, then a token in it. The sampled token
is the same as there, except for rounding, because the random numbers are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from holdfast.wire.requests import SamplingParams
from holdfast.worker.engine.backend import SamplingKind, Scores
from holdfast.worker.engine.sampling import evaluated
from holdfast.worker.engine.token_sampling import BLOCK, HOTTEST

Floats: TypeAlias = npt.NDArray[np.float32]
Ids: TypeAlias = npt.NDArray[np.intp]

# from this size on, numpy is faster than MLX on a CPU for any number of rows
LARGE_VOCABULARY = 8192
_GROUP = 32  # tokens per group, approximately
# as LARGE_VOCABULARY, for rows with top-p
_SMALLEST_FOR_NUCLEUS = 1024
_UNSEEN_SHARE = 1 / 4  # share of 1 - top_p that tokens may weigh together without being examined
_FEW_GROUPS = 1 / 16  # share of all groups; if more matter, all weights are computed
# share of all groups; if more matter, the edge is found by a histogram of all weights
_MANY_GROUPS = 1 / 2
_SORTED_AT_ONCE = 4096  # weights; sorting this many takes 30 µs
_ROUNDING_NATS = 1e-3  # above the largest rounding error of one block's sums and logarithms

_Doubles: TypeAlias = npt.NDArray[np.float64]
_Words: TypeAlias = npt.NDArray[np.uint32]  # of 32 bits, for hashing


class GroupedRow:
    """A row of logits, divided into n groups of tokens. Group g has the tokens g, g + n, g + 2n, …,
    so that the maxima of all groups are computed with vector instructions.
    """

    __slots__ = ("_group_count", "_ungrouped", "group_size", "maxima", "row")

    def __init__(self, row: Floats) -> None:
        self.row = row
        self._group_count = max(row.size // _GROUP, 1)
        grouped = row[: row.size - row.size % self._group_count].reshape(-1, self._group_count)
        self._ungrouped = np.arange(grouped.size, row.size)  # tokens outside all groups
        self.group_size = len(grouped)  # tokens
        self.maxima: Floats = grouped.max(axis=0)  # one per group

    def tokens(self, groups: Ids) -> Ids:
        """The tokens of these groups and the tokens that are in no group, unordered."""
        ids = (groups + np.arange(self.group_size)[:, None] * self._group_count).ravel()
        return np.concatenate([ids, self._ungrouped])

    def largest(self, count: int) -> Ids:
        """The tokens with the `count` largest entries, largest first, ties by rising id.

        No entry may be NaN.
        """
        if count * 4 > self._group_count:
            return np.argsort(-self.row, kind="stable")[:count]
        # `count` groups have a maximum of at least this, so none of the largest entries is smaller
        threshold = np.partition(self.maxima, -count)[-count]
        ids = self.tokens(np.flatnonzero(self.maxima >= threshold))
        values = self.row[ids]
        large_enough = np.flatnonzero(values >= threshold)
        ids = ids[large_enough]
        values = values[large_enough]
        return ids[np.lexsort((ids, -values))[:count]]


def scoring_pays(*, vocab_size: int) -> bool:
    """Whether `score_on_host` is faster than MLX; the same for all rows of a model."""
    return vocab_size >= LARGE_VOCABULARY


def score_on_host(logits: mx.array, token_ids: mx.array, *, top_logprobs: int) -> Scores:
    """Log-probabilities of one given token per row, and of each row's `top_logprobs` likeliest
    tokens.

    logits: fp32 [n, vocab]; token_ids: int [n]; both are evaluated. Rows without a finite maximum
    get NaN. Allocates memory for one additional row.
    """
    mx.eval(logits, token_ids)
    rows = evaluated(logits)
    tokens = np.array(token_ids)
    top_ids = np.zeros((len(rows), top_logprobs), np.uint32)
    top_values = np.full((len(rows), top_logprobs), np.nan, np.float32)
    token_values = np.full(len(rows), np.nan, np.float32)
    scratch = np.empty(rows.shape[1], np.float32)
    with np.errstate(all="ignore"):
        for index, row in enumerate(rows):
            peak = row.max()
            if not np.isfinite(peak):
                continue
            log_sum = float(peak) + float(
                np.log(
                    np.exp(np.subtract(row, peak, out=scratch), out=scratch).sum(dtype=np.float64)
                )
            )
            token_values[index] = float(row[tokens[index]]) - log_sum
            if top_logprobs:
                top_ids[index] = GroupedRow(row).largest(top_logprobs)
                top_values[index] = row[top_ids[index]] - np.float64(log_sum)
    if top_logprobs == 0:
        return Scores(chosen=mx.array(token_values))
    return Scores(chosen=mx.array(token_values), top=(mx.array(top_ids), mx.array(top_values)))


def sampling_pays(kind: SamplingKind, *, vocab_size: int) -> bool:
    """Whether `sample_on_host` is faster than MLX. The answer is the same for all rows
    of a kind, so that no sampled token depends on the other rows of a batch.
    """
    if kind.greedy or kind.candidates:
        return False
    return vocab_size >= (_SMALLEST_FOR_NUCLEUS if kind.nucleus else LARGE_VOCABULARY)


def sample_on_host(
    logits: mx.array, *, params: Sequence[SamplingParams], keys: Sequence[tuple[int, int]]
) -> mx.array:
    """Sample one token per row, uint32 [rows]. Evaluates `logits`, fp32 [rows, vocab].

    keys: of the random numbers of each row, two 32-bit integers.

    No row may be greedy or have top-k. If several tokens at the edge of top-p are equally likely,
    all pass. A row without a finite maximum gets token 0.
    """
    with np.errstate(all="ignore"):
        tokens = [
            _sample_row(row, row_params, key)
            for row, row_params, key in zip(evaluated(logits), params, keys, strict=True)
        ]
    return mx.array(tokens, dtype=mx.uint32)


@dataclass(frozen=True, slots=True)
class FewTokens:
    """The ids of the tokens that pass the filters, in ascending order, and their weights.

    vocab_size: of the model.
    """

    ids: Ids
    weights: Floats
    vocab_size: int

    def sample(self, key: tuple[int, int]) -> int:
        """Sample a token by Gumbel-max: first a block that has such tokens, then a token in it."""
        block_ids = self.ids // BLOCK
        starts = np.flatnonzero(np.diff(block_ids, prepend=-1))
        sums = np.add.reduceat(self.weights, starts)
        winner = int(np.argmax(np.log(sums) + _gumbel(key, block_ids[starts])))
        start = int(starts[winner])
        end = int(starts[winner + 1]) if winner + 1 < len(starts) else len(self.ids)
        noise = _gumbel(key, self.ids[start:end] % BLOCK + _block_count(self.vocab_size))
        return int(self.ids[start + int(np.argmax(np.log(self.weights[start:end]) + noise))])


@dataclass(frozen=True, slots=True)
class ManyTokens:
    """The weights of all tokens, 0 for those that do not pass the filters."""

    weights: Floats

    def sample(self, key: tuple[int, int]) -> int:
        """Sample as `FewTokens.sample` does."""
        block_count = _block_count(self.weights.size)
        full_blocks = self.weights.size // BLOCK
        sums = self.weights[: full_blocks * BLOCK].reshape(full_blocks, BLOCK).sum(axis=1)
        if full_blocks < block_count:
            sums = np.append(sums, self.weights[full_blocks * BLOCK :].sum())
        start = BLOCK * int(np.argmax(np.log(sums) + _gumbel(key, np.arange(block_count))))
        weights = self.weights[start : start + BLOCK]
        noise = _gumbel(key, np.arange(block_count, block_count + len(weights)))
        return start + int(np.argmax(np.log(weights) + noise))


class WeighedRow:
    """A row of logits, and its tokens' weights: sampling probabilities that are not normalized.

    The likeliest token has weight 1. The weights are computed as in `token_sampling`.
    """

    def __init__(self, row: Floats, params: SamplingParams) -> None:
        self.row = row
        self.peak: np.float32 = row.max()  # NaN if the row contains one
        self._inverse_temperature = np.float32(1.0 / min(params.temperature, HOTTEST))

    def log_weights(self, logits: Floats) -> Floats:
        """Natural logarithms of the weights that some logits of the row have."""
        return (logits - self.peak) * self._inverse_temperature

    def weights(self, logits: Floats) -> Floats:
        """The weights that some logits of the row have."""
        scaled = self.log_weights(logits)
        return np.exp(scaled, out=scaled)

    @cached_property
    def groups(self) -> GroupedRow:
        return GroupedRow(self.row)

    @cached_property
    def group_maxima(self) -> Floats:
        """The weight of each group's likeliest token."""
        return self.weights(self.groups.maxima)

    def tokens_of_groups_with(self, weight: float) -> tuple[Ids, Floats]:
        """The tokens of all groups with a token of at least this weight, unordered; and their weights."""
        ids = self.groups.tokens(np.flatnonzero(self.group_maxima >= np.float32(weight)))
        return ids, self.weights(self.row[ids])

    def select(self, ids: Ids, weights: Floats, *, threshold: float) -> FewTokens:
        """Select the tokens with a weight of at least `threshold` from `ids`."""
        selected = np.flatnonzero(weights >= np.float32(threshold))
        order = selected[np.argsort(ids[selected])]
        return FewTokens(ids[order], weights[order], self.row.size)


def filtered_tokens(row: WeighedRow, params: SamplingParams) -> FewTokens | ManyTokens:
    """The tokens that pass top-p and min-p. At least one of the two filters must be on, and the
    row's maximum must be finite.
    """
    floor = min(params.min_p, 1.0)
    if params.top_p < 1.0:
        if row.row.size <= _SORTED_AT_ONCE:
            weights = row.weights(row.row)
            return _many_tokens(
                weights, threshold=max(_nucleus_edge(weights, top_p=params.top_p), floor)
            )
        return _nucleus(row, top_p=params.top_p, floor=floor)
    if (
        np.count_nonzero(row.group_maxima >= np.float32(floor))
        > len(row.group_maxima) * _MANY_GROUPS
    ):
        return _many_tokens(row.weights(row.row), threshold=floor)
    return row.select(*row.tokens_of_groups_with(floor), threshold=floor)


def _sample_row(logits: Floats, params: SamplingParams, key: tuple[int, int]) -> int:
    """Sample a token from one row of logits; 0 without a finite maximum."""
    row = WeighedRow(logits, params)
    if not np.isfinite(row.peak):
        return 0
    if params.top_p >= 1.0 and params.min_p <= 0.0:
        return _sample_unfiltered(row, key)
    return filtered_tokens(row, params).sample(key)


def _block_count(vocab_size: int) -> int:
    return -(-vocab_size // BLOCK)


def _many_tokens(weights: Floats, *, threshold: float) -> ManyTokens:
    return ManyTokens(weights * (weights >= np.float32(threshold)))


def _nucleus(row: WeighedRow, *, top_p: float, floor: float) -> FewTokens | ManyTokens:
    """The tokens in the nucleus with a weight of at least `floor`. If possible, the weights of most
    tokens are not computed, but only bounded.
    """
    rising_maxima = np.sort(row.group_maxima)
    group_size = row.groups.group_size
    # upper bounds of the summed weight of unexamined tokens, by the number of lightest groups left out
    unseen_bounds = np.append(0.0, np.cumsum(rising_maxima, dtype=np.float64)) * group_size
    skipped_groups = _lightest_groups_within(
        unseen_bounds, _UNSEEN_SHARE * (1.0 - top_p) * unseen_bounds[-1] / group_size
    )
    examined_share = 1 - skipped_groups / len(rising_maxima)
    if examined_share <= _FEW_GROUPS:
        ids, weights = row.tokens_of_groups_with(float(rising_maxima[skipped_groups]))
        edge = _certain_edge(
            weights, top_p=top_p, unseen_bound=float(unseen_bounds[skipped_groups])
        )
        if edge is not None and edge > (
            rising_maxima[skipped_groups - 1] if skipped_groups else 0.0
        ):
            return row.select(ids, weights, threshold=max(edge, floor))
    all_weights = row.weights(row.row)
    find_edge = _nucleus_edge if examined_share <= _MANY_GROUPS else _edge_by_histogram
    return _many_tokens(all_weights, threshold=max(find_edge(all_weights, top_p=top_p), floor))


def _certain_edge(weights: Floats, *, top_p: float, unseen_bound: float) -> float | None:
    """The weight at the edge of the nucleus; None if it depends on tokens that are not examined.

    weights: those of the examined tokens. unseen_bound: upper bound of the sum of all others.
    """
    falling, cumulated = _sorted_weights(weights)
    # the index of the edge if the unexamined tokens weigh nothing, and if they weigh the most
    lowest, highest = (
        int(np.searchsorted(cumulated, top_p * (cumulated[-1] + unseen)))
        for unseen in (0.0, unseen_bound)
    )
    return float(falling[lowest]) if lowest == highest and lowest < len(falling) else None


def _lightest_groups_within(unseen_bounds: _Doubles, limit: float) -> int:
    """How many of the lightest groups can be left out, because the bound of their tokens' summed
    weight (`unseen_bounds`, by the number of groups) is at most `limit`. At least one remains.
    """
    return min(int(np.searchsorted(unseen_bounds, limit, side="right")) - 1, len(unseen_bounds) - 2)


def _sorted_weights(weights: Floats) -> tuple[Floats, _Doubles]:
    """The weights in falling order, and their cumulated sums."""
    falling = np.sort(weights)[::-1]
    return falling, np.cumsum(falling, dtype=np.float64)


def _nucleus_edge(weights: Floats, *, top_p: float) -> float:
    """The largest weight such that tokens of at least this weight make up `top_p`."""
    if len(weights) <= 2 * _SORTED_AT_ONCE:
        falling, cumulated = _sorted_weights(weights)
        return float(falling[np.searchsorted(cumulated, top_p * cumulated[-1])])
    falling, cumulated = _sorted_weights(np.partition(weights, -_SORTED_AT_ONCE)[-_SORTED_AT_ONCE:])
    index = int(np.searchsorted(cumulated, top_p * weights.sum(dtype=np.float64)))
    return (
        float(falling[index]) if index < len(falling) else _edge_by_histogram(weights, top_p=top_p)
    )


def _edge_by_histogram(weights: Floats, *, top_p: float) -> float:
    """As `_nucleus_edge`, but by a histogram of the weights, so that only the bin at the edge is sorted.

    The bins come from the floats' bits, which have the same order as positive floats.
    """
    bins = weights.view(np.uint32) >> np.uint32(16)
    bin_sums = np.bincount(bins, weights=weights)[::-1]  # of the heaviest weights first
    cumulated_sums = np.cumsum(bin_sums)
    nucleus_sum = top_p * cumulated_sums[-1]
    index = int(np.searchsorted(cumulated_sums, nucleus_sum))
    falling, cumulated = _sorted_weights(weights[bins == len(bin_sums) - 1 - index])
    sum_of_heavier_bins = cumulated_sums[index] - bin_sums[index]
    index_in_bin = int(np.searchsorted(cumulated, nucleus_sum - sum_of_heavier_bins))
    return float(falling[min(index_in_bin, len(falling) - 1)])


def _sample_unfiltered(weighed: WeighedRow, key: tuple[int, int]) -> int:
    """Sample from the whole vocabulary. The weights are summed only in blocks that can still win,
    given the maximum and the random number of each block.
    """
    row = weighed.row
    full_blocks = row.size // BLOCK
    maxima = row[: full_blocks * BLOCK].reshape(full_blocks, BLOCK).max(axis=1)
    if row.size > full_blocks * BLOCK:
        maxima = np.append(maxima, row[full_blocks * BLOCK :].max())
    noise = _gumbel(key, np.arange(len(maxima)))
    # a block's sum is at least its largest weight, and at most BLOCK times that
    lower_bounds = weighed.log_weights(maxima) + noise
    most_above = math.log(BLOCK) + _ROUNDING_NATS
    candidates = np.flatnonzero(lower_bounds >= lower_bounds.max() - most_above)
    sums = [weighed.weights(row[at * BLOCK : (at + 1) * BLOCK]).sum() for at in candidates]
    block = int(candidates[np.argmax(np.log(np.array(sums)) + noise[candidates])])
    weights = weighed.weights(row[block * BLOCK : (block + 1) * BLOCK])
    offset = int(np.argmax(np.log(weights) + _gumbel(key, np.arange(len(weights)) + len(maxima))))
    return block * BLOCK + offset


def _gumbel(key: tuple[int, int], numbers: Ids) -> Floats:
    """Gumbel noise: the random numbers of a key with these numbers, as `token_sampling` has them."""
    hashed = _scramble((numbers.astype(np.uint32) * np.uint32(0x9E3779B1)) ^ np.uint32(key[0]))
    hashed = _scramble(hashed ^ np.uint32(key[1]))
    uniform = np.clip(
        hashed.astype(np.float32) * np.float32(2.0**-32),
        np.float32(1e-10),
        np.float32(1.0 - 2.0**-24),
    )
    noise: Floats = -np.log(-np.log1p(-uniform))
    return noise


def _scramble(words: _Words) -> _Words:
    """The finalizer of MurmurHash3, as in `token_sampling`."""
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return words ^ (words >> np.uint32(16))
