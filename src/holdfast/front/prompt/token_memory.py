"""Remembers texts and their tokens, so that a later turn of a conversation handles only its new part.

Two memories work together. One has the tokens of pieces, which any text may contain. The other has
the latest long prompts: a prompt that begins like one of them is cut into pieces, searched for
answers and tokenized only where it differs. Comparing the beginnings takes microseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

from holdfast.config import DEFAULT_MODEL
from holdfast.front.prompt.beginnings import Beginnings, is_short
from holdfast.front.prompt.known_answers import AnswerMeaning
from holdfast.front.prompt.text_places import BEGINNING, AnswerFrame, AnswerSpan
from holdfast.front.prompt.text_splits import (
    NOTHING,
    TextPiece,
    settled_pieces,
)
from holdfast.front.prompt.tokenize import Tokenizer, TokenPlace, token_span
from holdfast.lru_cache import LruCache, bytes_of
from holdfast.wire.requests import TokenIds

_ENTRY_BYTES = 400  # overhead per remembered piece, on top of its text: key, record, table entries
_PLACE_BYTES = 200
_CUT_BYTES = 200  # of a prompt's piece in its lists
_KNOWN_BYTES = 80  # of a known position in a prompt
_SPAN_BYTES = 600  # of a span in a prompt: its positions, and an entry of the meanings


@dataclass(frozen=True, slots=True)
class _Piece:
    token_ids: TokenIds
    places: Mapping[int, TokenPlace]  # positions of the characters asked for so far


class PlacedPiece(NamedTuple):
    """A piece of a text: its range of characters, and its tokens."""

    start: int
    end: int
    first_token: int
    tokens: int

    def characters(self, tokens: int) -> int:
        """The number of characters that this number of tokens has on average, rounded up."""
        return -(-tokens * (self.end - self.start) // self.tokens)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RememberedText:
    """A text in pieces. Only positions requested in advance are known.

    starts: the first character of each piece. pieces: the tokens of the pieces, or of the first
    ones if the text is not tokenized yet. token_starts: the number of tokens before each of these
    pieces, and of all. known_places: the characters whose positions among the tokens are known.
    frame: what was searched for `candidates`, the spans that may be answers. meanings: of the spans
    that were read, for a conversation with these `tools`.
    """

    text: str
    cuts: Sequence[TextPiece]  # where the text is cut into pieces
    starts: Sequence[int] = ()
    pieces: Sequence[_Piece] = ()
    token_starts: Sequence[int] = (0,)
    token_ids: TokenIds = TokenIds()  # of the whole text; empty: not tokenized yet
    known_places: frozenset[int] = frozenset()
    frame: AnswerFrame | None = None
    candidates: Sequence[tuple[AnswerSpan, ...]] = ()
    tools: Sequence[Any] = ()
    meanings: dict[AnswerSpan, AnswerMeaning] = field(default_factory=dict)

    def meaning(self, span: AnswerSpan, read: Callable[[str], AnswerMeaning]) -> AnswerMeaning:
        """The meaning of a span, which is read only once."""
        found = self.meanings.get(span)
        if found is None:
            found = self.meanings[span] = read(self.text[span.start : span.end])
        return found

    def tokens_before(self, character: int) -> int:
        """The number of tokens that end at or before a character."""
        return self._place(character).before

    def span(self, start: int, end: int) -> tuple[int, int] | None:
        """The range of tokens that make up the characters from `start` to `end`.

        Returns None if the range is empty, or if `start` or `end` is inside a token.
        """
        return token_span(self._place(start), self._place(end))

    def piece_of(self, token: int) -> PlacedPiece:
        """The piece that contains the token with this index, which must exist."""
        at = bisect_right(self.token_starts, token) - 1
        return PlacedPiece(
            start=self.cuts[at].start,
            end=self.cuts[at].end,
            first_token=self.token_starts[at],
            tokens=self.token_starts[at + 1] - self.token_starts[at],
        )

    def _place(self, character: int) -> TokenPlace:
        if character >= len(self.text):
            return TokenPlace(len(self.token_ids), is_edge=True)
        at = bisect_right(self.starts, character) - 1
        place = self.pieces[at].places[character - self.starts[at]]
        return TokenPlace(self.token_starts[at] + place.before, place.is_edge)


class TokenMemory:
    """Remembers tokenized pieces of texts, and long prompts.

    Forgets the least recently used ones. Each tenant has separate pieces and prompts, so that not
    even the duration of a request reveals whether another tenant sent the same text. Thread-safe.
    """

    def __init__(self, *, max_bytes: int = DEFAULT_MODEL.known_text_bytes) -> None:
        """max_bytes: limit for all together; with 0, none are remembered. Half of it is for the
        pieces: their texts, tokens and positions. For the prompts, see `_prompt_size`.
        """
        for_prompts = max_bytes // 2
        # by tenant and text
        self._pieces: LruCache[tuple[str, str], _Piece] = LruCache(max_bytes - for_prompts)
        self._prompts: Beginnings[str, RememberedText] = Beginnings(for_prompts)

    def opened(
        self,
        text: str,
        tokenizer: Tokenizer,
        *,
        frame: AnswerFrame | None = None,
        tools: Sequence[Any] = (),
        tenant: str = "",
    ) -> RememberedText:
        """Cut a prompt's text into pieces and find the spans that may be answers, behind the
        beginning that the text shares with a remembered prompt. `tokens_of` tokenizes it.

        frame: what surrounds answers; None: they are not needed.
        tools: those of the conversation.
        """
        if is_short(text):
            return _cut(text, tokenizer, frame=frame, tools=tools)
        earlier, shared = self._prompts.closest(text, tenant=tenant)
        if earlier is None:
            opened = _cut(text, tokenizer, frame=frame, tools=tools)
        else:
            opened = _continued(earlier.value, shared, text, tokenizer, frame=frame, tools=tools)
        self._prompts.remember(
            text, opened, size=_prompt_size(opened), tenant=tenant, after=earlier, shared=shared
        )
        return opened

    def tokens_of(
        self, text: str, tokenizer: Tokenizer, *, tenant: str = "", places: Iterable[int] = ()
    ) -> RememberedText:
        """The tokens of a text, without special tokens around it. Of a prompt that was `opened`,
        only new pieces are tokenized, and those that have new places.

        places: the characters whose positions among the tokens will be requested.
        """
        before = self._prompts.same(text, tenant=tenant)
        opened = _cut(text, tokenizer) if before is None else before.value
        found = self._tokenized(opened, tokenizer, frozenset(places), tenant)
        if before is not None and found is not opened:
            size = _prompt_size(found)
            self._prompts.remember(
                text, found, size=size, tenant=tenant, after=before, shared=len(text)
            )
        return found

    def _tokenized(
        self, text: RememberedText, tokenizer: Tokenizer, places: frozenset[int], tenant: str
    ) -> RememberedText:
        begun = len(text.pieces)
        asked = places - text.known_places
        if begun == len(text.cuts) and not asked:
            return text
        wanted = _by_piece(asked, text)
        texts = [text.text[cut.start : cut.end] for cut in text.cuts[begun:]]
        found = self._found([*texts, *wanted], wanted, tokenizer, tenant=tenant)
        pieces = [*text.pieces, *(found[each] for each in texts)]
        for place in asked:
            at = bisect_right(text.starts, place) - 1
            if at < begun and place < len(text.text):  # tokenized again
                cut = text.cuts[at]
                new_places = found[text.text[cut.start : cut.end]].places
                # the found piece may lack the known places, if it was forgotten since
                all_places = {**pieces[at].places, **new_places}
                pieces[at] = _Piece(pieces[at].token_ids, all_places)
        new = [piece.token_ids for piece in pieces[begun:]]
        lengths = accumulate(map(len, new), initial=text.token_starts[-1])
        return replace(
            text,
            pieces=pieces,
            token_starts=[*text.token_starts[:-1], *lengths],
            token_ids=TokenIds.joined((text.token_ids, *new)),
            known_places=text.known_places | places,
        )

    def check_invariants(self) -> None:
        """Assert that the bytes are counted correctly and within their limit, and that the parts of
        each prompt fit together.
        """
        self._pieces.check_invariants()
        self._prompts.check_invariants()
        for each in (prompt.value for prompt in self._prompts.items()):
            assert "".join(each.text[cut.start : cut.end] for cut in each.cuts) == each.text
            assert len(each.token_starts) == len(each.pieces) + 1, "tokens are not counted by piece"
            assert each.token_starts[-1] == len(each.token_ids), "tokens are counted wrongly"
            for place in (place for place in each.known_places if place < len(each.text)):
                at = bisect_right(each.starts, place) - 1
                assert place - each.starts[at] in each.pieces[at].places, "a position is missing"

    def _found(
        self,
        texts: Iterable[str],
        wanted: Mapping[str, frozenset[int]],
        tokenizer: Tokenizer,
        *,
        tenant: str,
    ) -> dict[str, _Piece]:
        """The pieces with these texts; new ones, and those of which a position is not known, are
        tokenized.
        """
        pieces: dict[str, _Piece] = {}
        missing: list[str] = []
        for each in dict.fromkeys(texts):
            known = self._pieces.get((tenant, each))
            if known is not None:
                pieces[each] = known
            if known is None or (each in wanted and not known.places.keys() >= wanted[each]):
                missing.append(each)
        for each, piece in _encoded(missing, wanted, tokenizer):
            before = pieces[each].places if each in pieces else {}
            pieces[each] = _Piece(piece.token_ids, {**before, **piece.places})
            self._pieces.put((tenant, each), pieces[each], size=_size(each, pieces[each]))
        return pieces


def _cut(
    text: str,
    tokenizer: Tokenizer,
    *,
    frame: AnswerFrame | None = None,
    tools: Sequence[Any] = (),
) -> RememberedText:
    """Cut a whole text, and find the spans that may be answers."""
    cuts = list(tokenizer.splits.pieces(text))
    return RememberedText(
        text=text,
        cuts=cuts,
        starts=[cut.start for cut in cuts],
        frame=frame,
        candidates=() if frame is None else list(frame.candidates(text)),
        tools=tools,
    )


def _continued(
    earlier: RememberedText,
    shared: int,
    text: str,
    tokenizer: Tokenizer,
    *,
    frame: AnswerFrame | None,
    tools: Sequence[Any],
) -> RememberedText:
    """Like `_cut`, for a text that has its first `shared` characters in common with another one.
    Only the rest is handled.
    """
    begun = settled_pieces(earlier.cuts, shared)
    after = earlier.cuts[begun - 1] if begun else NOTHING
    cuts = list(tokenizer.splits.pieces(text, after=after))
    tokenized = min(begun, len(earlier.pieces))
    candidates: Sequence[tuple[AnswerSpan, ...]] = ()
    meanings: dict[AnswerSpan, AnswerMeaning] = {}
    if frame is not None and frame is earlier.frame:
        candidates = earlier.candidates[: frame.settled(earlier.candidates, shared)]
    last = candidates[-1][-1] if candidates else BEGINNING
    if _are_same(tools, earlier.tools):
        known = earlier.meanings.copy().items()  # other threads may add meanings
        meanings = {span: said for span, said in known if span.end <= last.end}
    if frame is not None:
        candidates = [*candidates, *frame.candidates(text, after=last)]
    return RememberedText(
        text=text,
        cuts=[*earlier.cuts[:begun], *cuts],
        starts=[*earlier.starts[:begun], *(cut.start for cut in cuts)],
        pieces=earlier.pieces[:tokenized],
        token_starts=earlier.token_starts[: tokenized + 1],
        token_ids=earlier.token_ids[: earlier.token_starts[tokenized]],
        known_places=frozenset(place for place in earlier.known_places if place < after.end),
        frame=frame,
        candidates=candidates,
        tools=tools,
        meanings=meanings,
    )


def _are_same(tools: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two conversations have the same tools, which are remembered objects."""
    return len(tools) == len(others) and all(map(lambda one, other: one is other, tools, others))


def _encoded(
    texts: Sequence[str], wanted: Mapping[str, frozenset[int]], tokenizer: Tokenizer
) -> Iterator[tuple[str, _Piece]]:
    plain = [text for text in texts if text not in wanted]
    for text, token_ids in zip(plain, tokenizer.encode_all(plain), strict=True):
        yield text, _Piece(TokenIds.of(token_ids), {})
    placed = [text for text in texts if text in wanted]
    for text, encoded in zip(placed, tokenizer.encode_in_place(placed), strict=True):
        places = {place: encoded.place(place) for place in wanted[text]}
        yield text, _Piece(encoded.token_ids, places)


def _by_piece(places: Iterable[int], text: RememberedText) -> dict[str, frozenset[int]]:
    """The positions within each piece. A position between two pieces belongs to the second."""
    found: dict[str, set[int]] = {}
    for place in places:
        if place < len(text.text):
            cut = text.cuts[bisect_right(text.starts, place) - 1]
            found.setdefault(text.text[cut.start : cut.end], set()).add(place - cut.start)
    return {piece: frozenset(each) for piece, each in found.items()}


def _size(text: str, piece: _Piece) -> int:
    token_bytes = len(piece.token_ids.packed)
    return _ENTRY_BYTES + bytes_of(text) + token_bytes + _PLACE_BYTES * len(piece.places)


def _prompt_size(prompt: RememberedText) -> int:
    """The memory of a prompt's text, tokens, pieces, known positions and spans.

    The pieces, which repeat all tokens, are counted as if the prompt alone had them; the meanings
    of spans as if they repeated the whole text.
    """
    texts = (2 if prompt.candidates else 1) * bytes_of(prompt.text)
    size = texts + 2 * len(prompt.token_ids.packed) + _CUT_BYTES * len(prompt.cuts)
    spans = sum(map(len, prompt.candidates))
    return size + (_KNOWN_BYTES + _PLACE_BYTES) * len(prompt.known_places) + _SPAN_BYTES * spans
