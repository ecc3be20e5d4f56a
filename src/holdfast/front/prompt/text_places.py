"""Finds past answers and cache breakpoints in a rendered conversation.

The texts that a template writes around answers are found by rendering probes when the model is
loaded, so that a request needs no second rendering. To find breakpoints, the conversation is
rendered again with marks in it. If a mark changes what the template writes (for example because it
parses results as JSON), the part of the conversation up to the breakpoint is rendered alone.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from holdfast.front.images.sources import IMAGE, is_image
from holdfast.front.prompt.conversation import Message
from holdfast.front.prompt.images import image_mark
from holdfast.front.prompt.template import ChatTemplate, common_prefix
from holdfast.front.prompt.tokenize import Guard, well_formed
from holdfast.front.request import CacheBreakpoint, ChatPrompt, MarkedPrefix, Prompt, PromptTokens

# maximum number of characters that a template may write before an answer, such as the marker that
# opens a thought
_MAX_OPENING = 200
# maximum number of messages per answer: some models write a thought, a text and a call as three
# messages
_MAX_MESSAGES = 4
_ANSWER = "answer7391"
_PROBE = "probe7391"
_OTHER_PROBE = "other826"
_OPEN_MARKER = re.compile(r"[<\[][^<\[>\]]*\Z")
_QUESTION: Message = {"role": "user", "content": "text"}
_EARLIER: tuple[Message, ...] = (_QUESTION, {"role": "assistant", "content": "text"})
_MARK = "\ue0f3{}\ue0f4"  # private use: no text contains it
_MARKS = re.compile("\ue0f3([0-9]+)\ue0f4")
_SYSTEM = frozenset({"system", "developer"})

# makes a conversation that contains a probe text and calls a tool with a given name
_Conversation: TypeAlias = Callable[[str, str], list[Message]]


class AnswerSpan(NamedTuple):
    """The characters of a rendered text that may be an answer."""

    start: int
    end: int


BEGINNING: Final = AnswerSpan(0, 0)


@dataclass(frozen=True, kw_only=True)
class AnswerFrame:
    """The texts that a template writes before answers (`headers`) and after them (`ends`).

    If either is empty, no answer is found.
    """

    headers: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    # the markers around thoughts, set only if the closing marker is also one of `ends`
    thought: tuple[str, str] | None = None

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        headers = sorted(self.headers, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, (*headers, *self.ends))))

    def candidates(
        self, text: str, *, after: AnswerSpan = BEGINNING
    ) -> Iterator[tuple[AnswerSpan, ...]]:
        """For each place where an answer may start, the spans that it may have, longest first.

        after: the last span of the last place that is known already.
        """
        messages = list(self._messages(text, after.end))
        for place, (start, end) in enumerate(messages):
            ends = [end]
            for (_, before), (header, behind) in pairwise(messages[place : place + _MAX_MESSAGES]):
                if not self._are_one(text[before:header]):
                    break
                ends.append(behind)
            yield tuple(AnswerSpan(start, end) for end in reversed(ends))

    def settled(self, candidates: Sequence[tuple[AnswerSpan, ...]], characters: int) -> int:
        """For how many of a text's first places the candidates are the same in all texts with the
        same first `characters`.
        """
        longest = max(map(len, (*self.headers, *self.ends)), default=0)
        found = bisect_right(candidates, characters - longest, key=lambda spans: spans[-1].end)
        return max(0, found - (_MAX_MESSAGES - 1))

    def opening(self, text: str) -> str | None:
        """The text of a prompt after the header of the new answer; None if it is unknown."""
        start = -1
        for header in self.headers:
            at = text.rfind(header)
            if at >= 0:
                start = max(start, at + len(header))
        opening = text[start:]
        if start < 0 or len(opening) > _MAX_OPENING or any(end in opening for end in self.ends):
            return None
        return opening

    def _messages(self, text: str, begin: int) -> Iterator[AnswerSpan]:
        """The spans from a header to the next end that contain no other header."""
        if not self.headers or not self.ends:
            return
        start = -1
        for mark in self._marks.finditer(text, begin):
            if mark.group() in self.headers:
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
        """Whether the text between two messages consists only of an end and a header.

        If so, the two messages may be one answer.
        """
        stripped = between.strip()
        return any(
            stripped.startswith(end) and stripped.removeprefix(end).strip() == header.strip()
            for end in self.ends
            for header in self.headers
        )


def find_frame(
    template: ChatTemplate, *, ends: Iterable[str], thought: tuple[str, str] | None = None
) -> AnswerFrame:
    """Find what a template writes around answers.

    ends: the texts of tokens that end an answer.
    thought: the markers of thoughts; a header ends before them.
    """
    every_end = dict.fromkeys((*ends, *_written_ends(template)))
    known_ends = tuple(sorted((end for end in every_end if end.strip()), key=len, reverse=True))
    markers = tuple(marker for marker in thought or () if marker)
    found = [
        _header(template, conversation, known_ends, markers) for conversation in (_asked, _called)
    ]
    return AnswerFrame(
        headers=tuple(dict.fromkeys(header for header in found if header.strip())),
        ends=known_ends,
        thought=thought if thought is not None and thought[1] in known_ends else None,
    )


def _written_ends(template: ChatTemplate) -> Iterator[str]:
    """Yield the first word that the template writes after an answer, and after a call.

    If it writes nothing there, yields the first word that it writes before the next message.
    """
    answer = {"role": "assistant", "content": _ANSWER}
    follow_up = {"role": "user", "content": _PROBE}
    *called, result = _called(_PROBE, "f")
    for messages, following in (([_QUESTION, answer], follow_up), (called, result)):
        alone = template.render_history(_prompt(messages))
        followed = template.render_history(_prompt([*messages, following]))
        after = alone.rpartition(_ANSWER)[2] if _ANSWER in alone else ""
        if not after.strip() and followed.startswith(alone.rstrip()):
            after = followed[len(alone.rstrip()) :].partition(_PROBE)[0]
        yield from after.split()[:1]


def _asked(probe: str, name: str) -> list[Message]:
    return [{"role": "user", "content": probe}]


def _called(probe: str, name: str) -> list[Message]:
    call_id = name * 9  # nine characters: some templates refuse other ids
    function = {"name": name, "arguments": '{"a": "text"}'}
    call = {"type": "function", "id": call_id, "function": function}
    return [
        _QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": probe, "tool_call_id": call_id, "name": name},
    ]


def _header(
    template: ChatTemplate,
    conversation: _Conversation,
    ends: tuple[str, ...],
    markers: tuple[str, ...],
) -> str:
    """The constant part of the text between a message and its answer.

    This part is the same for a new and a past answer.
    """
    asked = conversation(_PROBE, "f")
    first = _cut(_between(template, asked, _PROBE, "f"), ends, markers)
    other = _between(template, conversation(_OTHER_PROBE, "g"), _OTHER_PROBE, "g")
    other = _cut(other, ends, markers)
    header = common_prefix(first[::-1], other[::-1])[::-1]  # drops ids and names
    later = _cut(_between(template, [*_EARLIER, *asked], _PROBE, "f"), ends, markers)
    if later:
        header = common_prefix(header, later[len(first) - len(header) :])  # drops counters
    return _OPEN_MARKER.sub("", header).strip()


def _cut(between: str, ends: tuple[str, ...], markers: tuple[str, ...]) -> str:
    """Cut off the end of the previous message and the marker that may open a thought."""
    for end in ends:  # ends are cut first, because an end may also be a marker of thoughts
        rest = between.rpartition(end)[2]
        between = rest if rest.strip() else between
    for marker in markers:
        between = between.partition(marker)[0]
    return between


def _between(template: ChatTemplate, messages: list[Message], probe: str, name: str) -> str:
    past = [*messages, {"role": "assistant", "content": _ANSWER}, _QUESTION]
    asked = template.try_render(_prompt(messages, name))
    answered = template.try_render(_prompt(past, name))
    before, shown, _ = answered.rpartition(_ANSWER)
    if not shown:
        return ""
    return common_prefix(asked.rpartition(probe)[2], before.rpartition(probe)[2])


def _prompt(messages: Sequence[Message], name: str = "f") -> ChatPrompt:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "description": "text"}},
        "required": [],
    }
    function = {"name": name, "description": "text", "parameters": schema}
    return ChatPrompt(messages=tuple(messages), tools=({"type": "function", "function": function},))


class _Spot(NamedTuple):
    """The position before a character of a message's content."""

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
    """The positions of a prompt's breakpoints in its rendered text; 0 for an unknown position.

    asked: the conversation as sent, whose contents may be in parts.
    shown: the conversation as rendered.
    """
    if not asked.cache_breakpoints:
        return ()
    breakpoints = [_normal(each, asked.messages) for each in asked.cache_breakpoints]
    spots = [_spot(each, asked.messages, shown.messages, guard) for each in breakpoints]
    found = _marked_places(shown, text, spots, template)
    return tuple(
        found[number] if number in found else _end_of_beginning(each, shown, text, template)
        for number, each in enumerate(breakpoints)
    )


def marked_prefixes(prompt: Prompt, tokens: PromptTokens) -> tuple[MarkedPrefix, ...]:
    """The prefixes up to the breakpoints of a prompt, in ascending order.

    If breakpoints coincide, the longest time applies.
    """
    if not isinstance(prompt, ChatPrompt):
        return ()
    longest: dict[int, float] = {}
    for at, each in zip(tokens.breakpoints, prompt.cache_breakpoints, strict=True):
        if at:
            longest[at] = max(each.seconds, longest.get(at, 0.0))
    return tuple(MarkedPrefix(tokens=at, seconds=longest[at]) for at in sorted(longest))


def _normal(at: CacheBreakpoint, asked: Sequence[Any]) -> CacheBreakpoint:
    """The breakpoint in normal form: one after a message's last part is one after the message."""
    if at.messages < len(asked) and at.parts < len(_parts(asked[at.messages])):
        return at
    return CacheBreakpoint(messages=min(at.messages + bool(at.parts), len(asked)))


def _spot(
    at: CacheBreakpoint, asked: Sequence[Any], shown: Sequence[Any], guard: Guard
) -> _Spot | None:
    """The position at which to put a mark; None if there is no text for it."""
    if at.parts:
        return _after_parts(at, _parts(asked[at.messages]), _text(shown[at.messages]), guard)
    leading = _leading(shown)
    if at.messages > leading:
        last = shown[at.messages - 1]
        content = _text(last).rstrip()
        if content and last.get("role") != "assistant":
            return _Spot(at.messages - 1, len(content))
    # A breakpoint after an answer, or after the system prompt and tools, is marked at the beginning
    # of the next message's text.
    following = max(at.messages, leading)
    content = _text(shown[following]) if following < len(shown) else ""
    return _Spot(following, len(content) - len(content.lstrip())) if content.strip() else None


def _after_parts(
    at: CacheBreakpoint, parts: Sequence[str], content: str, guard: Guard
) -> _Spot | None:
    """The position after the given parts of a content.

    The content contains the parts in order, with any text in between.
    """
    end = len(content) - len(content.lstrip())
    for part in map(guard, parts[: at.parts]):
        found = content.find(part.strip(), end)
        if found >= 0:  # a missing part is an accounting header, which was left out
            end = found + len(part.strip())
    return _Spot(at.messages, end) if content.strip() else None


def _marked_places(
    shown: ChatPrompt, text: str, spots: Sequence[_Spot | None], template: ChatTemplate
) -> dict[int, int]:
    """The positions of marks in the rendered text, by number; empty if marks change the text."""
    messages = list(shown.messages)
    marks = [(spot, number) for number, spot in enumerate(spots) if spot is not None]
    for spot, number in sorted(marks, key=lambda mark: mark[0], reverse=True):
        content = messages[spot.message]["content"]
        marked = content[: spot.character] + _MARK.format(number) + content[spot.character :]
        messages[spot.message] = {**messages[spot.message], "content": marked}
    marked = template.try_render(msgspec.structs.replace(shown, messages=tuple(messages)))
    marked = well_formed(marked)
    if _MARKS.sub("", marked) != text:
        return {}
    found: dict[int, int] = {}
    marks_before = 0
    for mark in _MARKS.finditer(marked):
        found[int(mark[1])] = mark.start() - marks_before
        marks_before += len(mark[0])
    return found


def _end_of_beginning(
    at: CacheBreakpoint, shown: ChatPrompt, text: str, template: ChatTemplate
) -> int:
    """The length of the prefix that the text shares with the conversation up to a breakpoint."""
    messages = shown.messages[: max(at.messages, _leading(shown.messages))]
    beginning = msgspec.structs.replace(shown, messages=messages, continue_last=False)
    return len(common_prefix(template.render_history(beginning), text))


def _leading(messages: Sequence[Any]) -> int:
    """The number of system messages at the beginning."""
    for place, message in enumerate(messages):
        if message.get("role") not in _SYSTEM:
            return place
    return len(messages)


def _parts(message: Any) -> list[str]:
    """The texts of a content that is given in parts."""
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else ()
    return [_text_of_part(part) for part in parts]


def _text_of_part(part: Any) -> str:
    if is_image(part):
        return image_mark(part[IMAGE])
    return str(part.get("text") or "") if isinstance(part, dict) else str(part)


def _text(message: Any) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
