"""Calls as JSON objects (Hermes and many more), and as a name followed by a JSON object (Mistral,
Kimi K2, DeepSeek V3). No I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.front.toolcalls.argument_types import from_json
from holdfast.front.toolcalls.call_format import (
    AnswerDeltas,
    BareKeys,
    CallFormat,
    CallLayout,
    ChannelMarkup,
    JsonObject,
    distinct,
)
from holdfast.front.toolcalls.declared import ToolName
from holdfast.front.toolcalls.incoming import Incoming, Parser, markers_in
from holdfast.front.toolcalls.literals import LENIENT

_FENCES: Final = ("```json", "```")
# Maximum number of consecutive opening markers. Some models end up writing only these, and
# without a limit all would be read again from each one.
_MOST_OPENING_MARKERS: Final = 4
_MOST_NESTED_BRACES: Final = 8  # of a call's members
_ARGUMENTS_KEYS: Final = ("arguments", "parameters", "args", "input")  # models confuse these keys
_NAME_KEYS: Final = ("name", "tool_name", "function", "tool")
_HEAD_FIELD: Final = re.compile(r"\{(name|id)\}")
# an id of the form `functions.NAME:N`, from which the name is taken
_NUMBERED_ID: Final = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?")
_LONGEST_HEAD: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls(CallFormat):
    """A family that writes `{"name": NAME, "arguments": {...}}` between markers.

    section: markers around all calls of a turn. wrapper: markers around each call. other_pairs:
    other pairs of markers that are also read. array: whether the calls of a turn are one JSON array.
    between: text that separates two calls. id_key: the member that holds the call's id; empty if
    calls have none. name_is_key: whether a call is written as {NAME: {...}}.
    """

    section: tuple[str, str] = ("", "")
    wrapper: tuple[str, str] = ("", "")
    other_pairs: tuple[tuple[str, str], ...] = ()
    array: bool = False
    between: str = "\n"
    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str = ""
    name_is_key: bool = False

    @property
    def markers(self) -> Sequence[str]:
        return markers_in(*(marker for pair in self._pairs for marker in pair))

    @property
    def call_starts(self) -> Sequence[str]:
        return distinct(*(pair[0] for pair in self._pairs), "{", '[{"', *_FENCES)

    @property
    def layout(self) -> CallLayout:
        return self._layout(self.section, self.wrapper)

    @property
    def grammar_layouts(self) -> Sequence[CallLayout]:
        """The family's own layout, and the same layout with the other pairs of markers."""
        others = (
            self._layout(pair, ("", "")) if self.array else self._layout(("", ""), pair)
            for pair in self.other_pairs
        )
        return (self.layout, *others)

    @property
    def bare_keys(self) -> BareKeys:
        """The keys of calls that are read without a marker before them."""
        names = () if self.name_is_key else tuple(dict.fromkeys((self.name_key, *_NAME_KEYS)))
        keys = tuple(dict.fromkeys((self.arguments_key, *_ARGUMENTS_KEYS)))
        return BareKeys(names, keys, closings=distinct(*(pair[1] for pair in self._pairs)))

    def _layout(self, section: tuple[str, str], wrapper: tuple[str, str]) -> CallLayout:
        """The layout with these markers around all calls, and around each call."""
        members = f'"{self.name_key}": {{quoted}}, "{self.arguments_key}": '
        heads = [f"{{{members}"]
        if self.id_key:
            heads.append(f'{{"{self.id_key}": "{{id}}", {members}')
        open_array, close_array, between = (
            ("[", "]", ", ") if self.array else ("", "", self.between)
        )
        return CallLayout(
            opening=section[0] + open_array + wrapper[0],
            heads=("{{quoted}: ",) if self.name_is_key else tuple(heads),
            values=JsonObject(),
            optional_id=f', "{self.id_key}": "{{id}}"' if self.id_key else "",
            tail="}" + wrapper[1],
            again=between + wrapper[0],
            closing=close_array + section[1],
        )

    @property
    def _pairs(self) -> Sequence[tuple[str, str]]:
        """All pairs of an opening and a closing marker, either of which may be empty."""
        pairs = (self.section, self.wrapper, *self.other_pairs)
        return tuple((opening.strip(), closing.strip()) for opening, closing in pairs)

    def read(self, source: Incoming, deltas: AnswerDeltas) -> Parser[bool]:
        """Read the calls at the current position. Returns False if there are none."""
        opening = distinct(*(start for start, _ in self._pairs))
        unclosed_openings = {start for start, end in self._pairs if not end}
        closing = distinct(*(end for _, end in self._pairs))
        call_start, has_calls, openings_in_a_row = "", False, 0
        # each round reads one piece of markup, or one call; `call_start` is the last opening marker
        while True:
            yield from source.skip_space()
            marker = ""
            if openings_in_a_row < _MOST_OPENING_MARKERS:
                marker = yield from source.read_any(*opening)
            if marker:
                call_start, openings_in_a_row = marker, openings_in_a_row + 1
            elif has_calls and (source.starts_with("]") or (yield from source.match_at(closing))):
                source.place += max(1, len((yield from source.match_at(closing))))
                source.drop_read()
            elif source.starts_with("[", ",", ";"):
                source.place += 1
            elif (yield from source.read_any(*_FENCES)):
                closing = (*closing, "```")
            else:
                call = _JsonCall(self, deltas, bool(call_start), opening, closing)
                if not source.starts_with("{") or not (yield from call.read(source)):
                    break
                has_calls, openings_in_a_row = True, 0
                closed = yield from _read_closing(source, deltas, closing)
                is_closed = closed or not call_start or call_start in unclosed_openings
                deltas.end_call(closed=is_closed, is_whole_object=True)
                source.drop_read()
        if has_calls:
            source.place = 0
        return has_calls


@dataclass(slots=True)
class _JsonCall:
    """Reads the object of one call.

    is_marked: whether a marker precedes the call. early_arguments: arguments that came before the
    name, as JSON text. opening, closing: the family's markers around calls. failed: the object
    turned out not to be a call.
    """

    family: JsonCalls
    deltas: AnswerDeltas
    is_marked: bool
    opening: tuple[str, ...]
    closing: tuple[str, ...]
    tool: ToolName | None = None
    early_arguments: str | None = None
    id: str = ""
    repairs: list[str] = field(default_factory=list)
    failed: bool = False

    def read(self, source: Incoming) -> Parser[bool]:
        """Read from the opening brace to the closing one.

        Returns True if the call has begun and was emitted completely.
        """
        depth, closed = 0, False
        while True:
            if depth:
                yield from source.skip_space()
            if source.at_end or (self.closing and (yield from source.match_at(self.closing))):
                closed = not source.at_end
                break
            character = source.text[source.place]
            if character in "{},":
                source.place += 1
                depth += {"{": 1, "}": -1, ",": 0}[character]
                closed = closed or not depth
                self.failed = depth > _MOST_NESTED_BRACES
                if closed or self.failed:
                    break
                continue
            start = source.place
            yield from self._read_member(source)
            if self.failed:
                source.place = start  # what follows the arguments is not part of the call
                break
        return self._begin_if_valid(closed)

    def _read_member(self, source: Incoming) -> Parser[None]:
        """Read the key and the value of one member."""
        family = self.family
        if not self.is_marked and source.text[source.place] not in "\"'":
            self.failed = True
            return
        key = yield from self._read_value(source, ends=":,{}")
        yield from source.skip_space()
        if not isinstance(key, str) or not (yield from source.read_any(":")):
            self.failed = True
            return
        yield from source.skip_space()
        is_object = source.starts_with("{")
        if family.name_is_key and self.tool is None and is_object:
            self._set_name(key)
            yield from self._read_arguments(source)
        elif key == family.name_key or (key in _NAME_KEYS and not family.name_is_key):
            if not is_object:  # the members of a nested object are treated as members of the call
                self._set_name((yield from self._read_value(source)))
                self._note_repair("" if key == family.name_key else "name_key")
        elif key == family.arguments_key or key in _ARGUMENTS_KEYS:
            self._note_repair("" if key == family.arguments_key else "arguments_key")
            yield from self._read_arguments(source)
        elif key in (family.id_key, "id", "tool_call_id"):
            call_id = yield from self._read_value(source)
            self.id = str(call_id) if key == family.id_key else ""
        elif self.is_marked or key == "type":
            yield from self._read_value(source)
        else:
            self.failed = True

    def _set_name(self, name: Any) -> None:
        """Take the first name that occurs. Without a marker, it must be that of a declared tool."""
        tool = self.deltas.tools.resolve(name) if isinstance(name, str) else None
        if self.tool is None:
            self.tool = tool
            self.failed = tool is None or not (self.is_marked or tool.declared)

    def _read_arguments(self, source: Incoming) -> Parser[None]:
        """Read the arguments. They are streamed if the name is already known."""
        if self.failed or self.deltas.is_open or self.early_arguments is not None:
            if not self.failed:
                yield from self._read_value(source)
            return
        if self.tool is not None and source.starts_with("{"):
            self._begin(self.tool)
            yield from self.deltas.read_object(source, stops=self.closing, follows=self.opening)
            return
        self.early_arguments = self._arguments_json(
            (yield from LENIENT.read_value(source, self.repairs, ends=",}"))
        )
        if self.early_arguments is None:
            self.failed = True
        elif self.tool is not None:
            self._begin(self.tool)

    def _arguments_json(self, text: str) -> str | None:
        """Return the arguments as JSON text, or None if they are not a JSON object.

        Some models encode the object a second time, as a JSON string.
        """
        value = json.loads(text)
        if isinstance(value, str):
            text = value.strip() or "{}"
            value = from_json(text)
            if value is None and text != "null":
                return None
            self._note_repair("encoded_twice")
        if value is None:
            self._note_repair("null_arguments")
            return "{}"
        return text if isinstance(value, dict) else None

    def _begin_if_valid(self, closed: bool) -> bool:
        """Begin the call at the end of its object, unless it has begun. Returns whether it has."""
        if (
            not (self.deltas.is_open or self.failed)
            and self.tool is not None
            and closed
            and (self.is_marked or self.early_arguments is not None)
        ):
            self._begin(self.tool)
            if self.early_arguments is None:
                self.deltas.emit_json("{}")
        if self.deltas.is_open:
            self.deltas.note_repairs(*self.repairs)
        return self.deltas.is_open

    def _begin(self, tool: ToolName) -> None:
        """Begin the call, and emit arguments that were read before its name."""
        self.deltas.begin_call(tool, call_id=self.id)
        if self.early_arguments is not None:
            self.deltas.emit_json(self.early_arguments)

    def _read_value(self, source: Incoming, *, ends: str = ",}") -> Parser[Any]:
        """Read a key or a value. ends: the characters that end it if it is not quoted."""
        text = yield from LENIENT.read_value(source, self.repairs, ends=ends)
        return json.loads(text)

    def _note_repair(self, name: str) -> None:
        if name and name not in self.repairs:
            self.repairs.append(name)


def _read_closing(source: Incoming, deltas: AnswerDeltas, closing: Sequence[str]) -> Parser[bool]:
    """Read the markup after a call.

    Returns True if something closed the call, or if another call follows in the same markup.
    """
    while True:
        yield from source.skip_space()
        character = source.text[source.place : source.place + 1]
        if character == "}":
            source.place += 1
            deltas.note_repairs("extra_bracket")
        else:
            closed = bool(character) and character in ",;]{"
            return closed or bool((yield from source.read_any(*closing)))


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedJson(CallFormat):
    """A family that writes `MARKER NAME MARKER {...}`.

    section: markers around all calls of a turn. head: text before the arguments, with the fields
    {name} and {id}; other_heads: other heads that are also read. close: text after the arguments.
    between: text that separates two calls. text: a marker before visible text.
    """

    section: tuple[str, str] = ("", "")
    head: str
    other_heads: tuple[str, ...] = ()
    close: str = ""
    between: str = ""
    text: str = ""

    @property
    def markers(self) -> Sequence[str]:
        words = [word for head in self._heads for word in head[0::2]]
        tags = (lead for lead in self._leads if lead.startswith("<"))
        return distinct(*markers_in(*self.section, *words, self.close), *tags)

    @property
    def call_starts(self) -> Sequence[str]:
        return distinct(self.section[0], *self._leads)

    @property
    def layout(self) -> CallLayout:
        return self._layout(self.head, close=self.close)

    @property
    def grammar_layouts(self) -> Sequence[CallLayout]:
        """The family's own layout, and one for each of the other heads."""
        last_marker = "".join(markers_in(self.close)[-1:])
        return (self.layout, *(self._layout(head, close=last_marker) for head in self.other_heads))

    def _layout(self, head: str, *, close: str) -> CallLayout:
        """The layout with this head, whose first marker (or literal) is part of the opening."""
        before_name = head.partition("{")[0]
        before_name = next(
            (marker for marker in markers_in(before_name) if before_name.startswith(marker)),
            before_name,
        )
        return CallLayout(
            opening=self.section[0] + before_name,
            heads=(head.removeprefix(before_name),),
            values=JsonObject(),
            tail=close,
            again=self.between + before_name,
            closing=self.section[1],
        )

    @property
    def channels(self) -> ChannelMarkup | None:
        """The markup of text."""
        return ChannelMarkup(text=(self.text, "")) if self.text else None

    @property
    def _heads(self) -> Sequence[Sequence[str]]:
        """Each head, split into its literals and, between them, the names of its fields."""
        return [_HEAD_FIELD.split(head) for head in (self.head, *self.other_heads)]

    @property
    def _leads(self) -> Sequence[str]:
        """The literals that heads begin with."""
        return distinct(*(head[0] for head in self._heads))

    @property
    def _ends(self) -> tuple[str, ...]:
        """The strings that may follow the arguments."""
        return distinct(self.close, *markers_in(self.close, self.section[1]))

    def read(self, source: Incoming, deltas: AnswerDeltas) -> Parser[bool]:
        """Read the calls at the current position. Returns False if there are none."""
        section = self.section[0].strip()
        in_section = bool(section and (yield from source.read_any(section)))
        has_calls = False
        while True:
            start = source.place
            yield from source.skip_space()
            if has_calls and source.starts_with(";", ","):
                source.place += 1
                yield from source.skip_space()
            if not (yield from self._read_call(source, deltas)):
                break
            has_calls = True
        source.place = start
        if has_calls and in_section:
            yield from source.skip_space_and_read(self.section[1].strip())
        return has_calls

    def _read_call(self, source: Incoming, deltas: AnswerDeltas) -> Parser[bool]:
        """Read a call, starting at the first literal of its head."""
        lead = yield from source.read_any(*self._leads)
        if not lead:
            return False
        fields = yield from self._read_fields(source, lead)
        if fields is None:
            return False
        name, call_id = fields.get("name"), fields.get("id", "")
        if name is None:
            match = _NUMBERED_ID.fullmatch(call_id)
            name = match[1] if match else call_id
        stops = self._ends
        tool = deltas.tools.resolve(name) or _tool_named_first(deltas, name)
        if tool is not None and name.isdigit() and not tool.declared:
            # a number in place of the name: the arguments tell which tool is meant
            return (yield from self._read_unnamed(source, deltas, call_id))
        has_arguments = source.starts_with("{")
        if tool is None or not (has_arguments or (yield from source.match_at(stops))):
            return False
        deltas.begin_call(tool, call_id=call_id)
        if has_arguments:
            yield from deltas.read_object(source, stops=stops, follows=self.call_starts)
        else:
            deltas.emit_json("{}")
        yield from self._read_end(source, deltas)
        return True

    def _read_fields(self, source: Incoming, lead: str) -> Parser[dict[str, str] | None]:
        """Read the rest of a head, up to the arguments. Returns its fields; None: it is no head.

        lead: the head's first literal, which was read.
        """
        field_after = {
            word.strip(): field
            for head in self._heads
            for word, field in zip(head[0::2], (*head[1::2], ""), strict=True)
        }
        field = next(head[1] for head in self._heads if head[0].strip() == lead)
        literals = tuple(word for word in field_after if word and word not in self._leads)
        fields: dict[str, str] = {}
        while True:
            text, marker = yield from source.read_to(
                (*literals, "{", *self._ends, *self.call_starts), limit=_LONGEST_HEAD
            )
            if field:
                fields.setdefault(field, text.strip())
            if marker not in literals:
                return fields if marker == "{" or marker in self._ends else None
            source.place += len(marker)
            field = field_after[marker]
            yield from source.skip_space()

    def _read_unnamed(self, source: Incoming, deltas: AnswerDeltas, call_id: str) -> Parser[bool]:
        """Read a call that has a number in place of a name.

        It is taken as a call of the only tool that accepts the arguments. Returns False if not
        exactly one tool does.
        """
        repairs = ["inferred_name"]
        if not source.starts_with("{"):
            return False
        text = yield from LENIENT.read_value(source, repairs, ends="")
        name = deltas.tools.only_match(json.loads(text))
        if not name:
            return False
        deltas.begin_call(ToolName(name, declared=True), call_id=call_id)
        deltas.emit_json(text)
        deltas.note_repairs(*repairs)
        yield from self._read_end(source, deltas)
        return True

    def _read_end(self, source: Incoming, deltas: AnswerDeltas) -> Parser[None]:
        """Read what follows the arguments, and end the call."""
        close = self.close.strip()
        final_markers = (close, *markers_in(close)[-1:])
        closed = not close
        while not closed:
            yield from source.skip_space()
            if source.starts_with("}"):
                source.place += 1
                deltas.note_repairs("extra_bracket")
            elif marker := (yield from source.read_any(close, *markers_in(close))):
                closed = marker in final_markers
            else:
                break
        deltas.end_call(closed=closed, is_whole_object=True)
        source.drop_read()


def _tool_named_first(deltas: AnswerDeltas, name: str) -> ToolName | None:
    """Return the declared tool that is named by the first of several words."""
    words = name.split()
    tool = deltas.tools.resolve(words[0]) if words else None
    return tool if tool is not None and tool.declared else None
