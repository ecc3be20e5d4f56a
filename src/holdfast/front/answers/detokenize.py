"""Tokens to text, a few at a time, at a constant cost per token, and with the same result as
decoding the whole at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TypeAlias

from holdfast.front.answers.pieces import TokenPieces

_REPLACEMENT = "\ufffd"
# an opaque decoder's text may end in U+FFFD for so many tokens before it is believed
_WINDOW_TOKENS = 16


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
