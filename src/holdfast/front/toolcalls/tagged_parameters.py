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

from holdfast.front.toolcalls.argument_types import JSON_TYPES, from_json
from holdfast.front.toolcalls.call_format import (
    CDATA,
    AnswerDeltas,
    CallFormat,
    CallLayout,
    TaggedValues,
    distinct,
)
from holdfast.front.toolcalls.incoming import Incoming, Parser
from holdfast.front.toolcalls.literals import LENIENT, json_text

STRING: Final = frozenset({"string"})
_STRING_OR_NULL: Final = frozenset({"string", "null"})
_NULL_WORDS: Final = ("null", "None")
_TAG_HEADER: Final = re.compile(
    r"""\s*["']?([^"'<>]+)(?:["'](?:\s+(?:string|type)\s*=\s*["']?(\w+)["']?)?[^<>]*)?"""
)
_LONGEST_HEADER: Final = 256
_WRAPPER_KEYS: Final = frozenset({"arguments", "input", "parameters"})


class TagHeader(NamedTuple):
    """A tag's name, and the type that the tag declares for the value (empty: none)."""

    name: str
    type: str = ""


class ValueEnd(NamedTuple):
    """What ends a value: a marker, if one of `followed_by` or the end of the text comes next.

    then_followed_by: what must come after that one, unless the text ends; empty: anything may.
    spaces: further strings that count as white space. closes: True if the marker closes the value,
    False if it is left to be read. names_parameter: True if the marker ends the value only when the
    name of a parameter without a value is between the marker and `followed_by`.
    """

    marker: str
    followed_by: tuple[str, ...]
    then_followed_by: tuple[str, ...] = ()
    spaces: tuple[str, ...] = ()
    closes: bool = True
    names_parameter: bool = False


def read_tag_header(source: Incoming) -> Parser[TagHeader | None]:
    """Read the rest of a tag after its first word. Returns None if the text is not a tag."""
    at, marker = yield from source.find((">", "\n"), source.place, limit=_LONGEST_HEADER)
    if marker != ">" or not (match := _TAG_HEADER.fullmatch(source.text[source.place : at])):
        return None
    source.place = at + 1
    return TagHeader(source.plain(match[1]).strip(), match[2] or "")


def read_value(
    source: Incoming,
    deltas: AnswerDeltas,
    ends: Sequence[ValueEnd],
    *,
    types: frozenset[str],
    padding: str = "",
) -> Parser[None]:
    """Read the value of an argument up to its end. The argument's key was already emitted.

    padding: text that is part of the markup on both sides of the value, if it follows the opening
    tag.
    """
    if padding:
        padding = yield from source.read_any(padding)
    if types == STRING:
        deltas.emit_json('"')
        yield from _read_raw_text(source, deltas, ends, padding, deltas.emit_string_text)
        deltas.emit_json('"')
        return
    pieces: list[str] = []
    # For types that allow a string or null: True once the value can no longer be null, and is
    # therefore streamed as a string.
    is_string = False

    def collect(text: str) -> None:
        nonlocal is_string
        pieces.append(text)
        if (
            types == _STRING_OR_NULL
            and not is_string
            and not any(word.startswith("".join(pieces).strip()) for word in _NULL_WORDS)
        ):
            is_string = True
            deltas.emit_json('"')
        if is_string:
            deltas.emit_string_text("".join(pieces))
            pieces.clear()

    yield from _read_raw_text(source, deltas, ends, padding, collect)
    if is_string:
        deltas.emit_json('"')
        return
    deltas.emit_typed("".join(pieces), types)


def read_raw_value(
    source: Incoming, deltas: AnswerDeltas, ends: Sequence[ValueEnd], *, padding: str = ""
) -> Parser[str]:
    """Read the text of a value up to its end, without emitting it."""
    if padding:
        padding = yield from source.read_any(padding)
    pieces: list[str] = []
    yield from _read_raw_text(source, deltas, ends, padding, pieces.append)
    return "".join(pieces)


def read_json_body(
    source: Incoming, deltas: AnswerDeltas, *, stops: Sequence[str] = (), repair: str = "json_body"
) -> Parser[bool]:
    """Read the arguments of an open call if they are one JSON object instead of tags.

    Returns False if they are not.
    """
    if deltas.seen_keys or not source.starts_with("{"):
        return False
    deltas.note_repairs(repair)
    yield from deltas.read_object(source, stops=stops)
    return True


def read_json_call(
    source: Incoming, deltas: AnswerDeltas, *, repair: str = "json_call"
) -> Parser[bool]:
    """Read a call if it is one JSON object with a name and arguments, instead of tags.

    Returns False if it is not.
    """
    if not source.starts_with("{"):
        return False
    start, repairs = source.place, [repair]
    call = json.loads((yield from LENIENT.read_value(source, repairs, ends="")))
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
    tool = deltas.tools.resolve(name) if isinstance(name, str) else None
    if tool is None or not isinstance(arguments, dict):
        source.place = start
        return False
    deltas.begin_call(tool)
    deltas.emit_json(json_text(arguments))
    deltas.end_call(*repairs, is_whole_object=True)
    return True


def _read_raw_text(
    source: Incoming,
    deltas: AnswerDeltas,
    ends: Sequence[ValueEnd],
    padding: str,
    emit: Callable[[str], None],
) -> Parser[None]:
    """Pass on the text of a value when it is certain, and read what ends the value.

    padding: text before a closing marker that is part of the markup. emit: receives the text.
    """
    # without duplicates, in order
    markers = tuple({lead + end.marker: None for end in ends for lead in (padding, "")})
    while True:
        certain_end = source.safe_end(markers)
        if certain_end > source.place:
            emit(source.text_until(certain_end))
            source.place = certain_end
            source.drop_read()
        if source.at_end:
            if source.has_ended:
                deltas.note_repairs("unclosed_value")
                return
            yield
            continue
        marker = yield from source.match_at(markers)
        end = (yield from _end_at_marker(source, deltas, ends, marker, padding)) if marker else None
        if end is not None:
            deltas.note_repairs("" if end.closes else "unclosed_value")
            source.place += len(marker) if end.closes else len(marker) - len(end.marker)
            return
        emit(source.plain(source.text[source.place]))
        source.place += 1


def _end_at_marker(
    source: Incoming, deltas: AnswerDeltas, ends: Sequence[ValueEnd], marker: str, padding: str
) -> Parser[ValueEnd | None]:
    """Return the kind of end that this marker is, or None if it does not end the value."""
    after = source.place + len(marker)
    for end in ends:
        if end.marker != marker and padding + end.marker != marker:
            continue
        if end.names_parameter:
            name_end, name_closing = yield from source.find(
                (*end.followed_by, "\n"), after, limit=_LONGEST_HEADER
            )
            name = source.text[after:name_end].strip("\"' ")
            if (
                name_closing in end.followed_by
                and name in deltas.types.properties
                and name not in deltas.seen_keys
            ):
                return end
            continue
        if not end.followed_by:
            return end
        if (yield from _is_confirmed(source, after, end)):
            return end
    return None


def _is_confirmed(source: Incoming, place: int, end: ValueEnd) -> Parser[bool]:
    """Whether the text after the marker confirms that the value ends there."""
    for markers in (end.followed_by, end.then_followed_by):
        place = yield from source.after_space(place, spaces=end.spaces)
        if markers:
            marker = yield from source.match_at(markers, place)
            remaining_text = source.text[place:]  # the marker may be cut off at the text's end
            if source.has_ended and any(other.startswith(remaining_text) for other in markers):
                return True
            if not marker:
                return False
            place += len(marker)
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedParameters(CallFormat):
    """A family that writes `<function=NAME><parameter=KEY>VALUE</parameter></function>`, in these
    or other words.

    section: tags around all calls of a turn; other_sections: other spellings that are also read.
    wrapper: tags around each call. call: the text before its name, after the name, and at its end.
    parameter: the same around a key and its value. between: text that separates two calls. padding:
    text that is part of the markup on both sides of a value. types: how a parameter's tag marks a value as a
    string, and as JSON. tokens: parts of the tags that may be tokens by themselves. cdata: whether
    a value may be wrapped in a CDATA section.
    """

    section: tuple[str, str] = ("", "")
    other_sections: tuple[tuple[str, str], ...] = ()
    wrapper: tuple[str, str] = ("", "")
    call: tuple[str, str, str] = ("<function=", ">\n", "</function>")
    parameter: tuple[str, str, str] = ("<parameter=", ">", "</parameter>\n")
    between: str = "\n"
    padding: str = ""
    types: tuple[str, str] = ("", "")
    tokens: tuple[str, ...] = ()
    cdata: bool = False

    @property
    def markers(self) -> Sequence[str]:
        pairs = (
            self.section,
            *self.other_sections,
            self.wrapper,
            self.call[::2],
            self.parameter[::2],
        )
        return distinct(*(word for pair in pairs for word in pair), *self.tokens)

    @property
    def call_starts(self) -> Sequence[str]:
        pairs = (self.section, *self.other_sections, self.wrapper, self.call)
        return distinct(*(pair[0] for pair in pairs))

    @property
    def layout(self) -> CallLayout:
        return self._layout(self.section, self.wrapper)

    @property
    def grammar_layouts(self) -> Sequence[CallLayout]:
        """The family's own layout, and its variants."""
        sections = (self.section, *self.other_sections)
        return tuple(self._layout(section, self.wrapper) for section in sections)

    @property
    def incomplete_layouts(self) -> Sequence[CallLayout]:
        """Calls without the tags around them."""
        if not self.section[0] and not self.wrapper[0]:
            return ()
        return (self._layout(("", ""), ("", "")),)

    def _layout(self, section: tuple[str, str], wrapper: tuple[str, str]) -> CallLayout:
        """The layout with these tags around all calls, and around each call."""
        before_name = wrapper[0] + self.call[0]
        close = self.parameter[2].rstrip()
        return CallLayout(
            opening=section[0] + before_name,
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
            again=self.between + before_name,
            closing=section[1],
        )

    def read(self, source: Incoming, deltas: AnswerDeltas) -> Parser[bool]:
        """Read the calls at the current position. Returns False if there are none."""
        call_start = yield from source.read_any(*self.call_starts)
        # a call without the tags around it, which is accepted as a repair if a family has such tags
        is_bare = call_start == self._call_opening
        if is_bare:
            source.place -= len(call_start)
        section_ends = [
            pair[1].strip()
            for pair in (self.section, *self.other_sections)
            if pair[0] and (is_bare or pair[0].strip() == call_start)
        ]
        has_calls = False
        while True:
            yield from source.skip_space()
            start = source.place
            is_wrapped = (
                bool(self.wrapper[0]) and call_start == self.wrapper[0].strip() and not has_calls
            )
            if not is_wrapped and self.wrapper[0]:
                is_wrapped = bool((yield from source.read_any(self.wrapper[0].strip())))
                yield from source.skip_space()
            is_call = yield from self._read_call(
                source,
                deltas,
                is_bare=is_bare or (not is_wrapped and bool(self.wrapper[0])),
                is_wrapped=is_wrapped,
            )
            if has_calls and not is_call:
                source.place = start  # what follows is text
            has_calls = has_calls or is_call
            if not is_call or not section_ends:
                return has_calls
            if (yield from source.skip_space_and_read(*section_ends)):
                return True
            if not (yield from source.match_at(self.call_starts)):
                return True

    @property
    def _call_opening(self) -> str:
        return self.call[0].lstrip()

    @property
    def _call_closing(self) -> str:
        return self.call[2].strip()

    @property
    def _value_opening(self) -> str:
        return self.parameter[0].lstrip()

    @property
    def _value_closing(self) -> str:
        return self.parameter[2].strip()

    def _read_call(
        self, source: Incoming, deltas: AnswerDeltas, *, is_bare: bool, is_wrapped: bool
    ) -> Parser[bool]:
        """Read one call. Returns False if there is none.

        is_bare: the tags around the call are missing, so its tool must be declared. is_wrapped: the
        call is inside `wrapper`, where it may also be JSON.
        """
        if not (yield from source.read_any(*_tag_spellings(self._call_opening))):
            is_call = is_wrapped and (yield from read_json_call(source, deltas))
            if is_call:
                yield from self._read_wrapper_closing(source)
            return is_call
        tag = yield from read_tag_header(source)
        tool = deltas.tools.resolve(tag.name) if tag else None
        if tool is None or (is_bare and not tool.declared):
            return False
        lacks_opening = is_bare and bool(self.wrapper[0] or self.section[0])
        deltas.begin_call(tool, repair="missing_open" if lacks_opening else "")
        yield from self._read_values(source, deltas)
        return True

    def _read_values(self, source: Incoming, deltas: AnswerDeltas) -> Parser[None]:
        """Read the parameters of an open call, and the end of the call."""
        while True:
            spelling = yield from source.skip_space_and_read(*_tag_spellings(self._value_opening))
            tag = (yield from read_tag_header(source)) if spelling else None
            if tag is not None:
                deltas.note_repairs("" if spelling == self._value_opening else "parameter_form")
                if self.cdata or not _may_hold_all_arguments(tag.name, deltas):
                    yield from self._read_value(source, deltas, tag)
                    continue
                if not (yield from self._read_possible_wrapper(source, deltas, tag)):
                    continue
                yield from self._read_end(source, deltas, is_whole_object=True)
                return
            is_whole_object = yield from read_json_body(source, deltas, stops=(self._call_closing,))
            yield from self._read_end(source, deltas, is_whole_object=is_whole_object)
            return

    def _read_possible_wrapper(
        self, source: Incoming, deltas: AnswerDeltas, tag: TagHeader
    ) -> Parser[bool]:
        """Read a parameter that may hold all arguments as one object.

        Returns False if it does not, after emitting it as an ordinary parameter.
        """
        raw = yield from read_raw_value(source, deltas, self._value_ends(), padding=self.padding)
        yield from source.skip_space()
        next_opening = yield from source.match_at(_tag_spellings(self._value_opening))
        value = from_json(raw.strip())
        has_declared_keys = (
            isinstance(value, dict) and value.keys() <= deltas.types.properties.keys()
        )
        if value and has_declared_keys and not next_opening:
            deltas.note_repairs("wrapped_arguments")
            deltas.emit_json(raw.strip())
            deltas.seen_keys.update(value)
            return True
        deltas.emit_key(tag.name)
        deltas.emit_typed(raw, self._types_of_value(tag, deltas))
        return False

    def _types_of_value(self, tag: TagHeader, deltas: AnswerDeltas) -> frozenset[str]:
        """The types of a value: as its tag says, else as the tool's schema says."""
        if self.types[0] and tag.type:
            return JSON_TYPES if tag.type.lower() == "false" else STRING
        return deltas.types.of_parameter(tag.name)

    def _read_value(self, source: Incoming, deltas: AnswerDeltas, tag: TagHeader) -> Parser[None]:
        """Read the value after a parameter's opening tag, and the closing tag."""
        types = self._types_of_value(tag, deltas)
        deltas.emit_key(tag.name)
        if self.cdata and (yield from source.read_any(CDATA[0])):
            end = ValueEnd(CDATA[1], (self._value_closing,))
            yield from read_value(source, deltas, (end,), types=types)
            yield from source.read_any(self._value_closing)
            return
        yield from read_value(source, deltas, self._value_ends(), types=types, padding=self.padding)

    def _value_ends(self) -> tuple[ValueEnd, ...]:
        """What may end a value. A closing tag does so only if the rest of a call follows it."""
        section = self.section[1].strip()
        outer_closings = distinct(
            self.wrapper[1], section, *(pair[1] for pair in self.other_sections)
        )
        next_openings = distinct(self.wrapper[0], self._call_opening)
        after_call = (*outer_closings, *next_openings)
        ends = (
            ValueEnd(
                self._value_closing, (*_tag_spellings(self._value_opening), self._call_closing)
            ),
            ValueEnd(self._value_closing, outer_closings, then_followed_by=after_call),
            ValueEnd(
                self._call_closing,
                outer_closings or next_openings,
                then_followed_by=after_call,
                closes=False,
            ),
            ValueEnd("\n" + self._value_opening, (">",), closes=False, names_parameter=True),
        )
        if not outer_closings:
            return ends
        return (*ends, ValueEnd(outer_closings[0], (section or next_openings[0],), closes=False))

    def _read_end(
        self, source: Incoming, deltas: AnswerDeltas, *, is_whole_object: bool = False
    ) -> Parser[None]:
        """Read the closing tags of a call, which may be missing, and end the call."""
        yield from source.skip_space()
        closed = bool((yield from source.read_any(self._call_closing)))
        deltas.end_call(closed=closed, is_whole_object=is_whole_object)
        source.drop_read()
        yield from self._read_wrapper_closing(source)

    def _read_wrapper_closing(self, source: Incoming) -> Parser[None]:
        """Read the closing tag around a call, if there is one."""
        if self.wrapper[1]:
            yield from source.skip_space_and_read(self.wrapper[1].strip())


def _may_hold_all_arguments(name: str, deltas: AnswerDeltas) -> bool:
    """Whether this parameter may hold all arguments of the call.

    Some models write all arguments as one object, in a first parameter that the tool does not
    declare.
    """
    properties = deltas.types.properties
    return (
        name in _WRAPPER_KEYS
        and name not in properties
        and bool(properties)
        and not deltas.seen_keys
    )


def _tag_spellings(marker: str) -> tuple[str, ...]:
    """The ways to write the beginning of a tag, the family's own first.

    The tag's first word is followed by `=` or by ` name=`. Models confuse the two.
    """
    stem = marker.rstrip('"').removesuffix("=").removesuffix(" name")
    return tuple(dict.fromkeys((marker, stem + "=", stem + ' name="', stem + " name=")))
