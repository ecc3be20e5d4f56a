"""Calls as a name behind a marker and tagged pairs of key and raw value: GLM 4.5 to 5 and all that
look like it. Pure.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.front.toolcalls.call_format import Call, CallParts, IdForm
from holdfast.front.toolcalls.declared import ToolName
from holdfast.front.toolcalls.incoming import Incoming, Waiting
from holdfast.front.toolcalls.parameters import ValueEnd, read_json_body, read_json_call, read_value
from holdfast.front.toolcalls.typed_values import typed

_SPACES = ("\\n",)  # written as two characters by models that saw it so in their training
_NAME_LENGTH = 256
_WORDS_LENGTH = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValueTags:
    """A family that writes
    `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`.

    section: around all calls of a turn. name_end: stands behind the name, white space not counted.
    A reader minds no white space between tags, and none of a value is cut.
    """

    section: tuple[str, str] = ("", "")
    call: tuple[str, str] = ("<tool_call>", "</tool_call>")
    name_end: str = ""
    key: tuple[str, str] = ("<arg_key>", "</arg_key>")
    value: tuple[str, str] = ("<arg_value>", "</arg_value>")
    between: str = ""  # two calls
    id_form: IdForm = "random"

    @property
    def marks(self) -> Sequence[str]:
        """All markers."""
        words = (*self.section, *self.call, self.name_end, *self.key, *self.value)
        return tuple(dict.fromkeys(mark for word in words if (mark := word.strip())))

    @property
    def openers(self) -> Sequence[str]:
        """What a call may begin with."""
        return tuple(mark for word in (self.section[0], self.call[0]) if (mark := word.strip()))

    def write(self, calls: Sequence[Call]) -> str:
        """The calls as the model would write them."""
        return (
            self.section[0]
            + self.between.join(self._written(call) for call in calls)
            + self.section[1]
        )

    def read(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read calls from one of the openers on. False: none stands here, nothing was put out."""
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

    def _written(self, call: Call) -> str:
        pairs = "".join(self._written_pair(key, value) for key, value in call.arguments.items())
        return f"{self.call[0]}{call.name}{self.name_end}{pairs}{self.call[1]}"

    def _written_pair(self, key: str, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return f"{self.key[0]}{key}{self.key[1]}{self.value[0]}{text}{self.value[1]}"

    def _read_call(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read a call behind the marker that opens it."""
        yield from source.skip_space(spaces=_SPACES)
        if (yield from read_json_call(source, parts)):
            yield from self._close(source)
            return True
        name_end, key, close = self.name_end.strip(), self.key[0].strip(), self.call[1].strip()
        ends = tuple(mark for mark in (" ", "\n", "{", *_SPACES, name_end, key, close) if mark)
        at, _ = yield from source.find(ends, source.place, limit=_NAME_LENGTH)
        tool = parts.tools.named(source.plain(source.text[source.place : at]))
        if tool is None:
            return False
        source.place = at
        yield from self._skip_name_end(source, name_end)
        if not (yield from source.standing((key, "{"))):
            if not tool.declared:
                return False  # a word between the markers is no call by itself
            if not (yield from self._ends_here(source)):
                return (yield from self._read_words(source, parts, tool))
        parts.begin(tool)
        yield from self._read_pairs(source, parts)
        return True

    def _ends_here(self, source: Incoming) -> Waiting[bool]:
        """Whether a call without arguments ends here."""
        outer = tuple(mark for word in (self.section[1], *self.call) if (mark := word.strip()))
        return bool((yield from source.standing(outer))) or (
            source.ended and source.place == len(source.text)
        )

    def _read_words(self, source: Incoming, parts: CallParts, tool: ToolName) -> Waiting[bool]:
        """Read a call whose arguments are written as words, `KEY=VALUE`.

        False: there is anything else.
        """
        at, mark = yield from source.find(
            (self.call[1].strip(),), source.place, limit=_WORDS_LENGTH
        )
        words = (
            _words(source.plain(source.text[source.place : at]))
            if mark or at == len(source.text)
            else {}
        )
        properties = parts.tools.parameters(tool.name).properties
        if not words or not words.keys() <= properties.keys():
            return False
        source.place = at
        parts.begin(tool, repair="words_for_tags")
        for key, text in words.items():
            value = typed(text, parts.types.of(key))
            parts.repair(value.repair)
            parts.key(key)
            parts.json(value.json)
        closed = yield from self._close(source)
        parts.end("" if closed else "unclosed_call")
        source.drop_read()
        return True

    def _skip_name_end(self, source: Incoming, name_end: str) -> Waiting[None]:
        yield from source.skip_space(spaces=_SPACES)
        if name_end and (yield from source.taken(name_end)):
            yield from source.skip_space(spaces=_SPACES)

    def _read_pairs(self, source: Incoming, parts: CallParts) -> Waiting[None]:
        """The pairs of an open call, and its end."""
        if (yield from read_json_body(source, parts, stops=(self.call[1].strip(),))):
            closed = yield from self._close(source)
            parts.end("" if closed else "unclosed_call", complete=True)
            return
        key, key_close, value_open = self.key[0].strip(), self.key[1].strip(), self.value[0].strip()
        while (yield from source.taken(key)):
            at, mark = yield from source.find(
                (key_close, value_open), source.place, limit=_NAME_LENGTH
            )
            name = source.plain(source.text[source.place : at]).strip()
            source.place = at + (len(mark) if mark == key_close else 0)
            yield from source.skip_space(spaces=_SPACES)
            opened = yield from source.taken(value_open)
            parts.repair("" if mark == key_close and opened else "missing_tag")
            parts.key(name)
            yield from read_value(source, parts, self._value_ends(), types=parts.types.of(name))
            yield from source.skip_space(spaces=_SPACES)
        closed = yield from self._close(source)
        parts.end("" if closed else "unclosed_call")
        source.drop_read()

    def _value_ends(self) -> tuple[ValueEnd, ...]:
        """A closing tag in a value ends it only if the call goes on behind it as calls do."""
        key, close, value_close = self.key[0].strip(), self.call[1].strip(), self.value[1].strip()
        outer = tuple(mark for word in (self.section[1], self.call[0]) if (mark := word.strip()))
        return (
            ValueEnd(value_close, (key, close), spaces=_SPACES),
            ValueEnd(close, outer, closes=False, repair="unclosed_value"),
            ValueEnd(
                key,
                (self.key[1].strip(),),
                closes=False,
                repair="unclosed_value",
                names_parameter=True,
            ),
        )

    def _close(self, source: Incoming) -> Waiting[bool]:
        yield from source.skip_space(spaces=_SPACES)
        return bool((yield from source.taken(self.call[1].strip())))


def _words(text: str) -> dict[str, str]:
    """Keys and values of words such as `days=3 city="New York"`; empty when any word is another."""
    try:
        pairs = [word.partition("=") for word in shlex.split(text)]
    except ValueError:
        return {}
    return (
        {key: value for key, _, value in pairs}
        if all(key and equals for key, equals, _ in pairs)
        else {}
    )
