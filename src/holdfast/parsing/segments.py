"""What an answer's text is made of: parts that a client sees as text, as reasoning or as calls of tools. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from holdfast.messages.output import SegmentKind


class Segment(NamedTuple):
    """A part of an answer that is of one kind; not empty."""

    kind: SegmentKind
    text: str


class SegmentFormat(Protocol):
    """How the models of a family write reasoning and calls into their text. One object per sequence, since it has state.

    The joined texts of all segments are the text that came in, however it was cut; equal kinds may follow each other.
    """

    def push(self, text: str) -> Sequence[Segment]:
        """Add text; returns the segments that are certain now."""
        ...

    def flush(self) -> Sequence[Segment]:
        """What was held back, when no text follows."""
        ...
