"""Remembers the last answers with many prompt tokens that could have been cached but were not, and
finds out which line of the prompt has changed.

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
LEAST_LOST = 256  # tokens
_ITEM_BYTES = 100  # of an item's places in the tables
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
    client: str  # address
    session_id: str  # empty: none
    explanation: Explanation
    change: TextChange | None  # None: one prompt only continues the other


@dataclass(frozen=True, slots=True, eq=False)
class _Prompt:
    """A prompt: its tools and then its messages, or its text. Of images, it has digests."""

    items: tuple[Any, ...] = ()
    tools: int = 0  # how many of the items are tools
    resident_bytes: int = 0  # memory that it takes


@dataclass(slots=True)
class _Tenant:
    misses: deque[Miss] = field(default_factory=lambda: deque(maxlen=MOST_MISSES))
    # prompts by model, the last one at the end
    prompts: dict[str, deque[_Prompt]] = field(default_factory=dict)


class RecentMisses:
    """The recent misses of each tenant. Thread-safe.

    A prompt that continues an earlier one takes its place, with a look at its new messages only.
    Only after a miss are the texts of two prompts put together and compared.
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # the last used one at the end
        # how many prompts have an item, by its identity: most share their tools and first turns
        self._uses: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}  # of these items, as they were first counted
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
        """Assert that the items and their size are those of the remembered prompts."""
        with self._lock:
            kept = [
                item
                for tenant in self._tenants.values()
                for prompts in tenant.prompts.values()
                for prompt in prompts
                for item in prompt.items
            ]
            assert self._uses == Counter(map(id, kept)), "the uses of an item are wrong"
            once = {id(item): item for item in kept}
            assert self._sizes == {key: _bytes_of(item) for key, item in once.items()}, (
                "the size of an item is wrong"
            )
            assert self._bytes == sum(self._sizes.values()), "the size is wrong"

    def add_answer(
        self, request: GenerationRequest, explanation: Explanation, record: RequestRecord
    ) -> None:
        """Remember the prompt of an answer, and the answer if its prompt missed the cache.

        Takes milliseconds for long prompts that missed it.
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
        continued = _continued(prompts, prompt)
        closest = continued or _closest(prompts, prompt)
        if explanation.reason.is_miss:
            closest = _closest(prompts, prompt)
            earlier, parts = _parts(closest), _parts(prompt)
            if lost_tokens(explanation, earlier, parts) >= LEAST_LOST:
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
                        change=change_between(earlier, parts),
                    )
                )
        self._remember_prompt(prompts, prompt, closest)

    def _remember_prompt(self, prompts: deque[_Prompt], prompt: _Prompt, closest: _Prompt) -> None:
        """closest: the remembered prompt of which the first items are taken, so that they are not
        stored twice.
        """
        shared = _equal_items(closest, prompt)
        items = (*closest.items[:shared], *prompt.items[shared:])
        begun = closest if shared == len(closest.items) else _Prompt()
        added = items[len(begun.items) :]
        size = begun.resident_bytes + sum(map(_bytes_of, added))
        kept = _Prompt(items, prompt.tools, size)
        self._count(added, 1)
        if begun.items:  # its items now belong to the new one
            prompts.remove(begun)
        # the next turn of a conversation contains the earlier turns
        for other in [each for each in prompts if _is_continued(each, kept)]:
            self._drop(prompts, other)
        prompts.append(kept)
        if not items or size > MOST_BYTES // 4:
            self._drop(prompts, kept)
        while len(prompts) > MOST_PROMPTS:
            self._drop(prompts, prompts[0])
        while self._bytes > MOST_BYTES or len(self._tenants) > MOST_TENANTS:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Forget one prompt of the tenant that was idle for longest, or, without any, the tenant.

        A tenant with misses only is forgotten if there are too many, else it counts as used.
        """
        name, oldest = next(iter(self._tenants.items()))
        prompts = next(filter(None, oldest.prompts.values()), None)
        if prompts is not None:
            self._drop(prompts, prompts[0])
        elif len(self._tenants) > MOST_TENANTS:
            del self._tenants[name]
        else:  # it has misses, but no prompts
            self._tenants.move_to_end(name)

    def _drop(self, prompts: deque[_Prompt], prompt: _Prompt) -> None:
        prompts.remove(prompt)
        self._count(prompt.items, -1)

    def _count(self, items: Iterable[Any], uses: Literal[1, -1]) -> None:
        for item in items:
            before = self._uses[id(item)]
            self._uses[id(item)] = before + uses
            if not before:
                self._sizes[id(item)] = _bytes_of(item)
                self._bytes += self._sizes[id(item)]
            elif not before + uses:
                del self._uses[id(item)]
                self._bytes -= self._sizes.pop(id(item))


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
    content = message.get("content")
    if not isinstance(content, list | tuple) or not any(map(is_image, content)):
        return message
    return {**message, "content": [_with_digest(part) for part in content]}


def _with_digest(part: Any) -> Any:
    image = part[IMAGE] if is_image(part) else None
    return {"type": IMAGE, IMAGE: image.digest()} if isinstance(image, ImageSource) else part


def _is_continued(earlier: _Prompt, prompt: _Prompt) -> bool:
    return earlier.items == prompt.items[: len(earlier.items)]


def _continued(prompts: deque[_Prompt], prompt: _Prompt) -> _Prompt | None:
    """The latest prompt that another one continues; None if there is none."""
    return next((each for each in reversed(prompts) if _is_continued(each, prompt)), None)


def _closest(prompts: deque[_Prompt], prompt: _Prompt) -> _Prompt:
    """The prompt that has most in common with another one: equal items, and then characters of the
    next item; the latest of several.
    """

    def likeness(other: _Prompt) -> tuple[int, int]:
        equal = _equal_items(other, prompt)
        ours, theirs = (_parts(each, equal, equal + 1) for each in (prompt, other))
        characters = common_length(ours[0].text, theirs[0].text) if ours and theirs else 0
        return equal, characters

    return max(reversed(prompts), key=likeness, default=_Prompt())


def _equal_items(one: _Prompt, other: _Prompt) -> int:
    """With how many equal items both prompts begin."""
    if _is_continued(one, other):
        return len(one.items)
    pairs = enumerate(zip(one.items, other.items, strict=False))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), len(other.items))


def _bytes_of(item: Any) -> int:
    """The memory that a prompt's item takes, including its place in the tables."""
    return _ITEM_BYTES + bytes_of(item)


def parts_of(request: GenerationRequest) -> Parts:
    """The parts of a request's prompt, in order; none if it consists of token ids."""
    return _parts(_prompt_of(request))


def _parts(prompt: _Prompt, begin: int = 0, end: int | None = None) -> Parts:
    """The parts of a prompt, or some of them."""
    parts: list[PromptPart] = []
    for at, item in enumerate(prompt.items[begin:end], begin):
        if isinstance(item, str):
            parts.append(PromptPart("the prompt", item))
        elif at < prompt.tools:
            name = f"{_TOOL}{item.get('function', {}).get('name', '')}"
            parts.append(PromptPart(name, _as_json(item)))
        else:
            number = at - prompt.tools + 1
            role = str(item.get("role", ""))
            is_head = role in _SYSTEM and number == 1
            name = _SYSTEM_PROMPT if is_head else f"message {number} ({role})"
            parts.append(PromptPart(name, *_text_of(item)))
    return tuple(parts)


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
        at = common_length(cached, now)
        repeated += common_length(cached[at:][::-1], now[at:][::-1])
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


def _changed_line(earlier: PromptPart, part: PromptPart) -> TextChange:
    """Describe the first line that differs between two parts, one of which may be longer."""
    cached, text = earlier.text, part.text
    images = {*earlier.images, *part.images}
    at = common_length(cached, text)
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


def _characters(parts: Parts) -> int:
    """The number of characters."""
    return sum(len(part.text) for part in parts)
