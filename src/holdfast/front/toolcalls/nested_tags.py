"""Calls as pairs of key and value in tags (GLM and similar models), and as nested tags (MiniMax
M3). No I/O.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from holdfast.front.toolcalls.call_format import (
    CallFormat,
    CallLayout,
    CallParts,
    NestedValues,
    TaggedValues,
    distinct,
)
from holdfast.front.toolcalls.declared import ToolName, typed
from holdfast.front.toolcalls.incoming import Incoming, Waiting
from holdfast.front.toolcalls.literals import json_text
from holdfast.front.toolcalls.tagged_parameters import (
    STRING,
    ValueEnd,
    read_json_body,
    read_json_call,
    read_value,
)

_SPACES: Final = ("\\n",)  # some models write a line break as these two characters
_NAME_LENGTH: Final = 256
_WORDS_LENGTH: Final = 4096
_TAG: Final = re.compile(r"<(/?)([^\s<>=\"]+)(?:\s*=?\s*(?:name\s*=\s*)?\"?([^\"<>]*)\"?)?\s*>")
_TAG_LENGTH: Final = 300
_MAX_DEPTH: Final = 32
_GUESSED: Final = frozenset({"number", "boolean"})  # types tried for members without a schema


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValueTags(CallFormat):
    """A family that writes
    `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`.

    section: tags around all calls of a turn. name_end: text after the name. between: text that
    separates two calls.
    """

    section: tuple[str, str] = ("", "")
    call: tuple[str, str] = ("<tool_call>", "</tool_call>")
    name_end: str = ""
    key: tuple[str, str] = ("<arg_key>", "</arg_key>")
    value: tuple[str, str] = ("<arg_value>", "</arg_value>")
    between: str = ""

    @property
    def marks(self) -> Sequence[str]:
        """All markers that the family writes."""
        return distinct(*self.section, *self.call, self.name_end, *self.key, *self.value)

    @property
    def openers(self) -> Sequence[str]:
        """The strings that a call may begin with."""
        return distinct(self.section[0], self.call[0])

    @property
    def layout(self) -> CallLayout:
        """How the family writes calls."""
        lead = self.key[1] + self.value[0]
        end = self.value[1].rstrip()
        return CallLayout(
            opening=self.section[0] + self.call[0],
            heads=("{name}" + self.name_end,),
            values=TaggedValues(
                before=self.key[0],
                text=lead,
                json=lead,
                end=end,
                gap=self.value[1].removeprefix(end),
            ),
            tail=self.call[1],
            again=self.between + self.call[0],
            closing=self.section[1],
        )

    def read(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read the calls that start at an opener. Returns False if there are none."""
        opener = yield from source.taken(*self.openers)
        if opener != self.section[0].strip() or not opener:
            return (yield from self._read_call(source, parts))
        begun = False
        while True:
            yield from source.skip_space(spaces=_SPACES)
            start = source.place
            if not (yield from source.taken(self.call[0].strip())):
                if begun:
                    yield from source.taken(self.section[1].strip())
                return begun
            read = yield from self._read_call(source, parts)
            begun = begun or read
            if not read:
                source.place = start
                return begun

    def _read_call(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read a call after the marker that opens it."""
        yield from source.skip_space(spaces=_SPACES)
        if (yield from read_json_call(source, parts)):
            yield from self._close(source)
            return True
        name_end, key, close = self.name_end.strip(), self.key[0].strip(), self.call[1].strip()
        ends = tuple(mark for mark in (" ", "\n", "{", *_SPACES, name_end, key, close) if mark)
        name, _ = yield from source.read_to(ends, limit=_NAME_LENGTH)
        tool = parts.tools.named(name)
        if tool is None:
            return False
        yield from self._skip_name_end(source, name_end)
        if not (yield from source.standing((key, "{"))):
            if not tool.declared:
                return False  # a single word between the markers is not a call
            if not (yield from self._ends_here(source)):
                return (yield from self._read_words(source, parts, tool))
        parts.begin(tool)
        yield from self._read_pairs(source, parts)
        return True

    def _ends_here(self, source: Incoming) -> Waiting[bool]:
        """Whether a call without arguments ends here."""
        outer = distinct(self.section[1], *self.call)
        return bool((yield from source.standing(outer))) or (source.ended and source.at_end)

    def _read_words(self, source: Incoming, parts: CallParts, tool: ToolName) -> Waiting[bool]:
        """Read a call whose arguments are words of the form `KEY=VALUE`.

        Returns False if any word has another form or an undeclared key.
        """
        at, mark = yield from source.find(
            (self.call[1].strip(),), source.place, limit=_WORDS_LENGTH
        )
        ends = bool(mark) or at == len(source.text)
        words = _words(source.up_to(at)) if ends else {}
        properties = parts.tools.parameters(tool.name).properties
        if not words or not words.keys() <= properties.keys():
            return False
        source.place = at
        parts.begin(tool, repair="words_for_tags")
        for key, text in words.items():
            parts.key(key)
            parts.typed(text, parts.types.of_parameter(key))
        closed = yield from self._close(source)
        parts.end(closed=closed)
        source.drop_read()
        return True

    def _skip_name_end(self, source: Incoming, name_end: str) -> Waiting[None]:
        yield from source.skip_space(spaces=_SPACES)
        if name_end and (yield from source.taken(name_end)):
            yield from source.skip_space(spaces=_SPACES)

    def _read_pairs(self, source: Incoming, parts: CallParts) -> Waiting[None]:
        """Read the pairs of an open call, and the end of the call."""
        if (yield from read_json_body(source, parts, stops=(self.call[1].strip(),))):
            closed = yield from self._close(source)
            parts.end(closed=closed, complete=True)
            return
        key, key_close, value_open = self.key[0].strip(), self.key[1].strip(), self.value[0].strip()
        while (yield from source.taken(key)):
            name, mark = yield from source.read_to((key_close, value_open), limit=_NAME_LENGTH)
            source.place += len(mark) if mark == key_close else 0
            yield from source.skip_space(spaces=_SPACES)
            opened = yield from source.taken(value_open)
            parts.repair("" if mark == key_close and opened else "missing_tag")
            parts.key(name.strip())
            yield from read_value(
                source, parts, self._value_ends(), types=parts.types.of_parameter(name)
            )
            yield from source.skip_space(spaces=_SPACES)
        closed = yield from self._close(source)
        parts.end(closed=closed)
        source.drop_read()

    def _value_ends(self) -> tuple[ValueEnd, ...]:
        """What may end a value. A closing tag does so only if the rest of a call follows it."""
        key, close, value_close = self.key[0].strip(), self.call[1].strip(), self.value[1].strip()
        outer = distinct(self.section[1], self.call[0])
        return (
            ValueEnd(value_close, (key, close), spaces=_SPACES),
            ValueEnd(close, outer, closes=False),
            ValueEnd(key, (self.key[1].strip(),), closes=False, names_parameter=True),
        )

    def _close(self, source: Incoming) -> Waiting[bool]:
        yield from source.skip_space(spaces=_SPACES)
        return bool((yield from source.taken(self.call[1].strip())))


def _words(text: str) -> dict[str, str]:
    """Parse words such as `days=3 city="New York"`. Empty if any word has another form."""
    try:
        pairs = [word.partition("=") for word in shlex.split(text)]
    except ValueError:
        return {}
    if not all(key and equals for key, equals, _ in pairs):
        return {}
    return {key: value for key, _, value in pairs}


class Tag(NamedTuple):
    """A tag, without the mark before it."""

    name: str
    closes: bool
    value: str  # value of the tag's only attribute


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedTags(CallFormat):
    """A family that writes `<invoke name="NAME"><KEY>VALUE</KEY></invoke>` with `mark` before each
    tag.
    """

    mark: str = "]<]minimax[>["
    section: str = "tool_call"
    call: str = "invoke"
    item: str = "item"

    @property
    def marks(self) -> Sequence[str]:
        """All markers that the family writes."""
        return (self.mark, *self.openers)

    @property
    def openers(self) -> Sequence[str]:
        """The strings that calls may begin with."""
        return (f"{self.mark}<{self.section}>", f"{self.mark}<{self.call} ")

    @property
    def layout(self) -> CallLayout:
        """How the family writes calls."""
        lead = f'{self.mark}<{self.call} name="'
        return CallLayout(
            opening=f"{self.mark}<{self.section}>\n{lead}",
            heads=('{name}">',),
            values=NestedValues(mark=self.mark, item=self.item),
            tail=f"{self.mark}</{self.call}>\n",
            again=lead,
            closing=f"{self.mark}</{self.section}>",
        )

    def read(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read the calls that start at an opener. Returns False if there are none."""
        begun = False
        while True:
            start = source.place
            yield from source.skip_space()
            tag = yield from self._tag(source)
            opens = tag is not None and tag.name == self.call and not tag.closes
            tool = parts.tools.named(tag.value) if tag is not None and opens else None
            if tool is not None:
                parts.begin(tool)
                begun = True
                yield from self._read_arguments(source, parts)
                source.drop_read()
            elif tag == Tag(self.section, True, ""):
                return begun
            elif tag != Tag(self.section, False, "") or begun:
                source.place = start
                return begun

    def _read_arguments(self, source: Incoming, parts: CallParts) -> Waiting[None]:
        while True:
            yield from source.skip_space()
            if (yield from read_json_body(source, parts, stops=(self.mark,))):
                parts.end(complete=True)
                yield from source.taken_next(f"{self.mark}</{self.call}>")
                return
            start = source.place
            tag = yield from self._tag(source)
            if tag is None or tag.closes or tag.name == self.call:
                closed = tag == Tag(self.call, True, "")
                source.place = source.place if closed else start
                parts.end(closed=closed)
                return
            parts.key(tag.name)
            if parts.types.of_parameter(tag.name) == STRING:
                yield from read_value(source, parts, self._string_ends(tag.name), types=STRING)
            else:
                schema = parts.types.properties.get(tag.name)
                parts.json((yield from self._value(source, parts, schema, depth=0)))
            source.drop_read()

    def _string_ends(self, name: str) -> tuple[ValueEnd, ...]:
        others = (f"{self.mark}</{self.call}>", f"{self.mark}</{self.section}>")
        return (
            ValueEnd(f"{self.mark}</{name}>", ()),
            *(ValueEnd(mark, (), closes=False) for mark in others),
        )

    def _value(
        self, source: Incoming, parts: CallParts, schema: Any, *, depth: int
    ) -> Waiting[str]:
        """Read up to the tag that closes a value. Returns the value as JSON text."""
        text, _ = yield from source.read_to((self.mark,))
        names: list[str] = []
        values: list[str] = []
        while True:
            start = source.place
            yield from source.skip_space()
            tag = yield from self._tag(source)
            if tag is None or tag.closes or depth > _MAX_DEPTH:
                if tag is None or tag.name in (self.call, self.section):
                    source.place = start
                    parts.repair("unclosed_value")
                break
            names.append(tag.name)
            inner = parts.types.inner(schema, tag.name)
            values.append((yield from self._value(source, parts, inner, depth=depth + 1)))
        types = parts.types.allowed(schema)
        if self._is_list(names, types, names_item=parts.types.declares(schema, self.item)):
            return f"[{', '.join(values)}]"
        if names:
            members = zip(names, values, strict=True)
            return "{" + ", ".join(f"{json_text(name)}: {value}" for name, value in members) + "}"
        if not text and types and "string" not in types:
            return "[]" if "array" in types else "{}"
        value = typed(text, types or (_GUESSED if depth else types))
        parts.repair(value.repair)
        return value.json

    def _is_list(self, names: Sequence[str], types: Collection[str], *, names_item: bool) -> bool:
        """Whether nested tags are the items of an array.

        names_item: True if the schema declares a member that is named like the tag of array items.
        """
        if set(names) != {self.item}:
            return False
        return "object" not in types or len(names) > 1 or ("array" in types and not names_item)

    def _tag(self, source: Incoming) -> Waiting[Tag | None]:
        """Read a mark and the tag after it. Returns None if they are not there."""
        if not (yield from source.taken(self.mark)):
            return None
        at, mark = yield from source.find((">", "\n", self.mark), source.place, limit=_TAG_LENGTH)
        found = _TAG.fullmatch(source.text[source.place : at + 1]) if mark == ">" else None
        if found is None:
            return None
        source.place = at + 1
        return Tag(found[2], bool(found[1]), found[3] or "")
