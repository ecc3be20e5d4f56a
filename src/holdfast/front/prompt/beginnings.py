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
_MIN_LENGTH = 4096  # shorter texts are handled as fast without an earlier one
_MAX_TEXTS = 64  # remembered texts, because a new text is compared with each
# A text that begins with all but the last characters of an earlier one, of which this many may be
# missing, is its next turn and takes its place. The missing ones may be the generation prompt, which
# the next turn need not repeat.
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
        self._min_counted_bytes = max_bytes // _MAX_TEXTS
        self._numbers = count(1)  # of the next texts

    def closest(self, text: S, *, tenant: str) -> tuple[Remembered[S, V] | None, int]:
        """The text of a tenant that has the longest beginning in common with the given one, and the
        length of this common beginning.

        If the given text is the next turn of a remembered one, the latest such text is returned.
        """
        closest: Remembered[S, V] | None = None
        longest_shared = 0
        if is_short(text):
            return None, 0
        for (text_tenant, _), each in reversed(self._texts.items()):
            if text_tenant == tenant:
                shared_length = common_length(text, each.text)
                if shared_length > longest_shared:
                    closest, longest_shared = each, shared_length
                    if _is_next_turn_of(each.text, shared_length):
                        break
        return closest, longest_shared

    def same(self, text: S, *, tenant: str) -> Remembered[S, V] | None:
        """The remembered text that is this object; None if it is not remembered."""
        if is_short(text):
            return None
        latest_first = reversed(self._texts.items())
        return next(
            (
                each
                for (text_tenant, _), each in latest_first
                if text_tenant == tenant and each.text is text
            ),
            None,
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

        after, shared: the result of `closest` for this text. The new text replaces `after` if it is
        the next turn of it.
        """
        if is_short(text):
            return
        is_next_turn = after is not None and _is_next_turn_of(after.text, shared)
        number = after.number if after is not None and is_next_turn else next(self._numbers)
        remembered = Remembered(number, text, value)
        self._texts.put((tenant, number), remembered, size=max(size, self._min_counted_bytes))

    def items(self) -> list[Remembered[S, V]]:
        """All texts, the least recently used first."""
        return [each for _, each in self._texts.items()]

    def check_invariants(self) -> None:
        """Assert that sizes are counted correctly and within the limit."""
        self._texts.check_invariants()
        assert all(number == each.number for (_, number), each in self._texts.items())


def is_short(text: str | bytes) -> bool:
    """Whether a text is too short to be remembered."""
    return len(text) < _MIN_LENGTH


def _is_next_turn_of(text: str | bytes, shared_length: int) -> bool:
    """Whether a text that shares this many first characters with a remembered one is its next turn."""
    return shared_length + _END_LENGTH >= len(text)


def common_length(one: S, other: S) -> int:
    """The number of characters with which both texts begin."""
    end = min(len(one), len(other))
    shared = 0
    while shared < end and one[shared : shared + _BLOCK] == other[shared : shared + _BLOCK]:
        shared += _BLOCK
    if shared >= end:
        return end
    end = min(end, shared + _BLOCK)
    while shared < end:
        middle = (shared + end + 1) // 2
        if one[shared:middle] == other[shared:middle]:
            shared = middle
        else:
            end = middle - 1
    return shared
