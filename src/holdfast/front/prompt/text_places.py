"""Where answers and cache breakpoints are in a rendered conversation."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import msgspec

from holdfast.errors import InvalidRequest
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.tokenize import Guard, well_formed
from holdfast.wire.commands import PinnedPrefix
from holdfast.wire.requests import CacheBreakpoint, ChatPrompt, Prompt, PromptTokens

# characters that a template may write in front of an answer, such as the marker that opens a
# thought
_MOST_OPENING = 200
# of an answer: some models write a thought, a text and a call as messages of their own
_MOST_MESSAGES = 4
_ANSWER = "answer7391"
# at the end of a header: its rest is something that varies
_OPEN_MARKER = re.compile(r"[<\[][^<\[>\]]*\Z")
_EARLIER = ({"role": "user", "content": "text"}, {"role": "assistant", "content": "text"})

_Said: TypeAlias = Callable[[str, str], list[dict[str, Any]]]
_MARK = "\ue0f3{}\ue0f4"  # private use, as the template's own
_MARKS = re.compile("\ue0f3([0-9]+)\ue0f4")
_SYSTEM = frozenset({"system", "developer"})


class AnswerSpan(NamedTuple):
    """Characters of a rendered text that may be an answer."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFrame:
    """The texts behind which a template writes an answer, and those that end one.

    Without any, answers cannot be found.
    """

    headers: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    thought: tuple[str, str] | None = None  # its markers, where that of its end ends messages too

    def candidates(self, text: str) -> Iterator[tuple[AnswerSpan, ...]]:
        """For each place at which an answer may begin, what may be it, the longest first."""
        messages = list(self._messages(text))
        for place, (start, end) in enumerate(messages):
            ends = [end]
            for (_, before), (header, behind) in pairwise(messages[place : place + _MOST_MESSAGES]):
                if not self._are_one(text[before:header]):
                    break
                ends.append(behind)
            yield tuple(AnswerSpan(start, end) for end in reversed(ends))

    def opening(self, text: str) -> str | None:
        """What a prompt has behind the header of the answer that it asks for; None when there is no
        such header.
        """
        begin = max(
            (at + len(header) for header in self.headers if (at := text.rfind(header)) >= 0),
            default=-1,
        )
        opening = text[begin:] if begin >= 0 and len(text) - begin <= _MOST_OPENING else None
        return None if opening is None or any(end in opening for end in self.ends) else opening

    def _messages(self, text: str) -> Iterator[AnswerSpan]:
        """From a header to the next end, without another header between."""
        if not self.headers or not self.ends:
            return
        headers = sorted(self.headers, key=len, reverse=True)
        start = -1
        for mark in re.finditer("|".join(map(re.escape, (*headers, *self.ends))), text):
            if mark.group() in headers:
                start = mark.end()
            elif start >= 0 and not self._ends_thought(text[start : mark.start()], mark.group()):
                yield AnswerSpan(start, mark.start())
                start = -1

    def _ends_thought(self, text: str, mark: str) -> bool:
        return (
            self.thought is not None
            and mark == self.thought[1]
            and text.lstrip().startswith(self.thought[0])
            and mark not in text
        )

    def _are_one(self, between: str) -> bool:
        """Whether nothing but an end and a header stands between two messages."""
        stripped = between.strip()
        return any(
            stripped.startswith(end) and stripped.removeprefix(end).strip() == header.strip()
            for end in self.ends
            for header in self.headers
        )


def find_frame(
    template: ChatTemplate, *, ends: Iterable[str], thought: tuple[str, str] | None = None
) -> AnswerFrame:
    """What a template writes around answers.

    ends: texts of tokens that end an answer. thought: the markers of one; where one of them stands
    in front of an answer, a header ends.
    """
    every_end = {*ends, *_written_ends(template)}
    known_ends = tuple(sorted((end for end in every_end if end.strip()), key=len, reverse=True))
    markers = tuple(marker for marker in thought or () if marker)
    found = (
        _header(template, _asked, known_ends, markers),
        _header(template, _called, known_ends, markers),
    )
    return AnswerFrame(
        headers=tuple(dict.fromkeys(header for header in found if header.strip())),
        ends=known_ends,
        thought=thought if thought is not None and thought[1] in known_ends else None,
    )


def _written_ends(template: ChatTemplate) -> Iterator[str]:
    """What the template writes behind an answer, or in front of what follows it, up to the first
    white space.
    """
    follow_up = {"role": "user", "content": "probe7391"}
    question, answer = _EARLIER[0], {"role": "assistant", "content": _ANSWER}
    *called, result = _called("probe7391", "f")
    for messages, following in ((([question, answer]), follow_up), (called, result)):
        alone, followed = (
            _rendered(template, each, answer=False) for each in (messages, [*messages, following])
        )
        behind = alone.rpartition(_ANSWER)[2] if _ANSWER in alone else ""
        if not behind.strip() and followed.startswith(alone.rstrip()):
            behind = followed[len(alone.rstrip()) :].partition("probe7391")[0]
        yield from behind.split()[:1]


def _asked(probe: str, name: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": probe}]


def _called(probe: str, name: str) -> list[dict[str, Any]]:
    call_id = name * 9  # nine characters: some templates refuse others
    call = {
        "type": "function",
        "id": call_id,
        "function": {"name": name, "arguments": '{"a": "text"}'},
    }
    return [
        {"role": "user", "content": "text"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": probe, "tool_call_id": call_id, "name": name},
    ]


def _header(
    template: ChatTemplate, said: _Said, ends: tuple[str, ...], markers: tuple[str, ...]
) -> str:
    """What stands between a message and the answer to it, whether it is asked for or past; without
    what varies.
    """
    first = _cut(_between(template, said("probe7391", "f"), "probe7391", "f"), ends, markers)
    other = _cut(_between(template, said("other826", "g"), "other826", "g"), ends, markers)
    header = _common_beginning(first[::-1], other[::-1])[::-1]  # ids and names are gone
    later = _cut(
        _between(template, [*_EARLIER, *said("probe7391", "f")], "probe7391", "f"), ends, markers
    )
    if later:  # what the template counts is gone too
        header = _common_beginning(header, later[len(first) - len(header) :])
    return _OPEN_MARKER.sub("", header).strip()


def _cut(between: str, ends: tuple[str, ...], markers: tuple[str, ...]) -> str:
    """Without the end of the message before, and without the thought that may be opened."""
    for end in ends:  # first: there are models in which the same token ends thoughts and messages
        between = between.rpartition(end)[2] if between.rpartition(end)[2].strip() else between
    for marker in markers:
        between = between.partition(marker)[0]
    return between


def _between(template: ChatTemplate, messages: list[dict[str, Any]], probe: str, name: str) -> str:
    past = [
        *messages,
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": "text"},
    ]
    asked, answered = _rendered(template, messages, name), _rendered(template, past, name)
    before, shown, _ = answered.rpartition(_ANSWER)
    return (
        _common_beginning(asked.rpartition(probe)[2], before.rpartition(probe)[2]) if shown else ""
    )


def _rendered(
    template: ChatTemplate,
    messages: Sequence[dict[str, Any]],
    name: str = "f",
    *,
    answer: bool = True,
) -> str:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "description": "text"}},
        "required": [],
    }
    tools = (
        {
            "type": "function",
            "function": {"name": name, "description": "text", "parameters": schema},
        },
    )
    prompt = ChatPrompt(messages=tuple(messages), tools=tools)
    try:
        return template.render(prompt) if answer else template.without_opening(prompt)
    except InvalidRequest:
        return ""


def _common_beginning(one: str, other: str) -> str:
    differs = (
        place for place, (left, right) in enumerate(zip(one, other, strict=False)) if left != right
    )
    return one[: next(differs, min(len(one), len(other)))]


class _Spot(NamedTuple):
    """In front of a character of a message's content."""

    message: int
    character: int


def breakpoint_places(
    asked: ChatPrompt,
    shown: ChatPrompt,
    text: str,
    *,
    template: ChatTemplate,
    guard: Guard,
) -> tuple[int, ...]:
    """The characters of a rendered prompt behind which its breakpoints are, in their order; 0 where
    it cannot be told.

    asked: the conversation as it came, whose contents may be in parts. shown: as the template was
        given it.
    """
    if not asked.cache_breakpoints:
        return ()
    breakpoints = [_normal(each, asked.messages) for each in asked.cache_breakpoints]
    spots = [_spot(each, asked.messages, shown.messages, guard) for each in breakpoints]
    found = _marked_places(shown, text, spots, template.render)
    return tuple(
        found[number] if number in found else _end_of_beginning(each, shown, text, template)
        for number, each in enumerate(breakpoints)
    )


def pinned_prefixes(prompt: Prompt, tokens: PromptTokens) -> tuple[PinnedPrefix, ...]:
    """What of a tokenized prompt its breakpoints are to keep: ascending, each position once, for
    the longest of its times.
    """
    if not isinstance(prompt, ChatPrompt):
        return ()
    longest: dict[int, float] = {}
    for at, each in zip(tokens.breakpoints, prompt.cache_breakpoints, strict=True):
        if at:
            longest[at] = max(each.seconds, longest.get(at, 0.0))
    return tuple(PinnedPrefix(tokens=at, seconds=longest[at]) for at in sorted(longest))


def _normal(at: CacheBreakpoint, asked: Sequence[Any]) -> CacheBreakpoint:
    """Behind all parts of a message is behind the message, and behind the last of them is the end."""
    if at.messages < len(asked) and at.parts < len(_parts(asked[at.messages])):
        return at
    return CacheBreakpoint(messages=min(at.messages + bool(at.parts), len(asked)))


def _spot(
    at: CacheBreakpoint, asked: Sequence[Any], shown: Sequence[Any], guard: Guard
) -> _Spot | None:
    """Where to put a mark; None where there is no text that could take it."""
    if at.parts:
        return _behind_parts(at, _parts(asked[at.messages]), _text(shown[at.messages]), guard)
    if at.messages > (leading := _leading(shown)):
        content = _text(shown[at.messages - 1]).rstrip()
        if content and shown[at.messages - 1].get("role") != "assistant":
            return _Spot(at.messages - 1, len(content))
    # behind an answer, or behind the block of system prompt and tools
    following = max(at.messages, leading)
    content = _text(shown[following]) if following < len(shown) else ""
    return _Spot(following, len(content) - len(content.lstrip())) if content.strip() else None


def _behind_parts(
    at: CacheBreakpoint, parts: Sequence[str], content: str, guard: Guard
) -> _Spot | None:
    """The parts stand in the content one after the other, with something or other between them."""
    behind = len(content) - len(content.lstrip())
    for part in map(guard, parts[: at.parts]):
        found = content.find(part.strip(), behind)
        if found >= 0:  # else it was for accounting, and left out
            behind = found + len(part.strip())
    return _Spot(at.messages, behind) if content.strip() else None


def _marked_places(
    shown: ChatPrompt, text: str, spots: Sequence[_Spot | None], render: Callable[[ChatPrompt], str]
) -> dict[int, int]:
    """Where marks come out, by their numbers; empty when the text is another one with them."""
    messages = list(shown.messages)
    for number, spot in sorted(
        enumerate(spots), key=lambda each: each[1] or _Spot(0, 0), reverse=True
    ):
        if spot is not None:
            content = messages[spot.message]["content"]
            marked = content[: spot.character] + _MARK.format(number) + content[spot.character :]
            messages[spot.message] = {**messages[spot.message], "content": marked}
    try:
        marked = well_formed(render(msgspec.structs.replace(shown, messages=tuple(messages))))
    except InvalidRequest:
        return {}
    if _MARKS.sub("", marked) != text:
        return {}
    found, taken = {}, 0
    for mark in _MARKS.finditer(marked):
        found[int(mark[1])] = mark.start() - taken
        taken += len(mark[0])
    return found


def _end_of_beginning(
    at: CacheBreakpoint, shown: ChatPrompt, text: str, template: ChatTemplate
) -> int:
    """As far as the conversation up to a breakpoint, rendered alone, is what the whole one begins
    with.
    """
    messages = shown.messages[: max(at.messages, _leading(shown.messages))]
    beginning = msgspec.structs.replace(shown, messages=messages, continue_last=False)
    return len(os.path.commonprefix((template.without_opening(beginning), text)))  # noqa: RUF071 - character by character is meant


def _leading(messages: Sequence[Any]) -> int:
    """How many system messages stand at the beginning."""
    return next(
        (place for place, message in enumerate(messages) if message.get("role") not in _SYSTEM),
        len(messages),
    )


def _parts(message: Any) -> list[str]:
    """The texts of a content that came in parts; what is no text stands for nothing."""
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else ()
    return [str(part.get("text") or "") if isinstance(part, dict) else str(part) for part in parts]


def _text(message: Any) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
