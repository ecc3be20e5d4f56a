"""Odd tool names, unknown tool types and odd call ids: one table for all protocols."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from holdfast.config import LimitsSettings
from holdfast.front.prompt.prepare import prepare
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.front.request import ChatPrompt, GenerationRequest
from tests.fakes.family_bundles import OF_EACH_HABIT, bundle, bundle_of
from tests.fakes.http_clients import client_of
from tests.fakes.ollama_bodies import directory_of
from tests.fakes.scripted_client import model_info
from tests.fakes.scripted_gateway import MODEL, ScriptedGateway, calling

CHAT, RESPONSES, MESSAGES, OLLAMA = PATHS = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
)
LONG = "mcp__files__" + "read_" * 40
ODD_IDS = ["c 1", "ü:#/?&=%", "a\nb\tc", "<|im_end|>", "'\"\\{}", "functions.f:0", "7" * 500]


def parameters(key: str) -> dict[str, Any]:
    return {"type": "object", "properties": {key: {"type": "string"}}}


def body(
    path: str, *, name: str = "f", call_id: str = "c1", key: str = "x", **tool: Any
) -> dict[str, Any]:
    """A question, a call with its result, and the tool. tool: changes to its definition."""
    call = {"name": name, "arguments": json.dumps({key: "1"})}
    asked = {"role": "user", "content": "q"}
    if path == RESPONSES:
        items = [
            {"type": "message", **asked},
            {"type": "function_call", "call_id": call_id, **call},
            {"type": "function_call_output", "call_id": call_id, "output": "r"},
        ]
        given = {"type": "function", "name": name, "parameters": parameters(key), **tool}
        off = {"reasoning": {"effort": "none"}}  # as in Messages, where thinking is off by default
        return {"input": items, "tools": [given], "store": False, **off}
    if path == MESSAGES:
        use = {"type": "tool_use", "id": call_id, "name": name, "input": {key: "1"}}
        result = {"type": "tool_result", "tool_use_id": call_id, "content": "r"}
        turns = [
            asked,
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        # tools of Anthropic lack a schema
        given = {"name": name, **(tool or {"input_schema": parameters(key)})}
        return {"messages": turns, "tools": [given], "max_tokens": 9}
    function: dict[str, Any] = call if path == CHAT else {"name": name, "arguments": {key: "1"}}
    calls = [{"id": call_id, "type": "function", "function": function}]
    turns = [
        asked,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": call_id, "tool_name": name, "content": "r"},
    ]
    given = {"type": "function", "function": {"name": name, "parameters": parameters(key)}, **tool}
    off = {"enable_thinking": False} if path == CHAT else {"think": False}
    return {"messages": turns, "tools": [given], "stream": False, **off}


async def asked(gateway: ScriptedGateway, path: str, **fields: Any) -> httpx.Response:
    async with client_of(gateway, directory=directory_of()) as client:
        return await client.post(path, json={"model": MODEL, **body(path, **fields)})


async def request_of(path: str, **fields: Any) -> GenerationRequest:
    gateway = ScriptedGateway()
    response = await asked(gateway, path, **fields)
    assert response.status_code == 200, response.text
    return gateway.request


def read(request: GenerationRequest, model: TokenizerBundle) -> tuple[int, ...]:
    prepared = prepare(
        request, model, info=model_info(context_tokens=100_000), limits=LimitsSettings()
    )
    return tuple(prepared.sequences[0].prompt_token_ids)


def calls_in(path: str, answer: Any) -> list[str]:
    """The names of an answer's calls."""
    if path == RESPONSES:
        return [item["name"] for item in answer["output"] if item["type"] == "function_call"]
    if path == MESSAGES:
        return [block["name"] for block in answer["content"] if block["type"] == "tool_use"]
    message = answer["choices"][0]["message"] if path == CHAT else answer["message"]
    return [call["function"]["name"] for call in message["tool_calls"]]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["a" * 65, LONG, "n" * 256, "wetter_für", "ns.f/x:y-z"])
async def test_a_long_tool_name_reaches_the_model_and_returns_unchanged(
    name: str, path: str
) -> None:
    gateway = ScriptedGateway(script=calling((name, '{"x": "1"}')))
    response = await asked(gateway, path, name=name)
    assert response.status_code == 200, response.text
    prompt = gateway.request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert [tool["function"]["name"] for tool in prompt.tools] == [name]
    assert calls_in(path, response.json()) == [name]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["", "n" * 257, "a b", "<f>", 'a"b', "a\nb"])
async def test_invalid_names_are_refused_by_field(name: str, path: str) -> None:
    gateway = ScriptedGateway()
    response = await asked(gateway, path, name=name)
    field = "tools.0.name" if path in (RESPONSES, MESSAGES) else "tools.0.function.name"
    assert (response.status_code, gateway.requests) == (400, [])
    assert f"`{field}`" in response.text


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["web_search_20250305", "code_interpreter", "odd"])
async def test_tools_of_unknown_types_are_skipped_or_refused_by_name(kind: str, path: str) -> None:
    """Agents of Anthropic and OpenAI send their own service's tools with every request."""
    gateway = ScriptedGateway()
    response = await asked(gateway, path, type=kind)
    if path in (RESPONSES, MESSAGES):
        assert response.status_code == 200, response.text
        assert isinstance(gateway.request.prompt, ChatPrompt)
        assert gateway.request.prompt.tools == ()
    else:
        assert (response.status_code, "`tools.0.type`" in response.text) == (400, True)


@pytest.mark.parametrize("call_id", ODD_IDS, ids=range(len(ODD_IDS)))
async def test_odd_ids_are_read_equally_by_families_and_protocols(call_id: str) -> None:
    asked_by = {path: await request_of(path, call_id=call_id) for path in PATHS}
    for request in asked_by.values():
        assert isinstance(request.prompt, ChatPrompt)
        _, called, result = request.prompt.messages
        assert called["tool_calls"][0]["id"] == result["tool_call_id"] == call_id
    for name in OF_EACH_HABIT:
        model = bundle_of(name)
        prompts = {path: read(request, model) for path, request in asked_by.items()}
        assert prompts == dict.fromkeys(PATHS, prompts[CHAT]), name


@pytest.mark.parametrize("path", PATHS)
async def test_two_clients_with_equal_names_and_ids_do_not_mix(path: str) -> None:
    first, second = await asyncio.gather(
        request_of(path, name="f", key="city"), request_of(path, name="f", key="zone")
    )
    for name in OF_EACH_HABIT:
        shared = bundle(name)
        for request in (first, second, first):
            assert read(request, shared) == read(request, bundle(name))


@pytest.mark.parametrize("path", PATHS)
async def test_the_answers_of_two_clients_name_their_own_tools(path: str) -> None:
    gateways = [ScriptedGateway(script=calling((name, "{}"))) for name in ("a" * 70, "b" * 70)]
    answers = await asyncio.gather(
        *(
            asked(gateway, path, name=name * 70)
            for gateway, name in zip(gateways, "ab", strict=True)
        )
    )
    assert [calls_in(path, each.json()) for each in answers] == [["a" * 70], ["b" * 70]]
