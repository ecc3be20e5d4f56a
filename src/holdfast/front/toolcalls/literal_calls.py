"""Calls whose arguments are literals: in Python's syntax (LFM2) and in braces (Gemma 4). Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.front.toolcalls.call_format import Call, CallParts, IdForm
from holdfast.front.toolcalls.incoming import Incoming, Waiting
from holdfast.front.toolcalls.literals import Literals
from holdfast.front.toolcalls.tagged_parameters import read_json_call

_KEYWORD = re.compile(r"([^\s=,()\[\]{}'\":]+)\s*=(?!=)\s*")
_NAME_LENGTH = 256
_WORDS = {True: "True", False: "False", None: "None"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCalls:
    """A family that writes `[NAME(KEY=VALUE, ...), ...]` between two markers."""

    wrapper: tuple[str, str] = ("<|tool_call_start|>", "<|tool_call_end|>")
    between: str = ", "  # two calls
    id_form: IdForm = "random"

    @property
    def marks(self) -> Sequence[str]:
        """All markers."""
        return self.wrapper

    @property
    def openers(self) -> Sequence[str]:
        """What a call may begin with."""
        return self.wrapper[:1]

    def write(self, calls: Sequence[Call]) -> str:
        """The calls as the model would write them."""
        written = (f"{call.name}({', '.join(_python_arguments(call))})" for call in calls)
        return f"{self.wrapper[0]}[{self.between.join(written)}]{self.wrapper[1]}"

    def read(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read calls from an opener on. False: none stands here, nothing was put out."""
        close = self.wrapper[1]
        yield from source.taken(self.wrapper[0])
        yield from source.skip_space()
        yield from source.taken("[")
        literals, begun = Literals(stops=(close,)), False
        while True:
            yield from source.skip_space()
            if begun and source.text.startswith((",", ";"), source.place):
                source.place += 1
                continue
            if (yield from source.taken("]")) or (yield from source.standing((close,))):
                break
            start = source.place
            if not (yield from self._read_call(source, parts, literals)):
                source.place = start
                return begun
            begun = True
        yield from source.skip_space()
        yield from source.taken(close)
        return begun

    def _read_call(self, source: Incoming, parts: CallParts, literals: Literals) -> Waiting[bool]:
        if (yield from read_json_call(source, parts, repair="")):
            return True
        at, mark = yield from source.find(
            ("(", ")", "]", "[", "{", "\n", ",", "="), source.place, limit=_NAME_LENGTH
        )
        if mark != "(":
            return False
        tool = parts.tools.named(source.plain(source.text[source.place : at]))
        if tool is None:
            return False
        source.place = at + 1
        parts.begin(tool)
        while True:
            yield from source.skip_space()
            if source.place == len(source.text) or (yield from source.standing(literals.stops)):
                parts.end("unclosed_call")
                break
            if source.text[source.place] in ",)":
                source.place += 1
                if source.text[source.place - 1] == ",":
                    continue
                parts.end()
                break
            yield from self._read_argument(source, parts, literals)
            source.drop_read()
        source.drop_read()
        return True

    def _read_argument(
        self, source: Incoming, parts: CallParts, literals: Literals
    ) -> Waiting[None]:
        """One argument; one without a name is the next of the tool's parameters."""
        at, mark = yield from source.find(tuple("=,()[]{}'\":"), source.place)
        while at + 1 == len(source.text) and mark == "=" and not source.ended:
            yield
        keyword = _KEYWORD.match(source.text, source.place)
        if keyword:
            key, source.place = source.plain(keyword[1]), keyword.end()
        else:
            free = (name for name in parts.types.properties if name not in parts.given)
            key = next(free, f"argument_{len(parts.given) + 1}")
            parts.repair("positional_argument")
        repairs: list[str] = []
        value = yield from literals.value(source, repairs, ends=",)")
        parts.key(key)
        parts.json(value)
        parts.repair(*repairs)


def _python_arguments(call: Call) -> Iterator[str]:
    return (f"{key}={_python(value)}" for key, value in call.arguments.items())


def _python(value: Any) -> str:
    """A value as a Python literal, its strings in double quotes."""
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{_python(key)}: {_python(inner)}" for key, inner in value.items())
            + "}"
        )
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_python, value)) + "]"
    return (
        _WORDS[value]
        if value is None or isinstance(value, bool)
        else json.dumps(value, ensure_ascii=False)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BracedCalls:
    """A family that writes one or more `call:NAME{KEY:VALUE,...}` between two markers; `quote`
    encloses a string.
    """

    wrapper: tuple[str, str] = ("<|tool_call>", "<tool_call|>")
    lead: str = "call:"
    quote: str = '<|"|>'
    id_form: IdForm = "random"

    @property
    def marks(self) -> Sequence[str]:
        """All markers."""
        return (*self.wrapper, self.quote)

    @property
    def openers(self) -> Sequence[str]:
        """What a call may begin with."""
        return (self.wrapper[0],)

    def write(self, calls: Sequence[Call]) -> str:
        """The calls as the model would write them."""
        return "".join(
            f"{self.wrapper[0]}{self.lead}{call.name}{self._written(call.arguments)}{self.wrapper[1]}"
            for call in calls
        )

    def read(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read the calls of a block from its opener on.

        False: none stands here, nothing was put out.
        """
        yield from source.taken(self.wrapper[0])
        yield from source.skip_space()
        while (yield from source.taken(self.wrapper[0])):  # some repeat it
            yield from source.skip_space()
        yield from source.taken(self.lead)
        if not (yield from self._read_call(source, parts)):
            return False
        while (yield from self._read_another(source, parts)):
            pass
        yield from source.skip_space()
        yield from source.taken(self.wrapper[1])
        return True

    def _read_another(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read one more call of the same block. False: none stands here, nothing was read."""
        start = source.place
        yield from source.skip_space()
        if (yield from source.taken(",")):
            yield from source.skip_space()
        if (yield from source.taken(self.lead)) and (yield from self._read_call(source, parts)):
            return True
        source.place = start
        return False

    def _read_call(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read a name and its arguments. False: no call stands here, nothing was put out."""
        at, mark = yield from source.find(
            ("{", "\n", "}", *self.marks), source.place, limit=_NAME_LENGTH
        )
        tool = (
            parts.tools.named(source.plain(source.text[source.place : at])) if mark == "{" else None
        )
        if tool is None:
            return False
        source.place = at + 1
        parts.begin(tool)
        yield from self._read_arguments(source, parts)
        return True

    def _read_arguments(self, source: Incoming, parts: CallParts) -> Waiting[None]:
        literals = Literals(raw_quotes=(self.quote,), bare_keys=True, stops=(self.wrapper[1],))
        repairs: list[str] = []
        while True:
            source.drop_read()
            yield from source.skip_space()
            if source.place == len(source.text) or (yield from source.standing(literals.stops)):
                parts.end(*repairs, "unclosed_call")
                return
            character = source.text[source.place]
            if character in ",}":
                source.place += 1
                if character == ",":
                    continue
                parts.end(*repairs)
                source.drop_read()
                return
            key = yield from literals.key(source, repairs)
            value = yield from literals.value(source, repairs, ends=",}")
            parts.key(key)
            parts.json(value)

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            return self.quote + value + self.quote
        if isinstance(value, dict) or hasattr(value, "items"):
            return (
                "{"
                + ",".join(f"{key}:{self._written(inner)}" for key, inner in value.items())
                + "}"
            )
        if isinstance(value, (list, tuple)):
            return "[" + ",".join(map(self._written, value)) + "]"
        return json.dumps(value)
