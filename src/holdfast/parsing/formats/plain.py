"""The format of models whose text is text throughout, and of all whose own one is not known."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.parsing.segments import Segment


class PlainFormat:
    """All of it is visible text, and nothing is held back."""

    held = 0

    def push(self, text: str) -> Sequence[Segment]:
        """The text, as one segment."""
        return (Segment("text", text),) if text else ()

    def flush(self, *, cut: bool = False) -> Sequence[Segment]:
        """Nothing: there is no state."""
        return ()
