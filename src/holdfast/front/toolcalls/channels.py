"""Answers made of messages with a header that says what each is: gpt-oss' harmony, Muse.

No header is an error. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from holdfast.front.toolcalls.call_format import Call, CallParts, IdForm
from holdfast.front.toolcalls.declared import ToolName
from holdfast.front.toolcalls.incoming import Incoming, Waiting
from holdfast.front.toolcalls.json_stream import JsonStream
from holdfast.front.toolcalls.tagged_parameters import TaggedParameters
from holdfast.front.toolcalls.typed_values import json_text
from holdfast.wire.output import TextKind

_STRING: Final = frozenset({"string"})
_HEADER_LENGTH = 256
_NOBODY = frozenset({"", "assistant", "user", "all", "self", "none"})


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
