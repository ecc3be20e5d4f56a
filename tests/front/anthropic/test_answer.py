"""Streams and whole answers are equal, by the rules of the official client."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from holdfast.front.anthropic.answer import MessageEvent, MessagesAnswer
from holdfast.front.output import (
    ChoiceFinished,
    OutputDelta,
    OutputEvent,
    TextDelta,
    TokenCounts,
    ToolArgumentsDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from holdfast.front.server.access import Seal
from holdfast.front.server.problem import Problem
from holdfast.wire.events import FinishReason
from tests.fakes.http_clients import named_events_of
from tests.fakes.scripted_gateway import answer, calling

SEAL = Seal()
COUNTS = TokenCounts(prompt_tokens=20, completion_tokens=9, cached_tokens=15, reasoning_tokens=4)
EVENTS: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
arguments = st.dictionaries(
    st.text(max_size=4), st.none() | st.integers(0, 9) | st.text(max_size=6), max_size=3
)


def form(**options: Any) -> MessagesAnswer:
    return MessagesAnswer(
        **({"answer_id": "a", "model": "m", "seal": SEAL, "max_tokens": 9} | options)
    )


def streamed(script: Sequence[OutputEvent], answers: MessagesAnswer) -> str:
    parts = [answers.opening(prompt_tokens=20)]
    parts += [answers.piece(event) for event in script]
    return b"".join([*parts, answers.closing(COUNTS, None)]).decode()


def whole(script: Sequence[OutputEvent], answers: MessagesAnswer) -> Any:
    return json.loads(answers.whole(script, COUNTS, None))


def folded(text: str) -> Message:
    """What the official client makes of a stream; each event is checked against its type and ours."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for name, data in named_events_of(text):
        assert data["type"] == name
        msgspec.json.decode(json.dumps(data), type=MessageEvent)
        if name != "ping":
            snapshot = accumulate_event(
                event=EVENTS.validate_python(data), current_snapshot=snapshot, json_bufs=buffers
            )
    return cast(Message, snapshot)


def ended(
    deltas: Sequence[OutputDelta], *, reason: FinishReason = FinishReason.STOP, **facts: Any
) -> list[OutputEvent]:
    calls = sum(isinstance(delta, ToolCallFinished) for delta in deltas)
    end = ChoiceFinished(
        index=0, reason=reason, prompt_tokens=20, completion_tokens=9, calls=calls, **facts
    )
    return [*deltas, end]


@st.composite
def scripts(draw: st.DrawFn) -> list[OutputEvent]:
    """Any order of thoughts, texts and calls, in any pieces; the last call may be cut."""
    deltas: list[OutputDelta] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "reasoning", "call"]), max_size=6)):
        if kind != "call":
            deltas += [
                TextDelta(index=0, text=piece, kind=cast(Any, kind))
                for piece in draw(st.lists(st.text(max_size=3), max_size=4))
            ]
            continue
        said = json.dumps(draw(arguments), ensure_ascii=draw(st.booleans()))
        cuts = sorted(draw(st.lists(st.integers(0, len(said)), max_size=4)))
        pieces = [
            said[start:end] for start, end in zip([0, *cuts], [*cuts, len(said)], strict=True)
        ]
        deltas.append(ToolCallStarted(index=0, call=calls, id=f"call_{calls}", name="f"))
        deltas += [ToolArgumentsDelta(index=0, call=calls, text=piece) for piece in pieces]
        deltas.append(ToolCallFinished(index=0, call=calls))
        calls += 1
    if deltas and isinstance(deltas[-1], ToolCallFinished) and draw(st.booleans()):
        del deltas[draw(st.integers(max(0, len(deltas) - 3), len(deltas) - 1)) :]
        return ended(deltas, reason=FinishReason.LENGTH)
    return ended(deltas)


def content_of(message: Message) -> list[Any]:
    return [block.to_dict(mode="json") for block in message.content]


@settings(max_examples=30)
@given(script=scripts(), hides=st.booleans())
def test_any_stream_folds_to_the_whole_answer(script: list[OutputEvent], hides: bool) -> None:
    got = folded(streamed(script, form(hides_thinking=hides)))
    expected = whole(script, form(hides_thinking=hides))
    assert content_of(got) == expected["content"]
    assert (got.stop_reason, got.stop_sequence) == (
        expected["stop_reason"],
        expected["stop_sequence"],
    )
    assert got.usage.to_dict() | {"cache_creation": None} == expected["usage"] | {
        "cache_creation": None
    }


def test_fields_that_anthropics_types_require_are_present() -> None:
    script = cast(list[OutputEvent], calling(("f", "{}"), said="I call"))
    answer = whole(script, form())
    text, call = answer["content"]
    assert (text["citations"], call["caller"]) == (None, {"type": "direct"})
    assert (answer["stop_details"], answer["container"]) == (None, None)
    usage = answer["usage"]
    assert (usage["service_tier"], usage["server_tool_use"], usage["inference_geo"]) == (
        "standard",
        None,
        None,
    )


@settings(max_examples=30)
@given(script=scripts())
def test_blocks_come_strictly_one_after_another(script: list[OutputEvent]) -> None:
    is_open, begun = False, 0
    for name, data in named_events_of(streamed(script, form())):
        if name == "content_block_start":
            assert (is_open, data["index"]) == (False, begun)
            is_open, begun = True, begun + 1
        elif name.startswith("content_block"):
            assert (is_open, data["index"]) == (True, begun - 1)
            is_open = name != "content_block_stop"
    assert not is_open


@settings(max_examples=30)
@given(script=scripts(), hides=st.booleans())
def test_every_thought_can_be_sent_back_by_its_signature(
    script: list[OutputEvent], hides: bool
) -> None:
    said = "".join(
        event.text for event in script if isinstance(event, TextDelta) and event.kind == "reasoning"
    )
    blocks = [
        block
        for block in whole(script, form(hides_thinking=hides))["content"]
        if block["type"] == "thinking"
    ]
    if hides:
        assert all(block["thinking"] == "" for block in blocks)
        assert "".join(SEAL.open(block["signature"]) or "?" for block in blocks) == said
    else:
        assert all(SEAL.is_signed(block["thinking"], block["signature"]) for block in blocks)
        assert "".join(block["thinking"] for block in blocks) == said


def test_a_stream_has_exactly_these_events() -> None:
    script = cast(list[OutputEvent], calling(("f", '{"a": 1}'), thought="hm", said="I call"))
    events = named_events_of(streamed(script, form()))
    start, delta, stop = "content_block_start", "content_block_delta", "content_block_stop"
    assert [name for name, _ in events] == [
        "message_start",
        *(start, delta, delta, stop),
        *(start, delta, stop),
        *(start, delta, delta, stop),
        *("message_delta", "message_stop"),
    ]
    kinds = [data["delta"]["type"] for name, data in events if name == delta]
    assert kinds == [
        "thinking_delta",
        "signature_delta",
        "text_delta",
        "input_json_delta",
        "input_json_delta",
    ]
    begun, end = events[0][1]["message"]["usage"], events[-2][1]
    assert (begun["input_tokens"], begun["output_tokens"], begun["cache_read_input_tokens"]) == (
        20,
        0,
        0,
    )
    assert end["delta"] == {
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
    }
    assert end["usage"]["input_tokens"] + end["usage"]["cache_read_input_tokens"] == 20
    assert (end["usage"]["output_tokens"], end["usage"]["output_tokens_details"]) == (
        9,
        {"thinking_tokens": 4},
    )


@pytest.mark.parametrize(
    ("facts", "max_tokens", "reason", "sequence"),
    [
        ({}, 9, "end_turn", None),
        ({"stop_string": "END"}, 9, "stop_sequence", "END"),
        ({"reason": FinishReason.LENGTH}, 9, "max_tokens", None),
        ({"reason": FinishReason.LENGTH}, 10, "model_context_window_exceeded", None),
    ],
)
def test_the_stop_reason_is_correct(
    facts: dict[str, Any], max_tokens: int, reason: str, sequence: str | None
) -> None:
    script = ended([TextDelta(index=0, text="x")], **facts)
    got = folded(streamed(script, form(max_tokens=max_tokens)))
    assert (got.stop_reason, got.stop_sequence) == (reason, sequence)


def test_an_empty_answer_is_an_empty_list_of_blocks() -> None:
    script = cast(list[OutputEvent], answer())
    assert folded(streamed(script, form())).content == []
    assert whole(script, form())["content"] == []


def test_pings_keep_the_connection_open_even_before_the_beginning() -> None:
    answers = form()
    assert named_events_of(answers.keep_alive().decode()) == [("ping", {"type": "ping"})]
    script = cast(list[OutputEvent], answer("Hi"))
    assert (
        folded(answers.keep_alive().decode() + streamed(script, answers))
        .content[0]
        .to_dict()["text"]
        == "Hi"
    )


def test_an_error_within_a_stream_is_a_separate_event() -> None:
    broken = form().broken(Problem(status=500, code="generation_failed", message="the worker died"))
    detail = {"type": "api_error", "message": "the worker died", "advice": "wait"}
    assert named_events_of(broken.decode()) == [("error", {"type": "error", "error": detail})]
