"""The tokens of an answer on their way to a client: their text, and which of them made which
characters. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from holdfast.front.answers.detokenize import detokenizer
from holdfast.front.answers.pieces import TokenPieces
from holdfast.front.answers.places import PlacedToken, spread
from holdfast.front.toolcalls.markers import Markers
from holdfast.wire.events import TokenLogprob
from holdfast.wire.output import TokenText


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
