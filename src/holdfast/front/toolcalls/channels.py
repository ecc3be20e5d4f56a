"""Formats of answers that consist of messages or tags with a header: gpt-oss' harmony, Muse, Kimi
K3. No I/O.

A malformed header is never treated as an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import unescape
from typing import Final, NamedTuple

from holdfast.front.output import TextKind
from holdfast.front.toolcalls.call_format import (
    CallFormat,
    CallLayout,
    CallParts,
    ChannelMarkup,
    JsonObject,
    TaggedValues,
    distinct,
)
from holdfast.front.toolcalls.declared import JSON_TYPES, ToolName
from holdfast.front.toolcalls.incoming import Incoming, Waiting
from holdfast.front.toolcalls.literals import json_text
from holdfast.front.toolcalls.tagged_parameters import (
    STRING,
    TaggedParameters,
    ValueEnd,
    read_json_body,
    read_value,
)

_HEADER_LENGTH: Final = 256
_NOBODY: Final = frozenset({"", "assistant", "user", "all", "self", "none"})
_HEADER: Final = re.compile(r"\s*(\w+)((?:\s+\w+=\"[^\"]*\")*)\s*")
_ATTRIBUTE: Final = re.compile(r"(\w+)=\"([^\"]*)\"")
_TAG_LENGTH: Final = 512
_TEXTS: Final[Mapping[str, TextKind]] = {"think": "reasoning", "response": "text"}
_STRUCTURE: Final = frozenset({"message", "tools", *_TEXTS})


class MessageHeader(NamedTuple):
    """The fields of a message's header."""

    role: str = ""
    channel: str = ""
    recipient: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels(CallFormat):
    """A family whose answers consist of messages, each written as
    `<|start|>ROLE to=RECIPIENT<|channel|>CHANNEL<|message|>TEXT<|end|>`.

    The prompt ends with the `<|start|>ROLE` of the first message. A message to a tool is a call;
    its arguments are JSON or have the form that `calls` describes. prefix: text before a tool's
    name. reasoning: channels or recipients that mark a message as a thought.
    """

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    constrain: str = "<|constrain|>"
    message: str = "<|message|>"
    ends: tuple[str, ...] = ("<|end|>", "<|call|>", "<|return|>")
    prefix: str = "functions."
    reasoning: frozenset[str] = frozenset({"analysis"})
    calls: TaggedParameters | None = None

    @property
    def marks(self) -> Sequence[str]:
        """All markers that the family writes."""
        own = (self.start, self.channel, self.constrain, self.message, *self.ends)
        return distinct(*own, *(self.calls.marks if self.calls else ()))

    @property
    def openers(self) -> Sequence[str]:
        """The strings that a message may begin with. The first message begins in the prompt."""
        own = (self.start, self.channel, self.message, " to=", "to=", *self.ends)
        return tuple(mark for mark in own if mark)

    @property
    def channel_openers(self) -> Sequence[str]:
        """The same as `openers`: in this family, text and thoughts have markup, too."""
        return self.openers

    @property
    def layout(self) -> CallLayout:
        """How the family writes calls."""
        to = f"{self.start}assistant to={self.prefix}{{name}}"
        if self.calls is None:
            head = f"{to}{self.channel}commentary json{self.message}"
            return CallLayout(heads=(head,), values=JsonObject(), tail=self.ends[1])
        inner = self.calls.layout
        return CallLayout(
            heads=(to + self.message + inner.opening + inner.heads[0],),
            values=inner.values,
            tail=inner.tail + inner.closing + self.ends[0],
        )

    @property
    def grammar_layouts(self) -> Sequence[CallLayout]:
        """The layout that a grammar lets the model write: one call, which ends the answer."""
        if self.calls is not None:
            return ()
        to, kind = f" to={self.prefix}{{name}}", f"{self.channel}commentary"
        forms = (
            f"{kind}{to} {self.constrain}json",
            f"{to}{kind} {self.constrain}json",
            f"{to}{kind} json",
        )
        heads = tuple(form + self.message for form in forms)
        return (CallLayout(heads=heads, values=JsonObject(), is_single=True),)

    @property
    def channels(self) -> ChannelMarkup | None:
        """The markup of text and thoughts."""
        if self.calls is not None:
            return None
        return ChannelMarkup(
            text=(f"{self.channel}final{self.message}", ""),
            thought=(
                f"{self.channel}analysis{self.message}",
                f"{self.ends[0]}{self.start}assistant",
            ),
        )

    def read(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read one message or a single end mark. Returns False if the text is neither."""
        if (yield from source.taken(*self.ends)):
            return True
        begins = distinct(self.start, self.channel, self.message)
        is_marked = bool((yield from source.standing(begins)))
        header = yield from self._read_header(source, must=not is_marked)
        if header is None:
            return False
        source.drop_read()
        yield from self._read_content(source, parts, header)
        return True

    def _read_header(self, source: Incoming, *, must: bool) -> Waiting[MessageHeader | None]:
        """Read a message's header.

        If `<|message|>` is missing, the header ends after the last word that can be part of a
        header.

        must: True to accept only a header that contains `<|message|>` or `<|channel|>`.
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
        # some models write a second header inside: `commentary to=assistant<|channel|>analysis`
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
            name = header.role  # some models put the tool's name in place of the role
        may_call = name not in _NOBODY and parts.reads_calls
        tool = parts.tools.named(name.removeprefix(self.prefix)) if may_call else None
        if tool is not None and self.calls is None and (name == header.recipient or tool.declared):
            repair = "" if name == header.recipient else "role_for_recipient"
            yield from _read_arguments(
                source, parts, tool, ends=(*self.ends, self.start), repair=repair
            )
            yield from source.taken(*self.ends)
            source.drop_read()
            return
        is_thought = bool({header.channel, header.recipient} & self.reasoning)
        kind: TextKind = "reasoning" if is_thought else "text"
        yield from self._read_text(source, parts, kind, calls=self.calls if may_call else None)

    def _read_text(
        self, source: Incoming, parts: CallParts, kind: TextKind, *, calls: TaggedParameters | None
    ) -> Waiting[None]:
        """Read text up to the end of the message or the beginning of another.

        calls: how calls in the text are written; None if whatever looks like a call is text.
        """
        openers = tuple(calls.openers) if calls else ()
        begins = distinct(self.start, self.channel)
        marks = (*self.ends, *begins, *openers)
        while True:
            _say_up_to(source, parts, kind, source.certain(marks))
            if source.at_end:
                if source.ended:
                    return
                yield
                continue
            mark = yield from source.standing(marks)
            if mark in openers and mark and calls:
                if (yield from calls.read(source, parts)):
                    source.drop_read()
                else:
                    _say_up_to(source, parts, kind, len(mark))
                continue
            if mark:
                source.place += len(mark) if mark in self.ends else 0
                source.drop_read()
                return
            _say_up_to(source, parts, kind, 1)

    @property
    def _pattern(self) -> re.Pattern[str]:
        """A pattern of the words that a header may begin with."""
        to = r"(\s*to=[^\s<{]+)?"
        channel, constrain = re.escape(self.channel), re.escape(self.constrain)
        channels = rf"({channel}\s*(analysis|commentary|final)?)?" if channel else ""
        kind = rf"(\s*({constrain})?\s*(json|code)\b)?" if constrain else ""
        return re.compile(
            rf"(\s*(assistant|system|developer|user|tool)\b)?{to}{channels}{to}{kind}\s?"
        )


def _read_arguments(
    source: Incoming, parts: CallParts, tool: ToolName, *, ends: Sequence[str], repair: str = ""
) -> Waiting[None]:
    """Read the body of a call up to one of the ends.

    If the body is not an object, it becomes the value of the tool's only string argument.
    """
    parts.begin(tool, repair=repair)
    yield from source.skip_space()
    if source.at("{"):
        yield from parts.read_object(source, stops=ends)
        rest, _ = yield from source.read_to(ends)
        parts.end("text_behind_arguments" if rest.strip() else "", complete=True)
    else:
        text, _ = yield from source.read_to(ends)
        if text.strip():
            strings = [
                key for key in parts.types.properties if parts.types.of_parameter(key) == STRING
            ]
            parts.key(strings[0] if len(strings) == 1 else "input")
            parts.json(json_text(text))
        parts.end("raw_arguments" if text.strip() else "no_arguments")
    source.drop_read()


def _say_up_to(source: Incoming, parts: CallParts, kind: TextKind, place: int) -> None:
    """Emit the text up to this position as text of this kind."""
    source.place = 0
    start, source.place = source.position, place
    parts.say(kind, source.plain(source.drop_read()), start=start)


def _word(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiK3(CallFormat):
    """A family that writes text, thoughts and calls between `<|open|>NAME KEY="VALUE"<|sep|>` and
    `<|close|>NAME<|sep|>`. Anything outside of such tags is text, except for white space.
    """

    open: str = "<|open|>"
    close: str = "<|close|>"
    separator: str = "<|sep|>"

    @property
    def marks(self) -> Sequence[str]:
        """All markers that the family writes."""
        return (self.open, self.close, self.separator)

    @property
    def openers(self) -> Sequence[str]:
        """The tags that a channel or a call may begin or end with."""
        return (self.open, self.close)

    @property
    def channel_openers(self) -> Sequence[str]:
        """The same as `openers`: in this family, text and thoughts have markup, too."""
        return self.openers

    @property
    def layout(self) -> CallLayout:
        """How the family writes calls."""
        lead = f'{self.open}call tool="'
        return CallLayout(
            opening=f"{self.open}tools{self.separator}{lead}",
            heads=(f'{{name}}" index="{{number}}"{self.separator}',),
            values=TaggedValues(
                before=f'{self.open}argument key="',
                text=f'" type="string"{self.separator}',
                json=f'" type="{{type}}"{self.separator}',
                end=f"{self.close}argument{self.separator}",
            ),
            tail=f"{self.close}call{self.separator}",
            again=lead,
            closing=f"{self.close}tools{self.separator}",
        )

    @property
    def channels(self) -> ChannelMarkup:
        """The markup of text."""
        return ChannelMarkup(
            text=(f"{self.open}response{self.separator}", f"{self.close}response{self.separator}"),
            end=f"{self.close}message{self.separator}",
        )

    def read(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read tags, and the text in the channels and calls that the tags open.

        Returns False if there is no tag at the current position.
        """
        channel: TextKind | None = None
        read = False
        while True:
            mark = yield from source.standing(self.openers)
            tag = (yield from self._read_tag(source, mark)) if mark else None
            if tag is None and not read:
                return False
            if tag is None:
                _say_up_to(source, parts, channel or "text", source.place + max(1, len(mark)))
            elif mark == self.open:
                channel = yield from self._opened(source, parts, tag, channel)
            else:
                channel = None if tag[0] in _TEXTS else channel
                if tag[0] == "call" and parts.is_open:
                    parts.end()
            source.drop_read()
            read = True
            yield from self._read_text(source, parts, channel)
            if source.at_end or not (channel or parts.is_open):
                break
        if parts.is_open:
            parts.end(closed=False)
        return True

    def _read_text(
        self, source: Incoming, parts: CallParts, channel: TextKind | None
    ) -> Waiting[None]:
        """Read text up to a tag, if a channel or call is open.

        White space between the arguments of a call is not text.
        """
        while channel or parts.is_open:
            certain = source.certain(self.openers)
            if not channel:
                certain, _ = yield from source.find(self.openers, 0)
            if channel or source.text[:certain].strip():
                _say_up_to(source, parts, channel or "text", certain)
            else:
                source.place = certain
                source.drop_read()
            if source.text:
                if (yield from source.standing(self.openers)):
                    return
                _say_up_to(source, parts, channel or "text", 1)
            elif source.ended:
                return
            else:
                yield

    def _read_tag(self, source: Incoming, mark: str) -> Waiting[tuple[str, dict[str, str]] | None]:
        """Read a tag's name and attributes. Returns None and reads nothing if there is none."""
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
        """Process an opening tag. Returns the channel of the text that follows."""
        name, attributes = tag
        if name in _STRUCTURE:
            return _TEXTS.get(name)
        if name == "call":
            if parts.is_open:
                parts.end(closed=False)
            tool = parts.tools.named(attributes.get("tool", "")) if parts.reads_calls else None
            if tool is not None:
                parts.begin(tool)
                return None
        elif name == "argument" and parts.is_open and "key" in attributes:
            types = parts.types.of_parameter(attributes["key"])
            if "type" in attributes:
                types = STRING if attributes["type"] == "string" else JSON_TYPES
            parts.key(attributes["key"])
            yield from read_value(source, parts, self._value_ends(), types=types)
            return None
        elif name == "json" and parts.is_open:
            yield from source.skip_space()
            if (yield from read_json_body(source, parts, repair="")):
                parts.end(complete=True)
            return None
        _say_up_to(source, parts, channel or "text", source.place)
        return channel

    def _value_ends(self) -> tuple[ValueEnd, ...]:
        again = (f"{self.open}argument", f"{self.close}call")
        return (
            ValueEnd(
                f"{self.close}argument{self.separator}",
                (*again, f"{self.close}tools", f"{self.open}call"),
            ),
            *(ValueEnd(mark, (), closes=False) for mark in again[1:]),
        )
