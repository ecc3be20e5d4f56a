"""Streams and whole answers are equal, by the rules of the official client."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import anthropic
import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from holdfast.config import LimitsSettings
from holdfast.errors import GenerationFailed, PromptTooLong, QueueFull, WorkerUnavailable
from holdfast.front.anthropic.answer import (
    MessageEvent,
    MessagesAnswer,
    MessageUsage,
    anthropic_error,
    usage_of,
)
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
from holdfast.front.request import MarkedPrefix
from holdfast.front.server.access import Seal
from holdfast.front.server.problem import Problem
from holdfast.wire.events import FinishReason
from tests.fakes.http_clients import (
    HELLO,
    MESSAGES,
    Exchange,
    client_of,
    message_body,
    named_events_of,
    served,
)
from tests.fakes.scripted_gateway import ScriptedGateway, answer, calling

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
    parts = [answers.stream_start(prompt_tokens=20)]
    parts += [answers.event_bytes(event) for event in script]
    return b"".join([*parts, answers.stream_end(COUNTS, None)]).decode()


def whole(script: Sequence[OutputEvent], answers: MessagesAnswer) -> Any:
    return json.loads(answers.complete_body(script, COUNTS, None))


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
        assert "".join(SEAL.decrypt(block["signature"]) or "?" for block in blocks) == said
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
    broken = form().error_event(
        Problem(status=500, code="generation_failed", message="the worker died")
    )
    detail = {"type": "api_error", "message": "the worker died", "advice": "wait"}
    assert named_events_of(broken.decode()) == [("error", {"type": "error", "error": detail})]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (409, "invalid_request_error"),
        (413, "request_too_large"),
        (421, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (529, "overloaded_error"),
    ],
)
def test_anthropics_kinds_follow_the_status(status: int, kind: str) -> None:
    problem = Problem(status=status, code="odd", message="no")
    said = msgspec.to_builtins(anthropic_error(problem))
    detail = {"type": kind, "message": "no", "advice": problem.advice}
    assert said == {"type": "error", "error": detail}


def test_the_message_contains_the_field_name() -> None:
    said = anthropic_error(Problem(status=400, code="odd", message="no", field="stop"))
    assert said.error.message == "`stop`: no"


async def refused(
    refusal: Exception | None = None, *, path: str = MESSAGES, method: str = "POST", **fields: Any
) -> Any:
    async with client_of(
        ScriptedGateway(refusal=refusal), limits=LimitsSettings(max_body_bytes=2048)
    ) as client:
        return await client.request(method, path, json=message_body(**fields))


async def test_an_error_has_the_request_id_of_its_header() -> None:
    response = await refused(model="other")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    assert (
        response.json()["request_id"]
        == response.headers["request-id"]
        == response.headers["x-request-id"]
    )


async def test_an_error_within_a_stream_has_it_too() -> None:
    gateway = ScriptedGateway()
    exchange = Exchange(gateway)
    gateway.script = [*answer("Hel")[:1], exchange.first_body, GenerationFailed("it broke")]
    await exchange.run(MESSAGES, message_body(stream=True))
    name, event = named_events_of(exchange.text)[-1]
    headers = dict(exchange.messages[0]["headers"])
    assert (exchange.status, name, event["request_id"]) == (
        200,
        "error",
        headers[b"request-id"].decode(),
    )


async def test_an_overlong_prompt_has_the_wording_claude_code_expects() -> None:
    response = await refused(PromptTooLong(prompt_tokens=300, context_tokens=200))
    assert (response.status_code, response.json()["error"]["type"]) == (
        400,
        "invalid_request_error",
    )
    assert response.json()["error"]["message"] == "prompt is too long: 300 tokens > 200 maximum"


async def test_a_prompt_that_fills_the_window_is_refused_too() -> None:
    response = await refused(PromptTooLong(prompt_tokens=200, context_tokens=200))
    assert response.json()["error"]["message"] == "prompt is too long: 200 tokens > 199 maximum"


async def test_a_full_queue_is_an_overload_with_retry_after() -> None:
    response = await refused(QueueFull(queued=9, limit=9, retry_after_seconds=3))
    assert (response.status_code, response.headers["retry-after"]) == (529, "3")
    assert response.json()["error"]["type"] == "overloaded_error"


async def test_a_server_without_its_model_is_overloaded_too() -> None:
    response = await refused(WorkerUnavailable("not now"))
    assert (response.status_code, response.json()["error"]["type"]) == (503, "overloaded_error")


async def test_an_internal_error_reveals_no_details() -> None:
    response = await refused(RuntimeError("inner words"))
    assert (response.status_code, response.json()["error"]["type"]) == (500, "api_error")
    assert "inner words" not in response.text


@pytest.mark.parametrize(
    ("path", "method", "status", "kind"),
    [
        ("/v1/messages/nope", "POST", 404, "not_found_error"),
        (MESSAGES, "GET", 405, "invalid_request_error"),
        ("/v1/complete", "POST", 404, "not_found_error"),
    ],
)
async def test_unknown_paths_and_methods_have_its_form(
    path: str, method: str, status: int, kind: str
) -> None:
    response = await refused(path=path, method=method)
    assert (response.status_code, response.json()["type"], response.json()["error"]["type"]) == (
        status,
        "error",
        kind,
    )


async def test_too_large_a_body_has_its_form() -> None:
    response = await refused(messages=[{"role": "user", "content": "x" * 3000}])
    assert (response.status_code, response.json()["error"]["type"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    "path", ["/messages", "/v1/messages/", "/v1/v1/messages", "/v1/messages?beta=true"]
)
async def test_its_path_is_found_under_any_base_url(path: str) -> None:
    assert (await refused(path=path)).status_code == 200


async def test_the_official_client_raises_the_matching_errors() -> None:
    async with (
        served(ScriptedGateway(refusal=QueueFull(queued=9, limit=9, retry_after_seconds=3))) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client,
    ):
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.messages.create(model="other", max_tokens=1, messages=HELLO)  # type: ignore[arg-type]
        with pytest.raises(anthropic.APIStatusError, match="requests are already waiting") as full:
            await client.messages.create(model="demo/tiny", max_tokens=1, messages=HELLO)  # type: ignore[arg-type]
    assert (unknown.value.request_id or "").startswith("req_")
    assert full.value.status_code == 529


async def test_the_official_client_raises_on_an_error_within_a_stream() -> None:
    gateway = ScriptedGateway(script=[*answer("Hel")[:1], GenerationFailed("the worker died")])
    async with (
        served(gateway) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client,
    ):
        with pytest.raises(anthropic.APIError, match="the worker died"):
            await _read(client)


async def _read(client: anthropic.AsyncAnthropic) -> None:
    async with client.messages.stream(model="demo/tiny", max_tokens=9, messages=HELLO) as stream:  # type: ignore[arg-type]
        async for _ in stream:
            pass


# Anthropic's token counts: three disjoint parts of the prompt.


def usage(cached: int, *breakpoints: tuple[int, float], prompt: int = 100) -> MessageUsage:
    marked = tuple(MarkedPrefix(tokens=tokens, seconds=seconds) for tokens, seconds in breakpoints)
    return usage_of(
        TokenCounts(
            prompt_tokens=prompt, completion_tokens=7, cached_tokens=cached, breakpoints=marked
        )
    )


def test_without_breakpoints_no_tokens_count_as_cache_creation() -> None:
    assert usage(0).input_tokens == 100
    read = usage(60)
    assert (read.input_tokens, read.cache_creation_input_tokens, read.cache_read_input_tokens) == (
        40,
        0,
        60,
    )


def test_prefilled_tokens_before_the_last_breakpoint_count_as_cache_creation() -> None:
    cold, warm = usage(0, (40, 300.0), (90, 300.0)), usage(60, (40, 300.0), (90, 300.0))
    assert (cold.input_tokens, cold.cache_creation_input_tokens, cold.cache_read_input_tokens) == (
        10,
        90,
        0,
    )
    assert (warm.input_tokens, warm.cache_creation_input_tokens, warm.cache_read_input_tokens) == (
        10,
        30,
        60,
    )


def test_more_may_be_cached_than_the_client_has_marked() -> None:
    assert usage(99, (90, 300.0)).cache_creation_input_tokens == 0


def test_tokens_cached_for_an_hour_are_counted_separately() -> None:
    created = usage(10, (40, 3600.0), (90, 300.0)).cache_creation
    assert (created.ephemeral_1h_input_tokens, created.ephemeral_5m_input_tokens) == (30, 50)


@given(
    prompt=st.integers(1, 50),
    cached=st.integers(0, 49),
    breakpoints=st.lists(
        st.tuples(st.integers(1, 50), st.sampled_from((300.0, 3600.0))), max_size=4
    ),
)
def test_the_parts_add_up_to_the_prompt(
    prompt: int, cached: int, breakpoints: list[tuple[int, float]]
) -> None:
    cached = min(cached, prompt - 1)
    found = usage(
        cached, *[(min(tokens, prompt), seconds) for tokens, seconds in breakpoints], prompt=prompt
    )
    created = found.cache_creation
    parts = (found.input_tokens, found.cache_creation_input_tokens, found.cache_read_input_tokens)
    assert sum(parts) == prompt
    assert min(*parts, created.ephemeral_1h_input_tokens, created.ephemeral_5m_input_tokens) >= 0
    assert (
        created.ephemeral_1h_input_tokens + created.ephemeral_5m_input_tokens
        == found.cache_creation_input_tokens
    )
