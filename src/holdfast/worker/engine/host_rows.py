"""Rows of logits where they lie in host memory, for numpy: whether to work there, and groups that
find large entries quickly.
"""

from __future__ import annotations

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
