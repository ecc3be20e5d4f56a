"""Shortening a conversation: calls keep their results, the result fits, and it rarely changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.front.prompt.truncation import (
    Shortened,
    middle_of_tokens,
    roundest,
    without_middle,
)

Message = dict[str, Any]
TOOL_TOKENS = 30  # tokens of the tools and the template in `count`
LIMIT = 1000


class Words:
    """A tokenizer with one token per word."""

    def tokens(self, text: str) -> int:
        return len(text.split())

    def ends(self, text: str, first: int, last: int) -> tuple[str, str]:
        words = text.split()
        return " ".join(words[:first]), " ".join(words[-last:])


def count(messages: Sequence[Message]) -> int:
    """A template that writes five tokens around each message, and calls as JSON."""
    tokens = TOOL_TOKENS
    for message in messages:
        calls = json.dumps(message.get("tool_calls", ""))
        tokens += 5 + len(f"{message['content']} {calls}".split())
    return tokens


def shortened(messages: Sequence[Message], limit: int = LIMIT) -> Shortened | None:
    return without_middle(messages, tokens=count(messages), limit=limit, count=count, ruler=Words())


def words(number: int, name: str = "w") -> str:
    return " ".join(f"{name}{place}" for place in range(number))


def system(number: int = 20) -> Message:
    return {"role": "system", "content": words(number, "s")}


def user(number: int, name: str = "u") -> Message:
    return {"role": "user", "content": words(number, name)}


def answer(number: int) -> Message:
    return {"role": "assistant", "content": words(number, "a")}


def calling(*ids: str) -> Message:
    calls = [
        {"id": each, "type": "function", "function": {"name": "read", "arguments": "{}"}}
        for each in ids
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(call_id: str, number: int) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": words(number, "r")}


@st.composite
def turns(draw: st.DrawFn, longest: int = 400) -> list[Message]:
    """One to twelve turns with answers, calls and results, with or without a system message."""
    length = st.integers(0, longest)
    messages = draw(st.sampled_from([[], [system()], [system(), system(5)]]))
    messages = list(messages)
    for turn in range(draw(st.integers(1, 12))):
        messages.append(user(draw(length), f"u{turn}_"))
        for step in range(draw(st.integers(0, 3))):
            ids = [f"c{turn}_{step}_{place}" for place in range(draw(st.integers(1, 3)))]
            messages.append(calling(*ids))
            messages += [result(each, draw(length)) for each in draw(st.permutations(ids))]
        if draw(st.booleans()):
            messages.append(answer(draw(length)))
    return messages


def called(messages: Sequence[Message]) -> list[str]:
    return [call["id"] for message in messages for call in message.get("tool_calls", ())]


def answered(messages: Sequence[Message]) -> list[str]:
    return [each["tool_call_id"] for each in messages if each["role"] == "tool"]


@given(turns(), st.integers(150, 3000))
def test_the_shortened_conversation_fits_and_keeps_required_messages(
    messages: list[Message], limit: int
) -> None:
    short = shortened(messages, limit)
    if short is None:
        return
    assert count(short.messages) <= limit
    kept = [origin for origin in short.origins if origin is not None]
    assert kept == sorted(set(kept))
    users = [place for place, message in enumerate(messages) if message["role"] == "user"]
    systems = [place for place, message in enumerate(messages) if message["role"] == "system"]
    assert {*systems, users[0], users[-1], len(messages) - 1} <= {*kept}
    assert sorted(called(short.messages)) == sorted(answered(short.messages))
    for message, origin in zip(short.messages, short.origins, strict=True):
        if origin is None:
            assert message["role"] == "user"
            assert "left out here" in message["content"]
        elif message != messages[origin]:
            assert "left out here" in message["content"]
            assert {**message, "content": ""} == {**messages[origin], "content": ""}


@given(turns(), st.integers(150, 3000))
def test_shortening_twice_equals_shortening_once(messages: list[Message], limit: int) -> None:
    short = shortened(messages, limit)
    if short is not None:
        again = shortened(short.messages, limit)
        assert again is not None
        assert again.messages == short.messages


@given(turns(longest=40))
def test_a_conversation_that_fits_is_unchanged(messages: list[Message]) -> None:
    short = shortened(messages, count(messages))
    assert short is not None
    assert short.messages == tuple(messages)


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=40, max_size=80))
def test_a_growing_conversation_is_recut_only_occasionally(lengths: list[tuple[int, int]]) -> None:
    """Between two cuts, each prompt extends the one before it, so the prefix cache is hit."""
    messages = [system()]
    prompts: list[tuple[Message, ...]] = []
    for asked, told in lengths:
        messages = [*messages, user(asked)]
        short = shortened(messages)
        assert short is not None
        prompts.append(short.messages)
        messages = [*messages, answer(told)]
    cuts = sum(after[: len(before)] != before for before, after in pairwise(prompts))
    # on average, a cut frees at least a third of the room that the kept messages leave
    room = LIMIT - TOOL_TOKENS - 20 - 2 * 65 - 25
    assert cuts <= 1 + count(messages) / (room / 3)


@settings(max_examples=15)
@given(st.lists(st.integers(1, 100), min_size=40, max_size=80))
def test_a_long_run_of_tool_calls_is_recut_only_occasionally(lengths: list[int]) -> None:
    messages = [system(), user(30)]
    prompts: list[tuple[Message, ...]] = []
    for place, length in enumerate(lengths):
        messages = [*messages, calling(f"c{place}"), result(f"c{place}", length)]
        short = shortened(messages)
        assert short is not None
        assert called(short.messages) == answered(short.messages)
        prompts.append(short.messages)
    cuts = sum(after[: len(before)] != before for before, after in pairwise(prompts))
    room = LIMIT - TOOL_TOKENS - 20 - 35 - 120 - 25
    assert cuts <= 1 + count(messages) / (room / 3)


def test_the_oldest_middle_messages_go_first_and_are_counted() -> None:
    messages = [system(), user(10, "first")]
    for turn in range(20):
        messages += [answer(50), user(50, f"u{turn}_")]
    short = shortened(messages)
    assert short is not None
    gone = len(messages) - sum(origin is not None for origin in short.origins)
    assert short.origins[:3] == (0, 1, None)
    assert short.messages[2] == {
        "role": "user",
        "content": f"[{gone} messages left out here, because the conversation exceeds the model's "
        "context.]",
    }
    assert short.messages[3:] == tuple(messages[2 + gone :])


def test_a_call_and_its_results_stay_together() -> None:
    messages = [user(5), *(answer(60) for _ in range(9)), calling("a", "b"), result("a", 60)]
    messages += [user(60), result("b", 60), *(answer(60) for _ in range(5)), user(5)]
    for limit in range(150, 1000, 50):
        short = shortened(messages, limit)
        assert short is not None
        assert len(called(short.messages)) == len(answered(short.messages))


def test_a_text_that_is_too_long_loses_its_middle() -> None:
    document = user(3000, "d")
    first = shortened([system(), document])
    assert first is not None
    text = first.messages[1]["content"]
    assert text.startswith("d0 d1 d2 ")
    assert text.endswith(" d2998 d2999")
    assert "2,250 tokens left out here" in text
    assert first.messages[0] == system()
    later = shortened([system(), document, answer(20), user(20)])
    assert later is not None
    assert later.messages[:2] == first.messages
    assert later.messages[2:] == (answer(20), user(20))


def test_a_long_result_is_cut_equally_in_later_turns() -> None:
    run = [system(), user(20), calling("a"), result("a", 2000)]
    first = shortened(run)
    assert first is not None
    later = shortened([*run, calling("b"), result("b", 20)])
    assert later is not None
    assert later.messages[: len(first.messages)] == first.messages


def test_system_messages_are_cut_last() -> None:
    short = shortened([system(700), user(500)])
    assert short is not None
    assert short.messages[0] == system(700)
    assert "left out here" in short.messages[1]["content"]
    both = shortened([system(3000), user(500)])
    assert both is not None
    assert all("left out here" in message["content"] for message in both.messages)


@pytest.mark.parametrize(("around", "forgets"), [(0, False), (60, True)])
@pytest.mark.parametrize("fixed", [30, 700, 940])
@pytest.mark.parametrize("longest", [3, 40, 400, 4000])
def test_few_prompts_are_counted_and_few_texts_are_cut(
    around: int, fixed: int, longest: int, forgets: bool
) -> None:
    """For any text that a template adds, and whether or not it renders the older half."""
    messages = [system()]
    for turn in range(200):
        messages += [user(1 + turn * 7 % longest, f"u{turn}_"), answer(1 + turn * 5 % longest)]
    messages.append(user(longest))
    forgotten = [id(message) for message in messages[: len(messages) // 2] if forgets]
    counted: list[int] = []
    cut: list[str] = []

    def count_as_told(told: Sequence[Message]) -> int:
        shown = [message for message in told if id(message) not in forgotten]
        counted.append(fixed + around * len(told) + sum(map(Words().tokens, texts(shown))))
        return counted[-1]

    class Counting(Words):
        def ends(self, text: str, first: int, last: int) -> tuple[str, str]:
            cut.append(text)
            return super().ends(text, first, last)

    short = without_middle(
        messages,
        tokens=100_000,
        limit=LIMIT,
        count=count_as_told,
        ruler=Counting(),
    )
    assert len(counted) <= 9
    assert len(cut) <= 40
    if short is not None:
        assert short.tokens in counted
        assert short.tokens <= LIMIT


def texts(messages: Sequence[Message]) -> list[str]:
    return [message["content"] for message in messages]


def test_a_conversation_whose_tools_do_not_fit_cannot_be_shortened() -> None:
    assert shortened([user(5), answer(9), user(5)], limit=TOOL_TOKENS) is None


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_roundest_number_is_in_the_range(low: int, width: int) -> None:
    found = roundest(low, low + width)
    assert low <= found <= low + width
    assert low == 0 or found & -found > width / 4


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(5, 7, 6), (5, 8, 8), (0, 9, 0), (7, 7, 7), (33, 100, 64)]
)
def test_the_roundest_number_has_the_highest_power_of_two(
    low: int, high: int, expected: int
) -> None:
    assert roundest(low, high) == expected


@given(st.integers(64, 5000), st.integers(1, 20_000))
def test_the_middle_of_a_growing_text_rarely_changes(limit: int, excess: int) -> None:
    tokens = limit + excess
    start, end = middle_of_tokens(tokens, limit=limit)
    assert 0 < start < end <= tokens
    assert tokens - (end - start) <= limit
    assert tokens - end >= (limit - start) // 3 - 1
    ends = {middle_of_tokens(each, limit=limit) for each in range(tokens, tokens + limit // 16)}
    assert len(ends) <= 3
