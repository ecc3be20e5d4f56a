"""A format of which there is none in the product yet: reasoning stands between <think> and </think>."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.messages.output import TextKind
from holdfast.parsing.segments import Segment

_MARKS = {"text": "<think>", "reasoning": "</think>"}


class ThinkingFormat:
    """The marks belong to the reasoning, so that the segments joined are the text."""

    def __init__(self) -> None:
        self._kind: TextKind = "text"
        self._held = ""

    @property
    def held(self) -> int:
        return len(self._held)

    def push(self, text: str) -> Sequence[Segment]:
        found: list[Segment] = []
        self._held += text
        while (at := self._held.find(_MARKS[self._kind])) >= 0:
            end = at if self._kind == "text" else at + len("</think>")
            found.append(Segment(self._kind, self._held[:end]))
            self._held = self._held[end:]
            self._kind = "reasoning" if self._kind == "text" else "text"
        keep = max((n for n in range(1, len(_MARKS[self._kind])) if self._held.endswith(_MARKS[self._kind][:n])), default=0)
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return [segment for segment in [*found, Segment(self._kind, certain)] if segment.text]

    def flush(self, *, cut: bool = False) -> Sequence[Segment]:
        rest, self._held = self._held, ""
        return [Segment(self._kind, rest)] if rest else []
