"""What a reader of calls puts out: the parts of an answer, its arguments written member by member.

Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from holdfast.front.toolcalls.declared import DeclaredTools, ToolName
from holdfast.front.toolcalls.segments import (
    AnswerPart,
    CallArguments,
    CallBegun,
    CallEnded,
    Segment,
)
from holdfast.front.toolcalls.typed_values import ParameterTypes
from holdfast.wire.output import TextKind


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
