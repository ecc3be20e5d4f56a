"""How a model family declares the syntax of its tool calls, and the deltas that the parser of an
answer emits.
"""

from __future__ import annotations

import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from holdfast.front.output import (
    OutputDelta,
    TextDelta,
    TextKind,
    ToolArgumentsDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from holdfast.front.toolcalls.argument_types import ParameterTypes, convert_to_type
from holdfast.front.toolcalls.declared import DeclaredTools, ToolName
from holdfast.front.toolcalls.incoming import Incoming, Parser
from holdfast.front.toolcalls.json_schema import type_of
from holdfast.front.toolcalls.literals import JsonStream, json_text

_ID_CHARACTERS: Final = string.ascii_letters + string.digits
IdForm: TypeAlias = Literal["random", "alnum9", "function_number", "number", "client"]
"""The form of a family's call ids. In the order above: `call_` and 24 characters; 9 characters;
`functions.NAME:N`; `N`; the id that the client sent.
"""


def id_pattern(form: IdForm, name: str) -> str:
    """Return a regular expression that matches the ids a model writes for calls of this tool."""
    match form:
        case "alnum9":
            return "[a-zA-Z0-9]{9}"
        case "number":
            return "[0-9]{1,3}"
        case "function_number":
            return rf"functions\.{re.escape(name)}:[0-9]{{1,4}}"
        case _:
            return "[a-zA-Z0-9_.:-]{0,64}"


class Call(NamedTuple):
    """A complete call of a tool."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


# How calls are written


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonObject:
    """Arguments written as one JSON object."""

    def write(self, arguments: Mapping[str, Any]) -> str:
        """Return the arguments as the model would write them."""
        return json_text(dict(arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedValues:
    """Arguments written as tags around raw values.

    The order is: before, key, text or json, value, end, gap.

    text: what precedes a string value. json: what precedes any other value, which is written as
        JSON; the field {type} is replaced by the value's type.
    cdata: whether a string may be wrapped in a CDATA section. is_loose: whether any white space may
    surround values; otherwise a model that was not trained on the tags would continue inside a
    string.
    """

    before: str
    text: str
    json: str
    end: str
    gap: str = ""
    cdata: bool = False
    is_loose: bool = False

    def write(self, arguments: Mapping[str, Any]) -> str:
        """Return the arguments as the model would write them."""
        return "".join(self._write_argument(key, value) for key, value in arguments.items())

    def _write_argument(self, key: str, value: Any) -> str:
        """One argument with its tags. Templates name the type of an integer `number`."""
        if isinstance(value, str):
            lead, text = self.text, value
        else:
            json_type = type_of(value).replace("integer", "number")
            lead, text = self.json.replace("{type}", json_type), json_text(value)
        if self.cdata and any(character in text for character in "<&\n"):
            text = CDATA[0] + text + CDATA[1]
        return self.before + key + lead + text + self.end + self.gap


CDATA: Final = ("<![CDATA[", "]]>")


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedValues:
    """Arguments written as nested tags, with a marker before each tag. Null values are left out.

    item: the name of the tag around each item of an array.
    """

    marker: str
    item: str

    def write(self, arguments: Mapping[str, Any]) -> str:
        """Return the arguments as the model would write them."""
        written = (
            self._write_tag(key, value) for key, value in arguments.items() if value is not None
        )
        return "".join(written)

    def _write_tag(self, name: str, value: Any) -> str:
        """The tag of an argument, a member or an item, around its value."""
        if isinstance(value, Mapping):
            inner = self.write(value)
        elif isinstance(value, (list, tuple)):
            inner = "".join(self._write_tag(self.item, each) for each in value)
        else:
            inner = value if isinstance(value, str) else json_text(value)
        return f"{self.marker}<{name}>{inner}{self.marker}</{name}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralValues:
    """Arguments written as `KEY assign VALUE`, with values in the family's own syntax.

    words: the spellings of true, false and null. quote: the quotation mark on both sides of a string
    without escapes; if empty, strings are written as in JSON. quoted_keys: whether the keys of
    objects are quoted. assign: the text after an argument's name; if empty, arguments are written
    like the members of an object. single_quotes: whether strings may also use single quotes, as in
    Python. sorted_keys: whether templates sort the members of objects.
    """

    words: tuple[str, str, str] = ("true", "false", "null")
    quote: str = ""
    quoted_keys: bool = True
    colon: str = ": "
    comma: str = ", "
    assign: str = ""
    single_quotes: bool = False
    sorted_keys: bool = False

    def write(self, arguments: Mapping[str, Any]) -> str:
        """Return the arguments as the model would write them."""
        if not self.assign:
            return self._members(arguments)
        return self.comma.join(
            f"{key}{self.assign}{self.value(value)}" for key, value in arguments.items()
        )

    def value(self, value: Any) -> str:
        """Write one value."""
        if isinstance(value, str):
            if self.quote:
                return self.quote + value + self.quote
            return json_text(value)
        if isinstance(value, Mapping):
            return "{" + self._members(value) + "}"
        if isinstance(value, (list, tuple)):
            return "[" + self.comma.join(map(self.value, value)) + "]"
        if value is None or isinstance(value, bool):
            return self.word(value)
        return json_text(value)

    def word(self, value: bool | None) -> str:
        """Write a boolean or null."""
        return self.words[2 if value is None else int(not value)]

    def key(self, name: str) -> str:
        """Write the name of an object's member."""
        return json_text(name) if self.quoted_keys else name

    def _members(self, members: Mapping[str, Any]) -> str:
        return self.comma.join(
            self.key(name) + self.colon + self.value(value) for name, value in members.items()
        )


Values: TypeAlias = JsonObject | TaggedValues | NestedValues | LiteralValues


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLayout:
    """How a family writes the calls of an answer; its writer and its grammar are derived from this.

    The calls of an answer are written as `opening`, the first call, further calls that each follow
    `again`, and `closing`. A call is written as a head, its arguments, `optional_id` if the call
    has an id, and `tail`. Heads and `optional_id` may contain these fields: {name}, {quoted} (the
    name as a JSON string), {id} and {number} (the number of the call, from 1).

    heads: all heads that a grammar allows; the writer uses the first one. is_single: an answer can
    have only one call.
    """

    opening: str = ""
    heads: tuple[str, ...]
    values: Values
    optional_id: str = ""
    tail: str = ""
    again: str = ""
    closing: str = ""
    is_single: bool = False

    @property
    def markup(self) -> Iterator[str]:
        """All markup of the calls: everything except names, ids and values."""
        yield from (self.opening, *self.heads, self.optional_id, self.tail, self.again)
        yield self.closing
        for each in fields(self.values):
            text = getattr(self.values, each.name)
            if isinstance(text, str):
                yield text

    def write(self, calls: Sequence[Call], id_form: IdForm) -> str:
        """Return the calls as the model would write them."""
        written = (
            self._write_call(self._with_numbered_id(call, number, id_form), number)
            for number, call in enumerate(calls, 1)
        )
        return self.opening + self.again.join(written) + self.closing

    def _write_call(self, call: Call, number: int) -> str:
        """One call, without the markup around all calls. number: from 1."""
        head = named(self.heads[0], call.name).replace("{id}", call.id)
        call_id = self.optional_id.replace("{id}", call.id) if call.id else ""
        arguments = self.values.write(call.arguments)
        return head.replace("{number}", str(number)) + arguments + call_id + self.tail

    def _with_numbered_id(self, call: Call, number: int, id_form: IdForm) -> Call:
        """The call with an id of the form `functions.NAME:N`, N from 0, if the family has such ids."""
        if id_form != "function_number" or call.id.startswith(f"functions.{call.name}:"):
            return call
        return call._replace(id=f"functions.{call.name}:{number - 1}")


def named(head: str, name: str) -> str:
    """Fill a tool's name into a head of a layout."""
    return head.replace("{name}", name).replace("{quoted}", json_text(name))


class BareKeys(NamedTuple):
    """The JSON keys of a call's name and arguments. Without keys for names, the name itself is the
    key of the arguments. closings: markers that may follow such a call.
    """

    names: tuple[str, ...]
    arguments: tuple[str, ...]
    closings: tuple[str, ...] = ()


class ChannelMarkup(NamedTuple):
    """The markup around a thought and around visible text, in a family that answers in channels.

    end: what may follow all channels of an answer.
    """

    text: tuple[str, str]
    thought: tuple[str, str] = ("", "")
    end: str = ""

    @property
    def empty_text_channel(self) -> str:
        """An empty text channel, which some templates write before calls."""
        return "".join(self.text) if self.text[1] else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat(ABC):
    """How a family writes calls. Each subclass reads and writes one kind of syntax; its fields hold
    the markers and other details of one family.

    The strings hold markers as text. For one model, they are encoded (`Markers.encoded`): a marker
    that is a single token of the model becomes one character, both in these strings and in the
    answer, so a reader only has to compare strings.
    """

    id_form: IdForm = "random"

    @property
    @abstractmethod
    def markers(self) -> Sequence[str]:
        """All markers. A marker that is a single token of the model matches only as that token."""

    @property
    @abstractmethod
    def call_starts(self) -> Sequence[str]:
        """The strings that calls may begin with.

        A call start without a marker is ordinary text: it opens calls only at the start of a line.
        """

    @property
    @abstractmethod
    def layout(self) -> CallLayout:
        """How the family writes calls."""

    @property
    def grammar_layouts(self) -> Sequence[CallLayout]:
        """The layouts that a grammar allows, the family's own first; empty if no grammar can
        enforce calls.
        """
        return (self.layout,)

    @property
    def incomplete_layouts(self) -> Sequence[CallLayout]:
        """More layouts, with some markup missing. The reader accepts them, but as a repair."""
        return ()

    @property
    def bare_keys(self) -> BareKeys | None:
        """The keys of calls that are read even as bare JSON objects, without markers; None if there
        are none.
        """
        return None

    @property
    def channels(self) -> ChannelMarkup | None:
        """The markup of text and thoughts; None unless the family writes them in channels."""
        return None

    @property
    def channel_starts(self) -> Sequence[str]:
        """Openers that text or reasoning may follow. They are read even if calls are not read."""
        return ()

    def write(self, calls: Sequence[Call]) -> str:
        """Return the calls as the model would write them, for templates that leave calls out."""
        return self.layout.write(calls, self.id_form)

    @abstractmethod
    def read(self, source: Incoming, deltas: AnswerDeltas) -> Parser[bool]:
        """Read calls, from their start at the current position to the end of their markup.

        Returns False if there is no call. In that case nothing was emitted, what looked like the
        start is text, and reading continues after it. The text of a call may be dropped (`drop_read`) only after the
        call has begun. Every call that has begun is also ended. White space between markup is
        ignored.
        """


def distinct(*words: str) -> tuple[str, ...]:
    """Return the words stripped of white space, without duplicates and empty words."""
    return tuple(dict.fromkeys(marker for word in words if (marker := word.strip())))


# What a reader emits


class Thought(NamedTuple):
    """The position of a thought in an answer, including its markers, in characters."""

    start: int
    end: int


class AnswerDeltas:
    """Collects the deltas of an answer. Only one call is open at a time: begun, but not ended.

    A repair is the name of a deviation from the family's syntax that a reader accepted, as in the
    metric `tool_call_repairs`.
    """

    def __init__(
        self, tools: DeclaredTools, *, reads_calls: bool = True, ids: CallIds | None = None
    ) -> None:
        """reads_calls: False to leave calls as text and read only text and reasoning channels.

        ids: assigns the ids of the calls; None: they have the ids that the model wrote, or none.
        """
        self.tools = tools
        self.reads_calls = reads_calls
        self.ready: list[OutputDelta] = []  # deltas that were not taken yet
        self.types = ParameterTypes(None)  # parameter types of the open call
        self.seen_keys: set[str] = set()  # argument keys of the open call so far
        self.is_open = False  # a call is open
        self.any_call_ended = False  # at least one call has ended
        self._ids = ids
        self._begun_calls = 0  # number of calls that have begun
        self._repairs_of_call: list[str] = []  # of the open call
        self._is_cut_off = False

    def mark_cut_off(self) -> None:
        """Note that the answer was cut off: from now on no call begins, continues or ends."""
        self._is_cut_off = True

    def emit_text(self, kind: TextKind, text: str, *, start: int) -> None:
        """Emit text or reasoning, in which markers are already written out (`Incoming.plain`)."""
        if text:
            self.ready.append(TextDelta(text=text, kind=kind, start=start))

    def take_ready(self) -> Sequence[OutputDelta]:
        """Return the deltas collected since this method was last called, and forget them."""
        deltas, self.ready = self.ready, []
        return deltas

    def begin_call(self, tool: ToolName, *, call_id: str = "", repair: str = "") -> None:
        """Begin a call whose name is certain.

        call_id: the id that the model wrote; empty if it wrote none.
        """
        self.types = self.tools.parameters(tool.name)
        self.seen_keys = set()
        self.is_open = True
        self._repairs_of_call = []
        self.note_repairs(repair, "name" if tool.repaired else "")
        if not self._is_cut_off:
            if self._ids is not None:
                call_id = self._ids.next(tool.name, written=call_id)
            self.ready.append(ToolCallStarted(call=self._begun_calls, id=call_id, name=tool.name))
            self._begun_calls += 1

    def note_repairs(self, *names: str) -> None:
        """Note repairs of the open call. Empty names are ignored."""
        self._repairs_of_call += [
            name for name in names if name and name not in self._repairs_of_call
        ]

    def emit_key(self, key: str) -> None:
        """Emit the next argument's key."""
        self._write(("{" if not self.seen_keys else ", ") + json_text(key) + ": ")
        self.seen_keys.add(key)

    def emit_json(self, text: str) -> None:
        """Emit an argument's value, or all arguments, given as JSON text."""
        self._write(text)

    def emit_typed(self, raw: str, types: frozenset[str]) -> None:
        """Emit an argument's value, given as raw text and typed by the schema."""
        value = convert_to_type(raw, types)
        self.note_repairs(value.repair)
        self.emit_json(value.json)

    def emit_string_text(self, text: str) -> None:
        """Emit more text of an open string. The string's quotes are emitted with `emit_json`."""
        self._write(json_text(text)[1:-1])

    def read_object(
        self, source: Incoming, *, stops: Sequence[str] = (), follows: Sequence[str] = ()
    ) -> Parser[None]:
        """Read all arguments of the open call from one JSON object.

        stops, follows: the markers that end an unfinished object (`JsonStream`).
        """
        stream = JsonStream(source, self.emit_json, stops=stops, follows=follows)
        yield from stream.read()
        self.note_repairs(*stream.repairs)

    def end_call(self, *repairs: str, closed: bool = True, is_whole_object: bool = False) -> None:
        """End the open call.

        closed: whether its closing markup was there. is_whole_object: True if the arguments were emitted as
        a whole object, including its last brace.
        """
        self.note_repairs(*repairs, "" if closed else "unclosed_call")
        if not is_whole_object:
            self._write("}" if self.seen_keys else "{}")
        self.is_open = False
        self.any_call_ended = True
        if not self._is_cut_off:
            self.ready.append(
                ToolCallFinished(call=self._begun_calls - 1, repairs=tuple(self._repairs_of_call))
            )

    def _write(self, text: str) -> None:
        """Emit a fragment of the open call's arguments, which are JSON text."""
        if text and not self._is_cut_off:
            self.ready.append(ToolArgumentsDelta(call=self._begun_calls - 1, text=text))


# Call ids


def random_text(length: int) -> str:
    """Return random letters and digits from the operating system's random source."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(length))


class CallIds:
    """Assigns ids to the calls of one answer. The ids are unique in the conversation."""

    def __init__(
        self,
        form: IdForm,
        *,
        earlier: Iterable[str] = (),
        random_text: Callable[[int], str] = random_text,
    ) -> None:
        """earlier: ids of earlier calls in the conversation; numbered ids continue after them."""
        self._form = form
        self._random_text = random_text
        self._used_ids = set(earlier)
        self._next_number = len(self._used_ids)

    def next(self, name: str, *, written: str = "") -> str:
        """Return the id of the answer's next call.

        written: the id that the model wrote. It is used if it is new and has the family's form.
        """
        call_id = written
        if not written or written in self._used_ids or not self._is_of_form(written, name):
            call_id = next(new for new in self._new_ids(name) if new not in self._used_ids)
        self._used_ids.add(call_id)
        self._next_number += 1
        return call_id

    def _is_of_form(self, call_id: str, name: str) -> bool:
        if self._form in ("random", "client"):
            return True
        return re.fullmatch(id_pattern(self._form, name), call_id) is not None

    def _new_ids(self, name: str) -> Iterator[str]:
        """Yield candidates for the id of a call of this tool, without end."""
        while True:
            match self._form:
                case "alnum9":
                    yield self._random_text(9)
                case "function_number":
                    yield f"functions.{name}:{self._next_number}"
                case "number":
                    yield str(self._next_number)
                case _:
                    yield "call_" + self._random_text(24)
            self._next_number += 1  # an earlier call of the conversation already has this id
