"""For any answer: each line is JSON, and a stream says the same as the whole answer."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import ollama
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.front.ollama.answer import ChatLine, ChatLines, GenerateLine, GenerateLines
from holdfast.front.output import ChoiceFinished, TextDelta, TokenCounts
from holdfast.wire.events import FinishReason, Timings
from tests.fakes.json_values import FLOATS, json_values
from tests.fakes.scripted_gateway import calling, token

COUNTS = TokenCounts(prompt_tokens=9, completion_tokens=4, cached_tokens=3)
arguments = st.builds(
    lambda value, indent: json.dumps(value, indent=indent),
    st.dictionaries(st.text(max_size=4), json_values(FLOATS, longest_text=6, most=6), max_size=3),
    st.sampled_from([None, 2]),
)
texts = st.text(max_size=12) | st.sampled_from(["a\u2028b", "\x85", "\u2029\r\n"])
ends = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])


def events(
    calls: list[str], thought: str, said: str, reason: FinishReason, *, logprobs: bool
) -> list[Any]:
    script: list[Any] = [
        *calling(*(("f", text) for text in calls), thought=thought, said=said, reason=reason)
    ]
    if not logprobs:
        return script
    return [
        each
        if isinstance(each, ChoiceFinished)
        else msgspec.structs.replace(each, logprobs=(token("x", float("-inf")),))
        for each in script
    ]


@settings(max_examples=30)
@given(
    calls=st.lists(arguments, max_size=3),
    thought=texts,
    said=texts,
    reason=ends,
    logprobs=st.booleans(),
)
def test_streamed_and_whole_chats_are_equal(
    calls: list[str], thought: str, said: str, reason: FinishReason, logprobs: bool
) -> None:
    *deltas, end = events(calls, thought, said, reason, logprobs=logprobs)
    form = ChatLines(model="m", shows_logprobs=logprobs)
    raw = b"".join(
        [
            form.stream_start(prompt_tokens=9),
            *map(form.delta_event, deltas),
            form.choice_end(end),
            form.stream_end(COUNTS, None),
        ]
    )
    lines = [
        msgspec.json.decode(line, type=ChatLine) for line in raw.removesuffix(b"\n").split(b"\n")
    ]
    for line in raw.decode().splitlines():  # like httpx: not only at line feeds
        ollama.ChatResponse(**json.loads(line))
    whole = msgspec.json.decode(form.complete_body([*deltas, end], COUNTS, None), type=ChatLine)
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert "".join(line.message.content for line in lines) == whole.message.content == said
    assert (
        "".join(line.message.thinking or "" for line in lines)
        == (whole.message.thinking or "")
        == thought
    )
    streamed = [call for line in lines for call in line.message.tool_calls or ()]
    assert [call.id for call in streamed] == [call.id for call in whole.message.tool_calls or ()]
    assert [json.loads(bytes(call.function.arguments)) for call in streamed] == [
        json.loads(text) for text in calls[: end.calls]
    ]
    assert [call.function.index for call in streamed] == [*range(end.calls)]
    tokens = [each.logprob for line in lines for each in line.logprobs or ()]
    assert (
        tokens
        == [each.logprob for each in whole.logprobs or ()]
        == [-9999.0] * (len(deltas) if logprobs else 0)
    )


@given(thought=texts, said=texts, reason=ends)
def test_streamed_and_whole_completions_are_equal(
    thought: str, said: str, reason: FinishReason
) -> None:
    *deltas, end = events([], thought, said, reason, logprobs=False)
    form = GenerateLines(model="m")
    form.turns = ({"role": "user", "content": "hi"},)
    raw = b"".join(
        [*map(form.delta_event, deltas), form.choice_end(end), form.stream_end(COUNTS, None)]
    )
    lines = [
        msgspec.json.decode(line, type=GenerateLine)
        for line in raw.removesuffix(b"\n").split(b"\n")
    ]
    other = GenerateLines(model="m")
    other.turns = form.turns
    whole = msgspec.json.decode(
        other.complete_body([*deltas, end], COUNTS, None), type=GenerateLine
    )
    assert "".join(line.response for line in lines) == whole.response == said
    assert (lines[-1].context, lines[-1].done_reason) == (whole.context, whole.done_reason)


def test_untimed_generation_reports_a_positive_duration() -> None:
    end = ChoiceFinished(
        index=0,
        reason=FinishReason.STOP,
        prompt_tokens=9,
        completion_tokens=4,
        timings=Timings(prefill_seconds=1e-9),
        stop_string="END",
    )
    whole = json.loads(ChatLines(model="m").complete_body([TextDelta(text="x"), end], COUNTS, None))
    assert whole["eval_duration"] > 0
    assert whole["prompt_eval_duration"] == 1
    assert whole["total_duration"] >= whole["eval_duration"]
