"""What a family's reader is asked and gives: calls, their parts as they come, and their ids."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from holdfast.front.toolcalls.declared import DeclaredTools, ParameterTypes, ToolName
from holdfast.front.toolcalls.incoming import Incoming, Waiting
from holdfast.front.toolcalls.segments import (
    AnswerPart,
    CallArguments,
    CallBegun,
    CallEnded,
    Segment,
)
from holdfast.wire.output import TextKind

_ALPHABET = string.ascii_letters + string.digits
_NINE = re.compile(r"[a-zA-Z0-9]{9}")
_FUNCTION = re.compile(r"functions\.(.+):[0-9]+")
IdForm: TypeAlias = Literal["random", "alnum9", "function_number", "number", "client"]
"""What a family's call ids look like: `call_` and 24 characters, 9 characters, `functions.NAME:N`,
`N`.
"""


class CallParts:
    """Collects the parts of calls. One call is open at a time."""

    def __init__(self, tools: DeclaredTools, *, reads_calls: bool = True) -> None:
        """reads_calls: calls are wanted.

        Without, only channels of text and reasoning are read, and what is a call is text.
        """
        self.tools, self.reads_calls = tools, reads_calls
        self.done: list[AnswerPart] = []
        self.types = ParameterTypes(None)  # of the open call
        self.given: set[str] = set()  # its arguments
        self.is_open = False
        self.any_ended = False
        self._repairs: list[str] = []
        self._is_cut = False

    def cut(self) -> None:
        """The answer was ended by its length: from here on no call is begun, gone on with or ended."""
        self._is_cut = True

    def say(self, kind: TextKind, text: str, *, start: int) -> None:
        """Text or reasoning.

        Markers in it are written out (`Incoming.plain`); `start` is its `Incoming.position`.
        """
        if text:
            self.done.append(Segment(kind, text, start))

    def taken(self) -> Sequence[AnswerPart]:
        """What was put out since the last time."""
        done, self.done = self.done, []
        return done

    def begin(self, tool: ToolName, *, call_id: str = "", repair: str = "") -> None:
        """A call whose name is certain."""
        self.types, self.given, self.is_open = self.tools.parameters(tool.name), set(), True
        self._repairs = []
        self.repair(repair, "name" if tool.repaired else "")
        if not self._is_cut:
            self.done.append(CallBegun(tool.name, call_id))

    def repair(self, *names: str) -> None:
        """Something was mended; empty names are nothing."""
        self._repairs += [name for name in names if name and name not in self._repairs]

    def key(self, key: str) -> None:
        """The next argument's name."""
        self._write(("{" if not self.given else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self.given.add(key)

    def json(self, text: str) -> None:
        """An argument's value, or all arguments, as JSON text."""
        self._write(text)

    def text(self, text: str) -> None:
        """More of a string that is open; its quotes are written with `json`."""
        self._write(json.dumps(text, ensure_ascii=False)[1:-1])

    def end(self, *repairs: str, complete: bool = False) -> None:
        """The call is over. complete: its arguments were written as a whole."""
        self.repair(*repairs)
        if not complete:
            self._write("}" if self.given else "{}")
        self.is_open, self.any_ended = False, True
        if not self._is_cut:
            self.done.append(CallEnded(tuple(self._repairs)))

    def _write(self, text: str) -> None:
        if text and not self._is_cut:
            self.done.append(CallArguments(text))


def random_text(length: int) -> str:
    """So many letters and digits, from the system's source."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


class CallIds:
    """Gives the calls of one answer their ids. No id is given twice in a conversation."""

    def __init__(
        self,
        form: IdForm,
        *,
        earlier: Iterable[str] = (),
        random_text: Callable[[int], str] = random_text,
    ) -> None:
        """earlier: ids of the conversation's calls before this answer; where ids count, they count
        on from these.
        """
        self._form, self._random_text = form, random_text
        self._taken = set(earlier)
        self._count = len(self._taken)

    def next(self, name: str, *, written: str = "") -> str:
        """The id of the answer's next call. written: what the model wrote as its id; it stays if it
        is of the family's form.
        """
        call_id = (
            written
            if written and written not in self._taken and self._is_of_form(written, name)
            else self._new(name)
        )
        self._taken.add(call_id)
        self._count += 1
        return call_id

    def _is_of_form(self, written: str, name: str) -> bool:
        match self._form:
            case "alnum9":
                return _NINE.fullmatch(written) is not None
            case "function_number":
                found = _FUNCTION.fullmatch(written)
                return found is not None and found[1] == name
            case "number":
                return written.isascii() and written.isdigit()
        return True

    def _new(self, name: str) -> str:
        while True:
            match self._form:
                case "alnum9":
                    call_id = self._random_text(9)
                case "function_number":
                    call_id = f"functions.{name}:{self._count}"
                case "number":
                    call_id = str(self._count)
                case _:
                    call_id = "call_" + self._random_text(24)
            if call_id not in self._taken:
                return call_id
            self._count += 1  # a client may have ids of its own


class Call(NamedTuple):
    """A call of a tool, whole."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


class CallFormat(Protocol):
    """How a family writes calls: a frozen dataclass, one of the mechanisms of this room with the
    family's data.

    Its strings hold markers as text. For one model they are encoded (`Markers.encoded`): markers
    that are single tokens of the model are one character each, in the data as in what is read, so a
    mechanism matches strings and minds nothing else.
    """

    @property
    def id_form(self) -> IdForm:
        """What its call ids look like."""
        ...

    @property
    def marks(self) -> Sequence[str]:
        """All its markers, as text; those that are single tokens of the model are matched as tokens
        only.
        """
        ...

    @property
    def openers(self) -> Sequence[str]:
        """What calls may begin with.

        One that is none of the marks is ordinary text, and opens only at a line's beginning.
        """
        ...

    def write(self, calls: Sequence[Call]) -> str:
        """The calls as the model would write them, for templates that leave them out."""
        ...

    def read(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read calls from an opener on, at which `source` stands, up to behind the markup.

        False: no call stands here, and nothing was put out; then the opener is text, and reading
        goes on behind it. A call's text may be dropped (`drop_read`) once it is begun, not before.
        One that is begun is ended.
        """
        ...


@runtime_checkable
class ChannelFormat(CallFormat, Protocol):
    """A family that writes its text and its reasoning in channels too.

    `read` gives them out with `CallParts.say`.
    """

    @property
    def channel_openers(self) -> Sequence[str]:
        """Those openers behind which text and reasoning may stand: they are followed whether or not
        calls are to be read.
        """
        ...
