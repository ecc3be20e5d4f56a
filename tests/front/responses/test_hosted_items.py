"""Conversations that began on OpenAI's service can continue here, with every type of item in its
SDK.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.responses.response_input_item_param import ResponseInputItemParam

from holdfast.front.request import ChatPrompt, GenerationRequest
from tests.fakes.http_clients import client_of
from tests.fakes.scripted_gateway import MODEL, ScriptedGateway, answer

USER = {"type": "message", "role": "user", "content": "Fix the test."}
CALL = {"type": "function_call", "call_id": "f1", "name": "read", "arguments": '{"path": "a"}'}
RESULT = {"type": "function_call_output", "call_id": "f1", "output": "text"}
LATER = {"type": "function", "name": "found", "parameters": {"type": "object", "properties": {}}}
SHOT = "data:image/png;base64,iVBORw0KGgo="
ITEMS: list[list[dict[str, Any]]] = [
    [USER],
    [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]}],
    [CALL, RESULT],
    [
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
    ],
    [{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}],
    [
        {
            "type": "web_search_call",
            "id": "ws_1",
            "status": "completed",
            "action": {"type": "search", "query": "pytest", "sources": []},
        }
    ],
    [
        {
            "type": "file_search_call",
            "id": "fs_1",
            "status": "completed",
            "queries": ["q"],
            "results": [{"file_id": "file_1", "text": "t", "score": 0.5}],
        }
    ],
    [
        {
            "type": "code_interpreter_call",
            "id": "ci_1",
            "status": "completed",
            "code": "1 + 1",
            "container_id": "cntr_1",
            "outputs": [{"type": "logs", "logs": "2"}],
        }
    ],
    [{"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "aGk="}],
    [
        {
            "type": "local_shell_call",
            "id": "lsh_1",
            "call_id": "shell1",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls", "-la"], "env": {}},
        },
        {"type": "local_shell_call_output", "id": "shell1", "output": "a.py"},
    ],
    [
        {
            "type": "shell_call",
            "call_id": "sh1",
            "status": "completed",
            "action": {"commands": ["ls"], "timeout_ms": 1000},
        },
        {
            "type": "shell_call_output",
            "call_id": "sh1",
            "output": [
                {"stdout": "a.py", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
                {"stdout": "", "stderr": "no", "outcome": {"type": "exit", "exit_code": 2}},
            ],
        },
    ],
    [
        {
            "type": "apply_patch_call",
            "call_id": "ap1",
            "status": "completed",
            "operation": {"type": "update_file", "path": "a.py", "diff": "@@"},
        },
        {"type": "apply_patch_call_output", "call_id": "ap1", "status": "failed"},
    ],
    [
        {
            "type": "computer_call",
            "id": "cu_1",
            "call_id": "comp1",
            "status": "completed",
            "pending_safety_checks": [],
            "action": {"type": "screenshot"},
        },
        {
            "type": "computer_call_output",
            "call_id": "comp1",
            "output": {"type": "computer_screenshot", "image_url": SHOT},
        },
    ],
    [{"type": "tool_search_call", "id": "ts_1", "execution": "client", "arguments": {"q": "x"}}],
    [{"type": "tool_search_output", "call_id": "ts_1", "tools": [LATER]}],
    [{"type": "additional_tools", "role": "developer", "tools": [{**LATER, "name": "more"}]}],
    [{"type": "configuration_update", "reasoning": {"effort": "low"}}],
    [{"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "s", "tools": []}],
    [
        {
            "type": "mcp_approval_request",
            "id": "mcpr_1",
            "server_label": "s",
            "name": "f",
            "arguments": "{}",
        }
    ],
    [{"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}],
    [
        {
            "type": "mcp_call",
            "id": "mcp_1",
            "server_label": "s",
            "name": "f",
            "arguments": "{}",
            "output": "x",
        }
    ],
    [{"type": "program", "id": "pg_1", "call_id": "pg", "code": "1", "fingerprint": "x"}],
    [
        {
            "type": "program_output",
            "id": "po_1",
            "call_id": "pg",
            "result": "1",
            "status": "completed",
        }
    ],
]
HISTORY = [item for group in ITEMS for item in group]
# accepted elsewhere, because they name or replace other items
ELSEWHERE = {"item_reference", "compaction", "compaction_trigger"}


def types_of_the_sdk() -> Iterator[str]:
    for member in typing.get_args(ResponseInputItemParam):
        kind = typing.get_type_hints(member).get("type")
        yield next(
            each
            for each in (typing.get_args(kind) or ("message",))
            for each in (typing.get_args(each) or (each,))
            if isinstance(each, str)
        )


async def asked(*items: dict[str, Any], **fields: Any) -> GenerationRequest:
    gateway = ScriptedGateway(script=answer("x"))
    async with client_of(gateway) as client:
        body = {"model": MODEL, "input": list(items), "store": False, **fields}
        response = await client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    return gateway.request


async def messages(*items: dict[str, Any]) -> list[dict[str, Any]]:
    prompt = (await asked(*items)).prompt
    assert isinstance(prompt, ChatPrompt)
    return list(prompt.messages)


def test_the_table_has_every_item_type_of_the_sdk() -> None:
    assert set(types_of_the_sdk()) - ELSEWHERE <= {item["type"] for item in HISTORY}


@pytest.mark.parametrize("group", ITEMS, ids=lambda group: group[0]["type"])
async def test_every_item_is_accepted_between_others(group: list[dict[str, Any]]) -> None:
    first, *between, last = await messages(USER, *group, USER)
    assert first["content"] == last["content"] == "Fix the test."
    for message in between:
        assert message["role"] in ("user", "assistant", "tool")


async def test_a_conversation_with_all_items_continues_with_matching_results() -> None:
    calls: list[str] = []
    for message in await messages(*HISTORY):
        calls += [call["id"] for call in message.get("tool_calls", ())]
        if message["role"] == "tool":
            assert message["tool_call_id"] in calls
    assert calls == ["f1", "c1", "shell1", "sh1", "ap1", "comp1"]


async def test_calls_run_by_the_client_become_function_calls() -> None:
    shell, patch = ITEMS[9], ITEMS[11]
    called, result = await messages(*shell)
    assert called["tool_calls"][0]["function"] == {
        "name": "local_shell",
        "arguments": {"type": "exec", "command": ["ls", "-la"], "env": {}},
    }
    assert (result["tool_call_id"], result["content"]) == ("shell1", "a.py")
    _, failed = await messages(*patch)
    assert failed["content"] == "failed"
    _, ran = await messages(*ITEMS[10])
    assert ran["content"] == 'a.py\nno\n{"type": "exit", "exit_code": 2}'


async def test_codex_sends_its_shell_results_as_function_results() -> None:
    call, _ = ITEMS[9]
    result = {"type": "function_call_output", "call_id": "shell1", "output": "a.py"}
    assert [message["role"] for message in await messages(call, result)] == ["assistant", "tool"]


async def test_calls_and_results_without_each_other_are_left_out() -> None:
    for group in (ITEMS[9], ITEMS[10], ITEMS[11], ITEMS[12]):
        for alone in group:
            assert [each["role"] for each in await messages(USER, alone, USER)] == ["user", "user"]


@pytest.mark.parametrize(
    "value", [None, 7, "x", [], [7, None, {"stdout": 7}], {}, {"image_url": 7}]
)
@pytest.mark.parametrize("group", ITEMS[9:13], ids=lambda group: group[0]["type"])
async def test_odd_values_in_items_cause_no_server_error(
    group: list[dict[str, Any]], value: Any
) -> None:
    async with client_of(ScriptedGateway(script=answer("x"))) as client:
        for key in ("call_id", "id", "action", "operation", "output", "status"):
            odd = [{**item, key: value} for item in group]
            response = await client.post(
                "/v1/responses", json={"model": MODEL, "input": [USER, *odd], "store": False}
            )
            assert response.status_code in (200, 400), response.text


async def test_tools_in_items_are_callable_from_then_on() -> None:
    prompt = (await asked(*HISTORY, tools=[{**LATER, "description": "first"}])).prompt
    assert isinstance(prompt, ChatPrompt)
    functions = [tool["function"] for tool in prompt.tools]
    assert [(each["name"], each.get("description")) for each in functions] == [
        ("found", "first"),
        ("more", None),
    ]
    bad = {"type": "additional_tools", "role": "developer", "tools": [{"type": "function"}]}
    async with client_of(ScriptedGateway()) as client:
        response = await client.post("/v1/responses", json={"input": [USER, bad], "store": False})
    assert (response.status_code, response.json()["error"]["param"]) == (
        400,
        "input.1.tools.0.name",
    )


async def test_a_configuration_update_applies_until_the_next_one() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    form = {"type": "configuration_update", "text": {"format": schema}}
    low = {"type": "configuration_update", "reasoning": {"effort": "low"}}
    high = {"type": "configuration_update", "reasoning": {"effort": "high"}}
    request = await asked(low, USER, high, form, USER, reasoning={"effort": "none"})
    assert request.thinking.effort == "high"
    assert request.output_format is not None
    assert (request.output_format.kind, request.output_format.schema) == (
        "json_schema",
        {"type": "object"},
    )
    plain = {"type": "configuration_update", "text": {"format": {"type": "text"}}}
    assert (await asked(form, plain, USER)).output_format is None
    for wrong, field in (
        ({"reasoning": {"effort": "odd"}}, "input.1.reasoning.effort"),
        ({"text": {"format": {"type": "odd"}}}, "input.1.text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "input.1.text.format.schema"),
    ):
        async with client_of(ScriptedGateway()) as client:
            update = {"type": "configuration_update", **wrong}
            response = await client.post(
                "/v1/responses", json={"input": [USER, update], "store": False}
            )
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)


async def test_items_are_stored_unchanged_in_conversations() -> None:
    async with client_of(ScriptedGateway(script=answer("x"))) as client:
        opened = (await client.post("/v1/conversations", json={"items": HISTORY[:15]})).json()
        path = f"/v1/conversations/{opened['id']}/items"
        assert (await client.post(path, json={"items": HISTORY[15:]})).status_code == 200
        kept = (await client.get(path, params={"order": "asc", "limit": 100})).json()["data"]
        assert [item["type"] for item in kept] == [item["type"] for item in HISTORY]
        for item, sent in zip(kept, HISTORY, strict=True):
            if sent["type"] != "message":
                assert {**sent, **item} == item, json.dumps(item)
        body = {"model": MODEL, "input": "go on", "conversation": opened["id"]}
        assert (await client.post("/v1/responses", json=body)).status_code == 200
