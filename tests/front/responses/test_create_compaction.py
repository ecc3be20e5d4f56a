from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from openai.types.responses import ResponseCompactionItem

from holdfast.front.request import ChatPrompt, GenerationRequest
from tests.fakes.http_clients import client_of
from tests.fakes.scripted_gateway import MODEL, Script, ScriptedGateway, answer, calling

RESPONSES = "/v1/responses"
COMPACT = f"{RESPONSES}/compact"
SUMMARY = "Ferry plan: the 9:40 from Oban, two bicycles."
TRIGGER = {"type": "compaction_trigger"}
TOOL = {"type": "function", "name": "ferries"}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Which ferry takes bicycles?"},
    {"type": "function_call", "name": "ferries", "call_id": "c1", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "9:40 Oban"},
    {"role": "assistant", "content": "The 9:40 from Oban."},
]


def said_by_model(request: GenerationRequest) -> Script:
    assert isinstance(request.prompt, ChatPrompt)
    last = str(request.prompt.messages[-1]["content"])
    return calling(thought="hm", said=SUMMARY) if "summary only" in last else answer("Hello")


@pytest.fixture
def gateway() -> ScriptedGateway:
    return ScriptedGateway(script=said_by_model)


@pytest.fixture
async def client(gateway: ScriptedGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(gateway) as client:
        yield client


async def post(client: httpx.AsyncClient, path: str, *items: Any, **fields: Any) -> httpx.Response:
    return await client.post(path, json={"model": MODEL, "input": [*items], **fields})


async def compacted(client: httpx.AsyncClient, *items: Any, **fields: Any) -> Any:
    response = await post(client, COMPACT, *items, **fields)
    assert response.status_code == 200, response.text
    ResponseCompactionItem.model_validate(response.json()["output"][-1])
    return response.json()


def messages_of(gateway: ScriptedGateway) -> list[tuple[str, Any]]:
    prompt = gateway.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return [(message["role"], message["content"]) for message in prompt.messages]


async def test_a_conversation_becomes_user_messages_and_one_sealed_item(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    got = await compacted(client, *HISTORY, instructions="Be brief.", tools=[TOOL])
    assert (got["object"], [item["type"] for item in got["output"]]) == (
        "response.compaction",
        ["message", "compaction"],
    )
    assert got["output"][0]["content"][0]["text"] == HISTORY[0]["content"]
    assert SUMMARY not in json.dumps(got)
    asked = gateway.request
    assert isinstance(asked.prompt, ChatPrompt)
    assert [tool["function"]["name"] for tool in asked.prompt.tools] == ["ferries"]
    assert (asked.tool_choice.mode, asked.max_tokens) == ("none", 3072)
    assert [role for role, _ in messages_of(gateway)] == [
        *("system", "user", "assistant", "tool", "assistant", "user")
    ]


async def test_the_summary_replaces_the_item_in_later_prompts(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    got = await compacted(client, *HISTORY)
    item = got["output"][-1]
    question = {"role": "user", "content": "When does it leave?"}
    for sent in ([*got["output"], question], [*HISTORY, item, question]):
        assert (await post(client, RESPONSES, *sent, store=False)).status_code == 200
        first, summary, last = messages_of(gateway)
        assert SUMMARY in summary[1]
        assert (summary[0], last[1]) == ("user", question["content"])
        assert "Which ferry" in str(first[1])


async def test_a_trigger_makes_the_stream_return_only_the_item(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    response = await post(client, RESPONSES, *HISTORY, TRIGGER, stream=True)
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "output_item.done", "completed")
    ]
    added, done = events[2]["item"], events[3]["item"]
    assert (added["type"], added["id"]) == ("compaction", done["id"])
    assert events[-1]["response"]["output"] == [done]
    assert SUMMARY not in response.text
    answered = events[-1]["response"]["id"]
    question = {"role": "user", "content": "When?"}
    await post(client, RESPONSES, question, previous_response_id=answered)
    roles = [role for role, _ in messages_of(gateway)]
    assert roles == ["user", "user", "user"]
    assert SUMMARY in messages_of(gateway)[1][1]


@pytest.mark.parametrize("damage", ["another tenant", "another salt", "damaged", "a thought"])
async def test_an_unopenable_item_is_a_400_with_its_field(
    client: httpx.AsyncClient, gateway: ScriptedGateway, damage: str
) -> None:
    item = (await compacted(client, *HISTORY))["output"][-1]
    headers = {"x-holdfast-tenant": "bob"} if damage == "another tenant" else {}
    salt = {"cache_salt": "s"} if damage == "another salt" else {}
    if damage == "damaged":
        item["encrypted_content"] = item["encrypted_content"][:-8] + "AAAAAAA="
    if damage == "a thought":
        gateway.script = calling(thought="hm", said="Hi")
        include = ["reasoning.encrypted_content"]
        thought = (await post(client, RESPONSES, *HISTORY, include=include)).json()["output"][0]
        item["encrypted_content"] = thought["encrypted_content"]
    body = {"input": [HISTORY[0], item, HISTORY[0]], **salt}
    refused = await client.post(RESPONSES, json=body, headers=headers)
    error = refused.json()["error"]
    field = "input.1.encrypted_content"
    assert (refused.status_code, error["code"], error["param"]) == (
        400,
        "invalid_compaction",
        field,
    )


@pytest.mark.parametrize("stream", [True, False])
async def test_an_empty_summary_replaces_nothing(stream: bool) -> None:
    async with client_of(ScriptedGateway(script=answer(" "))) as client:
        response = await post(client, RESPONSES, *HISTORY, TRIGGER, stream=stream)
        assert '"compaction"' not in response.text.partition("response.failed")[2]
        assert "wrote no summary" in response.text
        assert (await post(client, COMPACT, *HISTORY)).status_code == 422


@pytest.mark.parametrize(
    ("path", "items", "fields", "param"),
    [
        (RESPONSES, [TRIGGER, HISTORY[0]], {}, "input.0.type"),
        (RESPONSES, [TRIGGER], {}, "input"),
        (COMPACT, [], {}, "input"),
        (COMPACT, HISTORY, {"model": None}, "model"),
        (COMPACT, HISTORY, {"stream": True}, "stream"),
        (COMPACT, HISTORY, {"background": True}, "background"),
        (COMPACT, HISTORY, {"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
async def test_an_impossible_compaction_is_a_400_with_the_field(
    client: httpx.AsyncClient, path: str, items: list[Any], fields: dict[str, Any], param: str
) -> None:
    refused = await post(client, path, *items, **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
