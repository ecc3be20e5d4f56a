"""Detects what ends an answer early: stop strings in visible text, and thoughts that repeat."""

from __future__ import annotations

import re
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from holdfast.front.output import OutputDelta, TextDelta

LEAST_ROUNDS = 8  # how often a period must occur in the tokens that are checked
_CHECK_INTERVAL_TOKENS = 64  # a check costs about 0.1 ms


class StopScanner:
    """Searches for stop strings in a text that arrives in parts. One per sequence.

    The stop string that is *completed* first ends the text, however the text is split. If several
    stop strings end at the same character, the longest one counts, so that no part is shown.
    Only the text before the stop string is visible.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: at least one stop string; none may be empty."""
        self._stops = tuple(stops)
        self._first_characters = re.compile(
            "|".join(re.escape(first) for first in sorted({stop[0] for stop in stops}))
        )
        self._longest = max(len(stop) for stop in stops)
        self.held_back = ""  # text that may be the beginning of a stop string
        self.found: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> str:
        """Add text. Returns the text that may be shown now: nothing after a stop string."""
        if self.found is not None or not text:
            return ""
        if not self.held_back and self._first_characters.search(text) is None:
            return text
        window = self.held_back + text
        match = self._first_completed_stop(window)
        if match is not None:
            place, self.found = match
            self.held_back = ""
            return window[:place]
        shown_characters = self._start_of_possible_stop(window)
        self.held_back = window[shown_characters:]
        return window[:shown_characters]

    def flush(self) -> str:
        """Return the text that was held back. Call this if the text ends without a stop string."""
        text = self.held_back
        self.held_back = ""
        return text

    def _first_completed_stop(self, window: str) -> tuple[int, str] | None:
        """Return the position of the stop string that ends first, and the string, or None."""
        best: tuple[int, int, str] | None = None  # end, start
        for stop in self._stops:
            start = window.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]

    def _start_of_possible_stop(self, window: str) -> int:
        """Return the first position where a stop string may begin, or the length of the window."""
        place = max(0, len(window) - self._longest + 1)
        while (found := self._first_characters.search(window, place)) is not None:
            tail = window[found.start() :]
            if any(stop.startswith(tail) for stop in self._stops):
                return found.start()
            place = found.start() + 1
        return len(window)


class VisibleStops:
    """Searches the visible text of an answer for stop strings. Other parts pass unchanged."""

    def __init__(self, stops: Sequence[str]) -> None:
        # positions count as in `TextDelta.start`
        self.found_at: int | None = None  # position of the stop string that was found
        self.held_back_from: int | None = None  # position from which text is held back
        self._scanner = StopScanner(stops) if stops else None

    @property
    def found(self) -> str | None:
        """The stop string that was found; None if there is none so far."""
        return None if self._scanner is None else self._scanner.found

    def scan(self, part: OutputDelta) -> Iterator[OutputDelta]:
        """Iterate over what may now be shown of the part and of the text held back before it."""
        if self._scanner is None:
            yield part
        elif isinstance(part, TextDelta) and part.kind == "text":
            yield from self._scan_text(self._scanner, part)
        else:
            yield from self.flush()
            yield part

    def flush(self) -> Iterator[TextDelta]:
        """Iterate over the text held back. Call this if no visible text follows without a gap."""
        if self._scanner is not None and self.held_back_from is not None:
            start = self.held_back_from
            self.held_back_from = None
            yield TextDelta(text=self._scanner.flush(), start=start)

    def _scan_text(self, scanner: StopScanner, part: TextDelta) -> Iterator[TextDelta]:
        """Yield the text that the scanner lets through, and update the positions."""
        held_characters = len(scanner.held_back)
        start = part.start if self.held_back_from is None else self.held_back_from
        shown = scanner.push(part.text)
        if shown:
            yield TextDelta(text=shown, start=start)
        # there may be omitted markup between the end of the held text and the beginning of the part
        end = (
            part.start + len(shown) - held_characters
            if len(shown) >= held_characters
            else start + len(shown)
        )
        self.held_back_from = end if scanner.held_back else None
        if scanner.found is not None:
            self.found_at = end


class RepetitionGuard:
    """Detects an endless thought or an endless answer, by its tokens alone.

    The guard is cautious rather than quick: a text is endless only if its last 2048 tokens (by
    default) repeat one period of at most an eighth of this length, without a single different
    token. Useful texts do not do that, not even with tables: a grid of 30 rows of 30 zeros has
    1,800 tokens.
    """

    def __init__(self, tokens: int) -> None:
        """tokens: how many tokens have to repeat; 0 switches the guard off."""
        self._tokens = tokens
        self._last: deque[int] = deque(maxlen=tokens)
        self._tokens_until_check = tokens

    def push(self, token_ids: Iterable[int]) -> bool:
        """Add tokens of the text. Returns True once a check finds it endless."""
        if not self._tokens:
            return False
        repeats = False
        for token_id in token_ids:
            self._last.append(token_id)
            self._tokens_until_check -= 1
            if not self._tokens_until_check:
                self._tokens_until_check = _CHECK_INTERVAL_TOKENS
                longest_period = self._tokens // LEAST_ROUNDS
                repeats = repeats or is_periodic(self._last, longest_period=longest_period)
        return repeats


def is_periodic(token_ids: Iterable[int], *, longest_period: int) -> bool:
    """Whether the tokens repeat a period of at most `longest_period` tokens.

    The last repetition may be incomplete.
    """
    ids = array("q", token_ids)
    packed = ids.tobytes()
    size = ids.itemsize
    for period in range(1, min(longest_period, len(ids) - 1) + 1):
        if ids[-1] == ids[-1 - period] and packed[period * size :] == packed[: -period * size]:
            return True
    return False
