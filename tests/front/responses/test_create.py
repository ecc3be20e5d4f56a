from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types.responses import Response

from holdfast.errors import PromptTooLong, QueueFull
from holdfast.front.request import ChatPrompt, Thinking
from tests.fakes.http_clients import client_of
from tests.fakes.recorded_requests import CODEX, RECORDED
from tests.fakes.scripted_gateway import MODEL, PROMPT_TOKENS, ScriptedGateway, answer, calling

RESPONSES = "/v1/responses"
TOO_LONG = PromptTooLong(prompt_tokens=9, context_tokens=8, field="input")


async def asked(
    gateway: ScriptedGateway, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    async with client_of(gateway) as client:
        return await client.post(
            RESPONSES, json={"input": "hello", "store": False, **fields}, headers=headers
        )


async def whole(gateway: ScriptedGateway, **fields: Any) -> Any:
    response = await asked(gateway, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def data_of(response: httpx.Response) -> list[Any]:
    return [
        json.loads(line.removeprefix("data: "))
        for line in response.text.splitlines()
        if line.startswith("data: ")
    ]


def prompt_of(gateway: ScriptedGateway) -> ChatPrompt:
    assert isinstance(gateway.request.prompt, ChatPrompt)
    return gateway.request.prompt


async def test_a_text_is_answered_with_a_response_object() -> None:
    got = await whole(ScriptedGateway())
    assert (got["object"], got["status"], got["model"]) == ("response", "completed", MODEL)
    assert [item["content"][0]["text"] for item in got["output"]] == ["Hello"]
    assert got["usage"]["input_tokens"] == PROMPT_TOKENS


async def test_thoughts_text_and_calls_are_output_items() -> None:
    gateway = ScriptedGateway(script=calling(("f", '{"x": 1}'), thought="hm", said="Hi"))
    got = await whole(gateway, tools=[{"type": "function", "name": "f"}])
    assert [item["type"] for item in got["output"]] == ["reasoning", "message", "function_call"]
    assert got["output"][2]["arguments"] == '{"x": 1}'


async def test_the_response_repeats_the_request() -> None:
    function = {
        "type": "function",
        "name": "f",
        "description": "D",
        "parameters": {"type": "object"},
        "strict": False,
    }
    tools = [function, {"type": "web_search"}]
    schema = {"type": "json_schema", "name": "s", "schema": {"type": "object"}, "strict": True}
    said = {
        "instructions": "Be brief.",
        "tools": tools,
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": False,
        "max_tool_calls": 3,
        "max_output_tokens": 50,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": schema, "verbosity": "low"},
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "user": "u",
    }
    got = await whole(ScriptedGateway(), **said)
    assert {name: got[name] for name in said} == said
    assert (await whole(ScriptedGateway(), truncation="auto", service_tier="flex"))[
        "truncation"
    ] == "auto"


async def test_the_response_shows_the_sampling_actually_used() -> None:
    used = {"temperature": 0.6, "top_p": 0.9, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert (await whole(ScriptedGateway())).items() >= used.items()
    stream = data_of(await asked(ScriptedGateway(), stream=True))
    assert all(event["response"].items() >= used.items() for event in stream if "response" in event)


async def test_a_function_is_repeated_with_all_its_fields() -> None:
    tools = [{"type": "function", "name": "f"}, {"type": "custom", "name": "c"}]
    got = await whole(ScriptedGateway(), tools=tools)
    assert got["tools"] == [
        {**tools[0], "description": None, "parameters": None, "strict": None},
        tools[1],
    ]


async def test_the_fields_of_a_request_reach_the_gateway() -> None:
    gateway = ScriptedGateway()
    await whole(
        gateway,
        instructions="Be brief.",
        reasoning={"effort": "high"},
        max_output_tokens=50,
        top_k=3,
        text={"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}},
        tools=[{"type": "function", "name": "f"}],
        tool_choice="required",
        parallel_tool_calls=False,
        top_logprobs=2,
    )
    request = gateway.request
    assert [message["role"] for message in prompt_of(gateway).messages] == ["system", "user"]
    assert (request.thinking, request.max_tokens, request.sampling.top_k) == (
        Thinking(effort="high"),
        50,
        3,
    )
    assert request.output_format is not None
    assert request.output_format.field == "text.format.schema"
    assert (request.tool_choice.mode, request.tool_choice.parallel) == ("required", False)
    assert (request.want_logprobs, request.top_logprobs) == (True, 2)


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda each: each["client"])
async def test_requests_of_real_clients_are_accepted(recorded: dict[str, Any]) -> None:
    gateway = ScriptedGateway(script=answer("Hi"))
    async with client_of(gateway) as client:
        response = await client.post(
            RESPONSES, json=recorded["body"] | {"model": MODEL}, headers=recorded["headers"]
        )
    assert response.status_code == 200, response.text
    got = data_of(response)[-1]["response"] if recorded["body"].get("stream") else response.json()
    official = Response.model_validate(got)  # with the fields of the request repeated
    assert (official.status, official.output_text) == ("completed", "Hi")


async def test_codex_gets_back_its_tools_session_and_history() -> None:
    gateway = ScriptedGateway(script=calling(("multi_agent_v1__close_agent", '{"target": "a"}')))
    body = CODEX[1]["body"] | {"model": MODEL}
    del body["prompt_cache_key"]
    async with client_of(gateway) as client:
        response = await client.post(RESPONSES, json=body, headers=CODEX[1]["headers"])
    prompt = prompt_of(gateway)
    names = [tool["function"]["name"] for tool in prompt.tools]
    assert names == [
        "exec_command",
        "request_user_input",
        "multi_agent_v1__close_agent",
        "multi_agent_v1__send_input",
    ]
    assert [message["role"] for message in prompt.messages] == ["developer"] * 2 + ["user"] * 2 + [
        "assistant",
        "tool",
    ]
    assert gateway.request.session_id == "0199-codex-session"
    done = next(
        event["item"] for event in data_of(response) if event["type"] == "response.output_item.done"
    )
    assert (done["type"], done["name"], done["namespace"]) == (
        "function_call",
        "close_agent",
        "multi_agent_v1",
    )


async def test_codex_gets_an_overflow_as_a_stream_event() -> None:
    refused = await asked(ScriptedGateway(refusal=TOO_LONG), stream=True)
    assert (refused.status_code, refused.json()["error"]["code"]) == (
        400,
        "context_length_exceeded",
    )
    told = await asked(ScriptedGateway(refusal=TOO_LONG), CODEX[0]["headers"], stream=True)
    assert told.status_code == 200
    assert [event["type"] for event in data_of(told)] == ["response.created", "response.failed"]
    assert data_of(told)[-1]["response"]["error"]["code"] == "context_length_exceeded"
    busy = await asked(
        ScriptedGateway(refusal=QueueFull(queued=1, limit=1, retry_after_seconds=2)),
        CODEX[0]["headers"],
        stream=True,
    )
    assert (busy.status_code, busy.headers["retry-after"]) == (503, "2")


async def test_fields_with_other_names_in_other_apis_are_named() -> None:
    refused = await asked(ScriptedGateway(), response_format={"type": "json_object"})
    assert (
        refused.json()["error"]["message"]
        == "`response_format`: the field is called `text.format` here"
    )


async def test_the_tokens_of_an_input_are_counted_without_generating() -> None:
    gateway = ScriptedGateway()
    async with client_of(gateway) as client:
        response = await client.post(
            f"{RESPONSES}/input_tokens", json={"model": MODEL, "input": "hello"}
        )
    assert response.json() == {"object": "response.input_tokens", "input_tokens": PROMPT_TOKENS}


async def test_an_explanation_is_added_on_request() -> None:
    got = await whole(ScriptedGateway(), holdfast={"explain": True})
    assert got["holdfast"]["prompt_tokens"] == PROMPT_TOKENS
    streamed = await asked(ScriptedGateway(), stream=True, holdfast={"explain": True})
    assert data_of(streamed)[-1]["response"]["holdfast"]["prompt_tokens"] == PROMPT_TOKENS
