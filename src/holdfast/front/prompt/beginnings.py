"""Remembers the latest long texts with something made of each, to be found by their beginnings.

The prompt of a later turn begins like that of an earlier one, so most of what was made of the
earlier one can be used again.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from holdfast.lru_cache import LruCache

S = TypeVar("S", str, bytes)
V = TypeVar("V")
_LEAST_LENGTH = 4096  # shorter texts are handled as fast without an earlier one
_MOST = 64  # remembered texts, because a new text is compared with each
# A text that shares all but this many last characters with an earlier one takes its place. They
# allow for a generation prompt, which the next turn may not repeat.
_END_LENGTH = 512
_BLOCK = 4096  # characters that are compared together


@dataclass(frozen=True, slots=True, eq=False)
class Remembered(Generic[S, V]):
    """A text and what was made of it. number: identifies it."""

    number: int
    text: S
    value: V


class Beginnings(Generic[S, V]):
    """Remembers long texts. Forgets the least recently used. Thread-safe.

    Each tenant has separate texts.
    """

    def __init__(self, max_bytes: int) -> None:
        # by tenant and number
        self._texts: LruCache[tuple[str, int], Remembered[S, V]] = LruCache(max_bytes)
        # a text counts as at least this long, which bounds their number
        self._least_bytes = max_bytes // _MOST
        self._numbers = count(1)  # of the next texts

    def closest(self, text: S, *, tenant: str) -> tuple[Remembered[S, V] | None, int]:
        """The text of a tenant that has the longest beginning in common with the given one, and the
        length of this common beginning.

        The latest one of which the other is the next turn comes first.
        """
        closest: Remembered[S, V] | None = None
        most = 0
        if is_short(text):
            return None, 0
        for (owner, _), each in reversed(self._texts.items()):
            if owner == tenant:
                shared = common_length(text, each.text)
                if shared > most:
                    closest, most = each, shared
                    if _is_next(each.text, shared):
                        break
        return closest, most

    def same(self, text: S, *, tenant: str) -> Remembered[S, V] | None:
        """The remembered text that is this object; None if it is not remembered."""
        if is_short(text):
            return None
        found = reversed(self._texts.items())
        return next(
            (each for (owner, _), each in found if owner == tenant and each.text is text), None
        )

    def remember(
        self,
        text: S,
        value: V,
        *,
        size: int,
        tenant: str,
        after: Remembered[S, V] | None,
        shared: int,
    ) -> None:
        """Remember a text, unless it is short.

        after: the closest text, which the new one replaces if it is its next turn.
        """
        if is_short(text):
            return
        is_next = after is not None and _is_next(after.text, shared)
        number = after.number if after is not None and is_next else next(self._numbers)
        kept = Remembered(number, text, value)
        self._texts.put((tenant, number), kept, size=max(size, self._least_bytes))

    def items(self) -> list[Remembered[S, V]]:
        """All texts, the least recently used first."""
        return [each for _, each in self._texts.items()]

    def check_invariants(self) -> None:
        """Assert that sizes are counted correctly and within the limit."""
        self._texts.check_invariants()
        assert all(number == each.number for (_, number), each in self._texts.items())


def is_short(text: str | bytes) -> bool:
    """Whether a text is too short to be remembered."""
    return len(text) < _LEAST_LENGTH


def _is_next(text: str | bytes, shared: int) -> bool:
    return shared + _END_LENGTH >= len(text)


def common_length(one: S, other: S) -> int:
    """The number of characters with which both texts begin."""
    end = min(len(one), len(other))
    at = 0
    while at < end and one[at : at + _BLOCK] == other[at : at + _BLOCK]:
        at += _BLOCK
    if at >= end:
        return end
    end = min(end, at + _BLOCK)
    while at < end:
        middle = (at + end + 1) // 2
        if one[at:middle] == other[at:middle]:
            at = middle
        else:
            end = middle - 1
    return at
