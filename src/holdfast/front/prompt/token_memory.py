"""Texts and their tokens, kept piece by piece: a conversation that goes on is tokenized once.

Each tenant has texts of its own: whether another one has sent the same cannot be told, not even by
the time that it takes.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from holdfast.config import DEFAULT_MODEL
from holdfast.front.prompt.tokenize import Tokenizer, TokenPlace
from holdfast.wire.requests import TokenIds

_ENTRY_BYTES = 400  # of a piece, however short: its key, its record, their places in the table
_PLACE_BYTES = 200


@dataclass(frozen=True, slots=True)
class _Piece:
    token_ids: TokenIds
    places: Mapping[int, TokenPlace]  # that have been asked for, by character


class RememberedText:
    """A text put together of pieces; knows only the places that were named beforehand."""

    def __init__(self, texts: Sequence[str], pieces: Mapping[str, _Piece]) -> None:
        self._pieces = [pieces[text] for text in texts]
        self._starts = [0, *accumulate(map(len, texts))]  # of each piece, and the end
        self._tokens = [0, *accumulate(len(piece.token_ids) for piece in self._pieces)]
        self.token_ids = TokenIds.joined(piece.token_ids for piece in self._pieces)

    def tokens_before(self, character: int) -> int:
        """Tokens that end at or before a character."""
        at = bisect_right(self._starts, character) - 1
        if at == len(self._pieces):
            return len(self.token_ids)
        return self._tokens[at] + self._pieces[at].places[character - self._starts[at]].before

    def span(self, start: int, end: int) -> tuple[int, int] | None:
        """Which tokens make up the characters from start to end exactly; None when one of them
        reaches over an edge.
        """
        if not 0 <= start < end <= self._starts[-1]:
            return None
        left, right = bisect_right(self._starts, start) - 1, bisect_left(self._starts, end) - 1
        opens = self._pieces[left].places[start - self._starts[left]].opens
        closes = self._pieces[right].places[end - self._starts[right]].closes
        if opens is None or closes is None:
            return None
        first, last = self._tokens[left] + opens, self._tokens[right] + closes
        return (first, last) if first < last else None


class TokenMemory:
    """The pieces of texts that one tokenizer was asked for; the longest unused are forgotten.

    Any thread may call it.
    """

    def __init__(self, *, most_bytes: int = DEFAULT_MODEL.known_text_bytes) -> None:
        """most_bytes: of texts and tokens together; 0: nothing is kept."""
        self._most_bytes, self._bytes = most_bytes, 0
        self._pieces: OrderedDict[tuple[str, str], _Piece] = OrderedDict()  # by tenant and text
        self._lock = threading.Lock()

    def tokens_of(
        self, text: str, tokenizer: Tokenizer, *, tenant: str = "", places: Iterable[int] = ()
    ) -> RememberedText:
        """A text's tokens, without special ones around it. places: the characters that will be
        asked for.
        """
        texts = list(tokenizer.seams.pieces(text))
        wanted = _by_piece(places, texts)
        distinct = dict.fromkeys(texts)
        with self._lock:
            pieces = {
                each: piece
                for each in distinct
                if (piece := self._known((tenant, each))) is not None
            }
        lacking = [
            each
            for each in distinct
            if each not in pieces or not pieces[each].places.keys() >= wanted.get(each, frozenset())
        ]
        if lacking:
            made = dict(self._encoded(lacking, wanted, tokenizer))
            for each, piece in made.items():
                before = pieces[each].places if each in pieces else {}
                pieces[each] = _Piece(piece.token_ids, {**before, **piece.places})
            with self._lock:
                for each in made:
                    self._keep((tenant, each), pieces[each])
        return RememberedText(texts, pieces)

    def check_invariants(self) -> None:
        """Assert that the bytes are counted rightly and within their bound."""
        with self._lock:
            assert self._bytes == sum(_size(key, piece) for key, piece in self._pieces.items()), (
                "bytes are miscounted"
            )
            assert self._bytes <= self._most_bytes, "more is remembered than may be"

    def _encoded(
        self, texts: Sequence[str], wanted: Mapping[str, frozenset[int]], tokenizer: Tokenizer
    ) -> Iterator[tuple[str, _Piece]]:
        plain = [text for text in texts if text not in wanted]
        for text, token_ids in zip(plain, tokenizer.encode_all(plain), strict=True):
            yield text, _Piece(TokenIds.of(token_ids), {})
        placed = [text for text in texts if text in wanted]
        for text, encoded in zip(placed, tokenizer.encode_in_place(placed), strict=True):
            yield (
                text,
                _Piece(encoded.token_ids, {place: encoded.place(place) for place in wanted[text]}),
            )

    def _known(self, key: tuple[str, str]) -> _Piece | None:
        if (piece := self._pieces.get(key)) is not None:
            self._pieces.move_to_end(key)
        return piece

    def _keep(self, key: tuple[str, str], piece: _Piece) -> None:
        if (before := self._pieces.pop(key, None)) is not None:
            self._bytes -= _size(key, before)
        if (size := _size(key, piece)) > self._most_bytes:
            return
        self._pieces[key] = piece
        self._bytes += size
        while self._bytes > self._most_bytes:
            self._bytes -= _size(*self._pieces.popitem(last=False))


def _by_piece(places: Iterable[int], texts: Sequence[str]) -> dict[str, frozenset[int]]:
    """Each place as one of the piece that it is in, and, where a piece ends, of that one too."""
    found: dict[str, set[int]] = {}
    starts = [0, *accumulate(map(len, texts))]
    for place in places:
        for at in {bisect_right(starts, place) - 1, bisect_left(starts, place) - 1}:
            if 0 <= at < len(texts):
                found.setdefault(texts[at], set()).add(place - starts[at])
    return {text: frozenset(each) for text, each in found.items()}


def _size(key: tuple[str, str], piece: _Piece) -> int:
    return (
        _ENTRY_BYTES
        + sys.getsizeof(key[1])
        + len(piece.token_ids.packed)
        + _PLACE_BYTES * len(piece.places)
    )
