"""Calls as JSON objects (Hermes and many more) and as a name followed by a JSON object (Mistral, Kimi K2,
DeepSeek V3). Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.front.toolcalls.call_format import Call, CallParts, IdForm
from holdfast.front.toolcalls.declared import ToolName, from_json
from holdfast.front.toolcalls.incoming import Incoming, Waiting
from holdfast.front.toolcalls.literals import JsonStream, Literals
from holdfast.front.toolcalls.markers import marks_in

_JSON: Final = Literals()
_FENCES: Final = ("```json", "```")
# in a row; some models write nothing else any more, and each would be read again from the next one
# on
_MOST_OPENERS: Final = 4
_MOST_BRACES: Final = 8  # around a call's members
_ARGUMENTS: Final = ("arguments", "parameters", "args", "input")  # as models mix them up
_NAMES: Final = ("name", "tool_name", "function", "tool")
_FIELD: Final = re.compile(r"\{(name|id)\}")
_NUMBERED: Final = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?")
_HEAD_LENGTH: Final = 512


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


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedJson:
    """A family that writes `MARKER NAME MARKER {...}`.

    section: around all calls of a turn. head: what stands before the arguments, with {name} and
    {id} in it; other heads that are read are in `heads_too`. close: behind the arguments. A reader
    minds no white space between markup.
    """

    section: tuple[str, str] = ("", "")
    head: str
    heads_too: tuple[str, ...] = ()
    close: str = ""
    between: str = ""  # two calls
    id_form: IdForm = "random"

    @property
    def marks(self) -> Sequence[str]:
        """All markers."""
        return marks_in(
            *self.section, *(word for head in self._heads for word in head[0::2]), self.close
        )

    @property
    def openers(self) -> Sequence[str]:
        """What calls may begin with."""
        return tuple(
            dict.fromkeys(mark for mark in (self.section[0].strip(), *self._leads) if mark)
        )

    def write(self, calls: Sequence[Call]) -> str:
        """The calls as the model would write them."""
        written = (
            self._written_head(call, number) + _text(call) + self.close
            for number, call in enumerate(calls)
        )
        return self.section[0] + self.between.join(written) + self.section[1]

    def read(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read calls from one of the openers on. False: none stands here, nothing was put out."""
        section = self.section[0].strip()
        in_section = bool(section and (yield from source.taken(section)))
        begun = False
        while True:
            start = source.place
            yield from source.skip_space()
            if begun and source.text.startswith((";", ","), source.place):
                source.place += 1
                yield from source.skip_space()
            if not (yield from self._read_call(source, parts)):
                break
            begun = True
        source.place = start
        if begun and in_section:
            yield from source.skip_space()
            yield from source.taken(self.section[1].strip())
        return begun

    @property
    def _heads(self) -> Sequence[Sequence[str]]:
        """Each head as its literals and, between them, the names of its fields."""
        return [_FIELD.split(head) for head in (self.head, *self.heads_too)]

    @property
    def _leads(self) -> Sequence[str]:
        return tuple(dict.fromkeys(head[0].strip() for head in self._heads))

    def _written_head(self, call: Call, number: int) -> str:
        call_id = call.id
        if self.id_form == "function_number" and not call_id.startswith(f"functions.{call.name}:"):
            call_id = f"functions.{call.name}:{number}"
        return self.head.replace("{name}", call.name).replace("{id}", call_id)

    def _read_call(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read a call from the first literal of its head on."""
        lead = yield from source.taken(*self._leads)
        if not lead:
            return False
        fields = yield from self._fields(source, lead)
        if fields is None:
            return False
        name, call_id = fields.get("name"), fields.get("id", "")
        if name is None:
            found = _NUMBERED.fullmatch(call_id)
            name = found[1] if found else call_id
        stops = self._ends
        tool = parts.tools.named(name) or _first_word(parts, name)
        if tool is not None and name.isdigit() and not tool.declared:
            return (yield from self._read_unnamed(source, parts, call_id))
        if tool is None or not (
            source.text.startswith("{", source.place) or (yield from source.standing(stops))
        ):
            return False
        parts.begin(tool, call_id=call_id)
        if source.text.startswith("{", source.place):
            stream = JsonStream(source, parts.json, stops=stops, follows=self.openers)
            yield from stream.read()
            parts.repair(*stream.repairs)
        else:
            parts.json("{}")
        yield from self._end(source, parts)
        return True

    @property
    def _ends(self) -> tuple[str, ...]:
        """What may stand behind the arguments."""
        return tuple(
            mark for mark in (self.close.strip(), *marks_in(self.close, self.section[1])) if mark
        )

    def _fields(self, source: Incoming, lead: str) -> Waiting[dict[str, str] | None]:
        """Read a head behind its first literal, up to the arguments. None: it is none."""
        follows = {
            word.strip(): field
            for head in self._heads
            for word, field in zip(head[0::2], (*head[1::2], ""), strict=True)
        }
        field = next(head[1] for head in self._heads if head[0].strip() == lead)
        literals = tuple(word for word in follows if word and word not in self._leads)
        fields: dict[str, str] = {}
        while True:
            at, mark = yield from source.find(
                (*literals, "{", *self._ends, *self.openers), source.place, limit=_HEAD_LENGTH
            )
            if field:
                fields.setdefault(field, source.plain(source.text[source.place : at]).strip())
            source.place = at
            if mark not in literals:
                return fields if mark == "{" or mark in self._ends else None
            source.place += len(mark)
            field = follows[mark]
            yield from source.skip_space()

    def _read_unnamed(self, source: Incoming, parts: CallParts, call_id: str) -> Waiting[bool]:
        """A call with a number for a name: its tool is the only one that its arguments fit."""
        repairs = ["inferred_name"]
        if not source.text.startswith("{", source.place):
            return False
        text = yield from _JSON.value(source, repairs, ends="")
        name = parts.tools.only_fitting(json.loads(text))
        if not name:
            return False
        parts.begin(ToolName(name, declared=True), call_id=call_id)
        parts.json(text)
        parts.repair(*repairs)
        yield from self._end(source, parts)
        return True

    def _end(self, source: Incoming, parts: CallParts) -> Waiting[None]:
        """Read what stands behind the arguments, and end the call."""
        close = self.close.strip()
        last = (close, *marks_in(close)[-1:])
        closed = not close
        while not closed:
            yield from source.skip_space()
            if source.text.startswith("}", source.place):
                source.place += 1
                parts.repair("extra_bracket")
            elif mark := (yield from source.taken(close, *marks_in(close))):
                closed = mark in last
            else:
                break
        parts.end("" if closed else "unclosed_call", complete=True)
        source.drop_read()


def _first_word(parts: CallParts, name: str) -> ToolName | None:
    """The declared tool that is named before more words, which some write there."""
    words = name.split()
    tool = parts.tools.named(words[0]) if words else None
    return tool if tool is not None and tool.declared else None


def _text(call: Call) -> str:
    return json.dumps(dict[str, Any](call.arguments), ensure_ascii=False)
