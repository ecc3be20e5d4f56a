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
_PLACE_BYTES = 200  # memory of a remembered position in a piece
_PIECE_OF_PROMPT_BYTES = 200  # for each piece of a prompt, in the lists of `RememberedText`
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
    frame: the texts around answers, by which `candidates`, the spans that may be answers, were
    found. meanings: those of the spans that were parsed, in a conversation with these `tools`.
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

    def meaning(
        self, span: AnswerSpan, read_meaning: Callable[[str], AnswerMeaning]
    ) -> AnswerMeaning:
        """The meaning of a span, which is parsed only once."""
        known_meaning = self.meanings.get(span)
        if known_meaning is None:
            known_meaning = self.meanings[span] = read_meaning(self.text[span.start : span.end])
        return known_meaning

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
        index = bisect_right(self.token_starts, token) - 1
        return PlacedPiece(
            start=self.cuts[index].start,
            end=self.cuts[index].end,
            first_token=self.token_starts[index],
            tokens=self.token_starts[index + 1] - self.token_starts[index],
        )

    def _place(self, character: int) -> TokenPlace:
        """The position of a character among the tokens. The character must be one of
        `known_places`.
        """
        if character >= len(self.text):
            return TokenPlace(len(self.token_ids), is_edge=True)
        index = bisect_right(self.starts, character) - 1
        place = self.pieces[index].places[character - self.starts[index]]
        return TokenPlace(self.token_starts[index] + place.before, place.is_edge)


class TokenMemory:
    """Remembers tokenized pieces of texts, and long prompts.

    Forgets the least recently used ones. Each tenant has separate pieces and prompts, so that not
    even the duration of a request reveals whether another tenant sent the same text. Thread-safe.
    """

    def __init__(self, *, max_bytes: int = DEFAULT_MODEL.known_text_bytes) -> None:
        """max_bytes: limit for all together; with 0, none are remembered. Half of it is for the
        pieces: their texts, tokens and positions. The other half is for the prompts.
        """
        prompts_bytes = max_bytes // 2
        # by tenant and text
        self._pieces: LruCache[tuple[str, str], _Piece] = LruCache(max_bytes - prompts_bytes)
        self._prompts: Beginnings[str, RememberedText] = Beginnings(prompts_bytes)

    def cut_prompt(
        self,
        text: str,
        tokenizer: Tokenizer,
        *,
        frame: AnswerFrame | None = None,
        tools: Sequence[Any] = (),
        tenant: str = "",
    ) -> RememberedText:
        """Cut a prompt's text into pieces, and find the spans that may be answers. Both are done only
        after the beginning that the text shares with a remembered prompt. `tokens_of` tokenizes it.

        frame: the texts around answers; None: the spans are not needed.
        tools: those of the conversation.
        """
        if is_short(text):
            return _cut_whole_text(text, tokenizer, frame=frame, tools=tools)
        earlier, shared_characters = self._prompts.closest(text, tenant=tenant)
        if earlier is None:
            prompt = _cut_whole_text(text, tokenizer, frame=frame, tools=tools)
        else:
            prompt = _cut_new_part(
                earlier.value, shared_characters, text, tokenizer, frame=frame, tools=tools
            )
        self._prompts.remember(
            text,
            prompt,
            size=_prompt_size(prompt),
            tenant=tenant,
            after=earlier,
            shared=shared_characters,
        )
        return prompt

    def tokens_of(
        self, text: str, tokenizer: Tokenizer, *, tenant: str = "", places: Iterable[int] = ()
    ) -> RememberedText:
        """The tokens of a text, without special tokens around it. Of a prompt from `cut_prompt`,
        only new pieces are tokenized, and those that have new places.

        places: the characters whose positions among the tokens will be requested.
        """
        remembered = self._prompts.same(text, tenant=tenant)
        prompt = _cut_whole_text(text, tokenizer) if remembered is None else remembered.value
        tokenized = self._with_tokens(prompt, tokenizer, frozenset(places), tenant)
        if remembered is not None and tokenized is not prompt:
            size = _prompt_size(tokenized)
            self._prompts.remember(
                text, tokenized, size=size, tenant=tenant, after=remembered, shared=len(text)
            )
        return tokenized

    def _with_tokens(
        self, text: RememberedText, tokenizer: Tokenizer, places: frozenset[int], tenant: str
    ) -> RememberedText:
        """The text with the tokens of all its pieces, and the positions of these characters among
        them. Pieces that are tokenized already are tokenized again only for new positions.
        """
        tokenized_pieces = len(text.pieces)
        new_places = places - text.known_places
        if tokenized_pieces == len(text.cuts) and not new_places:
            return text
        new_places_by_piece = _places_by_piece(new_places, text)
        texts = [text.text[cut.start : cut.end] for cut in text.cuts[tokenized_pieces:]]
        piece_by_text = self._pieces_with(
            [*texts, *new_places_by_piece], new_places_by_piece, tokenizer, tenant=tenant
        )
        pieces = [*text.pieces, *(piece_by_text[each] for each in texts)]
        for place in new_places:
            index = bisect_right(text.starts, place) - 1
            if index < tokenized_pieces and place < len(text.text):  # tokenized again
                cut = text.cuts[index]
                places_of_piece = piece_by_text[text.text[cut.start : cut.end]].places
                # if the piece was forgotten since, `_pieces_with` returns it without the known places
                all_places = {**pieces[index].places, **places_of_piece}
                pieces[index] = _Piece(pieces[index].token_ids, all_places)
        new_token_ids = [piece.token_ids for piece in pieces[tokenized_pieces:]]
        lengths = accumulate(map(len, new_token_ids), initial=text.token_starts[-1])
        return replace(
            text,
            pieces=pieces,
            token_starts=[*text.token_starts[:-1], *lengths],
            token_ids=TokenIds.joined((text.token_ids, *new_token_ids)),
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
                index = bisect_right(each.starts, place) - 1
                assert place - each.starts[index] in each.pieces[index].places, (
                    "a position is missing"
                )

    def _pieces_with(
        self,
        texts: Iterable[str],
        places_by_piece: Mapping[str, frozenset[int]],
        tokenizer: Tokenizer,
        *,
        tenant: str,
    ) -> dict[str, _Piece]:
        """The pieces with these texts. New ones are tokenized, and those of which a wanted position
        is not known.

        places_by_piece: the wanted positions, by the text of a piece.
        """
        pieces: dict[str, _Piece] = {}
        missing: list[str] = []
        for text in dict.fromkeys(texts):
            known_piece = self._pieces.get((tenant, text))
            if known_piece is not None:
                pieces[text] = known_piece
            if known_piece is None or (
                text in places_by_piece and not known_piece.places.keys() >= places_by_piece[text]
            ):
                missing.append(text)
        for text, piece in _tokenize_pieces(missing, places_by_piece, tokenizer):
            places_before = pieces[text].places if text in pieces else {}
            pieces[text] = _Piece(piece.token_ids, {**places_before, **piece.places})
            self._pieces.put((tenant, text), pieces[text], size=_size(text, pieces[text]))
        return pieces


def _cut_whole_text(
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


def _cut_new_part(
    earlier: RememberedText,
    shared_characters: int,
    text: str,
    tokenizer: Tokenizer,
    *,
    frame: AnswerFrame | None,
    tools: Sequence[Any],
) -> RememberedText:
    """Like `_cut_whole_text`, for a text that shares its first characters with an earlier one. Only
    what follows them is cut and searched.

    shared_characters: the number of shared characters.
    """
    kept_pieces = settled_pieces(earlier.cuts, shared_characters)
    last_kept_piece = earlier.cuts[kept_pieces - 1] if kept_pieces else NOTHING
    new_cuts = list(tokenizer.splits.pieces(text, after=last_kept_piece))
    tokenized_pieces = min(kept_pieces, len(earlier.pieces))
    candidates: Sequence[tuple[AnswerSpan, ...]] = ()
    meanings: dict[AnswerSpan, AnswerMeaning] = {}
    if frame is not None and frame is earlier.frame:
        candidates = earlier.candidates[: frame.settled(earlier.candidates, shared_characters)]
    last_candidate = candidates[-1][-1] if candidates else BEGINNING
    if _are_same(tools, earlier.tools):
        earlier_meanings = earlier.meanings.copy().items()  # other threads may add meanings
        meanings = {
            span: meaning for span, meaning in earlier_meanings if span.end <= last_candidate.end
        }
    if frame is not None:
        candidates = [*candidates, *frame.candidates(text, after=last_candidate)]
    return RememberedText(
        text=text,
        cuts=[*earlier.cuts[:kept_pieces], *new_cuts],
        starts=[*earlier.starts[:kept_pieces], *(cut.start for cut in new_cuts)],
        pieces=earlier.pieces[:tokenized_pieces],
        token_starts=earlier.token_starts[: tokenized_pieces + 1],
        token_ids=earlier.token_ids[: earlier.token_starts[tokenized_pieces]],
        known_places=frozenset(
            place for place in earlier.known_places if place < last_kept_piece.end
        ),
        frame=frame,
        candidates=candidates,
        tools=tools,
        meanings=meanings,
    )


def _are_same(tools: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two conversations have the same tools, which are remembered objects."""
    return len(tools) == len(others) and all(map(lambda one, other: one is other, tools, others))


def _tokenize_pieces(
    texts: Sequence[str], places_by_piece: Mapping[str, frozenset[int]], tokenizer: Tokenizer
) -> Iterator[tuple[str, _Piece]]:
    """Tokenize pieces, those without wanted positions by a faster function."""
    without_places = [text for text in texts if text not in places_by_piece]
    for text, token_ids in zip(without_places, tokenizer.encode_all(without_places), strict=True):
        yield text, _Piece(TokenIds.of(token_ids), {})
    with_places = [text for text in texts if text in places_by_piece]
    for text, encoded in zip(with_places, tokenizer.encode_in_place(with_places), strict=True):
        places = {place: encoded.place(place) for place in places_by_piece[text]}
        yield text, _Piece(encoded.token_ids, places)


def _places_by_piece(places: Iterable[int], text: RememberedText) -> dict[str, frozenset[int]]:
    """The positions within each piece. A position between two pieces belongs to the second."""
    places_by_piece: dict[str, set[int]] = {}
    for place in places:
        if place < len(text.text):
            cut = text.cuts[bisect_right(text.starts, place) - 1]
            places_by_piece.setdefault(text.text[cut.start : cut.end], set()).add(place - cut.start)
    return {piece: frozenset(each) for piece, each in places_by_piece.items()}


def _size(text: str, piece: _Piece) -> int:
    token_bytes = len(piece.token_ids.packed)
    return _ENTRY_BYTES + bytes_of(text) + token_bytes + _PLACE_BYTES * len(piece.places)


def _prompt_size(prompt: RememberedText) -> int:
    """The memory of a prompt's text, tokens, pieces, known positions and spans.

    The pieces, which repeat all tokens, are counted as if the prompt alone had them; the meanings
    of spans as if they repeated the whole text.
    """
    texts = (2 if prompt.candidates else 1) * bytes_of(prompt.text)
    size = texts + 2 * len(prompt.token_ids.packed) + _PIECE_OF_PROMPT_BYTES * len(prompt.cuts)
    spans = sum(map(len, prompt.candidates))
    return size + (_KNOWN_BYTES + _PLACE_BYTES) * len(prompt.known_places) + _SPAN_BYTES * spans
