"""Detokenizes a stream without splitting characters, and locates the tokens in the text."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from holdfast.front.answers.pieces import TokenPieces
from holdfast.front.output import TokenText
from holdfast.front.toolcalls.incoming import Markers
from holdfast.wire.events import TokenLogprob

_REPLACEMENT = "\ufffd"
# a trailing U+FFFD from a decoder of style `opaque` is accepted only after this number of tokens
_WINDOW_TOKENS = 16


@dataclass(slots=True)
class PlacedToken:
    """A token whose text is not shown yet.

    `start` and `end` are positions in the answer, and `emitted` is the text between them. A token
    that is part of a character has the position of that character. Until the character is certain,
    `end` equals `start`.
    """

    token_id: int
    start: int
    end: int
    emitted: str
    logprob: TokenLogprob | None


def place_by_bytes(
    text: str, tokens: Sequence[PlacedToken], bytes_of_tokens: Sequence[bytes], *, start: int
) -> bool:
    """Set the positions of tokens whose text became certain at the same time.

    Returns False if the text does not consist of the tokens' bytes.

    start: the position of the text in the answer.
    """
    data = text.encode()
    if b"".join(bytes_of_tokens) != data:
        return False
    characters = 0  # number of characters of the text that have begun
    for token, raw in zip(tokens, bytes_of_tokens, strict=True):
        first_character = characters - 1 if raw and _is_continuation(raw[0]) else characters
        characters += sum(not _is_continuation(byte) for byte in raw)
        token.start = start + first_character
        token.end = start + characters
        token.emitted = text[first_character:characters]
    return True


def _is_continuation(byte: int) -> bool:
    """Whether a byte of UTF-8 continues a character that an earlier byte began."""
    return byte & 0xC0 == 0x80


class PlacedTokens:
    """Detokenizes one answer, and stores each token with its position until the caller takes it.

    Positions count the characters of the answer, with markers written out.
    """

    def __init__(
        self, pieces: TokenPieces, markers: Markers, *, at_start: bool, offset: int = 0
    ) -> None:
        """offset: number of characters before the answer (an echoed prompt); included in the
        positions that a client sees.
        """
        self._pieces = pieces
        self._markers = markers
        self._offset = offset
        self._detokenizer = detokenizer(pieces, at_start=at_start)
        self._pending: deque[PlacedToken] = deque()  # tokens that were not taken yet
        # tokens whose text is not certain yet, because they contain a part of a character
        self._uncertain: list[PlacedToken] = []
        self._characters = 0  # length of the text so far

    def push(self, token_id: int, logprob: TokenLogprob | None) -> str:
        """Add a token. Returns the text that is certain now; a marker is one character."""
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
        """Return the text that was held back. Call this when no more tokens follow."""
        text = self._detokenizer.flush()
        if text and self._uncertain:
            self._place_uncertain(text, start=self._characters)
        self._uncertain.clear()
        self._characters += len(text)
        return text

    def take_until(self, upto: int) -> Sequence[PlacedToken]:
        """Remove and return the tokens whose text ends at this position or before."""
        taken: list[PlacedToken] = []
        while self._pending and self._pending[0].end <= upto and self._pending[0].start < upto:
            taken.append(self._pending.popleft())
        return taken

    def take_starting_before(self, cut: int | None) -> Sequence[PlacedToken]:
        """Remove and return the tokens that begin before the cut; without a cut, all tokens."""
        taken: list[PlacedToken] = []
        while self._pending and (cut is None or self._pending[0].start < cut):
            taken.append(self._pending.popleft())
        return taken

    def shown(self, token: PlacedToken, scored: TokenLogprob, *, cut: int | None) -> TokenText:
        """Return a token as a client sees it.

        scored: the token's logprob and those of likely others. cut: the position where the visible
        text ends; None: it is not cut off.
        """
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
        """Store a token. text: what became certain with it, also of earlier tokens."""
        start = self._characters
        self._characters += len(text)
        token = PlacedToken(token_id, start, self._characters, text, logprob)
        self._pending.append(token)
        if self._uncertain or not text:
            self._uncertain.append(token)
        if text and self._uncertain:
            self._place_uncertain(text, start=start)

    def _place_uncertain(self, text: str, *, start: int) -> None:
        """Set the positions of the tokens whose text was uncertain.

        If the text is not exactly the bytes of these tokens (invalid bytes were replaced, or the last
        token ends within the next character), all of it is assigned to the last token.
        """
        bytes_of_tokens = [self._pieces.visible_bytes(token.token_id) for token in self._uncertain]
        if not place_by_bytes(text, self._uncertain, bytes_of_tokens, start=start):
            last = self._uncertain[-1]
            last.start = start
            last.end = start + len(text)
            last.emitted = text
        self._uncertain.clear()


def text_and_bytes(pieces: TokenPieces, token_id: int) -> tuple[str, bytes]:
    """Return the text and bytes of a single token; invalid UTF-8 becomes U+FFFD in the text."""
    raw = pieces.all_bytes(token_id)
    return raw.decode("utf-8", "replace"), raw


def rival(pieces: TokenPieces, token_id: int, logprob: float) -> TokenText:
    """Return one of the likely tokens at a position (`top_logprobs`), with its text."""
    text, raw = text_and_bytes(pieces, token_id)
    return TokenText(text=text, raw=raw, logprob=logprob)


class _ByteDecoder:
    """Detokenizer for byte-level vocabularies: a table lookup per token, and a UTF-8 decoder."""

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
    """Detokenizer for vocabularies like those of SentencePiece.

    A run of byte tokens is decoded at its end: if any part is invalid UTF-8, the tokenizer
    turns *each* byte of the run into U+FFFD. So no part of a run is certain before its end.
    """

    def __init__(self, pieces: TokenPieces, at_start: bool, show_special: bool) -> None:
        self._pieces = pieces
        self._piece_of = pieces.all_pieces if show_special else pieces.visible_pieces
        self._is_first_token = at_start and bool(pieces.rules.dropped_from_first_token)
        self._stripped_character, self._strips_left = pieces.rules.leading_strip
        if not at_start:
            self._strips_left = 0
        self._byte_run = bytearray()

    def push(self, token_ids: Sequence[int]) -> str:
        parts: list[str] = []
        piece_of = self._piece_of
        byte_run = self._byte_run
        for token_id in token_ids:
            piece = piece_of(token_id)
            if piece is None:
                continue
            if self._is_first_token:
                piece = self._pieces.first_piece(token_id)
                self._is_first_token = False
            if isinstance(piece, int):
                byte_run.append(piece)
                continue
            if byte_run:
                parts.append(self._end_byte_run())
            if piece:
                parts.append(piece)
        text = "".join(parts)
        return self._without_leading_strip(text) if self._strips_left and text else text

    def flush(self) -> str:
        text = self._end_byte_run() if self._byte_run else ""
        return self._without_leading_strip(text) if self._strips_left and text else text

    def _end_byte_run(self) -> str:
        """The text of the run of byte tokens, which is over."""
        data = bytes(self._byte_run)
        self._byte_run.clear()
        try:
            return data.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(data)

    def _without_leading_strip(self, text: str) -> str:
        """Remove what the tokenizer strips from the beginning of a text (`leading_strip`)."""
        while self._strips_left and text.startswith(self._stripped_character):
            text = text[len(self._stripped_character) :]
            self._strips_left -= 1
        if text:
            self._strips_left = 0
        return text


class _WindowDecoder:
    """Detokenizer for all other tokenizers: decodes the last few tokens together with those before
    them, and returns the new text. This is correct if no token affects text beyond the window.
    """

    def __init__(self, pieces: TokenPieces, show_special: bool) -> None:
        self._backend = pieces.backend
        self._skips_special = not show_special
        # the tokens before the new ones, whose text was returned; decoded again for context
        self._context_ids: list[int] = []
        self._new_ids: list[int] = []  # tokens whose text was not returned yet

    def push(self, token_ids: Sequence[int]) -> str:
        parts: list[str] = []
        for token_id in token_ids:
            self._new_ids.append(token_id)
            text = self._new_text()
            if text and (not text.endswith(_REPLACEMENT) or len(self._new_ids) >= _WINDOW_TOKENS):
                parts.append(text)
                self._begin_window()
        return "".join(parts)

    def flush(self) -> str:
        text = self._new_text()
        self._begin_window()
        return text

    def _new_text(self) -> str:
        """The text that the new tokens add to that of the tokens before them."""
        context_text = self._backend.decode(
            self._context_ids, skip_special_tokens=self._skips_special
        )
        text = self._backend.decode(
            self._context_ids + self._new_ids, skip_special_tokens=self._skips_special
        )
        return text[len(context_text) :]

    def _begin_window(self) -> None:
        self._context_ids = self._new_ids[-_WINDOW_TOKENS:]
        self._new_ids = []


Detokenizer: TypeAlias = _ByteDecoder | _PieceDecoder | _WindowDecoder
"""Turns the token ids of a stream into text. One per sequence.

`push` adds tokens and returns the text that is certain now; `flush` returns the text that was held
back. Together they equal the tokenizer's decoding of all ids together, for any split of the ids.
Incomplete characters are held back; invalid UTF-8 becomes U+FFFD, as in the tokenizer's decoding.
"""


def detokenizer(
    pieces: TokenPieces, *, at_start: bool = True, show_special: bool = False
) -> Detokenizer:
    """Return a detokenizer for one sequence of a model.

    at_start: the tokens begin a text, so the space that some tokenizers add before the first word
        is removed. If False, they continue a text, and the space separates two words.
    show_special: special tokens are part of the text (for an echoed prompt).
    """
    if pieces.rules.style == "bytes":
        return _ByteDecoder(pieces, show_special)
    if pieces.rules.style == "pieces":
        return _PieceDecoder(pieces, at_start, show_special)
    return _WindowDecoder(pieces, show_special)
