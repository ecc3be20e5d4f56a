"""Answers of Kimi K3: channels and calls between `<|open|>NAME ...<|sep|>` and
`<|close|>NAME<|sep|>`. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape, unescape
from typing import Any, Final

from holdfast.front.toolcalls.call_format import Call, CallParts, IdForm
from holdfast.front.toolcalls.channels import say_up_to
from holdfast.front.toolcalls.incoming import Incoming, Waiting
from holdfast.front.toolcalls.parameters import ValueEnd, read_json_body, read_value
from holdfast.front.toolcalls.typed_values import JSON_TYPES
from holdfast.wire.output import TextKind

_HEADER: Final = re.compile(r"\s*(\w+)((?:\s+\w+=\"[^\"]*\")*)\s*")
_ATTRIBUTE: Final = re.compile(r"(\w+)=\"([^\"]*)\"")
_HEADER_LENGTH = 512
_TEXTS: Final[Mapping[str, TextKind]] = {"think": "reasoning", "response": "text"}
_STRUCTURE: Final = frozenset({"message", "tools", *_TEXTS})
_TYPES: Final = {
    bool: "boolean",
    str: "string",
    int: "number",
    float: "number",
    list: "array",
    type(None): "null",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiK3:
    """The marks of the family's tags. Text outside of a channel is text, white space excepted."""

    open: str = "<|open|>"
    close: str = "<|close|>"
    separator: str = "<|sep|>"
    id_form: IdForm = "random"

    @property
    def marks(self) -> Sequence[str]:
        """All markers."""
        return (self.open, self.close, self.separator)

    def write(self, calls: Sequence[Call]) -> str:
        """The calls as the model would write them."""
        inner = "".join(
            self._tag(
                "call",
                "".join(self._written(*pair) for pair in call.arguments.items()),
                tool=call.name,
                index=str(place),
            )
            for place, call in enumerate(calls, 1)
        )
        return self._tag("tools", inner)

    @property
    def openers(self) -> Sequence[str]:
        """What a channel or a call may begin or end with."""
        return (self.open, self.close)

    @property
    def channel_openers(self) -> Sequence[str]:
        """All of them."""
        return self.openers

    def read(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read a tag, or what stands in the channel or call that it opens. False: it is text."""
        channel: TextKind | None = None
        read = False
        while True:
            mark = yield from source.standing(self.openers)
            tag = (yield from self._read_tag(source, mark)) if mark else None
            if tag is None and not read:
                return False
            if tag is None:
                say_up_to(source, parts, channel or "text", source.place + max(1, len(mark)))
            elif mark == self.open:
                channel = yield from self._opened(source, parts, tag, channel)
            else:
                channel = None if tag[0] in _TEXTS else channel
                if tag[0] == "call" and parts.is_open:
                    parts.end()
            source.drop_read()
            read = True
            yield from self._read_text(source, parts, channel)
            if source.place == len(source.text) or not (channel or parts.is_open):
                break
        if parts.is_open:
            parts.end("unclosed_call")
        return True

    def _read_text(
        self, source: Incoming, parts: CallParts, channel: TextKind | None
    ) -> Waiting[None]:
        """Read text up to a tag, if a channel or call is open; white space between a call's
        arguments is none.
        """
        while channel or parts.is_open:
            certain = source.certain(self.openers)
            if not channel:
                certain, _ = yield from source.find(self.openers, 0)
            if channel or source.text[:certain].strip():
                say_up_to(source, parts, channel or "text", certain)
            else:
                source.place = certain
                source.drop_read()
            if source.text:
                if (yield from source.standing(self.openers)):
                    return
                say_up_to(source, parts, channel or "text", 1)
            elif source.ended:
                return
            else:
                yield

    def _read_tag(self, source: Incoming, mark: str) -> Waiting[tuple[str, dict[str, str]] | None]:
        """A tag's name and attributes. None: it is none, nothing was read."""
        start = source.place + len(mark)
        at, end = yield from source.find(
            (self.separator, self.open, self.close), start, limit=_HEADER_LENGTH
        )
        found = _HEADER.fullmatch(source.text[start:at])
        if end != self.separator or found is None:
            return None
        source.place = at + len(end)
        return found[1], {key: unescape(value) for key, value in _ATTRIBUTE.findall(found[2])}

    def _opened(
        self,
        source: Incoming,
        parts: CallParts,
        tag: tuple[str, dict[str, str]],
        channel: TextKind | None,
    ) -> Waiting[TextKind | None]:
        """Read on behind an opening tag; the channel of what follows."""
        name, attributes = tag
        if name in _STRUCTURE:
            return _TEXTS.get(name)
        if name == "call":
            if parts.is_open:
                parts.end("unclosed_call")
            tool = parts.tools.named(attributes.get("tool", "")) if parts.reads_calls else None
            if tool is not None:
                parts.begin(tool)
                return None
        elif name == "argument" and parts.is_open and "key" in attributes:
            kind = attributes.get("type")
            types = (
                parts.types.of(attributes["key"])
                if kind is None
                else frozenset({"string"})
                if kind == "string"
                else JSON_TYPES
            )
            parts.key(attributes["key"])
            yield from read_value(source, parts, self._value_ends(), types=types)
            return None
        elif name == "json" and parts.is_open:
            yield from source.skip_space()
            if (yield from read_json_body(source, parts, repair="")):
                parts.end(complete=True)
            return None
        say_up_to(source, parts, channel or "text", source.place)
        return channel

    def _value_ends(self) -> tuple[ValueEnd, ...]:
        again = (f"{self.open}argument", f"{self.close}call")
        return (
            ValueEnd(
                f"{self.close}argument{self.separator}",
                (*again, f"{self.close}tools", f"{self.open}call"),
            ),
            *(ValueEnd(mark, (), closes=False, repair="unclosed_value") for mark in again[1:]),
        )

    def _written(self, key: str, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return self._tag("argument", text, key=key, type=_TYPES.get(type(value), "object"))

    def _tag(self, name: str, inner: str, **attributes: str) -> str:
        words = "".join(f' {key}="{escape(value)}"' for key, value in attributes.items())
        return f"{self.open}{name}{words}{self.separator}{inner}{self.close}{name}{self.separator}"
