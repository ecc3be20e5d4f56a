"""Calls as JSON objects with a name and arguments, in a wrapper, alone or in an array: Hermes and
many more. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.front.toolcalls.call_format import Call, CallParts, IdForm
from holdfast.front.toolcalls.declared import ToolName
from holdfast.front.toolcalls.incoming import Incoming, Waiting
from holdfast.front.toolcalls.json_stream import JsonStream
from holdfast.front.toolcalls.literals import Literals
from holdfast.front.toolcalls.markers import marks_in
from holdfast.front.toolcalls.typed_values import from_json

_JSON: Final = Literals()
_FENCES: Final = ("```json", "```")
# in a row; some models write nothing else any more, and each would be read again from the next one
# on
_MOST_OPENERS: Final = 4
_MOST_BRACES: Final = 8  # around a call's members
_ARGUMENTS: Final = ("arguments", "parameters", "args", "input")  # as models mix them up
_NAMES: Final = ("name", "tool_name", "function", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """A family that writes `{"name": NAME, "arguments": {...}}` between markers.

    section: around all calls of a turn. wrapper: around each call. array: the calls of a turn stand
    in one JSON array. `write` puts the strings there as they are; a reader minds no white space
    between markup.
    """

    section: tuple[str, str] = ("", "")
    wrapper: tuple[str, str] = ("", "")
    pairs_too: tuple[tuple[str, str], ...] = ()  # other pairs of markers that are read
    array: bool = False
    between: str = "\n"  # two calls; in an array behind a comma
    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str = ""  # of the member that holds the call's id; empty: it has none
    name_is_key: bool = False  # a call is {NAME: {...}}
    id_form: IdForm = "random"

    @property
    def marks(self) -> Sequence[str]:
        """All markers."""
        return marks_in(*(mark for pair in self._pairs for mark in pair))

    @property
    def openers(self) -> Sequence[str]:
        """What calls may begin with."""
        opening = [pair[0] for pair in self._pairs if pair[0]]
        return tuple(dict.fromkeys((*opening, "{", '[{"', *_FENCES)))

    def write(self, calls: Sequence[Call]) -> str:
        """The calls as the model would write them."""
        written = [
            self.wrapper[0] + json.dumps(self._members(call), ensure_ascii=False) + self.wrapper[1]
            for call in calls
        ]
        joined = (", " if self.array and not self.between else self.between).join(written)
        return self.section[0] + (f"[{joined}]" if self.array else joined) + self.section[1]

    def read(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read calls from one of the openers on. False: none stands here, nothing was put out."""
        opening = tuple(dict.fromkeys(pair[0] for pair in self._pairs if pair[0]))
        endless = {pair[0] for pair in self._pairs if not pair[1]}  # nothing closes them
        closing = tuple(dict.fromkeys(pair[1] for pair in self._pairs if pair[1]))
        opener, begun, repeated = "", False, 0
        while True:
            yield from source.skip_space()
            if (
                opening
                and repeated < _MOST_OPENERS
                and (mark := (yield from source.taken(*opening)))
            ):
                opener, repeated = mark, repeated + 1
            elif begun and (
                source.text.startswith("]", source.place) or (yield from source.standing(closing))
            ):
                source.place += max(1, len((yield from source.standing(closing))))
                source.drop_read()
            elif source.text.startswith(("[", ",", ";"), source.place):
                source.place += 1
            elif (yield from source.taken(*_FENCES)):
                closing = (*closing, "```")
            else:
                call = _JsonCall(self, parts, marked=bool(opener), opening=opening, closing=closing)
                if not source.text.startswith("{", source.place) or not (
                    yield from call.read(source)
                ):
                    break
                begun, repeated = True, 0
                closed = yield from _close(source, parts, closing)
                parts.end(
                    "" if closed or not opener or opener in endless else "unclosed_call",
                    complete=True,
                )
                source.drop_read()
        if begun:
            source.place = 0
        return begun

    @property
    def _pairs(self) -> Sequence[tuple[str, str]]:
        return tuple(
            (pair[0].strip(), pair[1].strip())
            for pair in (self.section, self.wrapper, *self.pairs_too)
        )

    def _members(self, call: Call) -> Mapping[str, Any]:
        if self.name_is_key:
            return {call.name: call.arguments}
        members: dict[str, Any] = {self.name_key: call.name, self.arguments_key: call.arguments}
        return members | {self.id_key: call.id} if self.id_key and call.id else members


class _JsonCall:
    """Reads one call's object."""

    def __init__(
        self,
        family: JsonCalls,
        parts: CallParts,
        *,
        marked: bool,
        opening: tuple[str, ...],
        closing: tuple[str, ...],
    ) -> None:
        self._family, self._parts, self._marked = family, parts, marked
        self._opening, self._closing = opening, closing
        self._tool: ToolName | None = None
        self._early: str | None = None  # arguments that came before the name, as JSON text
        self._id = ""
        self._repairs: list[str] = []
        self._failed = False  # it is no call

    def read(self, source: Incoming) -> Waiting[bool]:
        """Read from the opening brace to behind the closing one.

        True: the call is begun, and all of it given.
        """
        depth, closed = 0, False
        while True:
            if depth:
                yield from source.skip_space()
            if source.place == len(source.text) or (
                self._closing and (yield from source.standing(self._closing))
            ):
                closed = source.place < len(source.text)
                break
            character = source.text[source.place]
            if character in "{},":
                source.place += 1
                depth += {"{": 1, "}": -1, ",": 0}[character]
                closed = closed or not depth
                self._failed = depth > _MOST_BRACES
                if closed or self._failed:
                    break
                continue
            start = source.place
            yield from self._member(source)
            if self._failed:
                source.place = start  # what follows the arguments is not of this call
                break
        return self._finished(closed)

    def _member(self, source: Incoming) -> Waiting[None]:
        """Read a member's key and value."""
        family = self._family
        if not self._marked and source.text[source.place] not in "\"'":
            self._failed = True
            return
        key = yield from self._value(source, ends=":,{}")
        yield from source.skip_space()
        if not isinstance(key, str) or not (yield from source.taken(":")):
            self._failed = True
            return
        yield from source.skip_space()
        is_object = source.text.startswith("{", source.place)
        if family.name_is_key and self._tool is None and is_object:
            self._named(key)
            yield from self._arguments(source)
        elif key == family.name_key or (key in _NAMES and not family.name_is_key):
            if not is_object:  # else what is in it counts as what stands beside it
                self._named((yield from self._value(source)))
                self._repair("" if key == family.name_key else "name_key")
        elif key == family.arguments_key or key in _ARGUMENTS:
            self._repair("" if key == family.arguments_key else "arguments_key")
            yield from self._arguments(source)
        elif key in (family.id_key, "id", "tool_call_id"):
            call_id = yield from self._value(source)
            self._id = str(call_id) if key == family.id_key else ""
        elif self._marked or key == "type":
            yield from self._value(source)
        else:
            self._failed = True

    def _named(self, name: Any) -> None:
        tool = self._parts.tools.named(name) if isinstance(name, str) else None
        if self._tool is None:
            self._tool = tool
            self._failed = tool is None or not (self._marked or tool.declared)

    def _arguments(self, source: Incoming) -> Waiting[None]:
        """Read the arguments. They stream once the name is known."""
        if self._failed or self._parts.is_open or self._early is not None:
            if not self._failed:
                yield from self._value(source)
            return
        if self._tool is not None and source.text.startswith("{", source.place):
            self._begin(self._tool)
            stream = JsonStream(
                source, self._parts.json, stops=self._closing, follows=self._opening
            )
            yield from stream.read()
            self._parts.repair(*stream.repairs)
            return
        self._early = self._object((yield from _JSON.value(source, self._repairs, ends=",}")))
        if self._early is None:
            self._failed = True
        elif self._tool is not None:
            self._begin(self._tool)

    def _object(self, text: str) -> str | None:
        """Arguments as JSON text, of JSON text that may be a string with them in it; None when they
        are no object.
        """
        value = json.loads(text)
        if isinstance(value, str):
            text = value.strip() or "{}"
            value = from_json(text)
            if value is None and text != "null":
                return None
            self._repair("encoded_twice")
        if value is None:
            self._repair("null_arguments")
            return "{}"
        return text if isinstance(value, dict) else None

    def _finished(self, closed: bool) -> bool:
        if (
            not (self._parts.is_open or self._failed)
            and self._tool is not None
            and closed
            and (self._marked or self._early is not None)
        ):
            self._begin(self._tool)
            if self._early is None:
                self._parts.json("{}")
        if self._parts.is_open:
            self._parts.repair(*self._repairs)
        return self._parts.is_open

    def _begin(self, tool: ToolName) -> None:
        self._parts.begin(tool, call_id=self._id)
        if self._early is not None:
            self._parts.json(self._early)

    def _value(self, source: Incoming, *, ends: str = ",}") -> Waiting[Any]:
        text = yield from _JSON.value(source, self._repairs, ends=ends)
        return json.loads(text)

    def _repair(self, name: str) -> None:
        if name and name not in self._repairs:
            self._repairs.append(name)


def _close(source: Incoming, parts: CallParts, closing: tuple[str, ...]) -> Waiting[bool]:
    """Read the markup behind a call.

    Whether something closed it, or another call follows in the same markup.
    """
    while True:
        yield from source.skip_space()
        character = source.text[source.place : source.place + 1]
        if character == "}":
            source.place += 1
            parts.repair("extra_bracket")
        else:
            closed = bool(character) and character in ",;]{"
            return closed or bool((yield from source.taken(*closing)))
