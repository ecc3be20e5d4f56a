"""Remembers cache misses, and finds out which line of the prompt has changed.

A miss is an answer with many prompt tokens that could have been cached but were not.

The worker knows only tokens. The front therefore keeps the texts of the last prompts, in memory only
and within a limit, and compares a prompt that missed the cache with the most similar one of the same
tenant and model. Of an image, it keeps a digest.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from holdfast.front.images.sources import IMAGE, ImageSource, is_image
from holdfast.front.prompt.beginnings import common_length
from holdfast.front.request import ChatPrompt, GenerationRequest
from holdfast.front.server.explanation import Explanation
from holdfast.front.telemetry.request_log import RequestRecord
from holdfast.lru_cache import bytes_of
from holdfast.wire.events import CacheOutcome

MOST_MISSES = 50  # per tenant
MOST_TENANTS = 200
MOST_PROMPTS = 24  # per tenant and model
MOST_BYTES = 8 << 20  # of all prompts together
LONGEST_LINE = 240  # characters of a changed line that are shown
LINES_BEFORE = 2
LEAST_LOST = 256  # tokens; an answer with fewer lost ones does not count as a miss
_ITEM_BYTES = 100  # memory of an item's entries in `RecentMisses`, besides the item itself
_TOOL = "the definition of the tool "
_SYSTEM_PROMPT = "the system prompt"
_SYSTEM_ROLES = ("system", "developer")
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
    client: str  # address
    session_id: str  # empty: none
    explanation: Explanation
    change: TextChange | None  # None: one prompt only continues the other


@dataclass(frozen=True, slots=True, eq=False)
class _Prompt:
    """A prompt as items: its tools and then its messages, or its text as the only item.

    Of images, it has digests.
    """

    items: tuple[Any, ...] = ()
    tools: int = 0  # how many of the items are tools
    resident_bytes: int = 0  # memory that it takes


@dataclass(slots=True)
class _Tenant:
    """What is remembered of one tenant, whose prompts are compared only with each other."""

    misses: deque[Miss] = field(default_factory=lambda: deque(maxlen=MOST_MISSES))
    # prompts by model, the last one at the end
    prompts: dict[str, deque[_Prompt]] = field(default_factory=dict)


class RecentMisses:
    """The recent misses of each tenant. Thread-safe.

    A prompt that continues an earlier one takes its place, for which only its new messages are
    read. Only after a miss are the whole texts of two prompts compared.
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # the last used one at the end
        # how many prompts have an item, by `id(item)`: most share their tools and first turns
        self._uses: Counter[int] = Counter()
        self._item_bytes: dict[int, int] = {}  # size of each of these items, by `id(item)`
        self._total_bytes = 0
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Miss]:
        """All misses, the latest first."""
        with self._lock:
            misses = [miss for tenant in self._tenants.values() for miss in tenant.misses]
        return iter(sorted(misses, key=lambda miss: miss.at, reverse=True))

    @property
    def resident_bytes(self) -> int:
        """The size of all remembered prompts."""
        return self._total_bytes

    def check_invariants(self) -> None:
        """Assert that the items and their size are those of the remembered prompts."""
        with self._lock:
            remembered_items = [
                item
                for tenant in self._tenants.values()
                for prompts in tenant.prompts.values()
                for prompt in prompts
                for item in prompt.items
            ]
            assert self._uses == Counter(map(id, remembered_items)), "the uses of an item are wrong"
            distinct = {id(item): item for item in remembered_items}
            assert self._item_bytes == {key: _bytes_of(item) for key, item in distinct.items()}, (
                "the size of an item is wrong"
            )
            assert self._total_bytes == sum(self._item_bytes.values()), "the size is wrong"

    def add_answer(
        self, request: GenerationRequest, explanation: Explanation, record: RequestRecord
    ) -> None:
        """Remember the prompt of an answer, and the answer if its prompt missed the cache.

        Takes milliseconds for a long prompt that missed it, so do not call it in the event loop.
        """
        prompt = _prompt_of(request)
        with self._lock:
            self._add_answer(request, prompt, explanation, record)

    def _add_answer(
        self,
        request: GenerationRequest,
        prompt: _Prompt,
        explanation: Explanation,
        record: RequestRecord,
    ) -> None:
        """Remember a prompt and, if much of it could have been cached but was not, what had
        changed.
        """
        tenant = self._tenants.setdefault(request.tenant, _Tenant())
        self._tenants.move_to_end(request.tenant)
        prompts = tenant.prompts.setdefault(request.model, deque())
        closest = _continued(prompts, prompt) or _closest(prompts, prompt)
        if explanation.reason.is_miss:
            closest = _closest(prompts, prompt)
            earlier_parts, parts = _parts(closest), _parts(prompt)
            if lost_tokens(explanation, earlier_parts, parts) >= LEAST_LOST:
                tenant.misses.append(
                    Miss(
                        at=time.time(),
                        tenant=request.tenant,
                        key=record.key,
                        model=request.model,
                        path=record.path,
                        client=record.client,
                        session_id=request.session_id,
                        explanation=explanation,
                        change=change_between(earlier_parts, parts),
                    )
                )
        self._remember_prompt(prompts, prompt, closest)

    def _remember_prompt(self, prompts: deque[_Prompt], prompt: _Prompt, closest: _Prompt) -> None:
        """Add a prompt, drop those that it continues, and drop others until all limits are met.

        closest: the remembered prompt whose first items are equal; they are not stored twice.
        """
        shared_items = _equal_items(closest, prompt)
        items = (*closest.items[:shared_items], *prompt.items[shared_items:])
        continued = closest if shared_items == len(closest.items) else _Prompt()
        new_items = items[len(continued.items) :]
        size_bytes = continued.resident_bytes + sum(map(_bytes_of, new_items))
        remembered = _Prompt(items, prompt.tools, size_bytes)
        self._count(new_items, 1)
        if continued.items:  # its items now belong to the new one
            prompts.remove(continued)
        # the next turn of a conversation contains the earlier turns
        for other in [each for each in prompts if _is_continued(each, remembered)]:
            self._drop(prompts, other)
        prompts.append(remembered)
        if not items or size_bytes > MOST_BYTES // 4:  # it would drive out too many others
            self._drop(prompts, remembered)
        while len(prompts) > MOST_PROMPTS:
            self._drop(prompts, prompts[0])
        while self._total_bytes > MOST_BYTES or len(self._tenants) > MOST_TENANTS:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Drop one prompt of the tenant that was idle for longest, or, without any, the tenant.

        A tenant with misses only is dropped if there are too many, else it counts as used.
        """
        name, oldest_tenant = next(iter(self._tenants.items()))
        prompts = next(filter(None, oldest_tenant.prompts.values()), None)
        if prompts is not None:
            self._drop(prompts, prompts[0])
        elif len(self._tenants) > MOST_TENANTS:
            del self._tenants[name]
        else:  # it has misses, but no prompts
            self._tenants.move_to_end(name)

    def _drop(self, prompts: deque[_Prompt], prompt: _Prompt) -> None:
        prompts.remove(prompt)
        self._count(prompt.items, -1)

    def _count(self, items: Iterable[Any], added_uses: Literal[1, -1]) -> None:
        """Count one use more or less of each item. Its size counts while a prompt uses it."""
        for item in items:
            uses = self._uses[id(item)]
            self._uses[id(item)] = uses + added_uses
            if not uses:
                self._item_bytes[id(item)] = _bytes_of(item)
                self._total_bytes += self._item_bytes[id(item)]
            elif not uses + added_uses:
                del self._uses[id(item)]
                self._total_bytes -= self._item_bytes.pop(id(item))


def _prompt_of(request: GenerationRequest) -> _Prompt:
    """The prompt of a request; empty if it consists of token ids."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return _Prompt((prompt,))
    if not isinstance(prompt, ChatPrompt):
        return _Prompt()
    messages: Iterable[Any] = prompt.messages
    if prompt.has_images:
        messages = map(_with_digests, messages)
    tools = prompt.listed_tools
    return _Prompt((*tools, *messages), len(tools))


def _with_digests(message: dict[str, Any]) -> dict[str, Any]:
    """The message with digests in place of its images, which would take too much memory."""
    content = message.get("content")
    if not isinstance(content, list | tuple) or not any(map(is_image, content)):
        return message
    return {**message, "content": [_with_digest(part) for part in content]}


def _with_digest(part: Any) -> Any:
    image = part[IMAGE] if is_image(part) else None
    return {"type": IMAGE, IMAGE: image.digest()} if isinstance(image, ImageSource) else part


def _is_continued(earlier: _Prompt, prompt: _Prompt) -> bool:
    """Whether `prompt` begins with all items of the earlier one."""
    return earlier.items == prompt.items[: len(earlier.items)]


def _continued(prompts: deque[_Prompt], prompt: _Prompt) -> _Prompt | None:
    """The latest prompt that another one continues; None if there is none."""
    return next((each for each in reversed(prompts) if _is_continued(each, prompt)), None)


def _closest(prompts: deque[_Prompt], prompt: _Prompt) -> _Prompt:
    """The prompt that has most in common with another one: equal items, and then characters of the
    next item; the latest of several.
    """

    def similarity(other: _Prompt) -> tuple[int, int]:
        equal_items = _equal_items(other, prompt)
        # the first items that differ; empty at the end of a prompt
        ours, theirs = (_parts(each, equal_items, equal_items + 1) for each in (prompt, other))
        characters = common_length(ours[0].text, theirs[0].text) if ours and theirs else 0
        return equal_items, characters

    return max(reversed(prompts), key=similarity, default=_Prompt())


def _equal_items(one: _Prompt, other: _Prompt) -> int:
    """The number of equal items with which both prompts begin."""
    if _is_continued(one, other):
        return len(one.items)
    pairs = enumerate(zip(one.items, other.items, strict=False))
    return next((index for index, (ours, theirs) in pairs if ours != theirs), len(other.items))


def _bytes_of(item: Any) -> int:
    """The memory that a prompt's item takes, including its entries in `RecentMisses`."""
    return _ITEM_BYTES + bytes_of(item)


def parts_of(request: GenerationRequest) -> Parts:
    """The parts of a request's prompt, in order; none if it consists of token ids."""
    return _parts(_prompt_of(request))


def _parts(prompt: _Prompt, begin: int = 0, end: int | None = None) -> Parts:
    """The parts of a prompt, one for each item from index `begin` to before `end`."""
    parts: list[PromptPart] = []
    for index, item in enumerate(prompt.items[begin:end], begin):
        if isinstance(item, str):
            parts.append(PromptPart("the prompt", item))
        elif index < prompt.tools:
            name = f"{_TOOL}{item.get('function', {}).get('name', '')}"
            parts.append(PromptPart(name, _as_json(item)))
        else:
            number = index - prompt.tools + 1
            role = str(item.get("role", ""))
            is_system_prompt = role in _SYSTEM_ROLES and number == 1
            name = _SYSTEM_PROMPT if is_system_prompt else f"message {number} ({role})"
            parts.append(PromptPart(name, *_text_of(item)))
    return tuple(parts)


def lost_tokens(explanation: Explanation, earlier: Parts, parts: Parts) -> int:
    """How many tokens of a prompt could have been cached but were prefilled.

    These are tokens that are or were cached but could not be used, and those after the first change
    that the most similar earlier prompt has, too: without the change, they would have been found.
    The latter are estimated from the number of characters.

    earlier, parts: the parts of the most similar earlier prompt, and of this prompt.
    """
    if not explanation.reason.is_miss:
        return 0
    if explanation.reason == CacheOutcome.FAILED:
        return explanation.read_tokens
    tokens_per_character = explanation.prompt_tokens / max(1, _characters(parts))
    index = _first_difference(earlier, parts)
    if index is None:
        # the texts are the same, so the chat template has rendered them otherwise
        shared_tokens = tokens_per_character * min(_characters(earlier), _characters(parts))
        cached_tokens = explanation.prompt_tokens - explanation.read_tokens
        # less a tenth of the prompt, because the estimate is not exact
        repeated_tokens = shared_tokens - cached_tokens - explanation.prompt_tokens / 10
    else:
        repeated_tokens = tokens_per_character * _repeated_characters(
            earlier[index:], parts[index:]
        )
    lost = explanation.unused_tokens + max(0, int(repeated_tokens))
    return min(explanation.read_tokens, lost)


def _first_difference(earlier: Parts, parts: Parts) -> int | None:
    """The index of the first part that differs; None if one prompt only continues the other."""
    pairs = enumerate(zip(earlier, parts, strict=False))
    return next((index for index, (cached, now) in pairs if cached != now), None)


def _repeated_characters(earlier: Parts, parts: Parts) -> int:
    """How many characters of `parts` are also in the earlier parts. The first parts differ."""
    texts = {part.text for part in earlier}
    repeated = sum(len(part.text) for part in parts if part.text in texts)
    if parts[0].text not in texts and parts[0].name == earlier[0].name:
        cached, now = earlier[0].text, parts[0].text
        begin = common_length(cached, now)
        repeated += common_length(cached[begin:][::-1], now[begin:][::-1])  # their common end
    return repeated


def change_between(earlier: Parts, parts: Parts) -> TextChange | None:
    """The first difference; None if one prompt only continues the other."""
    index = _first_difference(earlier, parts)
    if index is None:
        return None
    cached, now = earlier[index], parts[index]
    if now.text and now.text in {part.text for part in earlier[index + 1 :]}:
        return _whole_part(cached, "left_out")
    if cached.text and cached.text in {part.text for part in parts[index + 1 :]}:
        return _whole_part(now, "added")
    if cached.name == now.name:
        return _changed_line(cached, now)
    if cached.name == _SYSTEM_PROMPT:
        return _whole_part(cached, "left_out")
    if now.name == _SYSTEM_PROMPT:
        return _whole_part(now, "added")
    is_tool = _TOOL in cached.name + now.name
    place = "the list of tools" if is_tool else now.name
    return TextChange(
        kind="changed",
        summary=f"{_capital(place)} changed.",
        place=place,
        before="",
        cached=_line(cached.text, 0, 0),
        now=_line(now.text, 0, 0),
    )


def _whole_part(part: PromptPart, kind: Literal["added", "left_out"]) -> TextChange:
    """The change if a whole message or tool was added or left out."""
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


def _changed_line(earlier: PromptPart, part: PromptPart) -> TextChange:
    """The change of the first line that differs between two parts with the same name."""
    cached, text = earlier.text, part.text
    images = {*earlier.images, *part.images}
    at = common_length(cached, text)
    if at == len(text) or at == len(cached):
        # one text is the beginning of the other: the difference is the line that only one has, which
        # begins after the line break, if there is one
        longer = cached if at == len(text) else text
        at += longer[at:].startswith("\n")
    begin = max(cached.rfind("\n", 0, at), text.rfind("\n", 0, at)) + 1
    lines_before = text[:begin].splitlines()
    place = f"line {len(lines_before) + 1} of {part.name}"
    kind, line_count = _kind_of(cached[begin:], text[begin:])
    lines_shown = (_line(cached, begin, at), _line(text, begin, at))
    new_or_gone = {"added": lines_shown[1:], "left_out": lines_shown[:1], "changed": lines_shown}[
        kind
    ]
    is_one_image = line_count == 1 and images.issuperset(new_or_gone)
    if is_one_image:
        place = f"image {sum(line in images for line in lines_before) + 1} of {part.name}"
    summary = f"{_capital(place)} changed."
    if kind != "changed":
        subject = f"{line_count:,} lines were"
        if line_count == 1:
            subject = "An image was" if is_one_image else "A line was"
        summary = f"{subject} {_VERBS[kind]}: {'' if line_count == 1 else 'from '}{place}."
    return TextChange(
        kind=kind,
        summary=summary,
        place=place,
        before="\n".join(line[:LONGEST_LINE] for line in lines_before[-LINES_BEFORE:]),
        cached="" if kind == "added" else lines_shown[0],
        now="" if kind == "left_out" else lines_shown[1],
    )


def _kind_of(cached: str, now: str) -> tuple[Literal["changed", "added", "left_out"], int]:
    """What happened between two texts whose first lines differ, and to how many lines.

    Lines were added or left out if one text ends with the whole other one.
    """
    kind: Literal["added", "left_out"] = "added" if len(now) > len(cached) else "left_out"
    longer, shorter = (now, cached) if kind == "added" else (cached, now)
    extra = longer[: len(longer) - len(shorter)]
    if not longer.endswith(shorter) or (shorter and not extra.endswith("\n")):
        return "changed", 1
    return kind, max(1, len(extra.splitlines()))


def _line(text: str, begin: int, at: int) -> str:
    """The line that begins at `begin`, cut around position `at` if it is too long to show."""
    end = text.find("\n", begin)
    end = len(text) if end < 0 else end
    shown_begin = max(begin, at - LONGEST_LINE // 3)
    shown_end = min(end, shown_begin + LONGEST_LINE)
    return (
        ("…" if shown_begin > begin else "")
        + text[shown_begin:shown_end]
        + ("…" if shown_end < end else "")
    )


def _text_of(message: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The text of a message, then its reasoning and calls as JSON; and the lines of that text that
    represent images.
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
    other_fields = {
        name: value
        for name, value in message.items()
        if name not in ("role", "content") and value not in (None, "", [], ())
    }
    if other_fields:
        texts.append(_as_json(other_fields))
    text = texts[0] if len(texts) == 1 else "\n".join(texts)
    return text, tuple(images)


def _image_line(image: ImageSource | str) -> str:
    """The line that represents an image, or an image of which only the digest is kept."""
    return f"[image {image.digest() if isinstance(image, ImageSource) else image}]"


def _as_json(value: object) -> str:
    encoded = msgspec.json.encode(value, enc_hook=str)
    return msgspec.json.format(encoded, indent=1).decode()


def _characters(parts: Parts) -> int:
    """The number of characters in all parts."""
    return sum(len(part.text) for part in parts)
