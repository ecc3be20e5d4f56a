"""Calls whose arguments are literals: in Python syntax (LFM2) or in braces (Gemma 4). No I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.front.toolcalls.call_format import CallFormat, CallLayout, CallParts, LiteralValues
from holdfast.front.toolcalls.incoming import Incoming, Waiting
from holdfast.front.toolcalls.literals import Literals
from holdfast.front.toolcalls.tagged_parameters import read_json_call

_KEYWORD: Final = re.compile(r"([^\s=,()\[\]{}'\":]+)\s*=(?!=)\s*")
_NAME_LENGTH: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCalls(CallFormat):
    """A family that writes `[NAME(KEY=VALUE, ...), ...]` between two markers."""

    wrapper: tuple[str, str] = ("<|tool_call_start|>", "<|tool_call_end|>")

    @property
    def marks(self) -> Sequence[str]:
        """All markers that the family writes."""
        return self.wrapper

    @property
    def openers(self) -> Sequence[str]:
        """The strings that a call may begin with."""
        return self.wrapper[:1]

    @property
    def layout(self) -> CallLayout:
        """How the family writes calls."""
        return CallLayout(
            opening=self.wrapper[0] + "[",
            heads=("{name}(",),
            values=LiteralValues(words=("True", "False", "None"), assign="=", single_quotes=True),
            tail=")",
            again=", ",
            closing="]" + self.wrapper[1],
        )

    def read(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read the calls that start at an opener. Returns False if there are none."""
        close = self.wrapper[1]
        yield from source.taken(self.wrapper[0])
        yield from source.taken_next("[")
        literals, begun = Literals(stops=(close,)), False
        while True:
            yield from source.skip_space()
            if begun and source.at(",", ";"):
                source.place += 1
                continue
            if (yield from source.taken("]")) or (yield from source.standing((close,))):
                break
            start = source.place
            if not (yield from self._read_call(source, parts, literals)):
                source.place = start
                return begun
            begun = True
        yield from source.taken_next(close)
        return begun

    def _read_call(self, source: Incoming, parts: CallParts, literals: Literals) -> Waiting[bool]:
        if (yield from read_json_call(source, parts, repair="")):
            return True
        ends = ("(", ")", "]", "[", "{", "\n", ",", "=")
        name, mark = yield from source.read_to(ends, limit=_NAME_LENGTH)
        tool = parts.tools.named(name) if mark == "(" else None
        if tool is None:
            return False
        source.place += 1
        parts.begin(tool)
        while True:
            yield from source.skip_space()
            if source.at_end or (yield from source.standing(literals.stops)):
                parts.end(closed=False)
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
        """Read an argument. One without a name is assigned to the tool's next free parameter."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BracedCalls(CallFormat):
    """A family that writes one or more `call:NAME{KEY:VALUE,...}` between two markers.

    quote: the mark on both sides of a string without escapes.
    """

    wrapper: tuple[str, str] = ("<|tool_call>", "<tool_call|>")
    lead: str = "call:"
    quote: str = '<|"|>'

    @property
    def marks(self) -> Sequence[str]:
        """All markers that the family writes."""
        return (*self.wrapper, self.quote)

    @property
    def openers(self) -> Sequence[str]:
        """The strings that a call may begin with."""
        return self.wrapper[:1]

    @property
    def layout(self) -> CallLayout:
        """How the family writes calls."""
        opening = self.wrapper[0] + self.lead
        return CallLayout(
            opening=opening,
            heads=("{name}{",),
            values=LiteralValues(
                quote=self.quote, quoted_keys=False, colon=":", comma=",", sorted_keys=True
            ),
            tail="}" + self.wrapper[1],
            again=opening,
        )

    def read(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read the calls between two markers. Returns False if there are none."""
        yield from source.taken(self.wrapper[0])
        yield from source.skip_space()
        while (yield from source.taken(self.wrapper[0])):  # some models repeat the opening marker
            yield from source.skip_space()
        yield from source.taken(self.lead)
        if not (yield from self._read_call(source, parts)):
            return False
        while (yield from self._read_another(source, parts)):
            pass
        yield from source.taken_next(self.wrapper[1])
        return True

    def _read_another(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read another call between the same markers. Returns False if there is none."""
        start = source.place
        if (yield from source.taken_next(",")):
            yield from source.skip_space()
        if (yield from source.taken(self.lead)) and (yield from self._read_call(source, parts)):
            return True
        source.place = start
        return False

    def _read_call(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read a name and its arguments. Returns False if there is none."""
        name, mark = yield from source.read_to(("{", "\n", "}", *self.marks), limit=_NAME_LENGTH)
        tool = parts.tools.named(name) if mark == "{" else None
        if tool is None:
            return False
        source.place += 1
        parts.begin(tool)
        yield from self._read_arguments(source, parts)
        return True

    def _read_arguments(self, source: Incoming, parts: CallParts) -> Waiting[None]:
        literals = Literals(raw_quotes=(self.quote,), bare_keys=True, stops=(self.wrapper[1],))
        repairs: list[str] = []
        while True:
            source.drop_read()
            yield from source.skip_space()
            if source.at_end or (yield from source.standing(literals.stops)):
                parts.end(*repairs, closed=False)
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
