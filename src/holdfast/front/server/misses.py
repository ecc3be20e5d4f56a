"""Remembers the last answers with many prompt tokens that could have been cached but were not, and
finds out which line of the prompt has changed.

The worker knows only tokens. The front therefore keeps the texts of the last prompts, in memory only
and within a limit, and compares a prompt that missed the cache with the most similar one of the same
tenant and model. Of an image, it keeps a digest.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from holdfast.front.images.sources import IMAGE, ImageSource, is_image
from holdfast.front.request import ChatPrompt, GenerationRequest
from holdfast.front.server.answers import Explanation
from holdfast.front.telemetry.request_log import RequestRecord
from holdfast.wire.events import CacheOutcome

MOST_MISSES = 50  # per tenant
MOST_TENANTS = 200
MOST_PROMPTS = 24  # per tenant and model
MOST_BYTES = 8 << 20  # of all prompts together
LONGEST_LINE = 240  # characters of a changed line that are shown
LINES_BEFORE = 2
LEAST_LOST = 256  # tokens
_PART_BYTES = 150  # of a `PromptPart` and its places in the tables, without its texts
_PIECE = 4096  # characters that are compared together
_TOOL = "the definition of the tool "
_SYSTEM_PROMPT = "the system prompt"
_SYSTEM = ("system", "developer")
_VERBS = {"added": "added", "left_out": "left out"}


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A message, or the definition of a tool. `name` says which, in words.

    images: the lines of the text that represent images.
    """

    name: str
    text: str
    images: tuple[str, ...] = ()


Parts: TypeAlias = tuple[PromptPart, ...]


class TextChange(Struct, frozen=True, kw_only=True):
    """The first difference between a prompt and the most similar earlier prompt.

    `summary` says in a sentence what changed, and `place` where, for example "line 3 of the system
    prompt". `before` are the lines before it, `cached` is the line in the earlier prompt and `now`
    the line in this one. Long lines are cut around the difference. If lines or messages were added
    or left out, `kind` says so, and the text is the first of these lines; `cached` or `now` is then
    empty.
    """

    kind: Literal["changed", "added", "left_out"]
    summary: str
    place: str
    before: str
    cached: str
    now: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """An answer with many prompt tokens that could have been cached but were not."""

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
    """The recent misses of each tenant. Thread-safe."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # the last used one at the end
        # each part that prompts have, and how many have it: most share their tools and first turns
        self._parts: dict[PromptPart, PromptPart] = {}
        self._uses: Counter[PromptPart] = Counter()
        self._bytes = 0
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Miss]:
        """All misses, the latest first."""
        with self._lock:
            misses = [miss for tenant in self._tenants.values() for miss in tenant.misses]
        return iter(sorted(misses, key=lambda miss: miss.at, reverse=True))

    @property
    def resident_bytes(self) -> int:
        """The size of all remembered prompts."""
        return self._bytes

    def check_invariants(self) -> None:
        """Assert that the parts and their size are those of the remembered prompts."""
        with self._lock:
            kept = [
                part
                for tenant in self._tenants.values()
                for prompts in tenant.prompts.values()
                for parts in prompts
                for part in parts
            ]
            assert self._uses == Counter(kept), "the uses of a part are wrong"
            assert all(self._parts[part] is part for part in kept), "a part is kept twice"
            assert self._bytes == sum(map(_bytes_of, self._parts)), "the size is wrong"

    def note(
        self, request: GenerationRequest, explanation: Explanation, record: RequestRecord
    ) -> None:
        """Remember the prompt of an answer, and the answer if its prompt missed the cache.

        Takes milliseconds for long prompts.
        """
        parts = parts_of(request)
        with self._lock:
            self._note(request, parts, explanation, record)

    def _note(
        self,
        request: GenerationRequest,
        parts: Parts,
        explanation: Explanation,
        record: RequestRecord,
    ) -> None:
        tenant = self._tenants.setdefault(request.tenant, _Tenant())
        self._tenants.move_to_end(request.tenant)
        closest: Parts = ()
        if explanation.reason.is_miss:
            closest = _closest(tenant.prompts.get(request.model, ()), parts)
        if lost_tokens(explanation, closest, parts) >= LEAST_LOST:
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
                    change=change_between(closest, parts),
                )
            )
        self._keep(tenant, request.model, parts)

    def _keep(self, tenant: _Tenant, model: str, parts: Parts) -> None:
        prompts = tenant.prompts.setdefault(model, deque())
        # the next turn of a conversation contains the earlier turns
        for other in [each for each in prompts if each == parts[: len(each)]]:
            self._drop(prompts, other)
        if parts and sum(map(_bytes_of, parts)) <= MOST_BYTES // 4:
            prompts.append(self._counted(parts))
        while len(prompts) > MOST_PROMPTS:
            self._drop(prompts, prompts[0])
        while self._bytes > MOST_BYTES or len(self._tenants) > MOST_TENANTS:
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
        for part in parts:
            self._uses[part] -= 1
            if not self._uses[part]:
                del self._uses[part], self._parts[part]
                self._bytes -= _bytes_of(part)

    def _counted(self, parts: Parts) -> Parts:
        """The parts, if they are already known from other prompts."""
        for part in parts:
            if part not in self._parts:
                self._parts[part] = part
                self._bytes += _bytes_of(part)
            self._uses[part] += 1
        return tuple(self._parts[part] for part in parts)


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
        name = _SYSTEM_PROMPT if is_head else f"message {len(messages) + 1} ({role})"
        text, images = _text_of(message)
        messages.append(PromptPart(name, text, images))
    return (*tools, *messages)


def lost_tokens(explanation: Explanation, earlier: Parts, parts: Parts) -> int:
    """How many tokens of a prompt could have been cached but were prefilled.

    These are tokens that are or were cached but could not be used, and those after the first change
    that the most similar earlier prompt has, too: without the change, they would have been found.
    The latter are estimated from the number of characters.
    """
    if not explanation.reason.is_miss:
        return 0
    if explanation.reason == CacheOutcome.FAILED:
        return explanation.read_tokens
    per_character = explanation.prompt_tokens / max(1, _characters(parts))
    at = _first_difference(earlier, parts)
    if at is None:
        # the texts are the same, so the chat template has rendered them otherwise
        shared = per_character * min(_characters(earlier), _characters(parts))
        cached = explanation.prompt_tokens - explanation.read_tokens
        repeated = shared - cached - explanation.prompt_tokens / 10  # the estimate is not exact
    else:
        repeated = per_character * _repeated_characters(earlier[at:], parts[at:])
    lost = explanation.unused_tokens + max(0, int(repeated))
    return min(explanation.read_tokens, lost)


def _first_difference(earlier: Parts, parts: Parts) -> int | None:
    """The place of the first part that differs; None if one prompt only continues the other."""
    pairs = enumerate(zip(earlier, parts, strict=False))
    return next((at for at, (before, now) in pairs if before != now), None)


def _repeated_characters(earlier: Parts, parts: Parts) -> int:
    """How much of the parts, of which the first ones differ, is also in the earlier ones."""
    texts = {part.text for part in earlier}
    repeated = sum(len(part.text) for part in parts if part.text in texts)
    if parts[0].text not in texts and parts[0].name == earlier[0].name:
        cached, now = earlier[0].text, parts[0].text
        at = _common_characters(cached, now)
        repeated += _common_characters(cached[at:][::-1], now[at:][::-1])
    return repeated


def change_between(earlier: Parts, parts: Parts) -> TextChange | None:
    """The first difference; None if one prompt only continues the other."""
    at = _first_difference(earlier, parts)
    if at is None:
        return None
    before, now = earlier[at], parts[at]
    if now.text and now.text in {part.text for part in earlier[at + 1 :]}:
        return _whole_part(before, "left_out")
    if before.text and before.text in {part.text for part in parts[at + 1 :]}:
        return _whole_part(now, "added")
    if before.name == now.name:
        return _changed_line(before, now)
    if before.name == _SYSTEM_PROMPT:
        return _whole_part(before, "left_out")
    if now.name == _SYSTEM_PROMPT:
        return _whole_part(now, "added")
    is_tool = _TOOL in before.name + now.name
    place = "the list of tools" if is_tool else now.name
    return TextChange(
        kind="changed",
        summary=f"{_capital(place)} changed.",
        place=place,
        before="",
        cached=_line(before.text, 0, 0),
        now=_line(now.text, 0, 0),
    )


def _whole_part(part: PromptPart, kind: Literal["added", "left_out"]) -> TextChange:
    """A message or a tool was added or left out."""
    name = "a system prompt" if part.name == _SYSTEM_PROMPT else part.name
    line = _line(part.text, 0, 0)
    return TextChange(
        kind=kind,
        summary=f"{_capital(name)} was {_VERBS[kind]}.",
        place=part.name,
        before="",
        cached=line if kind == "left_out" else "",
        now=line if kind == "added" else "",
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


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
    """How many characters both texts begin with."""
    end = min(len(text), len(other))
    at = 0
    while at < end and text[at : at + _PIECE] == other[at : at + _PIECE]:
        at += _PIECE
    while at < end and text[at] == other[at]:
        at += 1
    return min(at, end)


def _changed_line(earlier: PromptPart, part: PromptPart) -> TextChange:
    cached, text = earlier.text, part.text
    images = {*earlier.images, *part.images}
    at = _common_characters(cached, text)
    if at == len(text) or at == len(cached):
        # one text is the beginning of the other: the difference is the line that only one has
        longer = cached if at == len(text) else text
        at += longer[at:].startswith("\n")
    begin = max(cached.rfind("\n", 0, at), text.rfind("\n", 0, at)) + 1
    head = text[:begin].splitlines()
    place = f"line {len(head) + 1} of {part.name}"
    kind, lines = _kind_of(cached[begin:], text[begin:])
    shown = (_line(cached, begin, at), _line(text, begin, at))
    changed = {"added": shown[1:], "left_out": shown[:1], "changed": shown}[kind]
    is_one_image = lines == 1 and images.issuperset(changed)
    if is_one_image:
        place = f"image {sum(line in images for line in head) + 1} of {part.name}"
    summary = f"{_capital(place)} changed."
    if kind != "changed":
        some = f"{lines:,} lines were"
        if lines == 1:
            some = "An image was" if is_one_image else "A line was"
        summary = f"{some} {_VERBS[kind]}: {'' if lines == 1 else 'from '}{place}."
    return TextChange(
        kind=kind,
        summary=summary,
        place=place,
        before="\n".join(line[:LONGEST_LINE] for line in head[-LINES_BEFORE:]),
        cached="" if kind == "added" else shown[0],
        now="" if kind == "left_out" else shown[1],
    )


def _kind_of(cached: str, now: str) -> tuple[Literal["changed", "added", "left_out"], int]:
    """What happened to texts of which the first lines differ, and to how many lines."""
    kind: Literal["added", "left_out"] = "added" if len(now) > len(cached) else "left_out"
    longer, rest = (now, cached) if kind == "added" else (cached, now)
    more = longer[: len(longer) - len(rest)]
    if not longer.endswith(rest) or (rest and not more.endswith("\n")):
        return "changed", 1
    return kind, max(1, len(more.splitlines()))


def _line(text: str, begin: int, at: int) -> str:
    """The line that begins at `begin`, cut around `at`."""
    end = text.find("\n", begin)
    end = len(text) if end < 0 else end
    first = max(begin, at - LONGEST_LINE // 3)
    last = min(end, first + LONGEST_LINE)
    return ("…" if first > begin else "") + text[first:last] + ("…" if last < end else "")


def _text_of(message: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """What a message says: its text, then its reasoning and calls as JSON; and those of the lines
    that represent images.
    """
    content = message.get("content")
    texts: list[str] = []
    images: list[str] = []
    if isinstance(content, str):
        texts.append(content)
    elif isinstance(content, list | tuple):
        for part in content:
            if is_image(part):
                images.append(_image_line(part[IMAGE]))
                texts.append(images[-1])
            elif isinstance(part, dict) and isinstance(part.get("text"), str):
                texts.append(part["text"])
            else:
                texts.append(_as_json(part))
    rest = {
        name: value
        for name, value in message.items()
        if name not in ("role", "content") and value not in (None, "", [], ())
    }
    if rest:
        texts.append(_as_json(rest))
    text = texts[0] if len(texts) == 1 else "\n".join(texts)
    return text, tuple(images)


def _image_line(image: ImageSource | str) -> str:
    return f"[image {image.digest() if isinstance(image, ImageSource) else image}]"


def _as_json(value: object) -> str:
    encoded = msgspec.json.encode(value, enc_hook=str)
    return msgspec.json.format(encoded, indent=1).decode()


def _bytes_of(part: PromptPart) -> int:
    return _PART_BYTES + sum(map(sys.getsizeof, (part.name, part.text, *part.images)))


def _characters(parts: Parts) -> int:
    """The number of characters."""
    return sum(len(part.text) for part in parts)
