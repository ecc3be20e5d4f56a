"""Stands for the reader of answers: finds where calls begin and lets a family's mechanism read them. No reasoning, no repairs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from holdfast.parsing.formats.call_format import CallFormat
from holdfast.parsing.formats.call_parts import CallParts
from holdfast.parsing.formats.declared import DeclaredTools
from holdfast.parsing.formats.incoming import Incoming, Waiting
from holdfast.parsing.markers import Markers
from holdfast.parsing.segments import AnswerPart, CallArguments, CallBegun, CallEnded, Segment


class MarkupReader:
    """Reads one answer of a family."""

    def __init__(self, calls: CallFormat, tools: Sequence[Mapping[str, Any]], markers: Markers) -> None:
        self.calls: CallFormat = markers.encoded(calls)
        self.source = Incoming(markers.restore)
        self.parts = CallParts(DeclaredTools(tools))
        self._steps = self._read()

    def push(self, text: str) -> list[AnswerPart]:
        self.source.add(text)
        return self._advance()

    def flush(self) -> list[AnswerPart]:
        self.source.ended = True
        return self._advance()

    def _advance(self) -> list[AnswerPart]:
        next(self._steps, None)
        done, self.parts.done = self.parts.done, []
        return done

    def _read(self) -> Waiting[None]:
        source, openers, at_line = self.source, tuple(self.calls.openers), True
        while True:
            certain = source.certain(openers)
            if certain > source.place:
                source.place = certain
                at_line = self._say()
            if source.place == len(source.text):
                if source.ended:
                    return
                yield
                continue
            opener = yield from source.standing(openers)
            line_only = opener not in self.calls.marks
            if opener and (at_line or not line_only) and (yield from self.calls.read(source, self.parts)):
                source.drop_read()
                at_line = True
                continue
            source.place = len(opener) or 1
            at_line = self._say()

    def _say(self) -> bool:
        text = self.source.plain(self.source.drop_read())
        self.parts.say("text", text)
        return text.endswith("\n")


def read(
    calls: CallFormat, tools: Sequence[Mapping[str, Any]], text: str, *, markers: Markers, places: Sequence[int] = ()
) -> list[AnswerPart]:
    """The parts of an answer that comes in pieces, cut at these places (counted around); adjacent ones of a kind joined."""
    reader = MarkupReader(calls, tools, markers)
    joined: list[AnswerPart] = []
    pieces = cut(markers.encode(text), places)
    for part in [part for piece in pieces for part in reader.push(piece)] + reader.flush():
        last = joined[-1] if joined else None
        if isinstance(part, CallArguments) and isinstance(last, CallArguments):
            joined[-1] = CallArguments(last.text + part.text)
        elif isinstance(part, Segment) and isinstance(last, Segment) and part.kind == last.kind:
            joined[-1] = Segment(part.kind, last.text + part.text)
        else:
            joined.append(part)
    return joined


def cut(text: str, places: Sequence[int]) -> list[str]:
    """The text in pieces, cut at these places (counted around)."""
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def told(parts: Sequence[AnswerPart]) -> list[Any]:
    """The parts in short: texts as they are, thoughts as ("thought", text), calls as (name, arguments, repairs)."""
    return list(_told(iter(parts)))


def _told(parts: Iterator[AnswerPart]) -> Iterator[Any]:
    for part in parts:
        if isinstance(part, Segment):
            yield part.text if part.kind == "text" else ("thought", part.text)
            continue
        assert isinstance(part, CallBegun), part
        arguments = next(parts)
        end = next(parts)
        assert isinstance(arguments, CallArguments), arguments
        assert isinstance(end, CallEnded), end
        yield part.name, json.loads(arguments.text), end.repairs
