"""What a family declares about its calls, and the parts of an answer that its reader puts out."""

from __future__ import annotations

import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from holdfast.front.toolcalls.declared import (
    DeclaredTools,
    ParameterTypes,
    ToolName,
    type_of,
    typed,
)
from holdfast.front.toolcalls.incoming import Incoming, Waiting
from holdfast.front.toolcalls.literals import JsonStream, json_text
from holdfast.wire.output import TextKind

_ALPHABET: Final = string.ascii_letters + string.digits
IdForm: TypeAlias = Literal["random", "alnum9", "function_number", "number", "client"]
"""The form of a family's call ids: `call_` and 24 characters, 9 characters, `functions.NAME:N`,
`N`, or whatever the client sent.
"""


def id_pattern(form: IdForm, name: str) -> str:
    """A regular expression of the ids that a model writes for calls of this tool."""
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
    """Arguments as one JSON object."""

    def write(self, arguments: Mapping[str, Any]) -> str:
        """The arguments as the model would write them."""
        return json_text(dict(arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedValues:
    """Arguments as tags with raw values: before, key, text or json, value, end, gap.

    text: before a string. json: before any other value, which is written as JSON; {type} in it
        stands for the value's type.
    cdata: a string may stand in a CDATA section.
    """

    before: str
    text: str
    json: str
    end: str
    gap: str = ""
    cdata: bool = False

    def write(self, arguments: Mapping[str, Any]) -> str:
        """The arguments as the model would write them."""
        return "".join(self._written(key, value) for key, value in arguments.items())

    def _written(self, key: str, value: Any) -> str:
        if isinstance(value, str):
            lead, text = self.text, value
        else:
            kind = type_of(value).replace("integer", "number")
            lead, text = self.json.replace("{type}", kind), json_text(value)
        if self.cdata and any(character in text for character in "<&\n"):
            text = CDATA[0] + text + CDATA[1]
        return self.before + key + lead + text + self.end + self.gap


CDATA: Final = ("<![CDATA[", "]]>")


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedValues:
    """Arguments as nested tags, with a mark before each tag. Null is left out.

    item: the tag of an array's item.
    """

    mark: str
    item: str

    def write(self, arguments: Mapping[str, Any]) -> str:
        """The arguments as the model would write them."""
        written = (
            self._written(key, value) for key, value in arguments.items() if value is not None
        )
        return "".join(written)

    def _written(self, name: str, value: Any) -> str:
        if isinstance(value, Mapping):
            inner = self.write(value)
        elif isinstance(value, (list, tuple)):
            inner = "".join(self._written(self.item, each) for each in value)
        else:
            inner = value if isinstance(value, str) else json_text(value)
        return f"{self.mark}<{name}>{inner}{self.mark}</{name}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralValues:
    """Arguments as `KEY assign VALUE`, with values in a syntax of their own.

    words: true, false and null. quote: on either side of a string without escapes; empty: strings
    are JSON's. quoted_keys: those of objects. assign: after an argument's name; empty: arguments
    are written like the members of an object.
    """

    words: tuple[str, str, str] = ("true", "false", "null")
    quote: str = ""
    quoted_keys: bool = True
    colon: str = ": "
    comma: str = ", "
    assign: str = ""

    def write(self, arguments: Mapping[str, Any]) -> str:
        """The arguments as the model would write them."""
        if not self.assign:
            return self._members(arguments)
        return self.comma.join(
            f"{key}{self.assign}{self.value(value)}" for key, value in arguments.items()
        )

    def value(self, value: Any) -> str:
        """One value."""
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
        """A boolean or null."""
        return self.words[2 if value is None else int(not value)]

    def key(self, name: str) -> str:
        """The name of an object's member."""
        return json_text(name) if self.quoted_keys else name

    def _members(self, members: Mapping[str, Any]) -> str:
        return self.comma.join(
            self.key(name) + self.colon + self.value(value) for name, value in members.items()
        )


Values: TypeAlias = JsonObject | TaggedValues | NestedValues | LiteralValues


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLayout:
    """How a family writes the calls of an answer; its writer and its grammar follow from it.

    The answer is `opening`, a call, more calls that each follow `again`, and `closing`. A call is a
    head, its arguments, `optional_id` if it has an id, and `tail`. In heads and `optional_id` stand
    {name}, {quoted} (the name as a JSON string), {id} and {number} (of the call, from 1).

    heads: the first one is written; a grammar allows any. is_single: an answer has only one call.
    """

    opening: str = ""
    heads: tuple[str, ...]
    values: Values
    optional_id: str = ""
    tail: str = ""
    again: str = ""
    closing: str = ""
    is_single: bool = False

    def write(self, calls: Sequence[Call], id_form: IdForm) -> str:
        """The calls as the model would write them."""
        written = (
            self._written(self._numbered(call, number, id_form), number)
            for number, call in enumerate(calls, 1)
        )
        return self.opening + self.again.join(written) + self.closing

    def _written(self, call: Call, number: int) -> str:
        head = named(self.heads[0], call.name).replace("{id}", call.id)
        call_id = self.optional_id.replace("{id}", call.id) if call.id else ""
        arguments = self.values.write(call.arguments)
        return head.replace("{number}", str(number)) + arguments + call_id + self.tail

    def _numbered(self, call: Call, number: int, id_form: IdForm) -> Call:
        if id_form != "function_number" or call.id.startswith(f"functions.{call.name}:"):
            return call
        return call._replace(id=f"functions.{call.name}:{number - 1}")


def named(head: str, name: str) -> str:
    """A head of a layout, with the tool's name."""
    return head.replace("{name}", name).replace("{quoted}", json_text(name))


class ChannelMarkup(NamedTuple):
    """What a family that answers in channels writes around a thought and around visible text."""

    text: tuple[str, str]
    thought: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat(ABC):
    """How a family writes calls; the subclasses are the mechanisms, their fields a family's data.

    The strings hold markers as text. For one model they are encoded (`Markers.encoded`): a marker
    that is a single token of the model becomes one character, in these strings as in the answer, so
    that a reader only compares strings.
    """

    id_form: IdForm = "random"

    @property
    @abstractmethod
    def marks(self) -> Sequence[str]:
        """All markers. Those that are single tokens of the model only match as tokens."""

    @property
    @abstractmethod
    def openers(self) -> Sequence[str]:
        """What calls may begin with.

        An opener without a marker is ordinary text: it only opens calls at the start of a line.
        """

    @property
    @abstractmethod
    def layout(self) -> CallLayout:
        """How calls are written."""

    @property
    def drawn_layout(self) -> CallLayout | None:
        """How a grammar lets the model write calls; None: no grammar can enforce them."""
        return self.layout

    @property
    def channels(self) -> ChannelMarkup | None:
        """The markup of text and thoughts, for a family that writes them in channels."""
        return None

    @property
    def channel_openers(self) -> Sequence[str]:
        """Openers that text or reasoning may follow: they are read even if calls are not."""
        return ()

    def write(self, calls: Sequence[Call]) -> str:
        """The calls as the model would write them, for templates that leave them out."""
        return self.layout.write(calls, self.id_form)

    @abstractmethod
    def read(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read calls from the opener at which `source` stands to the end of their markup.

        Returns False if there is no call; nothing was put out then, the opener is text, and reading
        continues after it. The text of a call may be dropped (`drop_read`) once the call has begun,
        not before. Every call that was begun is ended. White space between markup does not matter.
        """


def distinct(*words: str) -> tuple[str, ...]:
    """The words without white space at their ends, each once, empty ones left out."""
    return tuple(dict.fromkeys(mark for word in words if (mark := word.strip())))


# What a reader puts out


class Segment(NamedTuple):
    """A part of an answer's text of one kind; not empty."""

    kind: TextKind
    text: str
    start: int = 0  # characters of the answer before it, markers written out


class Thought(NamedTuple):
    """Where a thought stands in an answer, its markers included, in characters."""

    start: int
    end: int


class CallBegun(NamedTuple):
    """A call, once its name is certain."""

    name: str
    id: str = ""  # as the model wrote it, if it did


class CallArguments(NamedTuple):
    """A fragment of the open call's arguments, not empty. The fragments join to one JSON object."""

    text: str


class CallEnded(NamedTuple):
    """The open call is complete."""

    repairs: tuple[str, ...] = ()  # names of what was repaired


AnswerPart: TypeAlias = Segment | CallBegun | CallArguments | CallEnded


class CallParts:
    """Collects the parts of calls. One call is open at a time."""

    def __init__(self, tools: DeclaredTools, *, reads_calls: bool = True) -> None:
        """reads_calls: False if calls stay text, and only channels of text and reasoning are read."""
        self.tools = tools
        self.reads_calls = reads_calls
        self.done: list[AnswerPart] = []
        self.types = ParameterTypes(None)  # of the open call
        self.given: set[str] = set()  # the keys of its arguments
        self.is_open = False
        self.any_ended = False
        self._repairs: list[str] = []
        self._is_cut = False

    def cut(self) -> None:
        """The answer reached its length limit: from now on no call begins, continues or ends."""
        self._is_cut = True

    def say(self, kind: TextKind, text: str, *, start: int) -> None:
        """Put out text or reasoning, with its markers written out (`Incoming.plain`)."""
        if text:
            self.done.append(Segment(kind, text, start))

    def taken(self) -> Sequence[AnswerPart]:
        """The parts since the last time."""
        done, self.done = self.done, []
        return done

    def begin(self, tool: ToolName, *, call_id: str = "", repair: str = "") -> None:
        """Begin a call whose name is certain."""
        self.types = self.tools.parameters(tool.name)
        self.given = set()
        self.is_open = True
        self._repairs = []
        self.repair(repair, "name" if tool.repaired else "")
        if not self._is_cut:
            self.done.append(CallBegun(tool.name, call_id))

    def repair(self, *names: str) -> None:
        """Note repairs of the open call; empty names are ignored."""
        self._repairs += [name for name in names if name and name not in self._repairs]

    def key(self, key: str) -> None:
        """The next argument's key."""
        self._write(("{" if not self.given else ", ") + json_text(key) + ": ")
        self.given.add(key)

    def json(self, text: str) -> None:
        """An argument's value, or all arguments, as JSON text."""
        self._write(text)

    def typed(self, raw: str, types: frozenset[str]) -> None:
        """An argument's value from its text, typed by the schema."""
        value = typed(raw, types)
        self.repair(value.repair)
        self.json(value.json)

    def text(self, text: str) -> None:
        """More of an open string, whose quotes are written with `json`."""
        self._write(json_text(text)[1:-1])

    def read_object(
        self, source: Incoming, *, stops: Sequence[str] = (), follows: Sequence[str] = ()
    ) -> Waiting[None]:
        """Read all arguments of the open call, written as one JSON object (`JsonStream`)."""
        stream = JsonStream(source, self.json, stops=stops, follows=follows)
        yield from stream.read()
        self.repair(*stream.repairs)

    def end(self, *repairs: str, complete: bool = False) -> None:
        """End the call. complete: its arguments were written as a whole object."""
        self.repair(*repairs)
        if not complete:
            self._write("}" if self.given else "{}")
        self.is_open = False
        self.any_ended = True
        if not self._is_cut:
            self.done.append(CallEnded(tuple(self._repairs)))

    def _write(self, text: str) -> None:
        if text and not self._is_cut:
            self.done.append(CallArguments(text))


# Call ids


def random_text(length: int) -> str:
    """Random letters and digits, from the system's source."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


class CallIds:
    """Gives the calls of one answer their ids, unique in the conversation."""

    def __init__(
        self,
        form: IdForm,
        *,
        earlier: Iterable[str] = (),
        random_text: Callable[[int], str] = random_text,
    ) -> None:
        """earlier: the ids of earlier calls in the conversation; numbered ids continue from them."""
        self._form = form
        self._random_text = random_text
        self._taken = set(earlier)
        self._count = len(self._taken)

    def next(self, name: str, *, written: str = "") -> str:
        """The id of the answer's next call.

        written: the id that the model wrote. It is kept if it is new and of the family's form.
        """
        call_id = written
        if not written or written in self._taken or not self._is_of_form(written, name):
            call_id = next(new for new in self._new_ids(name) if new not in self._taken)
        self._taken.add(call_id)
        self._count += 1
        return call_id

    def _is_of_form(self, written: str, name: str) -> bool:
        if self._form in ("random", "client"):
            return True
        return re.fullmatch(id_pattern(self._form, name), written) is not None

    def _new_ids(self, name: str) -> Iterator[str]:
        while True:
            match self._form:
                case "alnum9":
                    yield self._random_text(9)
                case "function_number":
                    yield f"functions.{name}:{self._count}"
                case "number":
                    yield str(self._count)
                case _:
                    yield "call_" + self._random_text(24)
            self._count += 1  # the client already uses this id
