"""Leaves out the middle of a prompt that does not fit the context.

Whole messages from the middle go first, then the middle of texts that are too long to be kept. The
result depends only on the conversation and the limit. It should rarely change from turn to turn,
because each change costs a prefill of everything after it. So more is left out than necessary. The
number of tokens to leave out is chosen from a range: at least as many as necessary, and at most
the number at which the messages that remain of the middle fill a third of the room for them. The
*roundest* number of this range is chosen (the one divisible by the highest power of two), and the
oldest messages are left out until that number is reached. As the conversation grows, the range
moves up, but its roundest number stays the same until the conversation has grown by a third of the
room or more on average, and it never decreases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, groupby, pairwise
from typing import Any, Final, Protocol

from holdfast.front.prompt.conversation import Message

_SYSTEM: Final = frozenset({"system", "developer"})
_RESULTS: Final = frozenset({"tool", "function"})
_MESSAGE_TOKENS = 8  # roughly what a template writes around a message
_SHORTEST_TEXT_TOKENS = 32  # texts are not cut to less
_MESSAGES_NOTE = "[{count} left out here, because the conversation exceeds the model's context.]"
_TEXT_NOTE = "\n[{count} left out here, because the text exceeds the model's context.]\n"


class Ruler(Protocol):
    """Counts the tokens of texts, and cuts texts at tokens, with the tokenizer of a model."""

    def tokens(self, text: str) -> int:
        """The number of tokens in a text."""

    def ends(self, text: str, first: int, last: int) -> tuple[str, str]:
        """The first and the last tokens of a text, as texts. Both numbers are at least 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """A conversation without its middle.

    origins: for each message, the index of the original message; None for a note. tokens: the
    number of tokens of the whole prompt.
    """

    messages: tuple[Message, ...]
    origins: tuple[int | None, ...]
    tokens: int


def without_middle(
    messages: Sequence[Message],
    *,
    tokens: int,
    limit: int,
    count: Callable[[Sequence[Message]], int],
    ruler: Ruler,
) -> Shortened | None:
    """Leave out messages from the middle of a conversation, and cut texts, until it fits.

    System messages, the first and the last user message and the last message stay. A tool call and
    its results stay together or are left out together. A note replaces what was left out. The texts
    of system messages are cut only if cutting all others does not suffice. A conversation that fits
    is returned unchanged.

    tokens: the number of tokens of the whole prompt. limit: their maximum number. count: returns
        the number of tokens of a prompt with these messages, including tools and everything that
        the template adds. It is slow, so it is called only a few times, and only with messages that
        are likely to fit.
    Returns None if the conversation cannot be shortened enough.
    """
    if tokens <= limit:
        origins = tuple(range(len(messages)))
        return Shortened(messages=tuple(messages), origins=origins, tokens=tokens)
    kept = _protected(messages)
    middle = [unit for unit in _units(messages) if kept.isdisjoint(unit)]
    may_go = frozenset(place for unit in middle for place in unit)
    stay = [place for place in range(len(messages)) if place not in may_go]
    # tokens of each message: its text, and everything around the text
    sizes = [ruler.tokens(_text(message)) for message in messages]
    around = [_MESSAGE_TOKENS + ruler.tokens(_arguments(message)) for message in messages]

    @cache
    def cut(place: int, length: int) -> Message:
        message, size = messages[place], sizes[place]
        return message if length == size else _cut(message, length, size=size, ruler=ruler)

    added = 0  # tokens besides the texts that stay; known after the first attempt
    for longest, longest_system in _levels(limit):
        lengths = [
            min(size, longest_system if message.get("role") in _SYSTEM else longest)
            for message, size in zip(messages, sizes, strict=True)
        ]
        # when texts must be cut anyway, some room is left for the next turns
        is_cut = any(lengths[place] < sizes[place] for place in stay)
        room = limit - limit // 8 if is_cut else limit
        texts = sum(lengths[place] for place in stay)
        if texts + added > room:
            continue
        without = partial(_without, lengths, cut=cut, count=count)
        least = without(may_go)
        if least.tokens <= room:
            costs = [sum(lengths[place] + around[place] for place in unit) for unit in middle]
            return _with_most(without, middle, costs, least=least, limit=limit)
        added = least.tokens - texts
    return None


def _with_most(
    without: Callable[[frozenset[int]], Shortened],
    middle: Sequence[range],
    costs: Sequence[int],
    *,
    least: Shortened,
    limit: int,
) -> Shortened:
    """Leave out as little of the middle as the limit and round numbers allow.

    The tokens of a message within the prompt are only estimated. If an estimate was too low, at
    least an eighth of the room is left out in addition, so there are at most nine attempts.

    without: leaves out messages. middle: the groups of messages that may be left out (`_units`),
    oldest first. costs: the tokens of each group. least: the conversation without any of them.
    """
    saved = [0, *accumulate(costs)]
    room = limit - least.tokens
    needed = max(0, saved[-1] - room)
    while True:
        target = roundest(needed, needed + room * 2 // 3)
        units = next((at for at, tokens in enumerate(saved) if tokens >= target), len(middle))
        if units == len(middle):
            return least
        shortened = without(frozenset(place for unit in middle[:units] for place in unit))
        excess = shortened.tokens - limit
        if excess <= 0:
            return shortened
        needed = saved[units] + max(excess, room // 8)


def roundest(low: int, high: int) -> int:
    """The number from `low` to `high` that is divisible by the highest power of two."""
    if low <= 0:
        return 0
    step = 1
    while -(-low // (2 * step)) * 2 * step <= high:
        step *= 2
    return -(-low // step) * step


def middle_of_tokens(tokens: int, *, limit: int) -> tuple[int, int]:
    """The range of tokens to leave out of a prompt that is not a conversation.

    The range begins after a quarter of the limit. Its length is a round number, so that it rarely
    changes while the prompt grows.
    """
    start = limit // 4
    room = limit - start
    needed = tokens - limit
    return start, start + roundest(needed, needed + room * 2 // 3)


def text_note(tokens: int) -> str:
    """The note that replaces the middle of a text. tokens: the number of tokens left out."""
    return _TEXT_NOTE.format(count=f"{tokens:,} tokens")


def _units(messages: Sequence[Message]) -> list[range]:
    """Group the messages so that each tool call is in one group with its results."""
    starts: list[int] = []
    callers: dict[str, int] = {}  # call id → index of the message with the call
    caller = None  # index of the latest message with calls
    for place, message in enumerate(messages):
        starts.append(place)
        if message.get("role") in _RESULTS:
            call_id = message.get("tool_call_id")
            asked = callers.get(call_id, caller) if isinstance(call_id, str) else caller
            while asked is not None and starts[-1] > asked:
                starts.pop()
        elif calls := [*_calls(message)]:
            caller = place
            callers |= {call["id"]: place for call in calls if isinstance(call.get("id"), str)}
    return [range(start, end) for start, end in pairwise([*starts, len(messages)])]


def _calls(message: Message) -> Iterator[dict[str, Any]]:
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list | tuple) else ():
        if isinstance(call, dict):
            yield call
    if isinstance(message.get("function_call"), dict):
        yield {}


def _arguments(message: Message) -> str:
    """The arguments of a message's calls, as one text."""
    functions = [call.get("function") for call in _calls(message)]
    return "".join(
        str(function.get("arguments")) for function in functions if isinstance(function, dict)
    )


def _protected(messages: Sequence[Message]) -> frozenset[int]:
    """The indices of the messages that must stay."""
    roles = [message.get("role") for message in messages]
    users = [place for place, role in enumerate(roles) if role == "user"]
    systems = [place for place, role in enumerate(roles) if role in _SYSTEM]
    return frozenset((*systems, *users[:1], *users[-1:], len(messages) - 1))


def _levels(limit: int) -> Iterator[tuple[int, int]]:
    """Yield the limits to try, longest first: the maximum tokens of the text of an ordinary message
    and of a system message.
    """
    for longest in _lengths(limit):
        yield longest, limit
    for longest in _lengths(limit):
        yield _SHORTEST_TEXT_TOKENS, longest


def _lengths(limit: int) -> Iterator[int]:
    length = limit * 3 // 4
    while length > _SHORTEST_TEXT_TOKENS:
        yield length
        length = length * 2 // 3
    yield _SHORTEST_TEXT_TOKENS


def _without(
    lengths: Sequence[int],
    left_out: frozenset[int],
    *,
    cut: Callable[[int, int], Message],
    count: Callable[[Sequence[Message]], int],
) -> Shortened:
    """Replace the messages with the indices `left_out` by notes, one for each run of messages, and
    cut the texts of the others.

    lengths: the tokens to keep of each message's text. cut: returns the message with an index and
    a text of that length.
    """
    ready: list[Message] = []
    origins: list[int | None] = []
    for is_gone, run in groupby(range(len(lengths)), key=left_out.__contains__):
        places = list(run)
        if is_gone:
            number = "1 message" if len(places) == 1 else f"{len(places):,} messages"
            ready.append({"role": "user", "content": _MESSAGES_NOTE.format(count=number)})
            origins.append(None)
        else:
            ready += [cut(place, lengths[place]) for place in places]
            origins += places
    return Shortened(messages=tuple(ready), origins=tuple(origins), tokens=count(ready))


def _cut(message: Message, length: int, *, size: int, ruler: Ruler) -> Message:
    """Leave out the middle of a message's text, so that `length` tokens remain.

    size: the number of tokens in the text.
    """
    note = text_note(size - length)
    kept = max(2, length - ruler.tokens(note))
    first, last = ruler.ends(_text(message), kept - kept // 2, kept // 2)
    return {**message, "content": f"{first}{note}{last}"}


def _text(message: Message) -> str:
    """The text of a message, with its parts joined as for the template."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(_texts(content)) if isinstance(content, list | tuple) else ""


def _texts(parts: Iterable[Any]) -> Iterator[str]:
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text
