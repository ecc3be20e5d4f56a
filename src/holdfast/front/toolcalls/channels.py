"""Answers made of messages or tags with a header each: gpt-oss' harmony, Muse, Kimi K3. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape, unescape
from typing import Any, Final, NamedTuple

from holdfast.front.toolcalls.call_format import Call, CallParts, IdForm
from holdfast.front.toolcalls.declared import JSON_TYPES, ToolName, json_text
from holdfast.front.toolcalls.incoming import Incoming, Waiting
from holdfast.front.toolcalls.literals import JsonStream
from holdfast.front.toolcalls.tagged_parameters import (
    TaggedParameters,
    ValueEnd,
    read_json_body,
    read_value,
)
from holdfast.wire.output import TextKind

_STRING: Final = frozenset({"string"})
_HEADER_LENGTH = 256
_NOBODY = frozenset({"", "assistant", "user", "all", "self", "none"})
_HEADER: Final = re.compile(r"\s*(\w+)((?:\s+\w+=\"[^\"]*\")*)\s*")
_ATTRIBUTE: Final = re.compile(r"(\w+)=\"([^\"]*)\"")
_TAG_LENGTH = 512
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


def read_arguments(
    source: Incoming, parts: CallParts, tool: ToolName, *, ends: Sequence[str], repair: str = ""
) -> Waiting[None]:
    """Read the body of a call up to one of the ends, which is not read.

    What is no object becomes the tool's only string.
    """
    parts.begin(tool, repair=repair)
    yield from source.skip_space()
    if source.text.startswith("{", source.place):
        stream = JsonStream(source, parts.json, stops=tuple(ends))
        yield from stream.read()
        parts.repair(*stream.repairs)
        rest = yield from _up_to(source, ends)
        parts.end("text_behind_arguments" if rest.strip() else "", complete=True)
    else:
        text = yield from _up_to(source, ends)
        if text.strip():
            strings = [key for key in parts.types.properties if parts.types.of(key) == _STRING]
            parts.key(strings[0] if len(strings) == 1 else "input")
            parts.json(json_text(text))
        parts.end("raw_arguments" if text.strip() else "no_arguments")
    source.drop_read()


def _up_to(source: Incoming, ends: Sequence[str]) -> Waiting[str]:
    at, _ = yield from source.find(ends, source.place)
    text, source.place = source.text[source.place : at], at
    return source.plain(text)


class MessageHeader(NamedTuple):
    """What a message says of itself."""

    role: str = ""
    channel: str = ""
    recipient: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """A family whose answer is `<|start|>ROLE
    to=RECIPIENT<|channel|>CHANNEL<|message|>TEXT<|end|>`, repeated.

    The prompt has the first `<|start|>ROLE`. A message to a tool is a call, in JSON or as `calls`
    writes it.
    """

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    constrain: str = "<|constrain|>"
    message: str = "<|message|>"
    ends: tuple[str, ...] = ("<|end|>", "<|call|>", "<|return|>")
    prefix: str = "functions."  # of a tool's name
    reasoning: frozenset[str] = frozenset({"analysis"})  # channels, or recipients
    calls: TaggedParameters | None = None
    id_form: IdForm = "random"
    written: str = (
        "<|start|>assistant to=functions.{name}<|channel|>commentary "
        "json<|message|>{arguments}<|call|>"
    )

    @property
    def marks(self) -> Sequence[str]:
        """All markers."""
        own = (self.start, self.channel, self.constrain, self.message, *self.ends)
        return tuple(mark for mark in (*own, *(self.calls.marks if self.calls else ())) if mark)

    def write(self, calls: Sequence[Call]) -> str:
        """The calls as the model would write them."""
        return "".join(
            self.written.format(
                name=call.name,
                arguments=self.calls.write([call])
                if self.calls
                else json.dumps(dict(call.arguments), ensure_ascii=False),
            )
            for call in calls
        )

    @property
    def openers(self) -> Sequence[str]:
        """What a message may begin with: the answer's first goes on with the header that the prompt
        has begun.
        """
        return tuple(
            mark
            for mark in (self.start, self.channel, self.message, " to=", "to=", *self.ends)
            if mark
        )

    @property
    def channel_openers(self) -> Sequence[str]:
        """All of them."""
        return self.openers

    def read(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read one message, or the mark of an end that stands alone. False: it is text."""
        if (yield from source.taken(*self.ends)):
            return True
        by_words = not (
            yield from source.standing(
                tuple(mark for mark in (self.start, self.channel, self.message) if mark)
            )
        )
        header = yield from self._read_header(source, must=by_words)
        if header is None:
            return False
        source.drop_read()
        yield from self._read_content(source, parts, header)
        return True

    def _read_header(self, source: Incoming, *, must: bool) -> Waiting[MessageHeader | None]:
        """Read a message's header.

        Where `<|message|>` is missing, it ends with the last word that belongs to a header.

        must: one without `<|message|>` and `<|channel|>` is none.
        """
        yield from source.taken(self.start)
        start = source.place
        at, mark = yield from source.find(
            (self.message, self.start, *self.ends), start, limit=_HEADER_LENGTH
        )
        if mark != self.message:
            found = self._pattern.match(source.text, start, at)
            at = found.end() if found else start
            if must and not (self.channel and self.channel in source.text[start:at]):
                return None
        source.place = at + (len(mark) if mark == self.message else 0)
        text = source.text[start:at]
        named = re.findall(rf"{re.escape(self.channel)}\s*(\w+)", text) if self.channel else []
        # some begin a header anew, `commentary to=assistant<|channel|>analysis`
        channel = named[-1] if named else ""
        return MessageHeader(
            _word(r"^\s*([^\s<=\udc00-\udfff]+)(?=[\s<\udc00-\udfff]|$)", text),
            channel,
            _word(r"\bto=([^\s<\udc00-\udfff]+)", text),
        )

    def _read_content(
        self, source: Incoming, parts: CallParts, header: MessageHeader
    ) -> Waiting[None]:
        name = header.recipient
        if not name and header.role.removeprefix(self.prefix) not in _NOBODY:
            name = header.role  # some put the tool's name in the role's place
        tool = (
            parts.tools.named(name.removeprefix(self.prefix))
            if name not in _NOBODY and parts.reads_calls
            else None
        )
        if tool is not None and self.calls is None and (name == header.recipient or tool.declared):
            repair = "" if name == header.recipient else "role_for_recipient"
            yield from read_arguments(
                source, parts, tool, ends=(*self.ends, self.start), repair=repair
            )
            yield from source.taken(*self.ends)
            source.drop_read()
            return
        kind: TextKind = (
            "reasoning" if {header.channel, header.recipient} & self.reasoning else "text"
        )
        calls = self.calls if parts.reads_calls and name not in _NOBODY else None
        yield from self._read_text(source, parts, kind, calls=calls)

    def _read_text(
        self, source: Incoming, parts: CallParts, kind: TextKind, *, calls: TaggedParameters | None
    ) -> Waiting[None]:
        """Read text up to the message's end, or to where another one begins.

        calls: how calls are written in it. A message that is not to a tool has none, it only quotes
        them.
        """
        openers = tuple(calls.openers) if calls else ()
        begins = tuple(mark for mark in (self.start, self.channel) if mark)
        marks = (*self.ends, *begins, *openers)
        while True:
            say_up_to(source, parts, kind, source.certain(marks))
            if source.place == len(source.text):
                if source.ended:
                    return
                yield
                continue
            mark = yield from source.standing(marks)
            if mark in openers and mark and calls:
                if (yield from calls.read(source, parts)):
                    source.drop_read()
                else:
                    say_up_to(source, parts, kind, len(mark))
                continue
            if mark:
                source.place += len(mark) if mark in self.ends else 0
                source.drop_read()
                return
            say_up_to(source, parts, kind, 1)

    @property
    def _pattern(self) -> re.Pattern[str]:
        """The words that a header may begin with."""
        to, channel, constrain = (
            r"(\s*to=[^\s<{]+)?",
            re.escape(self.channel),
            re.escape(self.constrain),
        )
        channels = rf"({channel}\s*(analysis|commentary|final)?)?" if channel else ""
        kind = rf"(\s*({constrain})?\s*(json|code)\b)?" if constrain else ""
        return re.compile(
            rf"(\s*(assistant|system|developer|user|tool)\b)?{to}{channels}{to}{kind}\s?"
        )


def say_up_to(source: Incoming, parts: CallParts, kind: TextKind, place: int) -> None:
    """Give out what stands before this place, as text of this kind."""
    source.place = 0
    start, source.place = source.position, place
    parts.say(kind, source.plain(source.drop_read()), start=start)


def _word(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""


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
            (self.separator, self.open, self.close), start, limit=_TAG_LENGTH
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
