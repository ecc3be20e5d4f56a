"""Calls as pairs of key and value in tags (GLM and similar models), and as nested tags (MiniMax
M3). No I/O.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from holdfast.front.toolcalls.argument_types import convert_to_type
from holdfast.front.toolcalls.call_format import (
    AnswerDeltas,
    CallFormat,
    CallLayout,
    NestedValues,
    TaggedValues,
    distinct,
)
from holdfast.front.toolcalls.declared import ToolName
from holdfast.front.toolcalls.incoming import Incoming, Parser
from holdfast.front.toolcalls.literals import json_text
from holdfast.front.toolcalls.tagged_parameters import (
    STRING,
    ValueEnd,
    read_json_body,
    read_json_call,
    read_value,
)

_EXTRA_SPACES: Final = ("\\n",)  # some models write a line break as these two characters
_LONGEST_NAME: Final = 256  # characters, as are the other limits of this module
_LONGEST_WORDS: Final = 4096
_TAG: Final = re.compile(r"<(/?)([^\s<>=\"]+)(?:\s*=?\s*(?:name\s*=\s*)?\"?([^\"<>]*)\"?)?\s*>")
_LONGEST_TAG: Final = 300
_MAX_DEPTH: Final = 32
_GUESSED_TYPES: Final = frozenset({"number", "boolean"})  # types tried for members without a schema


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValueTags(CallFormat):
    """A family that writes
    `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`.

    section: tags around all calls of a turn. name_end: text after the name. between: text that
    separates two calls. call, key, value: the tags around each.
    """

    section: tuple[str, str] = ("", "")
    call: tuple[str, str] = ("<tool_call>", "</tool_call>")
    name_end: str = ""
    key: tuple[str, str] = ("<arg_key>", "</arg_key>")
    value: tuple[str, str] = ("<arg_value>", "</arg_value>")
    between: str = ""

    @property
    def markers(self) -> Sequence[str]:
        return distinct(*self.section, *self.call, self.name_end, *self.key, *self.value)

    @property
    def call_starts(self) -> Sequence[str]:
        return distinct(self.section[0], self.call[0])

    @property
    def layout(self) -> CallLayout:
        before_value = self.key[1] + self.value[0]
        end = self.value[1].rstrip()
        return CallLayout(
            opening=self.section[0] + self.call[0],
            heads=("{name}" + self.name_end,),
            values=TaggedValues(
                before=self.key[0],
                text=before_value,
                json=before_value,
                end=end,
                gap=self.value[1].removeprefix(end),
            ),
            tail=self.call[1],
            again=self.between + self.call[0],
            closing=self.section[1],
        )

    def read(self, source: Incoming, deltas: AnswerDeltas) -> Parser[bool]:
        """Read the calls at the current position. Returns False if there are none."""
        call_start = yield from source.read_any(*self.call_starts)
        if call_start != self.section[0].strip() or not call_start:
            return (yield from self._read_call(source, deltas))
        has_calls = False
        while True:
            yield from source.skip_space(spaces=_EXTRA_SPACES)
            start = source.place
            if not (yield from source.read_any(self.call[0].strip())):
                if has_calls:
                    yield from source.read_any(self.section[1].strip())
                return has_calls
            is_call = yield from self._read_call(source, deltas)
            has_calls = has_calls or is_call
            if not is_call:
                source.place = start
                return has_calls

    def _read_call(self, source: Incoming, deltas: AnswerDeltas) -> Parser[bool]:
        """Read a call after the marker that opens it. Returns False if there is none; then the
        source's place is undefined.
        """
        yield from source.skip_space(spaces=_EXTRA_SPACES)
        if (yield from read_json_call(source, deltas)):
            yield from self._read_closing_tag(source)
            return True
        name_end, key, close = self.name_end.strip(), self.key[0].strip(), self.call[1].strip()
        ends = tuple(
            marker for marker in (" ", "\n", "{", *_EXTRA_SPACES, name_end, key, close) if marker
        )
        name, _ = yield from source.read_to(ends, limit=_LONGEST_NAME)
        tool = deltas.tools.resolve(name)
        if tool is None:
            return False
        yield from self._skip_name_end(source, name_end)
        if not (yield from source.match_at((key, "{"))):  # no arguments, or words as arguments
            if not tool.declared:
                return False  # a single word between the markers is not a call
            if not (yield from self._call_ends_here(source)):
                return (yield from self._read_words(source, deltas, tool))
        deltas.begin_call(tool)
        yield from self._read_pairs(source, deltas)
        return True

    def _call_ends_here(self, source: Incoming) -> Parser[bool]:
        """Whether a call without arguments ends here."""
        outer_markers = distinct(self.section[1], *self.call)
        return bool((yield from source.match_at(outer_markers))) or (
            source.has_ended and source.at_end
        )

    def _read_words(self, source: Incoming, deltas: AnswerDeltas, tool: ToolName) -> Parser[bool]:
        """Read a call whose arguments are words of the form `KEY=VALUE`.

        Returns False if any word has another form or an undeclared key.
        """
        at, marker = yield from source.find(
            (self.call[1].strip(),), source.place, limit=_LONGEST_WORDS
        )
        is_complete = bool(marker) or at == len(source.text)
        words = _key_value_words(source.text_until(at)) if is_complete else {}
        properties = deltas.tools.parameters(tool.name).properties
        if not words or not words.keys() <= properties.keys():
            return False
        source.place = at
        deltas.begin_call(tool, repair="words_for_tags")
        for key, text in words.items():
            deltas.emit_key(key)
            deltas.emit_typed(text, deltas.types.of_parameter(key))
        closed = yield from self._read_closing_tag(source)
        deltas.end_call(closed=closed)
        source.drop_read()
        return True

    def _skip_name_end(self, source: Incoming, name_end: str) -> Parser[None]:
        """Move past white space and the markup after a call's name."""
        yield from source.skip_space(spaces=_EXTRA_SPACES)
        if name_end and (yield from source.read_any(name_end)):
            yield from source.skip_space(spaces=_EXTRA_SPACES)

    def _read_pairs(self, source: Incoming, deltas: AnswerDeltas) -> Parser[None]:
        """Read the pairs of an open call, and the end of the call."""
        if (yield from read_json_body(source, deltas, stops=(self.call[1].strip(),))):
            closed = yield from self._read_closing_tag(source)
            deltas.end_call(closed=closed, is_whole_object=True)
            return
        key, key_close, value_open = self.key[0].strip(), self.key[1].strip(), self.value[0].strip()
        while (yield from source.read_any(key)):
            name, marker = yield from source.read_to((key_close, value_open), limit=_LONGEST_NAME)
            source.place += len(marker) if marker == key_close else 0
            yield from source.skip_space(spaces=_EXTRA_SPACES)
            opened = yield from source.read_any(value_open)
            deltas.note_repairs("" if marker == key_close and opened else "missing_tag")
            deltas.emit_key(name.strip())
            yield from read_value(
                source, deltas, self._value_ends(), types=deltas.types.of_parameter(name)
            )
            yield from source.skip_space(spaces=_EXTRA_SPACES)
        closed = yield from self._read_closing_tag(source)
        deltas.end_call(closed=closed)
        source.drop_read()

    def _value_ends(self) -> tuple[ValueEnd, ...]:
        """What may end a value. A closing tag does so only if the rest of a call follows it."""
        key, close, value_close = self.key[0].strip(), self.call[1].strip(), self.value[1].strip()
        outer_markers = distinct(self.section[1], self.call[0])
        return (
            ValueEnd(value_close, (key, close), spaces=_EXTRA_SPACES),
            ValueEnd(close, outer_markers, closes=False),
            ValueEnd(key, (self.key[1].strip(),), closes=False, names_parameter=True),
        )

    def _read_closing_tag(self, source: Incoming) -> Parser[bool]:
        """Read the closing tag of a call. Returns False if it is missing."""
        yield from source.skip_space(spaces=_EXTRA_SPACES)
        return bool((yield from source.read_any(self.call[1].strip())))


def _key_value_words(text: str) -> dict[str, str]:
    """Parse words such as `days=3 city="New York"`. Empty if any word has another form."""
    try:
        pairs = [word.partition("=") for word in shlex.split(text)]
    except ValueError:
        return {}
    if not all(key and equals for key, equals, _ in pairs):
        return {}
    return {key: value for key, _, value in pairs}


class Tag(NamedTuple):
    """A tag, without the marker before it."""

    name: str
    closes: bool  # whether it is a closing tag
    value: str  # value of the tag's only attribute


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedTags(CallFormat):
    """A family that writes `<invoke name="NAME"><KEY>VALUE</KEY></invoke>`, each tag after `marker`.

    section: the name of the tag around all calls. item: that of the tag around an array's item.
    """

    marker: str = "]<]minimax[>["
    section: str = "tool_call"
    call: str = "invoke"
    item: str = "item"

    @property
    def markers(self) -> Sequence[str]:
        return (self.marker, *self.call_starts)

    @property
    def call_starts(self) -> Sequence[str]:
        return (f"{self.marker}<{self.section}>", f"{self.marker}<{self.call} ")

    @property
    def layout(self) -> CallLayout:
        before_name = f'{self.marker}<{self.call} name="'
        return CallLayout(
            opening=f"{self.marker}<{self.section}>\n{before_name}",
            heads=('{name}">',),
            values=NestedValues(marker=self.marker, item=self.item),
            tail=f"{self.marker}</{self.call}>\n",
            again=before_name,
            closing=f"{self.marker}</{self.section}>",
        )

    def read(self, source: Incoming, deltas: AnswerDeltas) -> Parser[bool]:
        """Read the calls at the current position. Returns False if there are none."""
        has_calls = False
        while True:
            start = source.place
            yield from source.skip_space()
            tag = yield from self._read_tag(source)
            opens = tag is not None and tag.name == self.call and not tag.closes
            tool = deltas.tools.resolve(tag.value) if tag is not None and opens else None
            if tool is not None:
                deltas.begin_call(tool)
                has_calls = True
                yield from self._read_arguments(source, deltas)
                source.drop_read()
            elif tag == Tag(self.section, True, ""):
                return has_calls
            elif tag != Tag(self.section, False, "") or has_calls:
                source.place = start
                return has_calls

    def _read_arguments(self, source: Incoming, deltas: AnswerDeltas) -> Parser[None]:
        """Read the arguments of an open call, and end the call."""
        while True:
            yield from source.skip_space()
            if (yield from read_json_body(source, deltas, stops=(self.marker,))):
                deltas.end_call(is_whole_object=True)
                yield from source.skip_space_and_read(f"{self.marker}</{self.call}>")
                return
            start = source.place
            tag = yield from self._read_tag(source)
            if tag is None or tag.closes or tag.name == self.call:
                closed = tag == Tag(self.call, True, "")
                source.place = source.place if closed else start
                deltas.end_call(closed=closed)
                return
            deltas.emit_key(tag.name)
            if deltas.types.of_parameter(tag.name) == STRING:
                yield from read_value(source, deltas, self._string_ends(tag.name), types=STRING)
            else:
                schema = deltas.types.properties.get(tag.name)
                deltas.emit_json(
                    (yield from self._read_value_as_json(source, deltas, schema, depth=0))
                )
            source.drop_read()

    def _string_ends(self, name: str) -> tuple[ValueEnd, ...]:
        """What ends a string argument: its closing tag, or that of the call or of all calls."""
        outer_closings = (f"{self.marker}</{self.call}>", f"{self.marker}</{self.section}>")
        return (
            ValueEnd(f"{self.marker}</{name}>", ()),
            *(ValueEnd(marker, (), closes=False) for marker in outer_closings),
        )

    def _read_value_as_json(
        self, source: Incoming, deltas: AnswerDeltas, schema: Any, *, depth: int
    ) -> Parser[str]:
        """Read up to the tag that closes a value. Returns the value as JSON text.

        depth: number of values around this one.
        """
        text, _ = yield from source.read_to((self.marker,))
        names: list[str] = []
        values: list[str] = []
        while True:
            start = source.place
            yield from source.skip_space()
            tag = yield from self._read_tag(source)
            if tag is None or tag.closes or depth > _MAX_DEPTH:
                if tag is None or tag.name in (self.call, self.section):
                    source.place = start
                    deltas.note_repairs("unclosed_value")
                break
            names.append(tag.name)
            member_schema = deltas.types.inner_schema(schema, tag.name)
            values.append(
                (
                    yield from self._read_value_as_json(
                        source, deltas, member_schema, depth=depth + 1
                    )
                )
            )
        types = deltas.types.allowed_types(schema)
        if self._is_list(names, types, declares_item=deltas.types.declares(schema, self.item)):
            return f"[{', '.join(values)}]"
        if names:
            members = zip(names, values, strict=True)
            return "{" + ", ".join(f"{json_text(name)}: {value}" for name, value in members) + "}"
        if not text and types and "string" not in types:
            return "[]" if "array" in types else "{}"
        value = convert_to_type(text, types or (_GUESSED_TYPES if depth else types))
        deltas.note_repairs(value.repair)
        return value.json

    def _is_list(
        self, names: Sequence[str], types: Collection[str], *, declares_item: bool
    ) -> bool:
        """Whether nested tags are the items of an array. If the schema also allows an object, a
        single tag could be its only member; repeated ones could not.

        declares_item: whether the schema declares a member that is named like the tag of items.
        """
        if set(names) != {self.item}:
            return False
        return "object" not in types or len(names) > 1 or ("array" in types and not declares_item)

    def _read_tag(self, source: Incoming) -> Parser[Tag | None]:
        """Read a marker and the tag after it. Returns None if they are not there."""
        if not (yield from source.read_any(self.marker)):
            return None
        at, marker = yield from source.find(
            (">", "\n", self.marker), source.place, limit=_LONGEST_TAG
        )
        match = _TAG.fullmatch(source.text[source.place : at + 1]) if marker == ">" else None
        if match is None:
            return None
        source.place = at + 1
        return Tag(match[2], bool(match[1]), match[3] or "")
