"""Calls that consist of a name in a tag and of tagged parameters with raw values (Qwen3-Coder and
similar models), and the reader of raw values for all families that use tags. No I/O.

Strings are streamed; any other value is typed by the tool's schema once it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from holdfast.front.toolcalls.call_format import (
    CDATA,
    CallFormat,
    CallLayout,
    CallParts,
    TaggedValues,
    distinct,
)
from holdfast.front.toolcalls.declared import JSON_TYPES, from_json
from holdfast.front.toolcalls.incoming import Incoming, Waiting
from holdfast.front.toolcalls.literals import LENIENT, json_text

STRING: Final = frozenset({"string"})
_NULLABLE: Final = frozenset({"string", "null"})
_NULLS: Final = ("null", "None")
_HEADER: Final = re.compile(
    r"""\s*["']?([^"'<>]+)(?:["'](?:\s+(?:string|type)\s*=\s*["']?(\w+)["']?)?[^<>]*)?"""
)
_HEADER_LENGTH: Final = 256
_WRAPPERS: Final = frozenset({"arguments", "input", "parameters"})


class TagHeader(NamedTuple):
    """A tag's name, and the type that the tag declares for the value (empty: none)."""

    name: str
    type: str = ""


class ValueEnd(NamedTuple):
    """What ends a value: a mark that is followed by one of `before`, or by the end of the text.

    last: what must follow after `before`, unless the text ends; if empty, anything may follow.
    spaces: further strings that count as white space. closes: True if the mark closes the value,
    False if the mark is left to be read. names_parameter: True if the mark ends the value only when
    the name of a parameter without a value is between the mark and `before`.
    """

    mark: str
    before: tuple[str, ...]
    last: tuple[str, ...] = ()
    spaces: tuple[str, ...] = ()
    closes: bool = True
    names_parameter: bool = False


def header(source: Incoming) -> Waiting[TagHeader | None]:
    """Read the rest of a tag after its first word. Returns None if the text is not a tag."""
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
    """Read the value of an argument up to its end. The argument's key was already emitted.

    padding: text that is part of the markup on both sides of the value, if it follows the opening
    tag.
    """
    if padding:
        padding = yield from source.taken(padding)
    if types == STRING:
        parts.json('"')
        yield from _raw(source, parts, ends, padding, parts.text)
        parts.json('"')
        return
    pieces: list[str] = []
    # For types that allow a string or null: True once the value can no longer be null, and is
    # therefore streamed as a string.
    is_open = False

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
    parts.typed("".join(pieces), types)


def read_raw_value(
    source: Incoming, parts: CallParts, ends: Sequence[ValueEnd], *, padding: str = ""
) -> Waiting[str]:
    """Read the text of a value up to its end, without emitting it."""
    if padding:
        padding = yield from source.taken(padding)
    pieces: list[str] = []
    yield from _raw(source, parts, ends, padding, pieces.append)
    return "".join(pieces)


def read_json_body(
    source: Incoming, parts: CallParts, *, stops: Sequence[str] = (), repair: str = "json_body"
) -> Waiting[bool]:
    """Read the arguments of an open call if they are one JSON object instead of tags.

    Returns False if they are not.
    """
    if parts.given or not source.at("{"):
        return False
    parts.repair(repair)
    yield from parts.read_object(source, stops=stops)
    return True


def read_json_call(
    source: Incoming, parts: CallParts, *, repair: str = "json_call"
) -> Waiting[bool]:
    """Read a call if it is one JSON object with a name and arguments, instead of tags.

    Returns False if it is not.
    """
    if not source.at("{"):
        return False
    start, repairs = source.place, [repair]
    found = json.loads((yield from LENIENT.value(source, repairs, ends="")))
    name, arguments = found.get("name"), found.get("arguments", found.get("parameters"))
    tool = parts.tools.named(name) if isinstance(name, str) else None
    if tool is None or not isinstance(arguments, dict):
        source.place = start
        return False
    parts.begin(tool)
    parts.json(json_text(arguments))
    parts.end(*repairs, complete=True)
    return True


def _raw(
    source: Incoming,
    parts: CallParts,
    ends: Sequence[ValueEnd],
    padding: str,
    give: Callable[[str], None],
) -> Waiting[None]:
    """Pass on the text of a value when it is certain, and read what ends the value."""
    marks = tuple({lead + end.mark: None for end in ends for lead in (padding, "")})
    while True:
        certain = source.certain(marks)
        if certain > source.place:
            give(source.up_to(certain))
            source.place = certain
            source.drop_read()
        if source.at_end:
            if source.ended:
                parts.repair("unclosed_value")
                return
            yield
            continue
        mark = yield from source.standing(marks)
        end = (yield from _ending(source, parts, ends, mark, padding)) if mark else None
        if end is not None:
            parts.repair("" if end.closes else "unclosed_value")
            source.place += len(mark) if end.closes else len(mark) - len(end.mark)
            return
        give(source.plain(source.text[source.place]))
        source.place += 1


def _ending(
    source: Incoming, parts: CallParts, ends: Sequence[ValueEnd], mark: str, padding: str
) -> Waiting[ValueEnd | None]:
    """Return the kind of end that this mark is, or None if it does not end the value."""
    after = source.place + len(mark)
    for end in ends:
        if end.mark != mark and padding + end.mark != mark:
            continue
        if end.names_parameter:
            at, close = yield from source.find((*end.before, "\n"), after, limit=_HEADER_LENGTH)
            name = source.text[after:at].strip("\"' ")
            if close in end.before and name in parts.types.properties and name not in parts.given:
                return end
            continue
        if not end.before:
            return end
        if (yield from _goes_on(source, after, end)):
            return end
    return None


def _goes_on(source: Incoming, place: int, end: ValueEnd) -> Waiting[bool]:
    """Whether the text after the mark confirms that the value ends there."""
    for marks in (end.before, end.last):
        place = yield from source.after_space(place, spaces=end.spaces)
        if marks:
            mark = yield from source.standing(marks, place)
            rest = source.text[place:]  # the mark may be cut off at the text's end
            if source.ended and any(other.startswith(rest) for other in marks):
                return True
            if not mark:
                return False
            place += len(mark)
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedParameters(CallFormat):
    """A family that writes `<function=NAME><parameter=KEY>VALUE</parameter></function>`, in these
    or other words.

    section: tags around all calls of a turn; sections_too: other spellings that are also read.
    wrapper: tags around each call. between: text that separates two calls. padding: text that is
    part of the markup on both sides of a value. types: how a parameter's tag marks a value as a
    string, and as JSON. tokens: parts of the tags that may be tokens by themselves. cdata: whether
    a value may be wrapped in a CDATA section.
    """

    section: tuple[str, str] = ("", "")
    sections_too: tuple[tuple[str, str], ...] = ()
    wrapper: tuple[str, str] = ("", "")
    call: tuple[str, str, str] = ("<function=", ">\n", "</function>")
    parameter: tuple[str, str, str] = ("<parameter=", ">", "</parameter>\n")
    between: str = "\n"
    padding: str = ""
    types: tuple[str, str] = ("", "")
    tokens: tuple[str, ...] = ()
    cdata: bool = False

    @property
    def marks(self) -> Sequence[str]:
        """All markers that the family writes."""
        pairs = (
            self.section,
            *self.sections_too,
            self.wrapper,
            self.call[::2],
            self.parameter[::2],
        )
        return distinct(*(word for pair in pairs for word in pair), *self.tokens)

    @property
    def openers(self) -> Sequence[str]:
        """The strings that a call may begin with."""
        pairs = (self.section, *self.sections_too, self.wrapper, self.call)
        return distinct(*(pair[0] for pair in pairs))

    @property
    def layout(self) -> CallLayout:
        """How the family writes calls."""
        return self._layout(self.section, self.wrapper)

    @property
    def grammar_layouts(self) -> Sequence[CallLayout]:
        """The family's own layout, and its variants."""
        sections = (self.section, *self.sections_too)
        return tuple(self._layout(section, self.wrapper) for section in sections)

    @property
    def incomplete_layouts(self) -> Sequence[CallLayout]:
        """Calls without the tags around them."""
        if not self.section[0] and not self.wrapper[0]:
            return ()
        return (self._layout(("", ""), ("", "")),)

    def _layout(self, section: tuple[str, str], wrapper: tuple[str, str]) -> CallLayout:
        lead = wrapper[0] + self.call[0]
        close = self.parameter[2].rstrip()
        return CallLayout(
            opening=section[0] + lead,
            heads=("{name}" + self.call[1],),
            values=TaggedValues(
                before=self.parameter[0],
                text=self.types[0] + self.parameter[1] + self.padding,
                json=self.types[1] + self.parameter[1] + self.padding,
                end=self.padding + close,
                gap=self.parameter[2].removeprefix(close),
                cdata=self.cdata,
            ),
            tail=self.call[2] + wrapper[1],
            again=self.between + lead,
            closing=section[1],
        )

    def read(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read the calls that start at an opener. Returns False if there are none."""
        opener = yield from source.taken(*self.openers)
        bare = opener == self._open_call
        if bare:
            source.place -= len(opener)
        closers = [
            pair[1].strip()
            for pair in (self.section, *self.sections_too)
            if pair[0] and (bare or pair[0].strip() == opener)
        ]
        begun = False
        while True:
            yield from source.skip_space()
            start = source.place
            wrapped = bool(self.wrapper[0]) and opener == self.wrapper[0].strip() and not begun
            if not wrapped and self.wrapper[0]:
                wrapped = bool((yield from source.taken(self.wrapper[0].strip())))
                yield from source.skip_space()
            read = yield from self._read_call(
                source, parts, bare=bare or (not wrapped and bool(self.wrapper[0])), wrapped=wrapped
            )
            if begun and not read:
                source.place = start  # what follows is text
            begun = begun or read
            if not read or not closers:
                return begun
            if (yield from source.taken_next(*closers)):
                return True
            if not (yield from source.standing(self.openers)):
                return True

    @property
    def _open_call(self) -> str:
        return self.call[0].lstrip()

    @property
    def _close_call(self) -> str:
        return self.call[2].strip()

    @property
    def _open_value(self) -> str:
        return self.parameter[0].lstrip()

    @property
    def _close_value(self) -> str:
        return self.parameter[2].strip()

    def _read_call(
        self, source: Incoming, parts: CallParts, *, bare: bool, wrapped: bool
    ) -> Waiting[bool]:
        if not (yield from source.taken(*_forms(self._open_call))):
            read = wrapped and (yield from read_json_call(source, parts))
            if read:
                yield from self._close_wrapper(source)
            return read
        tag = yield from header(source)
        tool = parts.tools.named(tag.name) if tag else None
        if tool is None or (bare and not tool.declared):
            return False
        lacks_opener = bare and bool(self.wrapper[0] or self.section[0])
        parts.begin(tool, repair="missing_open" if lacks_opener else "")
        yield from self._read_values(source, parts)
        return True

    def _read_values(self, source: Incoming, parts: CallParts) -> Waiting[None]:
        """Read the parameters of an open call, and the end of the call."""
        while True:
            form = yield from source.taken_next(*_forms(self._open_value))
            tag = (yield from header(source)) if form else None
            if tag is not None:
                parts.repair("" if form == self._open_value else "parameter_form")
                if self.cdata or not _may_wrap(tag.name, parts):
                    yield from self._read_value(source, parts, tag)
                    continue
                if not (yield from self._read_wrapped(source, parts, tag)):
                    continue
                yield from self._read_end(source, parts, complete=True)
                return
            complete = yield from read_json_body(source, parts, stops=(self._close_call,))
            yield from self._read_end(source, parts, complete=complete)
            return

    def _read_wrapped(self, source: Incoming, parts: CallParts, tag: TagHeader) -> Waiting[bool]:
        """Read a parameter that may hold all arguments as one object.

        Returns False if it does not, after emitting it as an ordinary parameter.
        """
        raw = yield from read_raw_value(source, parts, self._value_ends(), padding=self.padding)
        yield from source.skip_space()
        follows = yield from source.standing(_forms(self._open_value))
        found = from_json(raw.strip())
        fits = isinstance(found, dict) and found.keys() <= parts.types.properties.keys()
        if found and fits and not follows:
            parts.repair("wrapped_arguments")
            parts.json(raw.strip())
            parts.given.update(found)
            return True
        parts.key(tag.name)
        parts.typed(raw, self._types_of(tag, parts))
        return False

    def _types_of(self, tag: TagHeader, parts: CallParts) -> frozenset[str]:
        if self.types[0] and tag.type:
            return JSON_TYPES if tag.type.lower() == "false" else STRING
        return parts.types.of_parameter(tag.name)

    def _read_value(self, source: Incoming, parts: CallParts, tag: TagHeader) -> Waiting[None]:
        types = self._types_of(tag, parts)
        parts.key(tag.name)
        if self.cdata and (yield from source.taken(CDATA[0])):
            end = ValueEnd(CDATA[1], (self._close_value,))
            yield from read_value(source, parts, (end,), types=types)
            yield from source.taken(self._close_value)
            return
        yield from read_value(source, parts, self._value_ends(), types=types, padding=self.padding)

    def _value_ends(self) -> tuple[ValueEnd, ...]:
        """What may end a value. A closing tag does so only if the rest of a call follows it."""
        section = self.section[1].strip()
        outer = distinct(self.wrapper[1], section, *(pair[1] for pair in self.sections_too))
        again = distinct(self.wrapper[0], self._open_call)
        more = (*outer, *again)
        ends = (
            ValueEnd(self._close_value, (*_forms(self._open_value), self._close_call)),
            ValueEnd(self._close_value, outer, last=more),
            ValueEnd(self._close_call, outer or again, last=more, closes=False),
            ValueEnd("\n" + self._open_value, (">",), closes=False, names_parameter=True),
        )
        if not outer:
            return ends
        return (*ends, ValueEnd(outer[0], (section or again[0],), closes=False))

    def _read_end(
        self, source: Incoming, parts: CallParts, *, complete: bool = False
    ) -> Waiting[None]:
        """Read the closing tags of a call, which may be missing, and end the call."""
        yield from source.skip_space()
        closed = bool((yield from source.taken(self._close_call)))
        parts.end(closed=closed, complete=complete)
        source.drop_read()
        yield from self._close_wrapper(source)

    def _close_wrapper(self, source: Incoming) -> Waiting[None]:
        if self.wrapper[1]:
            yield from source.taken_next(self.wrapper[1].strip())


def _may_wrap(name: str, parts: CallParts) -> bool:
    """Whether this parameter may hold all arguments of the call.

    Some models write all arguments as one object, in a first parameter that the tool does not
    declare.
    """
    properties = parts.types.properties
    return name in _WRAPPERS and name not in properties and bool(properties) and not parts.given


def _forms(mark: str) -> tuple[str, ...]:
    """The ways to write the beginning of a tag, the family's own first.

    The tag's first word is followed by `=` or by ` name=`. Models confuse the two.
    """
    stem = mark.rstrip('"').removesuffix("=").removesuffix(" name")
    return tuple(dict.fromkeys((mark, stem + "=", stem + ' name="', stem + " name=")))
