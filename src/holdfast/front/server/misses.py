"""Remembers the last answers whose prompts could have been cached but were not, and finds out which
line of the prompt has changed.

The worker knows only tokens. The front therefore keeps the texts of the last prompts, in memory only
and within a limit, and compares a prompt that missed the cache with the most similar one of the same
tenant and model.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from msgspec import Struct

from holdfast.front.server.answers import Explanation
from holdfast.telemetry.request_log import RequestRecord
from holdfast.wire.events import CacheOutcome
from holdfast.wire.requests import ChatPrompt, GenerationRequest

MOST_MISSES = 50  # per tenant
MOST_TENANTS = 200
MOST_PROMPTS = 24  # per tenant and model
MOST_CHARACTERS = 8 << 20  # of all prompts together
LONGEST_LINE = 240  # characters of a changed line that are shown
LINES_BEFORE = 2
_NO_MISS = {
    CacheOutcome.COMPLETE.value,
    CacheOutcome.NEW_TOKENS.value,
    CacheOutcome.SCORED.value,
    CacheOutcome.OFF.value,
}
_PIECE = 4096  # characters that are compared at once
_TOOL = "the definition of the tool "
_SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A message, or the definition of a tool. `name` says which, in words."""

    name: str
    text: str


Parts: TypeAlias = tuple[PromptPart, ...]


class TextChange(Struct, frozen=True, kw_only=True):
    """The first line of a prompt that differs from the most similar earlier prompt.

    `place` says where it is, for example "line 3 of the system prompt". `before` are the lines
    before it, `cached` is the line in the earlier prompt and `now` the line in this one. Long lines
    are cut around the difference.
    """

    place: str
    before: str
    cached: str
    now: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """An answer whose prompt was not cached as far as possible."""

    at: float  # seconds since the epoch
    tenant: str
    key: str  # name of the request's API key
    model: str
    path: str
    client: str
    session_id: str
    explanation: Explanation
    change: TextChange | None


@dataclass(slots=True)
class _Tenant:
    misses: deque[Miss] = field(default_factory=lambda: deque(maxlen=MOST_MISSES))
    # prompts by model, the last one at the end
    prompts: dict[str, deque[Parts]] = field(default_factory=dict)


class RecentMisses:
    """The recent misses of each tenant. Event loop's thread only."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # the last used one at the end
        self._characters = 0

    def __iter__(self) -> Iterator[Miss]:
        """All misses, the latest first."""
        misses = [miss for tenant in self._tenants.values() for miss in tenant.misses]
        return iter(sorted(misses, key=lambda miss: miss.at, reverse=True))

    @property
    def characters(self) -> int:
        """The size of all remembered prompts."""
        return self._characters

    def note(
        self, request: GenerationRequest, explanation: Explanation, record: RequestRecord
    ) -> None:
        """Remember the prompt of an answer, and the answer if its prompt missed the cache."""
        tenant = self._tenants.setdefault(request.tenant, _Tenant())
        self._tenants.move_to_end(request.tenant)
        parts = parts_of(request)
        if explanation.reason not in _NO_MISS:
            earlier = tenant.prompts.get(request.model, ())
            tenant.misses.append(
                Miss(
                    at=self._clock(),
                    tenant=request.tenant,
                    key=record.key,
                    model=request.model,
                    path=record.path,
                    client=record.client,
                    session_id=request.session_id,
                    explanation=explanation,
                    change=change_between(_closest(earlier, parts), parts),
                )
            )
        self._keep(tenant, request.model, parts)

    def _keep(self, tenant: _Tenant, model: str, parts: Parts) -> None:
        prompts = tenant.prompts.setdefault(model, deque())
        # the next turn of a conversation contains the earlier turns
        for other in [each for each in prompts if each == parts[: len(each)]]:
            self._drop(prompts, other)
        if parts and _size(parts) <= MOST_CHARACTERS // 4:
            prompts.append(parts)
            self._characters += _size(parts)
        while len(prompts) > MOST_PROMPTS:
            self._drop(prompts, prompts[0])
        while self._characters > MOST_CHARACTERS or len(self._tenants) > MOST_TENANTS:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        name, oldest = next(iter(self._tenants.items()))
        prompts = next(filter(None, oldest.prompts.values()), None)
        if prompts is not None:
            self._drop(prompts, prompts[0])
        elif len(self._tenants) > MOST_TENANTS:
            del self._tenants[name]
        else:  # it has misses, but no prompts
            self._tenants.move_to_end(name)

    def _drop(self, prompts: deque[Parts], parts: Parts) -> None:
        prompts.remove(parts)
        self._characters -= _size(parts)


def parts_of(request: GenerationRequest) -> Parts:
    """The parts of a request's prompt, in order; none if it consists of token ids."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return (PromptPart("the prompt", prompt),)
    if not isinstance(prompt, ChatPrompt):
        return ()
    tools = [
        PromptPart(f"{_TOOL}{tool.get('function', {}).get('name', '')}", _as_json(tool))
        for tool in prompt.listed_tools
    ]
    messages: list[PromptPart] = []
    for message in prompt.messages:
        role = str(message.get("role", ""))
        is_head = role in _SYSTEM and not messages
        name = "the system prompt" if is_head else f"message {len(messages) + 1} ({role})"
        messages.append(PromptPart(name, _text_of(message)))
    return (*tools, *messages)


def change_between(earlier: Parts, parts: Parts) -> TextChange | None:
    """The first line that differs; None if one prompt only continues the other."""
    for before, now in zip(earlier, parts, strict=False):
        if before == now:
            continue
        if before.name != now.name:
            is_tool = _TOOL in before.name + now.name
            return TextChange(
                place="the list of tools" if is_tool else now.name,
                before="",
                cached=before.name,
                now=now.name,
            )
        return _changed_line(before.text, now)
    return None


def _closest(earlier: deque[Parts] | tuple[()], parts: Parts) -> Parts:
    """The prompt that has most text in common with `parts`; the latest of several."""
    return max(reversed(earlier), key=lambda other: _common(other, parts), default=())


def _common(parts: Parts, others: Parts) -> tuple[int, int]:
    """How many parts are equal, and how many characters of the next one."""
    equal = 0
    for part, other in zip(parts, others, strict=False):
        if part != other:
            return equal, _common_characters(part.text, other.text)
        equal += 1
    return equal, 0


def _common_characters(text: str, other: str) -> int:
    end = min(len(text), len(other))
    at = 0
    while at < end and text[at : at + _PIECE] == other[at : at + _PIECE]:
        at += _PIECE
    while at < end and text[at] == other[at]:
        at += 1
    return min(at, end)


def _changed_line(cached: str, part: PromptPart) -> TextChange:
    text = part.text
    at = _common_characters(cached, text)
    if at == len(text) or at == len(cached):
        # one text is the beginning of the other: the difference is the line that only one has
        longer = cached if at == len(text) else text
        at += longer[at:].startswith("\n")
    begin = max(cached.rfind("\n", 0, at), text.rfind("\n", 0, at)) + 1
    head = text[:begin].splitlines()
    return TextChange(
        place=f"line {len(head) + 1} of {part.name}",
        before="\n".join(line[:LONGEST_LINE] for line in head[-LINES_BEFORE:]),
        cached=_line(cached, begin, at),
        now=_line(text, begin, at),
    )


def _line(text: str, begin: int, at: int) -> str:
    """The line that begins at `begin`, cut around `at`."""
    end = text.find("\n", begin)
    end = len(text) if end < 0 else end
    first = max(begin, at - LONGEST_LINE // 3)
    last = min(end, first + LONGEST_LINE)
    return ("…" if first > begin else "") + text[first:last] + ("…" if last < end else "")


def _text_of(message: dict[str, Any]) -> str:
    """What a message says: its text, then its reasoning and calls as JSON."""
    content = message.get("content")
    texts: list[str] = []
    if isinstance(content, str):
        texts.append(content)
    elif isinstance(content, list | tuple):
        texts += [
            part["text"]
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else _as_json(part)
            for part in content
        ]
    rest = {
        name: value
        for name, value in message.items()
        if name not in ("role", "content") and value not in (None, "", [], ())
    }
    if rest:
        texts.append(_as_json(rest))
    return texts[0] if len(texts) == 1 else "\n".join(texts)


def _as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1, default=str)


def _size(parts: Parts) -> int:
    return sum(len(part.text) for part in parts)
