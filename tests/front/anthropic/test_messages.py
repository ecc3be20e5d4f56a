"""Requests to /v1/messages, and the resulting request to the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.config import LimitsSettings
from holdfast.front.request import CacheBreakpoint, ChatPrompt, OutputFormat, Thinking
from holdfast.front.server import answers as server_answers
from tests.fakes.http_clients import MESSAGES, Exchange, client_of, message_body, named_events_of
from tests.fakes.scripted_gateway import (
    MODEL,
    PROMPT_TOKENS,
    ScriptedDirectory,
    ScriptedGateway,
    answer,
    calling,
    model_status,
)

USER = {"role": "user", "content": "x"}
COUNT = f"{MESSAGES}/count_tokens"
EPHEMERAL = {"type": "ephemeral"}


async def asked(
    path: str = MESSAGES, *, headers: dict[str, str] | None = None, **fields: Any
) -> Any:
    gateway = ScriptedGateway()
    async with client_of(gateway) as client:
        response = await client.post(path, json=message_body(**fields), headers=headers)
    assert response.status_code == 200, response.text
    return gateway.request


async def refused(*, without: str = "", **fields: Any) -> tuple[int, str]:
    gateway = ScriptedGateway()
    body = {name: value for name, value in message_body(**fields).items() if name != without}
    async with client_of(gateway, limits=LimitsSettings(max_stop_strings=2, max_tools=2)) as client:
        response = await client.post(MESSAGES, json=body)
    assert gateway.requests == []
    assert response.json()["error"]["type"] == "invalid_request_error"
    return response.status_code, response.json()["error"]["message"]


async def test_a_minimal_request_is_accepted() -> None:
    request = await asked()
    assert request.request_id.startswith("msg_")
    assert request.prompt == ChatPrompt(
        messages=({"role": "user", "content": "hello"},), has_images=False
    )
    assert (request.model, request.max_tokens, request.choices, request.session_id) == (
        MODEL,
        100,
        1,
        "",
    )
    assert "temperature" in request.unset_sampling


async def test_sampling_and_stop_sequences_are_passed_on() -> None:
    request = await asked(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["a", "b", "a"])
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (
        0.5,
        0.9,
        7,
    )
    assert request.stop == ("a", "b")
    assert not {"temperature", "top_p", "top_k"} & {*request.unset_sampling}


@pytest.mark.parametrize("says", [
    lambda name: ({"x-holdfast-tenant": name}, {}),
    lambda name: ({}, {"cache_salt": name}),
])  # fmt: skip
async def test_a_thought_is_returned_only_to_its_tenant(
    says: Callable[[str], tuple[dict[str, str], dict[str, str]]],
) -> None:
    gateway = ScriptedGateway(script=calling(thought="hm", said="Hi"))
    ann, bob = says("ann"), says("bob")
    nobody: tuple[dict[str, str], dict[str, str]] = ({}, {})
    thinking = {"type": "enabled", "display": "omitted"}
    async with client_of(gateway) as client:
        first = await client.post(
            MESSAGES, json=message_body(thinking=thinking, **ann[1]), headers=ann[0]
        )
        turns = [USER, {"role": "assistant", "content": first.json()["content"]}, USER]
        for headers, fields in (ann, bob, nobody):
            await client.post(
                MESSAGES, json=message_body(messages=turns, **fields), headers=headers
            )
    prompts = [request.prompt for request in gateway.requests[1:]]
    assert [
        prompt.messages[1].get("reasoning_content")
        for prompt in prompts
        if isinstance(prompt, ChatPrompt)
    ] == [
        "hm",
        None,
        None,
    ]


@pytest.mark.parametrize("field", ["model", "messages", "max_tokens"])
async def test_required_fields_are_required(field: str) -> None:
    status = 422 if field == "max_tokens" else 400  # see tests/front/server/test_problem.py
    assert await refused(without=field) == (status, f"`{field}` is required")


@pytest.mark.parametrize(
    "more",
    [
        {"service_tier": "auto"},
        {"context_management": {"edits": []}},
        {"container": None},
        {"odd": 1},
    ],
)
async def test_fields_without_meaning_here_are_harmless(more: dict[str, Any]) -> None:
    assert (await asked(**more)).prompt == (await asked()).prompt


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, Thinking(effort="off")),
        ({"thinking": None}, Thinking(effort="off")),
        ({"thinking": {"type": "disabled"}}, Thinking(effort="off")),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            Thinking(effort="on", budget_tokens=1024),
        ),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, Thinking(effort="on")),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "xhigh"}},
            Thinking(effort="max"),
        ),
        ({"output_config": {"effort": "low"}}, Thinking(effort="off")),
    ],
)
async def test_thinking_is_enabled_on_request(fields: dict[str, Any], thinking: Thinking) -> None:
    assert (await asked(**fields)).thinking == thinking


@pytest.mark.parametrize("older", [True, False])
async def test_the_answer_format_is_passed_on(older: bool) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    request = await asked(
        **({"output_format": wanted} if older else {"output_config": {"format": wanted}})
    )
    field = "output_format.schema" if older else "output_config.format.schema"
    assert request.output_format == OutputFormat(
        kind="json_schema", schema={"type": "object"}, field=field
    )


async def test_a_last_answer_is_continued() -> None:
    prompt = (
        await asked(
            messages=[USER, {"role": "assistant", "content": [{"type": "text", "text": "The"}]}]
        )
    ).prompt
    assert (prompt.continue_last, prompt.messages[-1]) == (
        True,
        {"role": "assistant", "content": "The"},
    )


async def test_an_empty_last_answer_is_ignored() -> None:
    prompt = (await asked(messages=[USER, {"role": "assistant", "content": []}])).prompt
    assert (prompt.continue_last, prompt.messages) == (False, (USER,))


async def test_cache_breakpoints_are_passed_on() -> None:
    hour = {"type": "ephemeral", "ttl": "1h"}
    prompt = (
        await asked(
            tools=[{"name": "f", "input_schema": {"type": "object"}, "cache_control": hour}],
            system=[
                {"type": "text", "text": "a"},
                {"type": "text", "text": "b", "cache_control": EPHEMERAL},
            ],
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "c", "cache_control": EPHEMERAL},
                        {"type": "text", "text": "d"},
                    ],
                }
            ],
            cache_control=hour,
        )
    ).prompt
    assert prompt.cache_breakpoints == (
        CacheBreakpoint(messages=0, seconds=3600.0),
        CacheBreakpoint(messages=0, parts=2),
        CacheBreakpoint(messages=1, parts=1),
        CacheBreakpoint(messages=2, seconds=3600.0),
    )


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ({}, ""),
        ({"X-Claude-Code-Session-Id": "5c6a-1"}, "5c6a-1"),
        ({"X-Claude-Code-Session-Id": "5c6a-1", "X-Session-ID": "mine"}, "mine"),
    ],
)
async def test_claude_codes_session_id_is_used(headers: dict[str, str], session: str) -> None:
    assert (await asked(headers=headers)).session_id == session


async def test_a_session_in_the_body_precedes_claude_codes_header() -> None:
    headers = {"X-Claude-Code-Session-Id": "5c6a-1"}
    assert (await asked(headers=headers, prompt_cache_key="key")).session_id == "key"
    assert (
        await asked(headers=headers, prompt_cache_key="key", session_id="mine")
    ).session_id == "mine"


async def test_anthropics_model_names_mean_the_first_model() -> None:
    async with client_of(gateway := ScriptedGateway()) as client:
        response = await client.post(
            f"{MESSAGES}?beta=true", json=message_body(model="claude-haiku-4-5")
        )
    assert (gateway.request.model, response.json()["model"]) == (MODEL, MODEL)


async def test_tokens_are_counted_without_generating() -> None:
    async with client_of(gateway := ScriptedGateway()) as client:
        body = {
            name: value for name, value in message_body(system="s").items() if name != "max_tokens"
        }
        response = await client.post(COUNT, json=body)
    assert response.json() == {"input_tokens": PROMPT_TOKENS}
    assert [message["role"] for message in gateway.request.prompt.messages] == ["system", "user"]
    assert gateway.closed == []


async def test_twenty_five_concurrent_counts_are_answered() -> None:
    async with client_of(ScriptedGateway()) as client:
        responses = await asyncio.gather(
            *(client.post(COUNT, json=message_body()) for _ in range(25))
        )
    assert {response.status_code for response in responses} == {200}


async def test_pings_precede_the_message_while_the_model_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_answers, "KEEP_ALIVE_SECONDS", 0.001)
    monkeypatch.setattr(server_answers, "HEADER_GRACE_SECONDS", 0.001)
    loaded = asyncio.Event()
    gateway = ScriptedGateway(script=answer("Hi"), accept_when=loaded)
    exchange = Exchange(
        gateway, directory=ScriptedDirectory(models=(model_status(state="loading"),))
    )
    running = asyncio.create_task(exchange.run(MESSAGES, message_body(stream=True)))
    await exchange.until(lambda: exchange.text.count("event: ping") > 1)
    loaded.set()
    await running
    names = [name for name, _ in named_events_of(exchange.text) if name != "ping"]
    assert named_events_of(exchange.text)[0][0] == "ping"
    assert (names[0], names[-1]) == ("message_start", "message_stop")


async def test_an_explanation_comes_with_the_end() -> None:
    async with client_of(ScriptedGateway()) as client:
        for stream in (False, True):
            explained = {"X-Holdfast-Explain": "1"}
            response = await client.post(
                MESSAGES, json=message_body(stream=stream), headers=explained
            )
            told = named_events_of(response.text)[-2][1] if stream else response.json()
            assert told["holdfast"]["prompt_tokens"] == PROMPT_TOKENS


async def test_streamed_json_is_compact() -> None:
    async with client_of(ScriptedGateway(script=answer("☃"))) as client:
        response = await client.post(MESSAGES, json=message_body(stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert json.dumps("☃", ensure_ascii=False) in response.text
