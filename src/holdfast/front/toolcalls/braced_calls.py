"""Calls as a name and its arguments in braces, with marks for quotes: Gemma 4 and FunctionGemma.

Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.front.toolcalls.call_format import Call, CallParts, IdForm
from holdfast.front.toolcalls.incoming import Incoming, Waiting
from holdfast.front.toolcalls.literals import Literals

_NAME_LENGTH = 256


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
