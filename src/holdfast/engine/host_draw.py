"""Draw tokens by numpy where the logits lie in host memory anyway: on a CPU, from large vocabularies, without top-k.

There MLX computes exponentials one at a time, 13 ns each, and a nucleus takes 21 passes over the vocabulary. Here the largest
entries of groups of tokens bound what the rest can weigh. Where the bounds decide which tokens are in the nucleus, only those
that may be get an exponential; where they do not, all get one (0.5 ns each, with vector instructions), and a sample of them tells
what little has to be sorted. What is drawn is what `sampling_draw` draws, up to rounding: the same numbers for the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from holdfast.engine.host_rows import LARGE_VOCABULARY, Floats, GroupedRow, Ids, on_host, rows_of
from holdfast.engine.sampling_draw import BLOCK, HOTTEST, DrawKind
from holdfast.messages import SamplingParams

_SMALLEST_FOR_NUCLEUS = 1024  # tokens: from there on numpy is faster for top-p, up to about 16 rows
_ALLOWANCE = 1 / 4  # of 1 - top_p: what the tokens that are not looked at may weigh at most
_LARGEST_SHARE = 1 / 4  # of the groups: where more of them matter, all weights are computed
_SAMPLED_EVERY = 61  # tokens: odd, so that no regular arrangement is met in step
_SORTED_AT_ONCE = 1 << 15  # tokens
_ROUNDING_NATS = 1e-3  # more than sums and logarithms of one block can be off

_Doubles: TypeAlias = npt.NDArray[np.float64]
_Words: TypeAlias = npt.NDArray[np.uint32]


def drawing_pays(kind: DrawKind, *, vocab_size: int) -> bool:
    """Whether numpy is faster than MLX here. The same for all rows of a kind, so that nobody's draw depends on its company."""
    if kind.greedy or kind.candidates or not on_host():
        return False
    return vocab_size >= (_SMALLEST_FOR_NUCLEUS if kind.nucleus else LARGE_VOCABULARY)


def draw_on_host(logits: mx.array, *, params: Sequence[SamplingParams], keys: Sequence[tuple[int, int]]) -> mx.array:
    """Draw one token per row, uint32 [rows]. Evaluates `logits`, fp32 [rows, vocab]; none of the rows is greedy or has top-k.

    Tokens equal at the edge of top-p all stay. A row without a finite maximum gets token 0.
    """
    with np.errstate(all="ignore"):
        tokens = [_draw(row, one, key) for row, one, key in zip(rows_of(logits), params, keys, strict=True)]
    return mx.array(tokens, dtype=mx.uint32)


@dataclass(frozen=True, slots=True)
class FewKept:
    """Tokens that a filter leaves, by rising id, and their weights; the likeliest token of the row weighs 1."""

    ids: Ids
    weights: Floats
    columns: int

    def draw(self, key: tuple[int, int]) -> int:
        """Gumbel-max over the blocks that have a token left, then over the tokens of one, as `sampling_draw` does it over all."""
        block = self.ids // BLOCK
        starts = np.flatnonzero(np.diff(block, prepend=-1))
        sums = np.add.reduceat(self.weights, starts)
        winner = int(np.argmax(np.log(sums) + _gumbel(key, block[starts])))
        first = int(starts[winner])
        last = int(starts[winner + 1]) if winner + 1 < len(starts) else len(self.ids)
        noise = _gumbel(key, self.ids[first:last] % BLOCK + _blocks(self.columns))
        return int(self.ids[first + int(np.argmax(np.log(self.weights[first:last]) + noise))])


@dataclass(frozen=True, slots=True)
class ManyKept:
    """The weights of all tokens, 0 for those that a filter takes away."""

    weights: Floats

    def draw(self, key: tuple[int, int]) -> int:
        """As `FewKept.draw`."""
        blocks = _blocks(self.weights.size)
        whole = self.weights.size // BLOCK
        sums = self.weights[: whole * BLOCK].reshape(whole, BLOCK).sum(axis=1)
        if whole < blocks:
            sums = np.append(sums, self.weights[whole * BLOCK :].sum())
        first = BLOCK * int(np.argmax(np.log(sums) + _gumbel(key, np.arange(blocks))))
        inner = self.weights[first : first + BLOCK]
        return first + int(np.argmax(np.log(inner) + _gumbel(key, np.arange(blocks, blocks + len(inner)))))


@dataclass(frozen=True, slots=True)
class Scale:
    """From logits to weights, in the operations of `sampling_draw`."""

    peak: np.float32
    coldness: np.float32

    @staticmethod
    def of(row: Floats, params: SamplingParams) -> Scale:
        """That of a row; its peak is NaN where the row holds one."""
        return Scale(row.max(), np.float32(1.0 / min(params.temperature, HOTTEST)))

    def nats(self, logits: Floats) -> Floats:
        """Logarithms of the weights."""
        return (logits - self.peak) * self.coldness

    def weights(self, logits: Floats) -> Floats:
        """The likeliest token of the row weighs 1."""
        scaled = self.nats(logits)
        return np.exp(scaled, out=scaled)


def kept_tokens(logits: Floats, params: SamplingParams, scale: Scale) -> FewKept | ManyKept:
    """What top-p and min-p leave of a row with a finite maximum. At least one of them is on."""
    row = _Weighed(logits, scale)
    floor = min(params.min_p, 1.0)
    if params.top_p < 1.0:
        return _nucleus(row, top_p=params.top_p, floor=floor)
    if np.count_nonzero(row.tops >= np.float32(floor)) > len(row.tops) * _LARGEST_SHARE:
        return _many(row.everything(), threshold=floor)
    return row.few(*row.at_least(floor), threshold=floor)


def _draw(row: Floats, params: SamplingParams, key: tuple[int, int]) -> int:
    scale = Scale.of(row, params)
    if not np.isfinite(scale.peak):
        return 0
    if params.top_p >= 1.0 and params.min_p <= 0.0:
        return _draw_unfiltered(row, scale, key)
    return kept_tokens(row, params, scale).draw(key)


def _blocks(columns: int) -> int:
    return -(-columns // BLOCK)


class _Weighed:
    """A row whose groups are weighed by their likeliest token."""

    def __init__(self, row: Floats, scale: Scale) -> None:
        self._groups, self._scale = GroupedRow(row), scale
        self.group_tokens = self._groups.size
        self.tops = scale.weights(self._groups.maxima)

    def at_least(self, weight: float) -> tuple[Ids, Floats]:
        """The tokens of all groups that have one of at least this weight, and their weights, in no order."""
        ids = self._groups.tokens(np.flatnonzero(self.tops >= np.float32(weight)))
        return ids, self._scale.weights(self._groups.row[ids])

    def everything(self) -> Floats:
        """All weights."""
        return self._scale.weights(self._groups.row)

    def few(self, ids: Ids, weights: Floats, *, threshold: float) -> FewKept:
        """Those of at least this weight."""
        kept = np.flatnonzero(weights >= np.float32(threshold))
        ids, weights = ids[kept], weights[kept]
        order = np.argsort(ids)
        return FewKept(ids[order], weights[order], self._groups.row.size)


def _many(weights: Floats, *, threshold: float) -> ManyKept:
    return ManyKept(weights * (weights >= np.float32(threshold)))


def _nucleus(row: _Weighed, *, top_p: float, floor: float) -> FewKept | ManyKept:
    """The tokens that complete `top_p`, from bounds on what most tokens weigh if these decide it, else from what they weigh."""
    rising = np.sort(row.tops)
    unseen_at_most = np.append(0.0, np.cumsum(rising, dtype=np.float64)) * row.group_tokens  # by the number of groups left out
    left_out = _groups_within(unseen_at_most, _ALLOWANCE * (1.0 - top_p) * unseen_at_most[-1] / row.group_tokens)
    if left_out < len(rising) * (1 - _LARGEST_SHARE):
        return _nucleus_of_everything(row.everything(), top_p=top_p, floor=floor)
    ids, weights = row.at_least(float(rising[left_out]))
    falling, cumulated = _falling(weights)
    unseen_top = float(rising[left_out - 1]) if left_out else 0.0

    def decided(*totals: float) -> float | None:
        """The weight at the edge of the nucleus, when it is seen and the same for all of these totals."""
        places = {int(np.searchsorted(cumulated, top_p * total)) for total in totals}
        place = places.pop()
        return float(falling[place]) if not places and place < len(falling) and falling[place] > unseen_top else None

    threshold = decided(float(cumulated[-1]), float(cumulated[-1] + unseen_at_most[left_out]))
    if threshold is None:
        everything = row.everything()
        threshold = decided(float(everything.sum(dtype=np.float64)))
        if threshold is None:
            return _nucleus_of_everything(everything, top_p=top_p, floor=floor)
    return row.few(ids, weights, threshold=max(threshold, floor))


def _groups_within(unseen_at_most: _Doubles, limit: float) -> int:
    """The most groups that may be left out for what they weigh; one at least stays."""
    return min(int(np.searchsorted(unseen_at_most, limit, side="right")) - 1, len(unseen_at_most) - 2)


def _falling(weights: Floats) -> tuple[Floats, _Doubles]:
    falling = np.sort(weights)[::-1]
    return falling, np.cumsum(falling, dtype=np.float64)


def _nucleus_of_everything(weights: Floats, *, top_p: float, floor: float) -> ManyKept:
    aim = top_p * float(weights.sum(dtype=np.float64))
    return _many(weights, threshold=max(_threshold_among(weights, aim=aim), floor))


def _threshold_among(weights: Floats, *, aim: float) -> float:
    """The largest weight such that the tokens of at least so much weigh `aim` together; the smallest of all if none do.

    A sample tells between which weights it lies, so that little is left to sort.
    """
    above, candidates = 0.0, weights
    while len(candidates) > _SORTED_AT_ONCE:
        low, high = _bracket(candidates, aim=aim - above)
        is_above, is_below = candidates > high, candidates < low
        mass_above = float((candidates * is_above).sum(dtype=np.float64))
        between = candidates[np.flatnonzero(~(is_above | is_below))]
        mass_between = float(between.sum(dtype=np.float64))
        if above + mass_above >= aim:
            rest = candidates[is_above]
        elif above + mass_above + mass_between >= aim or not is_below.any():
            rest, above = between, above + mass_above
        else:
            rest, above = candidates[is_below], above + mass_above + mass_between
        if len(rest) == len(candidates):
            break
        candidates = rest
    falling, cumulated = _falling(candidates)
    return float(falling[min(int(np.searchsorted(cumulated, aim - above)), len(falling) - 1)])


def _bracket(weights: Floats, *, aim: float) -> tuple[np.float32, np.float32]:
    """Two weights between which, as far as a sample can tell, the one lies that completes `aim`."""
    falling, cumulated = _falling(weights[::_SAMPLED_EVERY])
    guess = int(np.searchsorted(cumulated, aim / _SAMPLED_EVERY))
    away = 3 * math.isqrt(len(falling))
    return falling[min(guess + away, len(falling) - 1)], falling[min(max(guess - away, 0), len(falling) - 1)]


def _draw_unfiltered(row: Floats, scale: Scale, key: tuple[int, int]) -> int:
    """The same over the whole vocabulary: only blocks that can win, by their largest weight and their noise, are summed."""
    whole = row.size // BLOCK
    maxima = row[: whole * BLOCK].reshape(whole, BLOCK).max(axis=1)
    if row.size > whole * BLOCK:
        maxima = np.append(maxima, row[whole * BLOCK :].max())
    noise = _gumbel(key, np.arange(len(maxima)))
    least = scale.nats(maxima) + noise
    able = np.flatnonzero(least >= least.max() - (math.log(BLOCK) + _ROUNDING_NATS))
    sums = [scale.weights(row[at * BLOCK : (at + 1) * BLOCK]).sum() for at in able]
    block = int(able[np.argmax(np.log(np.array(sums)) + noise[able])])
    inner = scale.weights(row[block * BLOCK : (block + 1) * BLOCK])
    offset = int(np.argmax(np.log(inner) + _gumbel(key, np.arange(len(inner)) + len(maxima))))
    return block * BLOCK + offset


def _gumbel(key: tuple[int, int], numbers: Ids) -> Floats:
    # As sampling_draw's: see there.
    hashed = _scramble((numbers.astype(np.uint32) * np.uint32(0x9E3779B1)) ^ np.uint32(key[0]))
    hashed = _scramble(hashed ^ np.uint32(key[1]))
    uniform = np.clip(hashed.astype(np.float32) * np.float32(2.0**-32), np.float32(1e-10), np.float32(1.0 - 2.0**-24))
    noise: Floats = -np.log(-np.log1p(-uniform))
    return noise


def _scramble(words: _Words) -> _Words:
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return words ^ (words >> np.uint32(16))
