"""Calls as Python writes them, in a list between two markers: LFM2. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.front.toolcalls.call_format import Call, CallParts, IdForm
from holdfast.front.toolcalls.incoming import Incoming, Waiting
from holdfast.front.toolcalls.literals import Literals
from holdfast.front.toolcalls.parameters import read_json_call

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
        written = (f"{call.name}({', '.join(_arguments(call))})" for call in calls)
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


def _arguments(call: Call) -> Iterator[str]:
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
