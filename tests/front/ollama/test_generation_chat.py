from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from holdfast.errors import GenerationFailed, QueueFull
from holdfast.front.output import TextDelta
from holdfast.front.request import ChatPrompt, OutputFormat
from holdfast.wire.events import FinishReason
from tests.fakes.http_clients import Exchange, client_of
from tests.fakes.ollama_bodies import (
    CHAT,
    HELLO,
    UNABLE,
    WEATHER,
    asked,
    directory_of,
    lines_of,
    said,
)
from tests.fakes.scripted_gateway import (
    MODEL,
    PROMPT_TOKENS,
    ScriptedGateway,
    answer,
    calling,
    token,
)


async def test_a_conversation_is_streamed_by_default() -> None:
    streamed = lines_of(await asked(ScriptedGateway(script=answer("Hel", "lo"))))
    whole = await asked(ScriptedGateway(script=answer("Hel", "lo")), stream=False)
    assert said(streamed, "content") == whole.json()["message"]["content"] == "Hello"
    assert [line["done"] for line in streamed] == [False, False, True]
    assert whole.headers["content-type"] == "application/json"
    assert whole.json().keys() == streamed[-1].keys()


async def test_the_last_line_has_counts_and_durations() -> None:
    gateway = ScriptedGateway(script=answer("a", "b", "c", cached_tokens=5))
    last = lines_of(await asked(gateway))[-1]
    assert (last["prompt_eval_count"], last["cached_tokens"], last["eval_count"]) == (
        PROMPT_TOKENS,
        5,
        3,
    )
    assert last["done_reason"] == "stop"
    durations = [last[name] for name in ("load_duration", "prompt_eval_duration", "eval_duration")]
    assert all(isinstance(duration, int) and duration > 0 for duration in durations)
    assert last["total_duration"] >= max(durations)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_is_one_line_with_object_arguments(stream: bool) -> None:
    script = calling(
        ("weather", '{"city":\n "Oslo"}'), ("weather", "{}"), thought="hm", said="Let me see."
    )
    response = await asked(ScriptedGateway(script=script), tools=[WEATHER], stream=stream)
    lines = lines_of(response) if stream else [response.json()]
    calls = [call for line in lines for call in line["message"].get("tool_calls", [])]
    assert calls == [
        {
            "id": "call_0",
            "function": {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}},
        },
        {"id": "call_1", "function": {"index": 1, "name": "weather", "arguments": {}}},
    ]
    assert (said(lines, "content"), said(lines, "thinking")) == ("Let me see.", "hm")
    assert lines[-1]["done_reason"] == "stop"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_cut_call_is_left_out_with_the_length_reason(stream: bool) -> None:
    script = calling(("weather", "{}"), ("weather", '{"city": "Os'), reason=FinishReason.LENGTH)
    response = await asked(ScriptedGateway(script=script), tools=[WEATHER], stream=stream)
    lines = lines_of(response) if stream else [response.json()]
    assert sum(len(line["message"].get("tool_calls", [])) for line in lines) == 1
    assert lines[-1]["done_reason"] == "length"


@pytest.mark.parametrize("name", [MODEL, f"{MODEL}:latest", None])
async def test_a_model_name_is_returned_as_given(name: str | None) -> None:
    gateway = ScriptedGateway()
    response = await asked(gateway, model=name, stream=False)
    assert (gateway.request.model, response.json()["model"]) == (MODEL, name or f"{MODEL}:latest")


async def test_an_unknown_model_has_the_message_clients_look_for() -> None:
    gateway = ScriptedGateway()
    response = await asked(gateway, model='no"ne')
    assert (response.status_code, response.json()) == (
        404,
        {
            "error": 'model "no\\"ne" not found, try pulling it first: it does not exist on this '
            "server",
            "advice": "pull_model",
        },
    )
    assert gateway.requests == []


async def test_images_in_tool_results_are_shown_to_the_model() -> None:
    gateway = ScriptedGateway()
    result = {"role": "tool", "tool_name": "look", "content": "seen", "images": ["aGk="]}
    assert (await asked(gateway, messages=[*HELLO, result])).status_code == 200
    assert isinstance(gateway.request.prompt, ChatPrompt)
    assert [part["text"] for part in gateway.request.prompt.messages[-1]["content"]] == [
        "seen",
        "[image left out: this model takes text only]",
    ]


@pytest.mark.parametrize(
    ("think", "effort"),
    [(True, "on"), (False, "off"), ("low", "low"), ("max", "max"), (None, None)],
)
async def test_thinking_is_requested_in_all_its_forms(think: Any, effort: str | None) -> None:
    gateway = ScriptedGateway()
    await asked(gateway, think=think)
    assert gateway.request.thinking.effort == effort


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"think": True}, "thinking"),
        ({"think": "high"}, "thinking"),
        ({"tools": [WEATHER]}, "tools"),
    ],
)
async def test_unsupported_capabilities_are_refused_in_ollamas_words(
    fields: dict[str, Any], what: str
) -> None:
    gateway = ScriptedGateway()
    response = await asked(gateway, report=UNABLE, **fields)
    assert (response.status_code, response.json()) == (
        400,
        {"error": f'"{MODEL}" does not support {what}', "advice": "fix_request"},
    )
    assert gateway.requests == []


@pytest.mark.parametrize(
    "fields", [{"think": False}, {"think": None}, {"tools": []}, {"tools": None}]
)
async def test_disabled_options_are_accepted_by_any_model(fields: dict[str, Any]) -> None:
    assert (await asked(ScriptedGateway(), report=UNABLE, **fields)).status_code == 200


async def test_results_belong_to_calls_by_id_name_or_order() -> None:
    calls = [
        {"function": {"name": name, "arguments": {"n": place}}} for place, name in enumerate("abc")
    ]
    with_id = [{"id": "mine", **calls[0]}]
    messages = [
        *HELLO,
        {"role": "assistant", "thinking": "hm", "tool_calls": calls},
        {"role": "tool", "tool_name": "b", "content": "of b"},
        {"role": "tool", "content": "of a"},
        {"role": "tool", "tool_name": "misnamed", "content": "of c"},
        {"role": "assistant", "content": "", "tool_calls": with_id},
        {"role": "tool", "tool_call_id": "mine", "content": "of mine"},
    ]
    gateway = ScriptedGateway()
    await asked(gateway, messages=messages, tools=[WEATHER])
    prompt: Any = gateway.request.prompt
    ids = {
        call["id"]: call["function"]["name"]
        for turn in prompt.messages
        for call in turn.get("tool_calls", ())
    }
    results = [
        (ids[turn["tool_call_id"]], turn["content"])
        for turn in prompt.messages
        if turn["role"] == "tool"
    ]
    assert results == [("b", "of b"), ("a", "of a"), ("c", "of c"), ("a", "of mine")]
    assert prompt.messages[1]["reasoning_content"] == "hm"
    assert prompt.messages[1]["tool_calls"][2]["function"]["arguments"] == {"n": 2}
    assert len(ids) == 4


async def test_an_unfinished_assistant_message_is_continued() -> None:
    for last, continues in (("The answer", True), ("", False)):
        gateway = ScriptedGateway()
        await asked(gateway, messages=[*HELLO, {"role": "assistant", "content": last}])
        assert isinstance(gateway.request.prompt, ChatPrompt)
        assert gateway.request.prompt.continue_last is continues


@pytest.mark.parametrize(
    ("asked_for", "found"),
    [
        ("", None),
        (None, None),
        ("json", OutputFormat(kind="json_object", field="format")),
        (
            {"type": "object"},
            OutputFormat(kind="json_schema", schema={"type": "object"}, field="format"),
        ),
    ],
)
@pytest.mark.parametrize("think", [True, False, None])
async def test_the_format_is_requested_in_every_thinking_mode(
    asked_for: Any, found: Any, think: Any
) -> None:
    gateway = ScriptedGateway()
    await asked(gateway, format=asked_for, think=think)
    assert gateway.request.output_format == found


@pytest.mark.parametrize("value", ["5m", "1h30m", "1.5h", -1, 300, 0.5, "-1", "300", "100ms", None])
async def test_keep_alive_is_accepted(value: Any) -> None:
    assert (await asked(ScriptedGateway(), keep_alive=value)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "load"),
        ({"keep_alive": "0s"}, "unload"),
        ({"keep_alive": 0}, "unload"),
        ({"keep_alive": 10}, "load"),
    ],
)
async def test_without_messages_the_model_is_only_loaded(
    fields: dict[str, Any], reason: str
) -> None:
    gateway = ScriptedGateway()
    for messages in ([], None):
        response = await asked(gateway, messages=messages, **fields)
        assert (
            response.json()["done"],
            response.json()["done_reason"],
            response.json()["message"]["content"],
        ) == (
            True,
            reason,
            "",
        )


async def test_log_probabilities_have_alternatives() -> None:
    tokens = (token("a", -0.25, rivals=(("b", -1.5),)),)
    script = [TextDelta(index=0, text="a", token_ids=(1,), logprobs=tokens), *answer("b")[1:]]
    for stream in (True, False):
        response = await asked(
            ScriptedGateway(script=script), logprobs=True, top_logprobs=1, stream=stream
        )
        line = lines_of(response)[0] if stream else response.json()
        assert line["logprobs"] == [
            {
                "token": "a",
                "logprob": -0.25,
                "bytes": [97],
                "top_logprobs": [{"token": "b", "logprob": -1.5, "bytes": [98]}],
            }
        ]


async def test_cache_hits_are_explained_on_request() -> None:
    plain = lines_of(await asked(ScriptedGateway()))[-1]
    explained = lines_of(await asked(ScriptedGateway(), holdfast={"explain": True}))[-1]
    assert "holdfast" not in plain
    assert explained["holdfast"]["prompt_tokens"] == PROMPT_TOKENS


async def test_a_failure_within_a_stream_is_its_last_line() -> None:
    breaks = asyncio.Event()
    script = [*answer("Hel")[:-1], breaks, GenerationFailed("the device is gone")]
    exchange = Exchange(ScriptedGateway(script=script), directory=directory_of())
    running = asyncio.create_task(exchange.run(CHAT, {"model": MODEL, "messages": HELLO}))
    await exchange.first_body.wait()
    breaks.set()
    await running
    lines = [json.loads(line) for line in exchange.text.splitlines()]
    assert lines[-1] == {"error": "the device is gone", "advice": "wait"}
    assert lines[0]["message"]["content"] == "Hel"


async def test_a_full_queue_has_its_status() -> None:
    gateway = ScriptedGateway(refusal=QueueFull(queued=1, limit=1, retry_after_seconds=2))
    response = await asked(gateway)
    assert (response.status_code, response.headers["retry-after"], list(response.json())) == (
        503,
        "2",
        ["error", "advice"],
    )


async def test_keep_alives_are_empty_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.front.server.answers.KEEP_ALIVE_SECONDS", 0.002)
    monkeypatch.setattr("holdfast.front.server.answers.HEADER_GRACE_SECONDS", 0.001)
    waiting = asyncio.Event()
    exchange = Exchange(
        ScriptedGateway(script=[waiting, *answer("late")]), directory=directory_of()
    )
    running = asyncio.create_task(exchange.run(CHAT, {"model": MODEL, "messages": HELLO}))
    await exchange.until(lambda: len(exchange.writes) >= 3)
    kept_open = [json.loads(line) for line in exchange.text.splitlines()]
    assert all(
        (line["done"], line["message"]) == (False, {"role": "assistant", "content": ""})
        for line in kept_open
    )
    waiting.set()
    await running
    assert said([json.loads(line) for line in exchange.text.splitlines()], "content") == "late"


async def test_copilot_may_request_thinking_from_every_model() -> None:
    gateway = ScriptedGateway()
    async with client_of(gateway, directory=directory_of(UNABLE)) as client:
        body = {"model": MODEL, "messages": HELLO, "think": "medium"}
        assert (
            await client.post(CHAT, json=body, headers={"user-agent": "GitHubCopilotChat/0.30"})
        ).status_code == 200
        assert (await client.post(CHAT, json=body)).status_code == 400
    assert gateway.request.thinking.effort is None
