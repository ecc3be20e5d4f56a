from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.http_clients import client_of
from tests.fakes.scripted_gateway import MODEL, PROMPT_TOKENS, ScriptedGateway, calling

RESPONSES = "/v1/responses"


async def whole(gateway: ScriptedGateway, **fields: Any) -> Any:
    async with client_of(gateway) as client:
        response = await client.post(RESPONSES, json={"input": "hello", **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_text_is_answered_with_a_response_object() -> None:
    got = await whole(ScriptedGateway())
    assert (got["object"], got["status"], got["model"]) == ("response", "completed", MODEL)
    assert [item["content"][0]["text"] for item in got["output"]] == ["Hello"]
    assert got["usage"]["input_tokens"] == PROMPT_TOKENS


async def test_thought_text_and_calls_are_items_of_the_output() -> None:
    gateway = ScriptedGateway(script=calling(("f", '{"x": 1}'), thought="hm", said="Hi"))
    got = await whole(gateway, tools=[{"type": "function", "name": "f"}])
    assert [item["type"] for item in got["output"]] == ["reasoning", "message", "function_call"]
    assert got["output"][2]["arguments"] == '{"x": 1}'


@pytest.mark.parametrize("fields", [{"input": None}, {"input": []}])
async def test_a_request_without_input_is_refused(fields: dict[str, Any]) -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(RESPONSES, json=fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input")
