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
from operator import add
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

    def ends(self, text: str, first_tokens: int, last_tokens: int) -> tuple[str, str]:
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
    # a unit is a message, or a message with calls and the messages with their results
    protected = _protected(messages)
    middle = [unit for unit in _units(messages) if protected.isdisjoint(unit)]
    removable = frozenset(index for unit in middle for index in unit)
    remaining = [index for index in range(len(messages)) if index not in removable]
    # tokens of each message: its text, and everything around the text
    text_tokens = [ruler.tokens(_text(message)) for message in messages]
    overhead_tokens = [_MESSAGE_TOKENS + ruler.tokens(_arguments(message)) for message in messages]

    @cache
    def cut_message(index: int, kept_tokens: int) -> Message:
        return _cut_text(messages[index], kept_tokens, text_tokens=text_tokens[index], ruler=ruler)

    tokens_besides_texts = 0  # tokens besides the texts that stay; known after the first attempt
    for max_text_tokens, max_system_tokens in _text_limits(limit):
        most_tokens = [
            max_system_tokens if message.get("role") in _SYSTEM else max_text_tokens
            for message in messages
        ]
        kept_text_tokens = [*map(min, text_tokens, most_tokens)]
        # when texts must be cut anyway, some room is left for the next turns
        has_cut_text = any(kept_text_tokens[index] < text_tokens[index] for index in remaining)
        room_tokens = limit - limit // 8 if has_cut_text else limit
        remaining_text_tokens = sum(kept_text_tokens[index] for index in remaining)
        if remaining_text_tokens + tokens_besides_texts > room_tokens:
            continue
        leave_out = partial(_leave_out, kept_text_tokens, cut_message=cut_message, count=count)
        shortest = leave_out(removable)
        if shortest.tokens <= room_tokens:
            message_tokens = [*map(add, kept_text_tokens, overhead_tokens)]
            return _with_most_of_middle(
                leave_out, middle, message_tokens, shortest=shortest, limit=limit
            )
        tokens_besides_texts = shortest.tokens - remaining_text_tokens
    return None


def _with_most_of_middle(
    leave_out: Callable[[frozenset[int]], Shortened],
    middle: Sequence[range],
    message_tokens: Sequence[int],
    *,
    shortest: Shortened,
    limit: int,
) -> Shortened:
    """Leave out as little of the middle as the limit and round numbers allow.

    The tokens of a message within the prompt are only estimated. If an estimate was too low, at
    least an eighth of the room is left out in addition, so there are at most nine attempts.

    leave_out: leaves out the messages with these indices. middle: the groups of messages that may be
    left out together (`_units`), oldest first. message_tokens: the tokens of each message. shortest:
    the conversation without any of them.
    """
    unit_tokens = (sum(message_tokens[unit.start : unit.stop]) for unit in middle)
    saved_tokens = [0, *accumulate(unit_tokens)]
    room_tokens = limit - shortest.tokens
    needed_tokens = max(0, saved_tokens[-1] - room_tokens)
    while True:
        target_tokens = roundest(needed_tokens, needed_tokens + room_tokens * 2 // 3)
        left_out_units = next(
            (count for count, tokens in enumerate(saved_tokens) if tokens >= target_tokens),
            len(middle),
        )
        if left_out_units == len(middle):
            return shortest
        shortened = leave_out(
            frozenset(index for unit in middle[:left_out_units] for index in unit)
        )
        excess_tokens = shortened.tokens - limit
        if excess_tokens <= 0:
            return shortened
        needed_tokens = saved_tokens[left_out_units] + max(excess_tokens, room_tokens // 8)


def roundest(low: int, high: int) -> int:
    """The number from `low` to `high` that is divisible by the highest power of two."""
    if low <= 0:
        return 0
    power_of_two = 1
    while -(-low // (2 * power_of_two)) * 2 * power_of_two <= high:
        power_of_two *= 2
    return -(-low // power_of_two) * power_of_two


def middle_of_tokens(tokens: int, *, limit: int) -> tuple[int, int]:
    """The range of tokens to leave out of a prompt that is not a conversation.

    The range begins after a quarter of the limit. Its length is a round number, so that it rarely
    changes while the prompt grows.
    """
    start = limit // 4
    room_tokens = limit - start
    needed_tokens = tokens - limit
    return start, start + roundest(needed_tokens, needed_tokens + room_tokens * 2 // 3)


def text_note(tokens: int) -> str:
    """The note that replaces the middle of a text. tokens: the number of tokens left out."""
    return _TEXT_NOTE.format(count=f"{tokens:,} tokens")


def _units(messages: Sequence[Message]) -> list[range]:
    """Group the messages so that each tool call is in one group with its results."""
    starts: list[int] = []
    callers: dict[str, int] = {}  # call id → index of the message with the call
    latest_caller = None  # index of the latest message with calls
    for index, message in enumerate(messages):
        starts.append(index)
        if message.get("role") in _RESULTS:
            call_id = message.get("tool_call_id")
            caller = (
                callers.get(call_id, latest_caller) if isinstance(call_id, str) else latest_caller
            )
            while caller is not None and starts[-1] > caller:
                starts.pop()
        elif calls := [*_calls(message)]:
            latest_caller = index
            callers |= {call["id"]: index for call in calls if isinstance(call.get("id"), str)}
    return [range(start, end) for start, end in pairwise([*starts, len(messages)])]


def _calls(message: Message) -> Iterator[dict[str, Any]]:
    """The calls of a message. A `function_call` in OpenAI's older form counts as a call without an
    id.
    """
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
    user_indices = [index for index, role in enumerate(roles) if role == "user"]
    system_indices = [index for index, role in enumerate(roles) if role in _SYSTEM]
    return frozenset((*system_indices, *user_indices[:1], *user_indices[-1:], len(messages) - 1))


def _text_limits(limit: int) -> Iterator[tuple[int, int]]:
    """Yield the limits to try, longest first: the maximum tokens of the text of an ordinary message
    and of a system message.
    """
    for longest in _decreasing_limits(limit):
        yield longest, limit
    for longest in _decreasing_limits(limit):
        yield _SHORTEST_TEXT_TOKENS, longest


def _decreasing_limits(limit: int) -> Iterator[int]:
    """Yield the limits for a text, in tokens: from three quarters of the whole limit down to the
    shortest.
    """
    length = limit * 3 // 4
    while length > _SHORTEST_TEXT_TOKENS:
        yield length
        length = length * 2 // 3
    yield _SHORTEST_TEXT_TOKENS


def _leave_out(
    kept_text_tokens: Sequence[int],
    left_out: frozenset[int],
    *,
    cut_message: Callable[[int, int], Message],
    count: Callable[[Sequence[Message]], int],
) -> Shortened:
    """Replace the messages with the indices `left_out` by notes, one for each run of messages, and
    cut the texts of the others.

    kept_text_tokens: the tokens to keep of each message's text. cut_message: returns the message
    with an index, whose text is cut to a number of tokens. count: counts the tokens of the prompt.
    """
    shortened: list[Message] = []
    origins: list[int | None] = []
    for is_left_out, index_run in groupby(range(len(kept_text_tokens)), key=left_out.__contains__):
        indices = list(index_run)
        if is_left_out:
            number = "1 message" if len(indices) == 1 else f"{len(indices):,} messages"
            shortened.append({"role": "user", "content": _MESSAGES_NOTE.format(count=number)})
            origins.append(None)
        else:
            shortened += [cut_message(index, kept_text_tokens[index]) for index in indices]
            origins += indices
    return Shortened(messages=tuple(shortened), origins=tuple(origins), tokens=count(shortened))


def _cut_text(message: Message, kept_tokens: int, *, text_tokens: int, ruler: Ruler) -> Message:
    """Leave out the middle of a message's text, so that about `kept_tokens` tokens remain, with the
    note. Images are marks within the text (`prompt/images.py`).

    text_tokens: the number of tokens in the text.
    """
    if kept_tokens == text_tokens:
        return message
    note = text_note(text_tokens - kept_tokens)
    kept_without_note = max(2, kept_tokens - ruler.tokens(note))
    beginning, ending = ruler.ends(
        _text(message), kept_without_note - kept_without_note // 2, kept_without_note // 2
    )
    return {**message, "content": f"{beginning}{note}{ending}"}


def _text(message: Message) -> str:
    """The text of a message, with its parts joined as for the template."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(_texts(content)) if isinstance(content, list | tuple) else ""


def _texts(parts: Iterable[Any]) -> Iterator[str]:
    """The texts of content parts. Parts without text are left out."""
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text
