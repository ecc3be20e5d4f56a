"""Finds past answers and cache breakpoints in a rendered conversation.

The texts that a template writes around answers are found by rendering probes when the model is
loaded, so that a request needs no second rendering. To find breakpoints, the conversation is
rendered again with marks in it. If a mark changes what the template writes (for example because it
parses results as JSON), the part of the conversation up to the breakpoint is rendered alone. A cache
breakpoint is the end of a part of the conversation that the client wants cached.
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
_EARLIER_TURN: tuple[Message, ...] = (_QUESTION, {"role": "assistant", "content": "text"})
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
"""Before the first answer: the whole text is searched."""


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
    def _frame_pattern(self) -> re.Pattern[str]:
        headers = sorted(self.headers, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, (*headers, *self.ends))))

    def candidates(
        self, text: str, *, after: AnswerSpan = BEGINNING
    ) -> Iterator[tuple[AnswerSpan, ...]]:
        """For each place where an answer may start, the spans that it may have, longest first: it may
        consist of several messages in a row.

        after: the last span of the last place that is known already.
        """
        messages = list(self._messages(text, after.end))
        for index, (start, message_end) in enumerate(messages):
            possible_ends = [message_end]
            for (_, end_before), (start_after, end_after) in pairwise(
                messages[index : index + _MAX_MESSAGES]
            ):
                if not self._may_be_one_answer(text[end_before:start_after]):
                    break
                possible_ends.append(end_after)
            yield tuple(AnswerSpan(start, end) for end in reversed(possible_ends))

    def settled(self, candidates: Sequence[tuple[AnswerSpan, ...]], characters: int) -> int:
        """How many of a text's first candidates are the same in all texts that begin with the same
        number of characters, so that they need not be searched for again.
        """
        longest_mark = max(map(len, (*self.headers, *self.ends)), default=0)
        candidates_before = bisect_right(
            candidates, characters - longest_mark, key=lambda spans: spans[-1].end
        )
        return max(0, candidates_before - (_MAX_MESSAGES - 1))

    def opening(self, text: str) -> str | None:
        """The text of a prompt after the header of the new answer; None if it is unknown."""
        start = -1
        for header in self.headers:
            header_start = text.rfind(header)
            if header_start >= 0:
                start = max(start, header_start + len(header))
        opening = text[start:]
        if start < 0 or len(opening) > _MAX_OPENING or any(end in opening for end in self.ends):
            return None
        return opening

    def _messages(self, text: str, search_from: int) -> Iterator[AnswerSpan]:
        """The spans from a header to the next end that contain no other header."""
        if not self.headers or not self.ends:
            return
        start = -1
        for mark in self._frame_pattern.finditer(text, search_from):
            if mark.group() in self.headers:
                start = mark.end()
            elif start >= 0 and not self._ends_thought(text[start : mark.start()], mark.group()):
                yield AnswerSpan(start, mark.start())
                start = -1

    def _ends_thought(self, text: str, mark: str) -> bool:
        """Whether a mark after this text ends a thought within the message, and not the message."""
        return (
            self.thought is not None
            and mark == self.thought[1]
            and text.lstrip().startswith(self.thought[0])
            and mark not in text
        )

    def _may_be_one_answer(self, between: str) -> bool:
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
    found_headers = [
        _header(template, conversation, known_ends, markers)
        for conversation in (_user_conversation, _tool_conversation)
    ]
    return AnswerFrame(
        headers=tuple(dict.fromkeys(header for header in found_headers if header.strip())),
        ends=known_ends,
        thought=thought if thought is not None and thought[1] in known_ends else None,
    )


def _written_ends(template: ChatTemplate) -> Iterator[str]:
    """Yield the first word that the template writes after an answer, and after a call.

    If it writes nothing there, yields the first word that it writes before the next message.
    """
    answer = {"role": "assistant", "content": _ANSWER}
    follow_up = {"role": "user", "content": _PROBE}
    *calling_messages, result = _tool_conversation(_PROBE, "f")
    for messages, following in (([_QUESTION, answer], follow_up), (calling_messages, result)):
        text_alone = template.render_history(_prompt(messages))
        text_with_next = template.render_history(_prompt([*messages, following]))
        text_after = text_alone.rpartition(_ANSWER)[2] if _ANSWER in text_alone else ""
        if not text_after.strip() and text_with_next.startswith(text_alone.rstrip()):
            text_after = text_with_next[len(text_alone.rstrip()) :].partition(_PROBE)[0]
        yield from text_after.split()[:1]


def _user_conversation(probe: str, name: str) -> list[Message]:
    """A question of the user, which is the probe. Calls no tool."""
    return [{"role": "user", "content": probe}]


def _tool_conversation(probe: str, name: str) -> list[Message]:
    """A call of the tool with this name, and its result, which is the probe."""
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

    This part is the same for a new and a past answer, with any content, and at any place in a
    conversation. So conversations with different probes, tool names and lengths are compared.
    """
    probe_messages = conversation(_PROBE, "f")
    first_text = _header_part(_text_between(template, probe_messages, _PROBE, "f"), ends, markers)
    other_text = _text_between(template, conversation(_OTHER_PROBE, "g"), _OTHER_PROBE, "g")
    other_text = _header_part(other_text, ends, markers)
    # drops call ids and tool names
    header = common_prefix(first_text[::-1], other_text[::-1])[::-1]
    later_text = _header_part(
        _text_between(template, [*_EARLIER_TURN, *probe_messages], _PROBE, "f"), ends, markers
    )
    if later_text:
        # drops numbers that count the messages
        header = common_prefix(header, later_text[len(first_text) - len(header) :])
    return _OPEN_MARKER.sub("", header).strip()


def _header_part(between: str, ends: tuple[str, ...], markers: tuple[str, ...]) -> str:
    """Cut off the end of the previous message and the marker that may open a thought."""
    for end in ends:  # ends are cut first, because an end may also be a marker of thoughts
        text_after_end = between.rpartition(end)[2]
        between = text_after_end if text_after_end.strip() else between
    for marker in markers:
        between = between.partition(marker)[0]
    return between


def _text_between(template: ChatTemplate, messages: list[Message], probe: str, name: str) -> str:
    """What the template writes between the message with the probe and the answer to it, as far as
    it is the same for a new and a past answer. Empty if the template refuses the conversation.

    name: the name of the tool that the conversation calls.
    """
    answered_messages = [*messages, {"role": "assistant", "content": _ANSWER}, _QUESTION]
    prompt_text = template.try_render(_prompt(messages, name))
    answered_text = template.try_render(_prompt(answered_messages, name))
    text_before_answer, answer_found, _ = answered_text.rpartition(_ANSWER)
    if not answer_found:
        return ""
    return common_prefix(prompt_text.rpartition(probe)[2], text_before_answer.rpartition(probe)[2])


def _prompt(messages: Sequence[Message], name: str = "f") -> ChatPrompt:
    """A conversation with a tool of this name."""
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
    sent_prompt: ChatPrompt,
    rendered_prompt: ChatPrompt,
    text: str,
    *,
    template: ChatTemplate,
    guard: Guard,
) -> tuple[int, ...]:
    """The positions of a prompt's breakpoints in its rendered text; 0 for an unknown position.

    sent_prompt: the conversation as sent, whose contents may be in parts.
    rendered_prompt: the conversation as rendered.
    """
    if not sent_prompt.cache_breakpoints:
        return ()
    breakpoints = [
        _normalized(each, sent_prompt.messages) for each in sent_prompt.cache_breakpoints
    ]
    spots = [
        _spot_for_mark(each, sent_prompt.messages, rendered_prompt.messages, guard)
        for each in breakpoints
    ]
    found_places = _marked_places(rendered_prompt, text, spots, template)
    return tuple(
        found_places[number]
        if number in found_places
        else _end_of_shared_prefix(each, rendered_prompt, text, template)
        for number, each in enumerate(breakpoints)
    )


def marked_prefixes(prompt: Prompt, tokens: PromptTokens) -> tuple[MarkedPrefix, ...]:
    """The prefixes up to the breakpoints of a prompt, in ascending order.

    If breakpoints coincide, the longest time applies.
    """
    if not isinstance(prompt, ChatPrompt):
        return ()
    seconds_by_position: dict[int, float] = {}
    for position, point in zip(tokens.breakpoints, prompt.cache_breakpoints, strict=True):
        if position:
            seconds_by_position[position] = max(
                point.seconds, seconds_by_position.get(position, 0.0)
            )
    return tuple(
        MarkedPrefix(tokens=position, seconds=seconds_by_position[position])
        for position in sorted(seconds_by_position)
    )


def _normalized(point: CacheBreakpoint, sent_messages: Sequence[Any]) -> CacheBreakpoint:
    """The breakpoint in normal form: one after a message's last part is one after the message."""
    if point.messages < len(sent_messages) and point.parts < len(
        _parts(sent_messages[point.messages])
    ):
        return point
    return CacheBreakpoint(messages=min(point.messages + bool(point.parts), len(sent_messages)))


def _spot_for_mark(
    point: CacheBreakpoint,
    sent_messages: Sequence[Any],
    rendered_messages: Sequence[Any],
    guard: Guard,
) -> _Spot | None:
    """Where in the conversation to put the mark of a breakpoint; None without a text for it."""
    if point.parts:
        return _after_parts(
            point,
            _parts(sent_messages[point.messages]),
            _text(rendered_messages[point.messages]),
            guard,
        )
    leading_messages = _count_leading_system(rendered_messages)
    if point.messages > leading_messages:
        last_message = rendered_messages[point.messages - 1]
        content = _text(last_message).rstrip()
        if content and last_message.get("role") != "assistant":
            return _Spot(point.messages - 1, len(content))
    # A breakpoint after an answer, or after the system prompt and tools, is marked at the beginning
    # of the next message's text.
    next_message = max(point.messages, leading_messages)
    content = (
        _text(rendered_messages[next_message]) if next_message < len(rendered_messages) else ""
    )
    return _Spot(next_message, len(content) - len(content.lstrip())) if content.strip() else None


def _after_parts(
    point: CacheBreakpoint, parts: Sequence[str], content: str, guard: Guard
) -> _Spot | None:
    """The position after the given parts of a content.

    The content contains the parts in order, with any text in between.
    """
    end = len(content) - len(content.lstrip())
    for part in map(guard, parts[: point.parts]):
        part_start = content.find(part.strip(), end)
        if part_start >= 0:  # a missing part is an accounting header, which was left out
            end = part_start + len(part.strip())
    return _Spot(point.messages, end) if content.strip() else None


def _marked_places(
    prompt: ChatPrompt, text: str, spots: Sequence[_Spot | None], template: ChatTemplate
) -> dict[int, int]:
    """The positions of marks in the rendered text, by number; empty if marks change the text.

    spots: where to put the marks; None for a breakpoint without one.
    """
    messages = list(prompt.messages)
    marks = [(spot, number) for number, spot in enumerate(spots) if spot is not None]
    for spot, number in sorted(marks, key=lambda mark: mark[0], reverse=True):
        content = messages[spot.message]["content"]
        marked_text = content[: spot.character] + _MARK.format(number) + content[spot.character :]
        messages[spot.message] = {**messages[spot.message], "content": marked_text}
    marked_text = template.try_render(msgspec.structs.replace(prompt, messages=tuple(messages)))
    marked_text = well_formed(marked_text)
    if _MARKS.sub("", marked_text) != text:
        return {}
    place_by_number: dict[int, int] = {}
    marks_before = 0
    for mark in _MARKS.finditer(marked_text):
        place_by_number[int(mark[1])] = mark.start() - marks_before
        marks_before += len(mark[0])
    return place_by_number


def _end_of_shared_prefix(
    point: CacheBreakpoint, prompt: ChatPrompt, text: str, template: ChatTemplate
) -> int:
    """The length of the prefix that the text shares with the conversation up to a breakpoint."""
    messages = prompt.messages[: max(point.messages, _count_leading_system(prompt.messages))]
    beginning = msgspec.structs.replace(prompt, messages=messages, continue_last=False)
    return len(common_prefix(template.render_history(beginning), text))


def _count_leading_system(messages: Sequence[Any]) -> int:
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
