"""Token ids to text as they come, never half a character; and the tokens at their places in it."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from holdfast.front.answers.pieces import TokenPieces
from holdfast.front.toolcalls.incoming import Markers
from holdfast.wire.events import TokenLogprob
from holdfast.wire.output import TokenText

_REPLACEMENT = "\ufffd"
# an opaque decoder's text may end in U+FFFD for so many tokens before it is believed
_WINDOW_TOKENS = 16


@dataclass(slots=True)
class PlacedToken:
    """A token whose text is not shown yet.

    `start` and `end` are places in the answer, `emitted` the text between them.

    A token that is a part of a character has the place of that character. Until the character is
    certain, `end` is `start`.
    """

    token_id: int
    start: int
    end: int
    emitted: str
    logprob: TokenLogprob | None


def spread(text: str, tokens: Sequence[PlacedToken], raws: Sequence[bytes], *, start: int) -> bool:
    """Place tokens that became certain together.

    False, and nothing done, when their bytes are not those of the text.

    start: the place of the text in the answer. raws: the bytes of each of the tokens.
    """
    data = text.encode()
    if b"".join(raws) != data:
        return False
    at, begun = 0, 0
    for token, raw in zip(tokens, raws, strict=True):
        first = begun - 1 if raw and _continues(raw[0]) else begun
        at, begun = at + len(raw), begun + sum(not _continues(byte) for byte in raw)
        token.start, token.end, token.emitted = start + first, start + begun, text[first:begun]
    return True


def _continues(byte: int) -> bool:
    return byte & 0xC0 == 0x80


class PlacedTokens:
    """Makes text of tokens and keeps them until they are asked for.

    Places are characters of the answer, markers written out.
    """

    def __init__(
        self, pieces: TokenPieces, markers: Markers, *, at_start: bool, offset: int = 0
    ) -> None:
        """offset: characters that stand before the answer's first, for the places that a client
        sees.
        """
        self._pieces, self._markers, self._offset = pieces, markers, offset
        self._detokenizer = detokenizer(pieces, at_start=at_start)
        self._pending: deque[PlacedToken] = deque()
        self._uncertain: list[PlacedToken] = []  # those of them without certain text
        self._characters = 0  # that have come

    def push(self, token_id: int, logprob: TokenLogprob | None) -> str:
        """Add a token; returns the text that is certain now, with one character for a token that is
        a marker.
        """
        marker = self._markers.characters.get(token_id)
        if marker is not None:
            before = self.flush()
            literal = self._markers.restore(marker)
            self._add(token_id, literal, logprob)
            return before + marker
        text = self._detokenizer.push((token_id,))
        self._add(token_id, text, logprob)
        return text

    def flush(self) -> str:
        """The text that was held back, when no token follows that could change it."""
        text = self._detokenizer.flush()
        if text and self._uncertain:
            self._place(text, start=self._characters)
        self._uncertain.clear()
        self._characters += len(text)
        return text

    def take(self, upto: int) -> Sequence[PlacedToken]:
        """The tokens whose text ends before this place, which are not asked for again."""
        taken: list[PlacedToken] = []
        while self._pending and self._pending[0].end <= upto and self._pending[0].start < upto:
            taken.append(self._pending.popleft())
        return taken

    def take_before(self, cut: int | None) -> Sequence[PlacedToken]:
        """The tokens that begin before this place, where the answer is cut; without a place all
        that are left.
        """
        taken: list[PlacedToken] = []
        while self._pending and (cut is None or self._pending[0].start < cut):
            taken.append(self._pending.popleft())
        return taken

    def shown(self, token: PlacedToken, scored: TokenLogprob, *, cut: int | None) -> TokenText:
        """A token as a client sees it. cut: the place from which on nothing of it is shown."""
        text, raw = text_and_bytes(self._pieces, token.token_id)
        hidden = 0 if cut is None else token.end - cut
        if hidden > 0:
            raw = raw[: max(0, raw.rfind(token.emitted[-hidden:].encode()))]
            text = raw.decode("utf-8", "replace")
        return TokenText(
            text=text,
            raw=raw,
            logprob=scored.logprob,
            top=tuple(rival(self._pieces, token_id, logprob) for token_id, logprob in scored.top),
            text_offset=self._offset + token.start,
        )

    def _add(self, token_id: int, text: str, logprob: TokenLogprob | None) -> None:
        start = self._characters
        self._characters += len(text)
        token = PlacedToken(token_id, start, self._characters, text, logprob)
        self._pending.append(token)
        if self._uncertain or not text:
            self._uncertain.append(token)
        if text and self._uncertain:
            self._place(text, start=start)

    def _place(self, text: str, *, start: int) -> None:
        """Place the tokens whose text was uncertain.

        Where bytes were replaced, all of it counts as made by the last of them.
        """
        raws = [self._pieces.visible_bytes(token.token_id) for token in self._uncertain]
        if not spread(text, self._uncertain, raws, start=start):
            last = self._uncertain[-1]
            last.start, last.end, last.emitted = start, start + len(text), text
        self._uncertain.clear()


def text_and_bytes(pieces: TokenPieces, token_id: int) -> tuple[str, bytes]:
    """A token's text and bytes by itself; what is no UTF-8 becomes U+FFFD in the text."""
    raw = pieces.all_bytes(token_id)
    return raw.decode("utf-8", "replace"), raw


def rival(pieces: TokenPieces, token_id: int, logprob: float) -> TokenText:
    """A token that could have stood in another's place."""
    text, raw = text_and_bytes(pieces, token_id)
    return TokenText(text=text, raw=raw, logprob=logprob)


class _ByteDecoder:
    """Byte-level vocabularies: a table lookup per token and an incremental UTF-8 decoder."""

    def __init__(self, pieces: TokenPieces, show_special: bool) -> None:
        self._bytes = pieces.all_bytes if show_special else pieces.visible_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        table = self._bytes
        if len(token_ids) == 1:
            return self._utf8.decode(table(token_ids[0]))
        return self._utf8.decode(b"".join([table(token_id) for token_id in token_ids]))

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class _PieceDecoder:
    """SentencePiece-like vocabularies.

    A run of byte tokens is decoded as one when it ends: a whole decode turns *each* byte of a run
    that is not UTF-8 throughout into U+FFFD, so no part of a run is certain before its end.
    """

    def __init__(self, pieces: TokenPieces, at_start: bool, show_special: bool) -> None:
        self._pieces = pieces
        self._table = pieces.all_pieces if show_special else pieces.visible_pieces
        self._first = at_start and bool(pieces.rules.dropped_from_first_token)
        self._strip, self._strip_left = pieces.rules.leading_strip
        if not at_start:
            self._strip_left = 0
        self._run = bytearray()

    def push(self, token_ids: Sequence[int]) -> str:
        parts: list[str] = []
        table, run = self._table, self._run
        for token_id in token_ids:
            piece = table(token_id)
            if piece is None:
                continue
            if self._first:
                piece, self._first = self._pieces.first_piece(token_id), False
            if isinstance(piece, int):
                run.append(piece)
                continue
            if run:
                parts.append(self._end_run())
            if piece:
                parts.append(piece)
        text = "".join(parts)
        return self._stripped(text) if self._strip_left and text else text

    def flush(self) -> str:
        text = self._end_run() if self._run else ""
        return self._stripped(text) if self._strip_left and text else text

    def _end_run(self) -> str:
        data = bytes(self._run)
        self._run.clear()
        try:
            return data.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(data)

    def _stripped(self, text: str) -> str:
        while self._strip_left and text.startswith(self._strip):
            text, self._strip_left = text[len(self._strip) :], self._strip_left - 1
        if text:
            self._strip_left = 0
        return text


class _WindowDecoder:
    """Any other decoder: decodes the last few tokens again with their predecessors, and gives what
    is new.

    The result is the whole's as long as no decision of the decoder reaches back over more than the
    window.
    """

    def __init__(self, pieces: TokenPieces, show_special: bool) -> None:
        self._backend = pieces.backend
        self._skip = not show_special
        self._context: list[int] = []
        self._new: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        parts: list[str] = []
        for token_id in token_ids:
            self._new.append(token_id)
            text = self._text_of_new()
            if text and (not text.endswith(_REPLACEMENT) or len(self._new) >= _WINDOW_TOKENS):
                parts.append(text)
                self._begin_window()
        return "".join(parts)

    def flush(self) -> str:
        text = self._text_of_new()
        self._begin_window()
        return text

    def _text_of_new(self) -> str:
        before = self._backend.decode(self._context, skip_special_tokens=self._skip)
        return self._backend.decode(self._context + self._new, skip_special_tokens=self._skip)[
            len(before) :
        ]

    def _begin_window(self) -> None:
        self._context, self._new = self._new[-_WINDOW_TOKENS:], []


Detokenizer: TypeAlias = _ByteDecoder | _PieceDecoder | _WindowDecoder
"""Turns token ids into text as they come. One per sequence.

`push` adds tokens and returns the text that is certain now; `flush` returns what was held back,
when no token follows. All of it joined equals the tokenizer's decoding of all ids at once, however
they were divided. Incomplete characters are held back; bytes that are no UTF-8 become U+FFFD as
they do in the whole.
"""


def detokenizer(
    pieces: TokenPieces, *, at_start: bool = True, show_special: bool = False
) -> Detokenizer:
    """A detokenizer for one sequence of a model.

    at_start: the tokens open a text, so that the space which some tokenizers put in front of a
        first word is taken off again.
        Off for a continuation: there the space parts the first word from what stands before it.
    show_special: special tokens are part of the text (for an echoed prompt).
    """
    if pieces.rules.style == "bytes":
        return _ByteDecoder(pieces, show_special)
    if pieces.rules.style == "pieces":
        return _PieceDecoder(pieces, at_start, show_special)
    return _WindowDecoder(pieces, show_special)
