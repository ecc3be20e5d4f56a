"""Arguments that stand as raw text between marks: strings stream, all else is typed by the tool's
schema at its end. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from holdfast.front.toolcalls.call_format import CallParts
from holdfast.front.toolcalls.incoming import Incoming, Waiting
from holdfast.front.toolcalls.json_stream import JsonStream
from holdfast.front.toolcalls.literals import Literals
from holdfast.front.toolcalls.typed_values import typed

_JSON: Final = Literals()
_STRING = frozenset({"string"})
_NULLABLE = frozenset({"string", "null"})
_NULLS = ("null", "None")
_HEADER = re.compile(
    r"""\s*["']?([^"'<>]+)(?:["'](?:\s+(?:string|type)\s*=\s*["']?(\w+)["']?)?[^<>]*)?"""
)
_HEADER_LENGTH = 256


class TagHeader(NamedTuple):
    """A tag's name, and what it says about the value's type (empty: nothing)."""

    name: str
    type: str = ""


class ValueEnd(NamedTuple):
    """What ends a value: a mark that one of `before` follows, white space between, or the end of
    the text.

    last: what may come behind that again, or the end of the text; empty: anything.
    """

    mark: str
    before: tuple[str, ...]
    last: tuple[str, ...] = ()
    spaces: tuple[str, ...] = ()  # what is white space too
    closes: bool = True  # the mark belongs to the value's markup; else it is only looked at
    repair: str = ""
    # behind the mark stands the name of a parameter that has no value yet, and `before`
    names_parameter: bool = False


def header(source: Incoming) -> Waiting[TagHeader | None]:
    """Read the rest of a tag after its first word. None: it is not a tag."""
    at, mark = yield from source.find((">", "\n"), source.place, limit=_HEADER_LENGTH)
    if mark != ">" or not (found := _HEADER.fullmatch(source.text[source.place : at])):
        return None
    source.place = at + 1
    return TagHeader(source.plain(found[1]).strip(), found[2] or "")


def read_value(
    source: Incoming,
    parts: CallParts,
    ends: Sequence[ValueEnd],
    *,
    types: frozenset[str],
    padding: str = "",
) -> Waiting[None]:
    """Read one argument's value, its key being written, up to what ends it.

    padding: stands once at either side of the value and belongs to the markup, if it stands behind
    the opening tag.
    """
    if padding:
        padding = yield from source.taken(padding)
    if types == _STRING:
        parts.json('"')
        yield from _raw(source, parts, ends, padding, parts.text)
        parts.json('"')
        return
    pieces: list[str] = []
    is_open = False  # a string that may be null is one once it is no beginning of "null"

    def collect(text: str) -> None:
        nonlocal is_open
        pieces.append(text)
        if (
            types == _NULLABLE
            and not is_open
            and not any(word.startswith("".join(pieces).strip()) for word in _NULLS)
        ):
            is_open = True
            parts.json('"')
        if is_open:
            parts.text("".join(pieces))
            pieces.clear()

    yield from _raw(source, parts, ends, padding, collect)
    if is_open:
        parts.json('"')
        return
    value = typed("".join(pieces), types)
    parts.repair(value.repair)
    parts.json(value.json)


def read_raw_value(
    source: Incoming, parts: CallParts, ends: Sequence[ValueEnd], *, padding: str = ""
) -> Waiting[str]:
    """Read one argument's value as it stands, up to what ends it, without giving it out."""
    if padding:
        padding = yield from source.taken(padding)
    pieces: list[str] = []
    yield from _raw(source, parts, ends, padding, pieces.append)
    return "".join(pieces)


def read_json_body(
    source: Incoming, parts: CallParts, *, stops: Sequence[str] = (), repair: str = "json_body"
) -> Waiting[bool]:
    """Read the arguments of an open call where they stand as one object in place of tags, up to
    `stops` at most.
    """
    if parts.given or not source.text.startswith("{", source.place):
        return False
    stream = JsonStream(source, parts.json, stops=stops)
    parts.repair(repair)
    yield from stream.read()
    parts.repair(*stream.repairs)
    return True


def read_json_call(
    source: Incoming, parts: CallParts, *, repair: str = "json_call"
) -> Waiting[bool]:
    """Read a call written as one object with a name and arguments instead of tags. False: none."""
    if not source.text.startswith("{", source.place):
        return False
    start, repairs = source.place, [repair]
    found = json.loads((yield from _JSON.value(source, repairs, ends="")))
    name, arguments = found.get("name"), found.get("arguments", found.get("parameters"))
    tool = parts.tools.named(name) if isinstance(name, str) else None
    if tool is None or not isinstance(arguments, dict):
        source.place = start
        return False
    parts.begin(tool)
    parts.json(json.dumps(arguments, ensure_ascii=False))
    parts.end(*repairs, complete=True)
    return True


def _raw(
    source: Incoming,
    parts: CallParts,
    ends: Sequence[ValueEnd],
    padding: str,
    give: Callable[[str], None],
) -> Waiting[None]:
    """Give out a value's text as it becomes certain, and read what ends it."""
    marks = tuple({lead + end.mark: None for end in ends for lead in (padding, "")})
    while True:
        certain = source.certain(marks)
        if certain > source.place:
            give(source.plain(source.text[source.place : certain]))
            source.place = certain
            source.drop_read()
        if source.place == len(source.text):
            if source.ended:
                parts.repair("unclosed_value")
                return
            yield
            continue
        mark = yield from source.standing(marks)
        end = (yield from _ending(source, parts, ends, mark, padding)) if mark else None
        if end is not None:
            parts.repair(end.repair)
            source.place += len(mark) if end.closes else len(mark) - len(end.mark)
            return
        give(source.plain(source.text[source.place]))
        source.place += 1


def _ending(
    source: Incoming, parts: CallParts, ends: Sequence[ValueEnd], mark: str, padding: str
) -> Waiting[ValueEnd | None]:
    """Which end the mark that stands here is, if it is one."""
    behind = source.place + len(mark)
    for end in ends:
        if end.mark != mark and padding + end.mark != mark:
            continue
        if end.names_parameter:
            at, close = yield from source.find((*end.before, "\n"), behind, limit=_HEADER_LENGTH)
            name = source.text[behind:at].strip("\"' ")
            if close in end.before and name in parts.types.properties and name not in parts.given:
                return end
            continue
        if not end.before:
            return end
        if (yield from _goes_on(source, behind, end)):
            return end
    return None


def _goes_on(source: Incoming, place: int, end: ValueEnd) -> Waiting[bool]:
    """Whether behind a value's end stands what has to."""
    for marks in (end.before, end.last):
        place = yield from source.behind_space(place, spaces=end.spaces)
        if marks:
            mark = yield from source.standing(marks, place)
            rest = source.text[place:]  # at the text's end, a mark may be cut too
            if source.ended and any(other.startswith(rest) for other in marks):
                return True
            if not mark:
                return False
            place += len(mark)
    return True
