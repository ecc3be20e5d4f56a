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
from holdfast.front.toolcalls.argument_types import JSON_TYPES
from holdfast.front.toolcalls.call_format import (
    AnswerDeltas,
    CallFormat,
    CallLayout,
    ChannelMarkup,
    JsonObject,
    TaggedValues,
    distinct,
)
from holdfast.front.toolcalls.declared import ToolName
from holdfast.front.toolcalls.incoming import Incoming, Parser
from holdfast.front.toolcalls.literals import json_text
from holdfast.front.toolcalls.tagged_parameters import (
    STRING,
    TaggedParameters,
    ValueEnd,
    read_json_body,
    read_value,
)

_LONGEST_HEADER: Final = 256  # characters, as are the other limits of this module
# what stands in place of a recipient if a message is not for a tool
_NOT_TOOL_NAMES: Final = frozenset({"", "assistant", "user", "all", "self", "none"})
_TAG_HEADER: Final = re.compile(r"\s*(\w+)((?:\s+\w+=\"[^\"]*\")*)\s*")
_ATTRIBUTE: Final = re.compile(r"(\w+)=\"([^\"]*)\"")
_LONGEST_TAG: Final = 512
_KIND_OF_TAG: Final[Mapping[str, TextKind]] = {"think": "reasoning", "response": "text"}
_STRUCTURAL_TAGS: Final = frozenset({"message", "tools", *_KIND_OF_TAG})


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
    def markers(self) -> Sequence[str]:
        strings = (self.start, self.channel, self.constrain, self.message, *self.ends)
        return distinct(*strings, *(self.calls.markers if self.calls else ()))

    @property
    def call_starts(self) -> Sequence[str]:
        """The strings that a message may begin with. The first message begins in the prompt."""
        starts = (self.start, self.channel, self.message, " to=", "to=", *self.ends)
        return tuple(marker for marker in starts if marker)

    @property
    def channel_starts(self) -> Sequence[str]:
        """The same as `call_starts`: in this family, text and thoughts have markup, too."""
        return self.call_starts

    @property
    def layout(self) -> CallLayout:
        start_and_recipient = f"{self.start}assistant to={self.prefix}{{name}}"
        if self.calls is None:
            head = f"{start_and_recipient}{self.channel}commentary json{self.message}"
            return CallLayout(heads=(head,), values=JsonObject(), tail=self.ends[1])
        inner = self.calls.layout
        return CallLayout(
            heads=(start_and_recipient + self.message + inner.opening + inner.heads[0],),
            values=inner.values,
            tail=inner.tail + inner.closing + self.ends[0],
        )

    @property
    def grammar_layouts(self) -> Sequence[CallLayout]:
        """The layout that a grammar lets the model write: one call, which ends the answer."""
        if self.calls is not None:
            return ()
        recipient, channel = f" to={self.prefix}{{name}}", f"{self.channel}commentary"
        forms = (
            f"{channel}{recipient} {self.constrain}json",
            f"{recipient}{channel} {self.constrain}json",
            f"{recipient}{channel} json",
        )
        heads = tuple(form + self.message for form in forms)
        return (CallLayout(heads=heads, values=JsonObject(), is_single=True),)

    @property
    def channels(self) -> ChannelMarkup | None:
        if self.calls is not None:
            return None
        return ChannelMarkup(
            text=(f"{self.channel}final{self.message}", ""),
            thought=(
                f"{self.channel}analysis{self.message}",
                f"{self.ends[0]}{self.start}assistant",
            ),
        )

    def read(self, source: Incoming, deltas: AnswerDeltas) -> Parser[bool]:
        """Read one message or a single end marker. Returns False if the text is neither."""
        if (yield from source.read_any(*self.ends)):
            return True
        openers = distinct(self.start, self.channel, self.message)
        is_marked = bool((yield from source.match_at(openers)))
        header = yield from self._read_header(source, needs_marker=not is_marked)
        if header is None:
            return False
        source.drop_read()
        yield from self._read_content(source, deltas, header)
        return True

    def _read_header(self, source: Incoming, *, needs_marker: bool) -> Parser[MessageHeader | None]:
        """Read a message's header.

        If `<|message|>` is missing, the header ends after the last word that can be part of a
        header.

        needs_marker: True to accept only a header that contains `<|message|>` or `<|channel|>`.
        """
        yield from source.read_any(self.start)
        start = source.place
        at, marker = yield from source.find(
            (self.message, self.start, *self.ends), start, limit=_LONGEST_HEADER
        )
        if marker != self.message:
            match = self._header_pattern.match(source.text, start, at)
            at = match.end() if match else start
            if needs_marker and not (self.channel and self.channel in source.text[start:at]):
                return None
        source.place = at + (len(marker) if marker == self.message else 0)
        text = source.text[start:at]
        channel_names = (
            re.findall(rf"{re.escape(self.channel)}\s*(\w+)", text) if self.channel else []
        )
        # some models write a second header inside: `commentary to=assistant<|channel|>analysis`
        channel = channel_names[-1] if channel_names else ""
        return MessageHeader(
            _first_group(r"^\s*([^\s<=\udc00-\udfff]+)(?=[\s<\udc00-\udfff]|$)", text),
            channel,
            _first_group(r"\bto=([^\s<\udc00-\udfff]+)", text),
        )

    def _read_content(
        self, source: Incoming, deltas: AnswerDeltas, header: MessageHeader
    ) -> Parser[None]:
        """Read the content of a message: a call if the header names a tool, else text or thought."""
        name = header.recipient
        if not name and header.role.removeprefix(self.prefix) not in _NOT_TOOL_NAMES:
            name = header.role  # some models put the tool's name in place of the role
        may_call = name not in _NOT_TOOL_NAMES and deltas.reads_calls
        tool = deltas.tools.resolve(name.removeprefix(self.prefix)) if may_call else None
        if tool is not None and self.calls is None and (name == header.recipient or tool.declared):
            repair = "" if name == header.recipient else "role_for_recipient"
            yield from _read_arguments(
                source, deltas, tool, ends=(*self.ends, self.start), repair=repair
            )
            yield from source.read_any(*self.ends)
            source.drop_read()
            return
        is_thought = bool({header.channel, header.recipient} & self.reasoning)
        kind: TextKind = "reasoning" if is_thought else "text"
        yield from self._read_text(source, deltas, kind, calls=self.calls if may_call else None)

    def _read_text(
        self,
        source: Incoming,
        deltas: AnswerDeltas,
        kind: TextKind,
        *,
        calls: TaggedParameters | None,
    ) -> Parser[None]:
        """Read text up to the end of the message or the beginning of another.

        calls: how calls in the text are written; None if whatever looks like a call is text.
        """
        call_starts = tuple(calls.call_starts) if calls else ()
        openers = distinct(self.start, self.channel)
        markers = (*self.ends, *openers, *call_starts)
        while True:
            _emit_up_to(source, deltas, kind, source.safe_end(markers))
            if source.at_end:
                if source.has_ended:
                    return
                yield
                continue
            marker = yield from source.match_at(markers)
            if marker in call_starts and marker and calls:
                if (yield from calls.read(source, deltas)):
                    source.drop_read()
                else:
                    _emit_up_to(source, deltas, kind, len(marker))
                continue
            if marker:
                source.place += len(marker) if marker in self.ends else 0
                source.drop_read()
                return
            _emit_up_to(source, deltas, kind, 1)

    @property
    def _header_pattern(self) -> re.Pattern[str]:
        """A pattern of a header's first words, to find its end if `message` is missing."""
        recipient = r"(\s*to=[^\s<{]+)?"
        channel, constrain = re.escape(self.channel), re.escape(self.constrain)
        channel_name = rf"({channel}\s*(analysis|commentary|final)?)?" if channel else ""
        content_type = rf"(\s*({constrain})?\s*(json|code)\b)?" if constrain else ""
        return re.compile(
            r"(\s*(assistant|system|developer|user|tool)\b)?"
            rf"{recipient}{channel_name}{recipient}{content_type}\s?"
        )


def _read_arguments(
    source: Incoming, deltas: AnswerDeltas, tool: ToolName, *, ends: Sequence[str], repair: str = ""
) -> Parser[None]:
    """Read the body of a call up to one of the ends.

    If the body is not an object, it becomes the value of the tool's only string argument.
    """
    deltas.begin_call(tool, repair=repair)
    yield from source.skip_space()
    if source.starts_with("{"):
        yield from deltas.read_object(source, stops=ends)
        ignored_text, _ = yield from source.read_to(ends)
        deltas.end_call(
            "text_behind_arguments" if ignored_text.strip() else "", is_whole_object=True
        )
    else:
        text, _ = yield from source.read_to(ends)
        if text.strip():
            string_keys = [
                key for key in deltas.types.properties if deltas.types.of_parameter(key) == STRING
            ]
            deltas.emit_key(string_keys[0] if len(string_keys) == 1 else "input")
            deltas.emit_json(json_text(text))
        deltas.end_call("raw_arguments" if text.strip() else "no_arguments")
    source.drop_read()


def _emit_up_to(source: Incoming, deltas: AnswerDeltas, kind: TextKind, place: int) -> None:
    """Emit all text that was not dropped, up to this position, as text of this kind."""
    source.place = 0
    start, source.place = source.position, place
    deltas.emit_text(kind, source.plain(source.drop_read()), start=start)


def _first_group(pattern: str, text: str) -> str:
    """What the first group of a pattern matches in a text; empty if the pattern does not match."""
    match = re.search(pattern, text)
    return match[1] if match else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiK3(CallFormat):
    """A family that writes text, thoughts and calls between `<|open|>NAME KEY="VALUE"<|sep|>` and
    `<|close|>NAME<|sep|>`. Anything outside of such tags is text, except for white space.

    The names are those of channels (`_KIND_OF_TAG`), `call` with a tool, and within a call `argument`
    with a key and a type, or `json` with all arguments as one object.
    """

    open: str = "<|open|>"
    close: str = "<|close|>"
    separator: str = "<|sep|>"

    @property
    def markers(self) -> Sequence[str]:
        return (self.open, self.close, self.separator)

    @property
    def call_starts(self) -> Sequence[str]:
        """The tags that a channel or a call may begin or end with."""
        return (self.open, self.close)

    @property
    def channel_starts(self) -> Sequence[str]:
        """The same as `call_starts`: in this family, text and thoughts have markup, too."""
        return self.call_starts

    @property
    def layout(self) -> CallLayout:
        before_name = f'{self.open}call tool="'
        return CallLayout(
            opening=f"{self.open}tools{self.separator}{before_name}",
            heads=(f'{{name}}" index="{{number}}"{self.separator}',),
            values=TaggedValues(
                before=f'{self.open}argument key="',
                text=f'" type="string"{self.separator}',
                json=f'" type="{{type}}"{self.separator}',
                end=f"{self.close}argument{self.separator}",
            ),
            tail=f"{self.close}call{self.separator}",
            again=before_name,
            closing=f"{self.close}tools{self.separator}",
        )

    @property
    def channels(self) -> ChannelMarkup:
        """The markup of text."""
        return ChannelMarkup(
            text=(f"{self.open}response{self.separator}", f"{self.close}response{self.separator}"),
            end=f"{self.close}message{self.separator}",
        )

    def read(self, source: Incoming, deltas: AnswerDeltas) -> Parser[bool]:
        """Read tags, and the text in the channels and calls that the tags open.

        Returns False if there is no tag at the current position.
        """
        channel: TextKind | None = None
        any_tag_read = False
        while True:
            marker = yield from source.match_at(self.call_starts)
            tag = (yield from self._read_tag(source, marker)) if marker else None
            if tag is None and not any_tag_read:
                return False
            if tag is None:
                _emit_up_to(source, deltas, channel or "text", source.place + max(1, len(marker)))
            elif marker == self.open:
                channel = yield from self._process_opening_tag(source, deltas, tag, channel)
            else:
                channel = None if tag[0] in _KIND_OF_TAG else channel
                if tag[0] == "call" and deltas.is_open:
                    deltas.end_call()
            source.drop_read()
            any_tag_read = True
            yield from self._read_text(source, deltas, channel)
            if source.at_end or not (channel or deltas.is_open):
                break
        if deltas.is_open:
            deltas.end_call(closed=False)
        return True

    def _read_text(
        self, source: Incoming, deltas: AnswerDeltas, channel: TextKind | None
    ) -> Parser[None]:
        """Read text up to a tag, if a channel or call is open.

        White space between the arguments of a call is not text.
        """
        while channel or deltas.is_open:
            certain_end = source.safe_end(self.call_starts)
            if not channel:
                certain_end, _ = yield from source.find(self.call_starts, 0)
            if channel or source.text[:certain_end].strip():
                _emit_up_to(source, deltas, channel or "text", certain_end)
            else:
                source.place = certain_end
                source.drop_read()
            if source.text:
                if (yield from source.match_at(self.call_starts)):
                    return
                _emit_up_to(source, deltas, channel or "text", 1)
            elif source.has_ended:
                return
            else:
                yield

    def _read_tag(self, source: Incoming, marker: str) -> Parser[tuple[str, dict[str, str]] | None]:
        """Read a tag's name and attributes. Returns None and reads nothing if there is none."""
        start = source.place + len(marker)
        at, end = yield from source.find(
            (self.separator, self.open, self.close), start, limit=_LONGEST_TAG
        )
        match = _TAG_HEADER.fullmatch(source.text[start:at])
        if end != self.separator or match is None:
            return None
        source.place = at + len(end)
        return match[1], {key: unescape(value) for key, value in _ATTRIBUTE.findall(match[2])}

    def _process_opening_tag(
        self,
        source: Incoming,
        deltas: AnswerDeltas,
        tag: tuple[str, dict[str, str]],
        channel: TextKind | None,
    ) -> Parser[TextKind | None]:
        """Process an opening tag that was read. Returns the channel of the text that follows.

        tag: its name and attributes. channel: the channel before the tag; None: no channel.
        """
        name, attributes = tag
        if name in _STRUCTURAL_TAGS:
            return _KIND_OF_TAG.get(name)
        if name == "call":
            if deltas.is_open:
                deltas.end_call(closed=False)
            tool = deltas.tools.resolve(attributes.get("tool", "")) if deltas.reads_calls else None
            if tool is not None:
                deltas.begin_call(tool)
                return None
        elif name == "argument" and deltas.is_open and "key" in attributes:
            types = deltas.types.of_parameter(attributes["key"])
            if "type" in attributes:
                types = STRING if attributes["type"] == "string" else JSON_TYPES
            deltas.emit_key(attributes["key"])
            yield from read_value(source, deltas, self._value_ends(), types=types)
            return None
        elif name == "json" and deltas.is_open:
            yield from source.skip_space()
            if (yield from read_json_body(source, deltas, repair="")):
                deltas.end_call(is_whole_object=True)
            return None
        # all other tags, and calls of tools that do not exist, are emitted as text
        _emit_up_to(source, deltas, channel or "text", source.place)
        return channel

    def _value_ends(self) -> tuple[ValueEnd, ...]:
        """What may end an argument: its closing tag, if more markup follows, or the call's."""
        markers = (f"{self.open}argument", f"{self.close}call")
        return (
            ValueEnd(
                f"{self.close}argument{self.separator}",
                (*markers, f"{self.close}tools", f"{self.open}call"),
            ),
            *(ValueEnd(marker, (), closes=False) for marker in markers[1:]),
        )
