"""The segments of an answer, and the reader of answers without any marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

from holdfast.wire.output import TextKind, separator


class Segment(NamedTuple):
    """A part of an answer's text that is of one kind; not empty."""

    kind: TextKind
    text: str
    start: int = 0  # where it begins in the answer: characters before it, markers written out


class Thought(NamedTuple):
    """Where a thought stands in an answer, its markers included: characters before it and before
    what follows it.
    """

    start: int
    end: int


class CallBegun(NamedTuple):
    """A call of a tool, once its name is certain."""

    name: str
    id: str = ""  # as the model wrote it; empty: it writes none


class CallArguments(NamedTuple):
    """More of the open call's arguments: JSON text, whose fragments join to one object; not empty."""

    text: str


class CallEnded(NamedTuple):
    """The open call is complete."""

    repairs: tuple[str, ...] = ()  # names of what was mended


AnswerPart: TypeAlias = Segment | CallBegun | CallArguments | CallEnded


class TextJoints:
    """Follows the parts of an answer to tell what goes between its texts where they become one
    string. One per answer.
    """

    def __init__(self) -> None:
        self._last = ""  # the last character of visible text
        self._parted = False  # something else has followed it

    def separator(self, part: AnswerPart) -> str:
        """What goes before this part, the next one."""
        if not isinstance(part, Segment) or part.kind != "text":
            self._parted = True
            return ""
        found = separator(self._last, part.text) if self._parted else ""
        self._last = part.text[-1:] or self._last
        self._parted = False
        return found


class SegmentFormat(Protocol):
    """How the models of a family write reasoning and calls into their text.

    One object per sequence, since it has state.

    However the text was cut, the parts are the same (adjacent segments of a kind and adjacent
    arguments joined). What is not a complete call, and no marker, comes out as a segment: no text
    is dropped. Markers that are single tokens come in as one character each (`parsing.markers`),
    which no text has.
    """

    @property
    def certain(self) -> int:
        """Characters from the answer's beginning, markers written out, about which all is certain."""
        ...

    @property
    def thoughts(self) -> Sequence[Thought]:
        """Where the answer's reasoning stands, as far as it is certain."""
        ...

    def push(self, text: str) -> Sequence[AnswerPart]:
        """Add text; returns the parts that are certain now."""
        ...

    def flush(self, *, cut: bool = False) -> Sequence[AnswerPart]:
        """What was held back, when no text follows.

        cut: the answer was ended by its length. A call that is open then stays as it is, without
        `CallEnded`.
        """
        ...


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
