"""Calls whose arguments are literals: in Python syntax (LFM2) or in braces (Gemma 4). No I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.front.toolcalls.call_format import AnswerDeltas, CallFormat, CallLayout, LiteralValues
from holdfast.front.toolcalls.incoming import Incoming, Parser
from holdfast.front.toolcalls.literals import Literals
from holdfast.front.toolcalls.tagged_parameters import read_json_call

_KEY_AND_EQUALS: Final = re.compile(r"([^\s=,()\[\]{}'\":]+)\s*=(?!=)\s*")
_LONGEST_NAME: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCalls(CallFormat):
    """A family that writes `[NAME(KEY=VALUE, ...), ...]` between two markers."""

    wrapper: tuple[str, str] = ("<|tool_call_start|>", "<|tool_call_end|>")

    @property
    def markers(self) -> Sequence[str]:
        return self.wrapper

    @property
    def call_starts(self) -> Sequence[str]:
        return self.wrapper[:1]

    @property
    def layout(self) -> CallLayout:
        return CallLayout(
            opening=self.wrapper[0] + "[",
            heads=("{name}(",),
            values=LiteralValues(words=("True", "False", "None"), assign="=", single_quotes=True),
            tail=")",
            again=", ",
            closing="]" + self.wrapper[1],
        )

    def read(self, source: Incoming, deltas: AnswerDeltas) -> Parser[bool]:
        """Read the calls at the current position. Returns False if there are none."""
        close = self.wrapper[1]
        yield from source.read_any(self.wrapper[0])
        yield from source.skip_space_and_read("[")
        literals, has_calls = Literals(stops=(close,)), False
        while True:
            yield from source.skip_space()
            if has_calls and source.starts_with(",", ";"):
                source.place += 1
                continue
            if (yield from source.read_any("]")) or (yield from source.match_at((close,))):
                break
            start = source.place
            if not (yield from self._read_call(source, deltas, literals)):
                source.place = start
                return has_calls
            has_calls = True
        yield from source.skip_space_and_read(close)
        return has_calls

    def _read_call(
        self, source: Incoming, deltas: AnswerDeltas, literals: Literals
    ) -> Parser[bool]:
        """Read `NAME(KEY=VALUE, ...)`, or a call in JSON. Returns False if there is none."""
        if (yield from read_json_call(source, deltas, repair="")):
            return True
        ends = ("(", ")", "]", "[", "{", "\n", ",", "=")
        name, marker = yield from source.read_to(ends, limit=_LONGEST_NAME)
        tool = deltas.tools.resolve(name) if marker == "(" else None
        if tool is None:
            return False
        source.place += 1
        deltas.begin_call(tool)
        while True:
            yield from source.skip_space()
            if source.at_end or (yield from source.match_at(literals.stops)):
                deltas.end_call(closed=False)
                break
            if source.text[source.place] in ",)":
                source.place += 1
                if source.text[source.place - 1] == ",":
                    continue
                deltas.end_call()
                break
            yield from self._read_argument(source, deltas, literals)
            source.drop_read()
        source.drop_read()
        return True

    def _read_argument(
        self, source: Incoming, deltas: AnswerDeltas, literals: Literals
    ) -> Parser[None]:
        """Read an argument. One without a name is assigned to the tool's next free parameter."""
        at, marker = yield from source.find(tuple("=,()[]{}'\":"), source.place)
        # a second `=` may follow, so that the first one belongs to the value
        while at + 1 == len(source.text) and marker == "=" and not source.has_ended:
            yield
        key_match = _KEY_AND_EQUALS.match(source.text, source.place)
        if key_match:
            key, source.place = source.plain(key_match[1]), key_match.end()
        else:
            unused_keys = (name for name in deltas.types.properties if name not in deltas.seen_keys)
            key = next(unused_keys, f"argument_{len(deltas.seen_keys) + 1}")
            deltas.note_repairs("positional_argument")
        repairs: list[str] = []
        value = yield from literals.read_value(source, repairs, ends=",)")
        deltas.emit_key(key)
        deltas.emit_json(value)
        deltas.note_repairs(*repairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class BracedCalls(CallFormat):
    """A family that writes one or more `call:NAME{KEY:VALUE,...}` between two markers.

    quote: the quotation mark on both sides of a string without escapes. lead: the text before a
    call's name.
    """

    wrapper: tuple[str, str] = ("<|tool_call>", "<tool_call|>")
    lead: str = "call:"
    quote: str = '<|"|>'

    @property
    def markers(self) -> Sequence[str]:
        return (*self.wrapper, self.quote)

    @property
    def call_starts(self) -> Sequence[str]:
        return self.wrapper[:1]

    @property
    def layout(self) -> CallLayout:
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

    def read(self, source: Incoming, deltas: AnswerDeltas) -> Parser[bool]:
        """Read the calls between two markers. Returns False if there are none."""
        yield from source.read_any(self.wrapper[0])
        yield from source.skip_space()
        while (
            yield from source.read_any(self.wrapper[0])
        ):  # some models repeat the opening marker
            yield from source.skip_space()
        yield from source.read_any(self.lead)
        if not (yield from self._read_call(source, deltas)):
            return False
        while (yield from self._read_another(source, deltas)):
            pass
        yield from source.skip_space_and_read(self.wrapper[1])
        return True

    def _read_another(self, source: Incoming, deltas: AnswerDeltas) -> Parser[bool]:
        """Read another call between the same markers. Returns False if there is none."""
        start = source.place
        if (yield from source.skip_space_and_read(",")):
            yield from source.skip_space()
        if (yield from source.read_any(self.lead)) and (yield from self._read_call(source, deltas)):
            return True
        source.place = start
        return False

    def _read_call(self, source: Incoming, deltas: AnswerDeltas) -> Parser[bool]:
        """Read a name and its arguments. Returns False if there is none."""
        name, marker = yield from source.read_to(
            ("{", "\n", "}", *self.markers), limit=_LONGEST_NAME
        )
        tool = deltas.tools.resolve(name) if marker == "{" else None
        if tool is None:
            return False
        source.place += 1
        deltas.begin_call(tool)
        yield from self._read_arguments(source, deltas)
        return True

    def _read_arguments(self, source: Incoming, deltas: AnswerDeltas) -> Parser[None]:
        """Read the arguments of an open call, and end the call."""
        literals = Literals(raw_quotes=(self.quote,), bare_keys=True, stops=(self.wrapper[1],))
        repairs: list[str] = []
        while True:
            source.drop_read()
            yield from source.skip_space()
            if source.at_end or (yield from source.match_at(literals.stops)):
                deltas.end_call(*repairs, closed=False)
                return
            character = source.text[source.place]
            if character in ",}":
                source.place += 1
                if character == ",":
                    continue
                deltas.end_call(*repairs)
                source.drop_read()
                return
            key = yield from literals.read_key(source, repairs)
            value = yield from literals.read_value(source, repairs, ends=",}")
            deltas.emit_key(key)
            deltas.emit_json(value)
