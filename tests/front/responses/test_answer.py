"""Generated output becomes a response, whole and as the official client's events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from holdfast.errors import GenerationFailed, PromptTooLong, QueueFull, WorkerUnavailable
from holdfast.front.output import (
    ChoiceFinished,
    OutputDelta,
    TextDelta,
    TokenCounts,
    ToolArgumentsDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from holdfast.front.responses.answer import CustomInput, ResponseAnswer, ResponseObject
from holdfast.front.responses.fields import ClientTool, OfferedTools, Shows
from holdfast.front.server.problem import problem_of
from holdfast.wire.events import FinishReason
from tests.fakes.scripted_gateway import token

COUNTS = TokenCounts(prompt_tokens=7, completion_tokens=5, cached_tokens=3, reasoning_tokens=2)
TOOLS = OfferedTools(
    by_model_name={
        "f": ClientTool(name="f"),
        "ns__f": ClientTool(name="f", namespace="ns"),
        "patch": ClientTool(name="patch", is_custom=True),
    }
)
ENDED = {FinishReason.STOP: "response.completed", FinishReason.LENGTH: "response.incomplete"}
PLAIN = Shows()
THOUGHT = TextDelta(index=0, text="hm", kind="reasoning")
TEXT = TextDelta(index=0, text="Hi")


@cache
def events_type() -> TypeAdapter[Any]:
    return TypeAdapter(ResponseStreamEvent)


def answer_of(shows: Shows = PLAIN, **facts: Any) -> ResponseAnswer:
    return ResponseAnswer(
        ResponseObject(id="resp_00", created_at=1, model="m", text={"format": {"type": "text"}}),
        tools=TOOLS,
        shows=shows,
        **facts,
    )


def call(
    name: str, *arguments: str, number: int = 0, is_complete: bool = True
) -> list[OutputDelta]:
    parts = [ToolArgumentsDelta(index=0, call=number, text=text) for text in arguments]
    end = [ToolCallFinished(index=0, call=number)] if is_complete else []
    return [ToolCallStarted(index=0, call=number, id=f"call_{number}", name=name), *parts, *end]


def finished(reason: FinishReason, deltas: Sequence[OutputDelta]) -> ChoiceFinished:
    calls = sum(isinstance(delta, ToolCallFinished) for delta in deltas)
    return ChoiceFinished(index=0, reason=reason, prompt_tokens=7, completion_tokens=5, calls=calls)


def read(data: bytes) -> list[Any]:
    """The events, checking the framing of each."""
    events = []
    for frame in data.decode().split("\n\n")[:-1]:
        name, _, body = frame.partition("\n")
        events.append(json.loads(body.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def streamed(
    answer: ResponseAnswer, deltas: Sequence[OutputDelta], reason: FinishReason = FinishReason.STOP
) -> list[Any]:
    data = [
        answer.stream_start(prompt_tokens=7),
        *map(answer.delta_event, deltas),
        answer.choice_end(finished(reason, deltas)),
    ]
    return read(b"".join([*data, answer.stream_end(COUNTS, None)]))


def whole(
    answer: ResponseAnswer, deltas: Sequence[OutputDelta], reason: FinishReason = FinishReason.STOP
) -> Any:
    return json.loads(answer.complete_body([*deltas, finished(reason, deltas)], COUNTS, None))


def kinds(events: Sequence[Any]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


texts = st.text(max_size=5)


@st.composite
def outputs(draw: st.DrawFn) -> tuple[list[OutputDelta], FinishReason]:
    """Any answer: texts, thoughts and calls in any order, perhaps cut within the last call."""
    reason = draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    deltas: list[OutputDelta] = []
    pieces = draw(
        st.lists(
            st.sampled_from(["text", "reasoning", "f", "ns__f", "patch", "made_up"]), max_size=8
        )
    )
    for number, piece in enumerate(pieces):
        if piece in ("text", "reasoning"):
            deltas.append(TextDelta(index=0, text=draw(texts), kind=piece))  # type: ignore[arg-type]
            continue
        said = json.dumps({"input": draw(texts)})
        cut = draw(st.integers(0, len(said)))
        is_complete = not (
            reason is FinishReason.LENGTH and number == len(pieces) - 1 and draw(st.booleans())
        )
        deltas += call(
            piece,
            said[:cut],
            *([said[cut:]] if is_complete else []),
            number=number,
            is_complete=is_complete,
        )
    return deltas, reason


def without_ids_of_time(response: Any) -> Any:
    return {key: value for key, value in response.items() if key != "completed_at"}


@settings(max_examples=60, deadline=None)
@given(outputs(), st.booleans(), st.booleans())
def test_any_stream_is_valid_for_openais_client_and_ends_whole(
    output: tuple[list[OutputDelta], FinishReason], summaries: bool, sealed: bool
) -> None:
    deltas, reason = output
    shows = Shows(summaries=summaries, sealed_thoughts=sealed)
    events = streamed(answer_of(shows, seal=lambda thought: f"sealed {thought}"), deltas, reason)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == ENDED[reason]
    state = ResponseStreamState[None](input_tools=omit, text_format=omit)
    for event in events:
        parsed = events_type().validate_python(event)
        assert parsed.type == event["type"]
        state.handle_event(parsed)
    got = events[-1]["response"]
    assert without_ids_of_time(got) == without_ids_of_time(
        whole(answer_of(shows, seal=lambda thought: f"sealed {thought}"), deltas, reason)
    )
    assert_deltas_join(events, got["output"])


def assert_deltas_join(events: Sequence[Any], output: Sequence[Any]) -> None:
    """The pieces add up to the final items, and each item is done except a cut call."""
    said = [
        "".join(
            event["delta"]
            for event in events
            if event["type"].endswith(".delta") and event["output_index"] == at
        )
        for at in range(len(output))
    ]
    assert said == [text_of(item) for item in output]
    done = {
        event["output_index"]: event["item"]
        for event in events
        if event["type"] == "response.output_item.done"
    }
    for at, item in enumerate(output):
        is_cut = item["status"] == "incomplete" and item["type"].endswith("call")
        assert done.get(at) == (None if is_cut else item)


def text_of(item: Any) -> str:
    if item["type"] in ("message", "reasoning"):
        return "".join(
            part["text"] for part in [*item.get("content", ()), *item.get("summary", ())]
        )
    return str(item["arguments"] if item["type"] == "function_call" else item["input"])


def test_the_events_of_an_answer_have_openais_order() -> None:
    assert kinds(streamed(answer_of(), [THOUGHT, TEXT, *call("f", "{}")])) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *(
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ),
        "completed",
    ]


def test_an_answer_without_output_has_an_empty_message() -> None:
    """Without it, a later request would continue the conversation without the assistant's turn."""
    assert kinds(streamed(answer_of(), [])) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.done"),
        *("content_part.done", "output_item.done"),
        "completed",
    ]
    (message,) = whole(answer_of(), [])["output"]
    assert (message["type"], message["role"], text_of(message)) == ("message", "assistant", "")


def test_a_thought_is_shown_as_summary_on_request() -> None:
    events = streamed(answer_of(Shows(summaries=True)), [THOUGHT])
    assert kinds(events)[2:-1] == [
        *(
            "output_item.added",
            "reasoning_summary_part.added",
            "reasoning_summary_text.delta",
            "reasoning_summary_text.done",
        ),
        *("reasoning_summary_part.done", "output_item.done"),
    ]
    assert events[-2]["item"] == {
        "type": "reasoning",
        "id": "rs_0000",
        "summary": [{"type": "summary_text", "text": "hm"}],
        "status": "completed",
    }


def test_a_call_in_a_namespace_has_the_clients_names() -> None:
    item = streamed(answer_of(), call("ns__f", "{}"))[-2]["item"]
    assert (item["name"], item["namespace"], item["call_id"]) == ("f", "ns", "call_0")


def test_a_call_of_a_custom_tool_has_its_text() -> None:
    events = streamed(answer_of(), call("patch", '{"in', 'put": "a\\', 'nb"}'))
    assert [event["delta"] for event in events if event["type"].endswith("input.delta")] == [
        "a",
        "\nb",
    ]
    assert events[-2]["item"]["input"] == "a\nb"


def test_a_cut_call_is_never_marked_as_done() -> None:
    events = streamed(
        answer_of(), call("patch", '{"input": "rm -rf /', is_complete=False), FinishReason.LENGTH
    )
    assert kinds(events)[2:] == ["output_item.added", "custom_tool_call_input.delta", "incomplete"]
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_log_probabilities_come_with_the_text_and_its_end() -> None:
    delta = TextDelta(index=0, text="Hi", logprobs=(token("Hi", rivals=(("Ho", -1.0),)),))
    events = streamed(answer_of(Shows(logprobs=True)), [delta])
    shown = [
        event["logprobs"] for event in events if event["type"].startswith("response.output_text.")
    ]
    assert shown[0] == shown[1] == events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert [(each["token"], each["top_logprobs"][0]["token"]) for each in shown[0]] == [
        ("Hi", "Ho")
    ]


def test_counts_are_reported_as_usage() -> None:
    assert whole(answer_of(), [TEXT])["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 12,
    }


def test_counted_keep_alive_events_are_sent_even_before_the_opening() -> None:
    answer = answer_of()
    events = read(
        answer.keep_alive()
        + answer.keep_alive()
        + answer.stream_start(prompt_tokens=7)
        + answer.keep_alive()
    )
    assert kinds(events) == ["created", "in_progress", "in_progress", "in_progress", "in_progress"]
    assert [event["sequence_number"] for event in events] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PromptTooLong(prompt_tokens=9, context_tokens=8), "context_length_exceeded"),
        (QueueFull(queued=1, limit=1, retry_after_seconds=3), "rate_limit_exceeded"),
        (WorkerUnavailable("gone"), "server_is_overloaded"),
        (GenerationFailed("broken"), "server_error"),
    ],
)
def test_an_error_within_a_stream_has_a_code_known_to_codex(error: Exception, code: str) -> None:
    answer = answer_of()
    events = read(
        answer.stream_start(prompt_tokens=7)
        + answer.delta_event(TEXT)
        + answer.error_event(problem_of(error))
    )
    failed = events[-1]
    assert (failed["type"], failed["response"]["status"], failed["response"]["error"]["code"]) == (
        "response.failed",
        "failed",
        code,
    )
    assert failed["response"]["output"][0]["content"][0]["text"] == "Hi"
    if code == "rate_limit_exceeded":
        assert "try again in 3 s" in failed["response"]["error"]["message"]


def test_a_failure_before_the_opening_still_creates_the_response() -> None:
    events = read(answer_of().error_event(problem_of(WorkerUnavailable("gone"))))
    assert kinds(events) == ["created", "failed"]


@pytest.mark.parametrize("reason", list(ENDED))
def test_every_event_is_recorded_with_the_final_response_last(reason: FinishReason) -> None:
    heard: list[tuple[int, bytes, str]] = []
    answer = answer_of()
    answer.record = lambda number, event: heard.append((number, event, answer.response.status))
    events = streamed(answer, [TEXT], reason)
    assert [
        (number, json.loads(event.partition(b"data: ")[2])) for number, event, _ in heard
    ] == list(enumerate(events))
    assert [status for _, _, status in heard] == ["in_progress"] * (len(events) - 1) + [
        events[-1]["response"]["status"]
    ]


def test_a_cancelled_response_keeps_its_output() -> None:
    answer = answer_of()
    answer.delta_event(TEXT)
    answer.cancel()
    assert answer.response.status == "cancelled"
    assert answer.response.output[0].status == "incomplete"


def test_a_whole_response_has_openais_type() -> None:
    got = whole(
        answer_of(Shows(sealed_thoughts=True), seal=lambda _: "sealed"),
        [THOUGHT, TEXT, *call("patch", '{"input": ""}')],
    )
    assert Response.model_validate(got).output_text == "Hi"
    assert got["output"][0]["encrypted_content"] == "sealed"


def decoded(*fragments: str) -> tuple[str, str]:
    """The output while fragments arrived, and at the end."""
    reader = CustomInput()
    return "".join([reader.push(fragment) for fragment in fragments]), reader.finish()


def mended(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@given(st.text(st.characters(categories=("L", "Z", "Cs", "So", "Cc"))), st.booleans(), st.data())
def test_the_pieces_join_to_the_text_wherever_split(
    text: str, is_ascii: bool, data: st.DataObject
) -> None:
    said = json.dumps({"input": text}, ensure_ascii=is_ascii)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(said)), max_size=6)))
    got = decoded(
        *(said[start:end] for start, end in zip([0, *cuts], [*cuts, len(said)], strict=True))
    )
    assert got == (mended(text), "")


@given(st.text(max_size=20), st.integers(1, 4))
def test_escapes_are_streamed_except_a_trailing_backslash(text: str, width: int) -> None:
    reader, said = CustomInput(), json.dumps({"input": text})
    got = ""
    for start in range(0, len(said), width):
        got += reader.push(said[start : start + width])
        so_far = said[: start + width].removeprefix('{"input": "')
        assert len(got) >= len(mended(text)) - (len(said) - start - width) - 12 or not so_far


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"why": "x", "input": "a"}', "a"),
        ('{ "input" :"a", "why": 1}', "a"),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": "line\nline"}', "line\nline"),
        ("{}", "{}"),
        ("[]", "[]"),
        ("not JSON", "not JSON"),
        (r'{"input": "\ud83d\ud83d\ude00"}', "\ufffd😀"),
        (r'{"input": "\ud83d"}', "\ufffd"),
        (r'{"input": "\\ud83d"}', r"\ud83d"),
        ('{"input": ""}', ""),
    ],
)
def test_calls_in_other_forms_are_read_too(arguments: str, text: str) -> None:
    assert "".join(decoded(arguments)) == text
    assert "".join(decoded(*arguments)) == text


def test_a_cut_call_keeps_the_received_input() -> None:
    assert decoded('{"input": "abc\\u00')[0] == "abc"
    assert decoded('{"in') == ("", '{"in')
