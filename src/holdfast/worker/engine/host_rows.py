"""Rows of logits where they lie in host memory, for numpy: whether to work there, and groups that
find large entries quickly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
Ids: TypeAlias = npt.NDArray[np.intp]

# from here on numpy is faster than MLX on a CPU, however many rows there are
LARGE_VOCABULARY = 8192
_GROUP = 32  # tokens that one maximum stands for


def on_host() -> bool:
    """Whether logits lie in host memory and MLX computes on a CPU, where its exponentials take 13
    ns each.
    """
    return mx.default_device() == mx.Device(mx.cpu)


def rows_of(logits: mx.array) -> Floats:
    """A view of float32 logits, [rows, vocab]; evaluates them."""
    mx.eval(logits)
    return np.array(logits, copy=False)


class GroupedRow:
    """A row seen as groups of tokens.

    Group g has the tokens g, g + n, g + 2n, …, so that maxima are taken by whole vectors.
    """

    __slots__ = ("_count", "_rest", "maxima", "row", "size")

    def __init__(self, row: Floats) -> None:
        self.row = row
        self._count = max(row.size // _GROUP, 1)
        grouped = row[: row.size - row.size % self._count].reshape(-1, self._count)
        self._rest = np.arange(grouped.size, row.size)  # belong to no group
        self.size = len(grouped)  # tokens of a group
        self.maxima: Floats = grouped.max(axis=0)  # one per group

    def tokens(self, groups: Ids) -> Ids:
        """The tokens of these groups and those that belong to none, in no order."""
        ids = (groups + np.arange(self.size)[:, None] * self._count).ravel()
        return np.concatenate([ids, self._rest])

    def largest(self, count: int) -> Ids:
        """The tokens with the `count` largest entries, largest first, equal ones by rising id.

        No entry may be NaN.
        """
        if count * 4 > self._count:
            return np.argsort(-self.row, kind="stable")[:count]
        # The groups with the largest maxima have an entry of at least `least` each, so nothing
        # smaller is wanted.
        least = np.partition(self.maxima, -count)[-count]
        ids = self.tokens(np.flatnonzero(self.maxima >= least))
        values = self.row[ids]
        wanted = np.flatnonzero(values >= least)
        ids, values = ids[wanted], values[wanted]
        return ids[np.lexsort((ids, -values))[:count]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Log-probabilities of given tokens.

    chosen: fp32 [n]; top_ids: uint32 [n, k] and top_logprobs: fp32 [n, k], most likely first, None
    when k is 0.
    """

    chosen: mx.array
    top_ids: mx.array | None = None
    top_logprobs: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        """All arrays that are there."""
        return [
            array for array in (self.chosen, self.top_ids, self.top_logprobs) if array is not None
        ]


def scoring_pays(*, vocab_size: int) -> bool:
    """Whether numpy is faster than MLX here; the same for all rows of a model."""
    return vocab_size >= LARGE_VOCABULARY and on_host()


def score_on_host(logits: mx.array, token_ids: mx.array, *, top_logprobs: int) -> Scores:
    """Log-probabilities of one given token per row, and of each row's `top_logprobs` most likely,
    NaN for rows without any.

    logits: fp32 [n, vocab], token_ids: int [n]; both are evaluated. Needs the room of one row
    beside them.
    """
    mx.eval(logits, token_ids)
    rows, tokens = rows_of(logits), np.array(token_ids)
    top_ids = np.zeros((len(rows), top_logprobs), np.uint32)
    top = np.full((len(rows), top_logprobs), np.nan, np.float32)
    chosen = np.full(len(rows), np.nan, np.float32)
    room = np.empty(rows.shape[1], np.float32)
    with np.errstate(all="ignore"):
        for index, row in enumerate(rows):
            peak = row.max()
            if not np.isfinite(peak):
                continue
            total = float(peak) + float(
                np.log(np.exp(np.subtract(row, peak, out=room), out=room).sum(dtype=np.float64))
            )
            chosen[index] = float(row[tokens[index]]) - total
            if top_logprobs:
                top_ids[index] = GroupedRow(row).largest(top_logprobs)
                top[index] = row[top_ids[index]] - np.float64(total)
    if top_logprobs == 0:
        return Scores(chosen=mx.array(chosen))
    return Scores(chosen=mx.array(chosen), top_ids=mx.array(top_ids), top_logprobs=mx.array(top))
