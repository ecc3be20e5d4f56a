from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from holdfast.front.openai.answer import (
    ChatCompletion,
    TextCompletion,
    completion_logprobs,
    openai_error,
)
from holdfast.front.output import (
    PromptProgress,
    TextDelta,
    TokenText,
    ToolArgumentsDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from holdfast.front.request import GenerationRequest
from holdfast.front.server.problem import Problem
from holdfast.wire.events import FinishReason
from tests.fakes.http_clients import (
    CHAT,
    COMPLETIONS,
    NOTHING_DRAFTED,
    chat_body,
    client_of,
    completion_body,
    events_of,
)
from tests.fakes.scripted_gateway import (
    MODEL,
    PROMPT_TOKENS,
    ScriptedGateway,
    answer,
    calling,
    token,
)


async def whole(gateway: ScriptedGateway, **fields: Any) -> Any:
    async with client_of(gateway) as client:
        response = await client.post(CHAT, json=chat_body(**fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    msgspec.json.decode(response.content, type=ChatCompletion)
    return response.json()


async def streamed(gateway: ScriptedGateway, **fields: Any) -> list[Any]:
    async with client_of(gateway) as client:
        response = await client.post(CHAT, json=chat_body(stream=True, **fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    events = events_of(response.text)
    assert events.pop() == "[DONE]"
    for event in events:
        msgspec.json.decode(json.dumps(event).encode(), type=ChatCompletion, strict=True)
    return events


def without_head(event: Any) -> Any:
    return {
        key: value
        for key, value in event.items()
        if key not in ("id", "created", "system_fingerprint")
    }


async def test_a_whole_answer_has_the_golden_shape() -> None:
    got = await whole(ScriptedGateway(script=answer("Hel", "lo ☃", cached_tokens=3)))
    assert got["id"].startswith("chatcmpl-")
    assert without_head(got) == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello ☃", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": 2,
            "total_tokens": PROMPT_TOKENS + 2,
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {**NOTHING_DRAFTED, "reasoning_tokens": 0},
        },
    }


async def test_a_stream_has_continuous_counts_on_request() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await streamed(
        ScriptedGateway(script=answer("Hel", "lo", cached_tokens=3)), stream_options=options
    )
    counted = [
        (event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]) for event in events
    ]
    assert counted == [
        (PROMPT_TOKENS, 0),
        (PROMPT_TOKENS, 1),
        (PROMPT_TOKENS, 2),
        (PROMPT_TOKENS, 2),
        (PROMPT_TOKENS, 2),
    ]
    assert [event["usage"].get("prompt_tokens_details") for event in events] == [None] * 4 + [
        {"cached_tokens": 3}
    ]
    unasked = await streamed(
        ScriptedGateway(script=answer("Hel")), stream_options={"continuous_usage_stats": True}
    )
    assert all("usage" not in event for event in unasked)


async def test_a_stream_has_the_golden_events() -> None:
    events = await streamed(ScriptedGateway(script=answer("Hel", 'lo "☃"\n')))
    assert (
        len(
            {
                (event["id"], event["created"], event["model"], event["system_fingerprint"])
                for event in events
            }
        )
        == 1
    )
    assert [event["choices"] for event in events] == [
        [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
        [{"index": 0, "delta": {"content": "Hel"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": 'lo "☃"\n'}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}],
    ]
    assert all("usage" not in event for event in events)


async def test_the_counts_come_last_and_only_on_request() -> None:
    events = await streamed(
        ScriptedGateway(script=answer("a", cached_tokens=4)), stream_options={"include_usage": True}
    )
    assert [event["usage"] for event in events[:-1]] == [None, None, None]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": 1,
        "total_tokens": PROMPT_TOKENS + 1,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {**NOTHING_DRAFTED, "reasoning_tokens": 0},
    }


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
async def test_the_finish_reason_is_correct(reason: FinishReason) -> None:
    script = answer("a", reason=reason)
    assert (await whole(ScriptedGateway(script=script)))["choices"][0][
        "finish_reason"
    ] == reason.value
    assert (await streamed(ScriptedGateway(script=script)))[-1]["choices"][0][
        "finish_reason"
    ] == reason.value


async def test_several_choices_are_separate_and_their_tokens_summed() -> None:
    script = [
        *answer("a", "b", cached_tokens=2)[:-1],
        *answer("x", index=1, cached_tokens=7),
        answer("a", "b", cached_tokens=2)[-1],
    ]
    got = await whole(ScriptedGateway(script=script), n=2)
    assert [choice["message"]["content"] for choice in got["choices"]] == ["ab", "x"]
    assert got["usage"]["prompt_tokens"] == PROMPT_TOKENS
    assert got["usage"]["completion_tokens"] == 3
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    events = await streamed(ScriptedGateway(script=script), n=2)
    assert [event["choices"][0]["index"] for event in events] == [0, 1, 0, 0, 1, 1, 0]
    assert [event["choices"][0]["delta"] for event in events[:2]] == [
        {"role": "assistant", "content": ""}
    ] * 2


def scored() -> list[Any]:
    tokens = (
        token("Hel", -0.25, rivals=(("Hel", -0.25), ("Yo", -2.0))),
        TokenText(text="\ufffd", raw=b"\xe2\x98", logprob=-math.inf),
    )
    return [
        TextDelta(index=0, text="Hel", token_ids=(1, 2), logprobs=tokens),
        answer("Hel", "x")[-1],
    ]


EXPECTED_LOGPROBS = {
    "content": [
        {
            "token": "Hel",
            "logprob": -0.25,
            "bytes": [72, 101, 108],
            "top_logprobs": [
                {"token": "Hel", "logprob": -0.25, "bytes": [72, 101, 108]},
                {"token": "Yo", "logprob": -2.0, "bytes": [89, 111]},
            ],
        },
        {"token": "\ufffd", "logprob": -9999.0, "bytes": [226, 152], "top_logprobs": []},
    ],
    "refusal": None,
}


async def test_logprobs_have_the_chat_shape() -> None:
    fields = {"logprobs": True, "top_logprobs": 2}
    assert (await whole(ScriptedGateway(script=scored()), **fields))["choices"][0][
        "logprobs"
    ] == EXPECTED_LOGPROBS
    assert (await streamed(ScriptedGateway(script=scored()), **fields))[1]["choices"][0][
        "logprobs"
    ] == EXPECTED_LOGPROBS


async def test_an_answer_without_text_is_an_empty_string() -> None:
    got = await whole(ScriptedGateway(script=answer()))
    assert got["choices"][0]["message"]["content"] == ""


CALLS = (("look_up", '{"word": "☃"}'), ("add", '{"a": 1, "b": 2}'))


async def test_a_whole_answer_has_its_thought_twice_and_its_calls() -> None:
    got = await whole(ScriptedGateway(script=calling(*CALLS, thought="hm")))
    (choice,) = got["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "hm",
        "reasoning": "hm",
        "tool_calls": [
            {
                "id": f"call_{place}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for place, (name, arguments) in enumerate(CALLS)
        ],
    }
    assert choice["finish_reason"] == "tool_calls"
    assert got["usage"]["completion_tokens_details"] == {
        **NOTHING_DRAFTED,
        "reasoning_tokens": 2,
    }


async def test_a_stream_names_a_call_before_its_arguments() -> None:
    events = await streamed(ScriptedGateway(script=calling(CALLS[0], thought="hm", said="well")))
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm", "reasoning": "hm"},
        {"content": "well"},
        {
            "tool_calls": [
                {
                    "index": 0,
                    "id": "call_0",
                    "type": "function",
                    "function": {"name": "look_up", "arguments": ""},
                }
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"word'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '": "☃"}'}}]},
        {},
    ]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 6 + ["tool_calls"]


async def test_a_call_cut_by_length_is_shown_partially() -> None:
    got = await whole(ScriptedGateway(script=calling(CALLS[0], reason=FinishReason.LENGTH)))
    (choice,) = got["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["look_up"]
    assert choice["finish_reason"] == "length"


async def test_a_thought_that_is_cut_leaves_no_content() -> None:
    got = await whole(ScriptedGateway(script=calling(thought="hm", reason=FinishReason.LENGTH)))
    assert (got["choices"][0]["message"]["content"], got["choices"][0]["finish_reason"]) == (
        None,
        "length",
    )


async def test_functions_in_the_request_give_a_function_call() -> None:
    fields: dict[str, Any] = {"functions": [{"name": "look_up"}]}
    got = await whole(ScriptedGateway(script=calling(CALLS[0])), **fields)
    (choice,) = got["choices"]
    assert choice["message"]["function_call"] == {"name": "look_up", "arguments": CALLS[0][1]}
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "function_call"
    events = await streamed(ScriptedGateway(script=calling(CALLS[0])), **fields)
    parts = [event["choices"][0]["delta"].get("function_call") for event in events[1:-1]]
    assert parts[0] == {"name": "look_up", "arguments": ""}
    assert "".join(part["arguments"] for part in parts) == CALLS[0][1]
    assert events[-1]["choices"][0]["finish_reason"] == "function_call"


async def test_a_calls_tokens_have_logprobs_and_are_counted() -> None:
    scored = [
        ToolCallStarted(
            index=0, call=0, id="call_0", name="f", token_ids=(1,), logprobs=(token("<"),)
        ),
        ToolArgumentsDelta(index=0, call=0, text="{}", token_ids=(2,), logprobs=(token("{}"),)),
        ToolCallFinished(index=0, call=0, token_ids=(3,), logprobs=(token(">"),)),
        calling(("f", "{}"))[-1],
    ]
    got = await whole(ScriptedGateway(script=scored), logprobs=True)
    assert [each["token"] for each in got["choices"][0]["logprobs"]["content"]] == ["<", "{}", ">"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await streamed(ScriptedGateway(script=scored), logprobs=True, stream_options=options)
    shown = [event["choices"][0]["logprobs"] for event in events if event["choices"]]
    assert [each and each["content"][0]["token"] for each in shown] == [None, "<", "{}", ">", None]
    assert [event["usage"]["completion_tokens"] for event in events][1:4] == [1, 2, 3]


async def test_invisible_tokens_are_counted_with_the_next_event() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await streamed(
        ScriptedGateway(script=calling(("f", "{}"), ("g", "{}"))), stream_options=options
    )
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 2, 3, 5, 6, 7, 8, 8]


PROGRESS = [
    PromptProgress(index=0, total_tokens=7, cached_tokens=2, read_tokens=4, seconds=0.5),
    PromptProgress(index=0, total_tokens=7, cached_tokens=2, read_tokens=7, seconds=1.25),
]


async def test_a_stream_reports_prefill_progress_on_request() -> None:
    gateway = ScriptedGateway(script=[*PROGRESS, *answer("Hel")])
    opening, *told, first, _ = [
        event for event in await streamed(gateway, return_progress=True) if event != "[DONE]"
    ]
    assert gateway.request.reports_progress
    assert [event["prompt_progress"] for event in told] == [
        {"total": 7, "cache": 2, "processed": 4, "time_ms": 500},
        {"total": 7, "cache": 2, "processed": 7, "time_ms": 1250},
    ]
    for event in told:
        assert event["choices"] == [
            {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}
        ]
        assert {"id": event["id"], "object": event["object"]} == {
            "id": opening["id"],
            "object": "chat.completion.chunk",
        }
    assert first["choices"][0]["delta"] == {"content": "Hel"}


@pytest.mark.parametrize("fields", [{}, {"return_progress": False}])
async def test_a_stream_reports_no_progress_by_default(fields: dict[str, Any]) -> None:
    events = await streamed(ScriptedGateway(script=[*PROGRESS, *answer("Hel")]), **fields)
    assert [event for event in events if "prompt_progress" in event] == []
    assert len(events) == len(await streamed(ScriptedGateway(script=answer("Hel"))))


async def answered(gateway: ScriptedGateway, **fields: Any) -> Any:
    async with client_of(gateway) as client:
        response = await client.post(COMPLETIONS, json=completion_body(**fields))
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        msgspec.json.decode(response.content, type=TextCompletion)
        return response.json()
    events = events_of(response.text)
    assert events.pop() == "[DONE]"
    for event in events:
        msgspec.json.decode(json.dumps(event).encode(), type=TextCompletion)
    return events


async def test_a_whole_completion_has_the_golden_shape() -> None:
    got = await answered(ScriptedGateway(script=answer("Hel", "lo")))
    assert got.pop("id").startswith("cmpl-")
    assert got.pop("created") > 0
    assert got.pop("system_fingerprint")
    assert got == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": 2,
            "total_tokens": PROMPT_TOKENS + 2,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {**NOTHING_DRAFTED, "reasoning_tokens": 0},
        },
    }


async def test_a_streamed_completion_has_the_golden_events() -> None:
    events = await answered(
        ScriptedGateway(script=answer("Hel", "lo")),
        stream=True,
        stream_options={"include_usage": True},
    )
    assert [event["choices"] for event in events] == [
        [{"index": 0, "text": "Hel", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "lo", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}],
        [],
    ]
    assert events[-1]["usage"]["total_tokens"] == PROMPT_TOKENS + 2


def by_prompt(request: GenerationRequest) -> Any:
    assert isinstance(request.prompt, str)
    text = request.prompt
    return [*answer(text + "0", cached_tokens=1), *answer(text + "1", index=1, cached_tokens=5)]


async def test_choices_of_several_prompts_are_numbered_consecutively() -> None:
    got = await answered(ScriptedGateway(script=by_prompt), prompt=["a", "b"], n=2)
    assert [choice["text"] for choice in got["choices"]] == ["a0", "a1", "b0", "b1"]
    assert got["usage"]["prompt_tokens"] == 2 * PROMPT_TOKENS
    assert got["usage"]["completion_tokens"] == 4
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    events = await answered(ScriptedGateway(script=by_prompt), prompt=["a", "b"], n=2, stream=True)
    texts: dict[int, str] = {}
    for event in events:
        choice = event["choices"][0]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "a0", 1: "a1", 2: "b0", 3: "b1"}


async def test_logprobs_have_the_completions_shape() -> None:
    tokens = (
        token("Hel", -0.25, rivals=(("Hel", -0.25), ("Yo", -2.0))),
        token("lo", -3.0, offset=3, rivals=(("la", -0.1),)),
    )
    script = [
        TextDelta(index=0, text="Hello", token_ids=(1, 2), logprobs=tokens),
        answer("a", "b")[-1],
    ]
    expected = {
        "text_offset": [0, 3],
        "token_logprobs": [-0.25, -3.0],
        "tokens": ["Hel", "lo"],
        "top_logprobs": [{"Hel": -0.25, "Yo": -2.0}, {"la": -0.1, "lo": -3.0}],
    }
    assert (await answered(ScriptedGateway(script=script), logprobs=2))["choices"][0][
        "logprobs"
    ] == expected
    assert (await answered(ScriptedGateway(script=script), logprobs=2, stream=True))[0]["choices"][
        0
    ]["logprobs"] == expected


def test_the_first_token_of_an_echoed_prompt_lacks_a_logprob() -> None:
    shape = completion_logprobs([token("The", math.nan), token(" end", -1.0, offset=3)])
    assert shape.token_logprobs == [None, -1.0]
    assert shape.top_logprobs == [None, {" end": -1.0}]


def test_a_partial_character_is_shown_as_bytes() -> None:
    shape = completion_logprobs([TokenText(text="\ufffd", raw=b"\xe2\x98", logprob=-1.0)])
    assert shape.tokens == ["bytes:\\xe2\\x98"]


def test_of_two_tokens_with_equal_text_the_likelier_is_shown() -> None:
    shape = completion_logprobs([token("a", -0.1, rivals=(("a", -0.1), ("b", -1.0), ("b", -2.0)))])
    assert shape.top_logprobs == [{"a": -0.1, "b": -1.0}]


@pytest.mark.parametrize(
    ("status", "kind", "advice"),
    [
        (404, "invalid_request_error", "fix_request"),
        (429, "rate_limit_error", "wait"),
        (500, "server_error", "wait"),
        (503, "server_error", "wait"),
    ],
)
def test_the_error_type_follows_the_status(status: int, kind: str, advice: str) -> None:
    said = openai_error(Problem(status=status, code="odd", message="no", field="stop"))
    assert json.loads(msgspec.json.encode(said)) == {
        "error": {
            "message": "no",
            "type": kind,
            "param": "stop",
            "code": "odd",
            "advice": advice,
        }
    }


def test_an_error_without_a_field_has_a_null_param() -> None:
    assert openai_error(Problem(status=400, code="odd", message="no")).error.param is None
