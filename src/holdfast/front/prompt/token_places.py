"""Where tokens stand in the text that they were made of."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import cached_property
from typing import NamedTuple, Protocol

from tokenizers import Encoding

from holdfast.wire.token_ids import TokenIds


class TokenPlace(NamedTuple):
    """How a character stands to the tokens of its text."""

    before: int  # so many end in front of it, or at it
    opens: int | None  # the token that begins exactly with it, when none reaches over its edge
    closes: int | None  # the token behind the one that ends exactly in front of it


class TokenizedText(Protocol):
    """A text's tokens, and where they are in it."""

    @property
    def token_ids(self) -> TokenIds:
        """All of them."""
        ...

    def tokens_before(self, character: int) -> int:
        """Tokens that end at or before a character."""
        ...

    def span(self, start: int, end: int) -> tuple[int, int] | None:
        """Which tokens make up the characters from start to end exactly; None when one of them
        reaches over an edge.
        """
        ...


class EncodedText:
    """What the library made of a text.

    It is asked for single places: all of them, as Python's tuples, cost 4 ms for a text of 25,000
    tokens.
    """

    def __init__(self, encoding: Encoding, *, characters: int) -> None:
        """characters: of the text."""
        self._encoding, self._characters = encoding, characters
        # the library makes the list anew whenever it is asked
        self.token_ids = TokenIds.of(encoding.ids)

    def place(self, character: int) -> TokenPlace:
        """A character's place, which may be the one behind the last."""
        first = self._first_from(character)
        previous_end = self._at(first - 1)[1] if first else 0
        begins = first < len(self.token_ids) and self._at(first)[0] == character
        return TokenPlace(
            before=self.tokens_before(character),
            opens=first if begins and previous_end <= character else None,
            closes=first if first and previous_end == character else None,
        )

    def tokens_before(self, character: int) -> int:
        """Tokens that end at or before a character."""
        found = self._encoding.char_to_token(character)
        if found is None and character >= self._characters:
            return len(self.token_ids)
        return (
            bisect_right(self._all, character, key=lambda offset: offset[1])
            if found is None
            else found
        )

    def span(self, start: int, end: int) -> tuple[int, int] | None:
        """See `TokenizedText`."""
        first, last = self.place(start).opens, self.place(end).closes
        return (first, last) if first is not None and last is not None and first < last else None

    def _first_from(self, character: int) -> int:
        """The first token that begins at or behind a character."""
        if character >= self._characters:
            return len(self.token_ids)
        found = self._encoding.char_to_token(character)
        if found is None or self._at(found)[0] < character:
            return bisect_left(self._all, character, key=lambda offset: offset[0])
        return found

    def _at(self, token: int) -> tuple[int, int]:
        place = self._encoding.token_to_chars(token)
        return self._all[token] if place is None else place

    @cached_property
    def _all(self) -> list[tuple[int, int]]:
        return self._encoding.offsets
