"""Where the cache breakpoints of a conversation stand in its prompt.

The conversation is rendered once more, with marks in it. Where a mark changes what the template
writes (it reads results as JSON, say), the beginning up to the breakpoint is rendered alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import InvalidRequest
from holdfast.front.prompt.control_tokens import Guard
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.tokenize import well_formed
from holdfast.wire.commands import PinnedPrefix
from holdfast.wire.requests import CacheBreakpoint, ChatPrompt, Prompt, PromptTokens

_MARK = "\ue0f3{}\ue0f4"  # private use, as the template's own
_MARKS = re.compile("\ue0f3([0-9]+)\ue0f4")
_SYSTEM = frozenset({"system", "developer"})


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
