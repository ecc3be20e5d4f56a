"""Tools found by a search are defined where they were found, so that the prefix stays cached."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from holdfast.config import LimitsSettings
from holdfast.front.application import create_application
from holdfast.front.output import tool_calls_of
from holdfast.front.prompt.prepare import Prepared, prepare
from holdfast.front.request import GenerationRequest
from holdfast.front.toolcalls.call_format import Call
from tests.fakes.agent_turns import answer
from tests.fakes.family_bundles import bundle_of
from tests.fakes.family_templates import FAMILY_TEMPLATES
from tests.fakes.http_clients import MESSAGES
from tests.fakes.scripted_client import model_info
from tests.fakes.scripted_gateway import MODEL, ScriptedGateway, scripted_services

FOUND = [f"mcp__harbour__tool_{number}" for number in range(4)]


def tool(name: str, *, deferred: bool) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": f"Of {name}."},
            "count": {"type": "integer"},
        },
        "required": ["path"],
    }
    more = {"defer_loading": True} if deferred else {}
    return {"name": name, "description": f"Does what {name} does.", "input_schema": schema, **more}


TOOLS = [tool("ToolSearch", deferred=False), *(tool(name, deferred=True) for name in FOUND)]


def turn(number: int) -> list[dict[str, Any]]:
    """A search that finds a tool, a call of that tool, and the result."""
    search, call, name = f"search_{number}", f"call_{number}", FOUND[number]
    return [
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": search, "name": "ToolSearch", "input": {"path": name}}
            ],
        },
        {
            "role": "user",
            "content": [result(search, [{"type": "tool_reference", "tool_name": name}])],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": call, "name": name, "input": {"path": "a", "count": 1}}
            ],
        },
        {"role": "user", "content": [result(call, "done")]},
    ]


def result(call_id: str, content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content}


def conversations() -> list[list[dict[str, Any]]]:
    """All conversations of these searches that wait for an answer; each continues the one before."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello the world"}]
    found = [messages]
    for number in range(len(FOUND)):
        first, second, third, fourth = turn(number)
        messages = [*messages, first, second]
        found.append(messages)
        messages = [*messages, third, fourth]
        found.append(messages)
    return found


async def requests(bodies: list[list[dict[str, Any]]], **fields: Any) -> list[GenerationRequest]:
    gateway = ScriptedGateway()
    transport = httpx.ASGITransport(
        create_application(scripted_services(gateway)), client=("127.0.0.1", 1)
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for messages in bodies:
            body = {
                "model": MODEL,
                "max_tokens": 100,
                "messages": messages,
                "tools": TOOLS,
                **fields,
            }
            response = await client.post(MESSAGES, json=body)
            assert response.status_code == 200, response.text
    return gateway.requests


def prepared(request: GenerationRequest, name: str) -> Prepared:
    return prepare(
        request, bundle_of(name), info=model_info(context_tokens=100_000), limits=LimitsSettings()
    )


async def test_found_tools_keep_the_prefix_in_every_family() -> None:
    asked = await requests(conversations())
    for name in FAMILY_TEMPLATES:
        tokenizer = bundle_of(name).tokenizer
        before: tuple[int, ...] = ()
        for request in asked:
            ready = prepared(request, name)
            ids = tuple(ready.sequences[0].prompt_token_ids)
            assert ids[: len(before)] == before, name
            tail = tokenizer.encode(ready.answer_opening or "", add_special_tokens=False)
            before = ids[: len(ids) - len(tail)]
        text = tokenizer.decode(list(ids), skip_special_tokens=False)
        assert [text.count(f"Does what {each} does.") for each in FOUND] == [1] * len(FOUND), name


async def test_a_tool_that_was_not_found_is_hidden() -> None:
    request = (await requests(conversations()[1:2]))[0]
    ids = prepared(request, "qwen3").sequences[0].prompt_token_ids
    text = bundle_of("qwen3").tokenizer.decode(list(ids), skip_special_tokens=False)
    assert [f"Does what {each} does." in text for each in FOUND] == [True] + [False] * 3


@pytest.mark.parametrize("name", sorted(FAMILY_TEMPLATES))
async def test_calls_of_found_tools_are_read_by_their_schemas(name: str) -> None:
    request = (await requests(conversations()[1:2]))[0]
    dialect = bundle_of(name).dialect
    assert dialect.calls is not None
    ready = prepared(request, name)
    said = dialect.calls.write([Call(FOUND[0], {"path": "7", "count": 7})]).removeprefix(
        "<|start|>assistant"
    )
    if dialect.reasoning is not None and ready.rules.in_reasoning:
        said = dialect.reasoning.end + said
    ids = tuple(bundle_of(name).tokenizer.encode(said, add_special_tokens=False))
    (call,) = tool_calls_of(answer(bundle_of(name), request, ready, ids))
    assert (call.name, json.loads(call.arguments)) == (FOUND[0], {"path": "7", "count": 7})


async def test_a_found_tool_can_be_chosen_and_its_schema_enforced() -> None:
    (request,) = await requests(
        [conversations()[1]], tool_choice={"type": "tool", "name": FOUND[0]}
    )
    grammar = prepared(request, "qwen3").sequences[0].grammar
    assert FOUND[0] in grammar
    assert FOUND[1] not in grammar


async def test_if_all_tools_are_deferred_found_ones_are_listed_normally() -> None:
    (request,) = await requests([conversations()[1]], tools=TOOLS[1:])
    assert [each["function"]["name"] for each in request.prompt.listed_tools] == FOUND[:1]  # type: ignore[union-attr]
