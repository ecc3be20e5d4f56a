"""Stop strings of an answer: they stand in visible text, in one piece of it, and never in reasoning
or calls. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.front.answers.stops import StopScanner
from holdfast.front.toolcalls.segments import AnswerPart, Segment


class VisibleStops:
    """Looks for stop strings in the parts of an answer."""

    def __init__(self, stops: Sequence[str]) -> None:
        # the place of the stop string that was found; places are those of `Segment.start`
        self.cut: int | None = None
        self.held_from: int | None = None  # the place from which on text is held back
        self._scanner = StopScanner(stops) if stops else None

    @property
    def found(self) -> str | None:
        """The stop string that was found."""
        return None if self._scanner is None else self._scanner.found

    def scan(self, part: AnswerPart) -> Iterator[AnswerPart]:
        """What may be shown now, of the part and of what was held back before it."""
        if self._scanner is None:
            yield part
        elif isinstance(part, Segment) and part.kind == "text":
            yield from self._scan_text(self._scanner, part)
        else:
            yield from self.flush()
            yield part

    def flush(self) -> Iterator[Segment]:
        """What was held back, when no visible text follows in one piece with it."""
        if self._scanner is not None and self.held_from is not None:
            start, self.held_from = self.held_from, None
            yield Segment("text", self._scanner.flush(), start)

    def _scan_text(self, scanner: StopScanner, part: Segment) -> Iterator[Segment]:
        held = len(scanner.held)
        start = part.start if self.held_from is None else self.held_from
        shown = scanner.push(part.text)
        if shown:
            yield Segment("text", shown, start)
        # what was held may not stand right before the part: markup that is left out may stand
        # between them
        end = part.start + len(shown) - held if len(shown) >= held else start + len(shown)
        if scanner.stopped:
            self.cut, self.held_from = end, None
        else:
            self.held_from = end if scanner.held else None
