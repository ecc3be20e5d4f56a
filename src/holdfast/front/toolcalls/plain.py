"""The format of models whose text is text throughout, and of all whose own one is not known."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.front.toolcalls.segments import Segment, Thought


class PlainFormat:
    """All of it is visible text, and nothing is held back."""

    thoughts: Sequence[Thought] = ()

    def __init__(self) -> None:
        self.certain = 0

    def push(self, text: str) -> Sequence[Segment]:
        """The text, as one segment."""
        start = self.certain
        self.certain += len(text)
        return (Segment("text", text, start),) if text else ()

    def flush(self, *, cut: bool = False) -> Sequence[Segment]:
        """Nothing: there is no state."""
        return ()
