"""A choice whose model thinks and calls tools: typed events, ids, and every token's log-probability
exactly once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import count, groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from holdfast.front.answers.choice import ChoiceRules, ChoiceText
from holdfast.front.answers.pieces import TokenPieces
from holdfast.front.output import (
    ChoiceFinished,
    OutputDelta,
    OutputEvent,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallFinished,
    ToolCallStarted,
    text_of,
)
from holdfast.front.toolcalls.call_format import Call
from holdfast.front.toolcalls.declared import DeclaredTools
from holdfast.front.toolcalls.dialect import PLAIN, ModelDialect, ReasoningFormat
from holdfast.front.toolcalls.families import FAMILIES
from holdfast.wire.events import Accepted, Finished, FinishReason, TokenLogprob, TokensGenerated
from holdfast.wire.requests import TokenIds
from tests.fakes import toy_tokenizers

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TOOLS = DeclaredTools([{"type": "function", "function": {"name": "look_up"}}])
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "stop"}}\n</tool_call>'
ANSWER = f"<think>\nhm 🙂\n</think>\n\nLet me see.\n{CALL}\n{CALL}"


@cache
def model(style: str, special: bool) -> tuple[Tokenizer, TokenPieces, ModelDialect]:
    tokenizer = toy_tokenizers.EXACT[style]()
    tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in MARKS])
    ids = {mark: tokenizer.token_to_id(mark) for mark in MARKS}
    dialect = ModelDialect(
        family="hermes",
        calls=FAMILIES["hermes"].calls,
        reasoning=ReasoningFormat(start="<think>", end="</think>"),
        marker_ids=ids,
    )
    return tokenizer, TokenPieces(tokenizer), dialect


def answer(
    text: str,
    *,
    style: str = "byte_level",
    special: bool = True,
    per_event: int = 1,
    end: FinishReason = FinishReason.STOP,
    scored: bool = False,
    **rules: object,
) -> tuple[list[OutputEvent], tuple[int, ...]]:
    """What a client sees of a text, and the generated tokens."""
    tokenizer, pieces, dialect = model(style, special)
    ids = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
    defaults = {
        "prompt_token_ids": TokenIds.of((1,)), "stop_token_ids": frozenset(), "max_tokens": 1000, "dialect": dialect,
        "tools": TOOLS,
        "reads_calls": True, "want_logprobs": scored,
    }  # fmt: skip
    reader = ChoiceText(pieces=pieces, rules=ChoiceRules(**{**defaults, **rules}))  # type: ignore[arg-type]
    events = [*reader.feed(Accepted(request_id="r"))]
    for start in range(0, len(ids), per_event):
        piece = ids[start : start + per_event]
        logprobs = tuple(TokenLogprob(token_id, -1.0, ()) for token_id in piece) if scored else ()
        events += reader.feed(TokensGenerated(request_id="r", token_ids=piece, logprobs=logprobs))
    if not reader.is_done:
        events += reader.feed(
            Finished(request_id="r", reason=end, prompt_tokens=1, completion_tokens=len(ids))
        )
    return events, ids


def deltas(events: list[OutputEvent]) -> list[OutputDelta]:
    return [event for event in events if not isinstance(event, ChoiceFinished)]


def finish(events: list[OutputEvent]) -> ChoiceFinished:
    (last,) = [event for event in events if isinstance(event, ChoiceFinished)]
    assert events[-1] is last
    return last


def told(events: list[OutputEvent]) -> list[tuple[object, ...]]:
    """The events without tokens; fragments are joined."""
    rows: list[tuple[object, str]] = []
    for event in deltas(events):
        match event:
            case TextDelta():
                rows.append((event.kind, event.text))
            case ToolCallStarted():
                rows.append((f"start {event.call}", event.name))
            case ToolArgumentsDelta():
                rows.append((f"arguments {event.call}", event.text))
            case ToolCallFinished():
                rows.append((f"end {event.call}", ",".join(event.repairs)))
    runs = [
        (kind, "".join(text for _, text in run))
        for kind, run in groupby(rows, key=lambda row: row[0])
    ]
    return [
        (kind, text)
        for kind, text in runs
        if text or not str(kind).startswith(("text", "reasoning"))
    ]


@pytest.mark.parametrize("style", sorted(toy_tokenizers.EXACT))
@pytest.mark.parametrize("special", [True, False])
def test_reasoning_text_and_calls_are_separate_events(style: str, special: bool) -> None:
    events, ids = answer(ANSWER, style=style, special=special)
    assert told(events) == [
        ("reasoning", "hm 🙂"),
        ("text", "Let me see."),
        ("start 0", "look_up"),
        ("arguments 0", '{"word": "stop"}'),
        ("end 0", ""),
        ("start 1", "look_up"),
        ("arguments 1", '{"word": "stop"}'),
        ("end 1", ""),
    ]
    end = finish(events)
    assert (end.calls, end.finish_reason, end.completion_tokens) == (2, "tool_calls", len(ids))


words = st.sampled_from(
    [
        *MARKS,
        CALL,
        '{"name": "look_up", "arguments": {"a": "🙂',
        "🙂",
        "hello ",
        "\n",
        "stop",
        '"}}',
    ]
)


@given(
    text=st.lists(words, max_size=8).map("".join),
    per_event=st.integers(1, 9),
    special=st.booleans(),
    scored=st.booleans(),
    end=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    in_reasoning=st.booleans(),
)
def test_every_token_belongs_to_exactly_one_event(
    text: str, per_event: int, special: bool, scored: bool, end: FinishReason, in_reasoning: bool
) -> None:
    events, ids = answer(
        text,
        special=special,
        per_event=per_event,
        scored=scored,
        end=end,
        in_reasoning=in_reasoning,
    )
    assert tuple(token_id for event in deltas(events) for token_id in event.token_ids) == ids
    assert sum(len(event.logprobs) for event in deltas(events)) == (len(ids) if scored else 0)
    whole, _ = answer(
        text,
        special=special,
        per_event=len(ids) or 1,
        scored=scored,
        end=end,
        in_reasoning=in_reasoning,
    )
    assert told(events) == told(whole)
    assert finish(events) == finish(whole)


def test_reasoning_tokens_are_counted_up_to_the_end_marker() -> None:
    tokenizer, _, _ = model("byte_level", True)
    thought = len(tokenizer.encode("<think>\nhm 🙂\n</think>", add_special_tokens=False).ids)
    assert finish(answer(ANSWER)[0]).reasoning_tokens == thought
    opened = answer(ANSWER.removeprefix("<think>"), in_reasoning=True)[0]
    assert finish(opened).reasoning_tokens == thought - 1
    cut = answer("<think>\nhm 🙂", end=FinishReason.LENGTH)
    assert finish(cut[0]).reasoning_tokens == len(cut[1])
    assert finish(answer("hello")[0]).reasoning_tokens == 0


@pytest.mark.parametrize("per_event", [1, 100])
def test_stop_strings_are_ignored_in_thoughts_and_calls(per_event: int) -> None:
    text = f"<think>stop</think>so {CALL}now stop here"
    events, ids = answer(text, per_event=per_event, stops=("stop",))
    assert told(events) == [
        ("reasoning", "stop"),
        ("text", "so"),
        ("start 0", "look_up"),
        ("arguments 0", '{"word": "stop"}'),
        ("end 0", ""),
        ("text", "now "),
    ]
    kept = tuple(token_id for event in deltas(events) for token_id in event.token_ids)
    assert kept == ids[: len(kept)] and len(kept) < len(ids)


@pytest.mark.parametrize("per_event", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"I look.\n{CALL}\nI answer.", "I look.\nI answer."),
        (f"I look.{CALL}I answer.", "I look.\nI answer."),
        (f"I look.\n{CALL}\n{CALL}\n\nI answer.", "I look.\nI answer."),
        (f"I look.<think>Hm.</think>\n\n{CALL}I answer.", "I look.\nI answer."),
        (f"{CALL}\nI answer.", "I answer."),
        (f"I look.\n{CALL}", "I look."),
        ("I look.\n\nI answer.", "I look.\n\nI answer."),
        ("I look. </think> I answer.", "I look.  I answer."),
    ],
)
def test_texts_around_a_call_are_joined_as_lines(per_event: int, text: str, expected: str) -> None:
    events, _ = answer(text, per_event=per_event)
    assert text_of(deltas(events)) == expected


def test_a_stop_string_does_not_match_across_a_call() -> None:
    events, _ = answer(f"I look.\n{CALL}\nI answer.", stops=("look.\nI", "\nI"))
    assert text_of(deltas(events)) == "I look.\nI answer."
    assert finish(events).stop_string is None


def test_the_only_allowed_call_ends_the_answer() -> None:
    events, ids = answer(ANSWER, one_call=True)
    end = finish(events)
    assert [kind for kind, _ in told(events)][-1] == "end 0"
    assert (end.calls, end.reason, end.finish_reason) == (1, FinishReason.STOP, "tool_calls")
    kept = tuple(token_id for event in deltas(events) for token_id in event.token_ids)
    assert kept == ids[: len(kept)] and end.completion_tokens < len(ids)


@pytest.mark.parametrize("per_event", [1, 100])
def test_a_call_considered_in_a_thought_does_not_count(per_event: int) -> None:
    text = f"<think>Either\n{CALL}\nor not.</think>{CALL}"
    events, ids = answer(text, per_event=per_event, one_call=True)
    assert told(events) == [
        ("reasoning", f"Either\n{CALL}\nor not."),
        ("start 0", "look_up"),
        ("arguments 0", '{"word": "stop"}'),
        ("end 0", ""),
    ]
    assert (finish(events).calls, finish(events).completion_tokens) == (1, len(ids))
    assert finish(events).reasoning_tokens > len(ids) / 2


@pytest.mark.parametrize("per_event", [1, 100])
def test_a_final_call_in_a_thought_is_shown_at_the_end(per_event: int) -> None:
    events, _ = answer(f"<think>Hm.\n{CALL}\n{CALL}", per_event=per_event)
    calls = [f"{part} {call}" for call in (0, 1) for part in ("start", "arguments", "end")]
    assert [kind for kind, _ in told(events)] == ["reasoning", *calls]
    assert finish(events).finish_reason == "tool_calls"
    only, _ = answer(f"<think>Hm.\n{CALL}\n{CALL}", per_event=per_event, one_call=True)
    assert finish(only).calls == 1
    cut, _ = answer(f"<think>Hm.\n{CALL}", per_event=per_event, end=FinishReason.LENGTH)
    assert told(cut) == [("reasoning", f"Hm.\n{CALL}")]
    assert (finish(cut).calls, finish(cut).finish_reason) == (0, "length")


def test_thoughts_are_withheld_only_while_they_may_become_calls() -> None:
    shown, _ = answer(f"<think>Hm.\n{CALL}\nor rather hello there", end=FinishReason.LENGTH)
    before_end = [event for event in deltas(shown) if isinstance(event, TextDelta)][:-1]
    assert "".join(event.text for event in before_end).startswith(f"Hm.\n{CALL}")


def test_a_call_cut_by_length_neither_ends_nor_counts() -> None:
    events, _ = answer(ANSWER[: ANSWER.index("stop") + 2], end=FinishReason.LENGTH)
    assert told(events)[-1] == ("arguments 0", '{"word": "st')
    assert (finish(events).calls, finish(events).finish_reason) == (0, "length")


def test_without_tools_calls_are_text_and_thoughts_are_thoughts() -> None:
    assert told(answer(f"<think>hm</think>{CALL}", reads_calls=False)[0]) == [
        ("reasoning", "hm"),
        ("text", CALL),
    ]


def test_a_model_without_a_dialect_writes_text() -> None:
    assert told(answer(ANSWER, special=False, dialect=PLAIN)[0]) == [("text", ANSWER)]


def numbered() -> Callable[[int], str]:
    numbers = count()
    return lambda length: f"{next(numbers):0{length}d}"


@pytest.mark.parametrize(
    ("family", "earlier", "expected"),
    [
        ("hermes", (), ["call_" + "0" * 24, "call_" + "0" * 23 + "1"]),
        ("hermes", ("call_" + "0" * 24,), ["call_" + "0" * 23 + "1", "call_" + "0" * 23 + "2"]),
        ("mistral_v13", (), ["000000000", "000000001"]),
        ("kimi_k2", ("a", "b"), ["functions.look_up:0", "functions.look_up:1"]),
        (
            "kimi_k2",
            ("functions.look_up:0", "functions.other:1"),
            ["functions.look_up:2", "functions.look_up:1"],
        ),
        ("cohere", ("0",), ["1", "2"]),
    ],
)
def test_ids_have_the_familys_format_and_are_unique(
    family: str, earlier: tuple[str, ...], expected: list[str]
) -> None:
    form = FAMILIES[family].calls
    text = form.write([Call("look_up", {}), Call("look_up", {"a": 1})])
    dialect = ModelDialect(family=family, calls=form)
    events, _ = answer(text, dialect=dialect, earlier_call_ids=earlier, random_text=numbered())
    assert [event.id for event in events if isinstance(event, ToolCallStarted)] == expected
