from __future__ import annotations

import json
from typing import Any

from tests.fakes.http_clients import CHAT, COMPLETIONS, client_of
from tests.fakes.scripted_gateway import ScriptedGateway


async def description() -> Any:
    async with client_of(ScriptedGateway()) as client:
        return (await client.get("/openapi.json")).json()


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(value) for value in node.values()))
    return set().union(*(references(value) for value in node)) if isinstance(node, list) else set()


async def test_every_path_is_described() -> None:
    assert set((await description())["paths"]) == {
        CHAT,
        COMPLETIONS,
        "/v1/models",
        "/v1/models/{model_id}",
        "/v1/sessions",
        "/v1/sessions/import",
        "/v1/sessions/{session_id}",
        "/v1/sessions/{session_id}/export",
        "/v1/sessions/{session_id}/fork",
        "/",
        "/health",
        "/metrics",
    }


async def test_every_reference_leads_somewhere() -> None:
    found = await description()
    names = {f"#/components/schemas/{name}" for name in found["components"]["schemas"]}
    assert references(found) <= names


async def test_the_request_says_what_its_fields_are_and_may_be() -> None:
    found = await description()
    reference = found["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = found["components"]["schemas"][reference.rsplit("/", 1)[1]]
    assert schema["required"] == ["messages"]
    assert schema["properties"]["temperature"]["anyOf"][0]["maximum"] == 2
    assert all("description" in field or "$ref" in json.dumps(field) for field in schema["properties"].values())


async def test_tags_that_are_only_for_error_messages_do_not_show() -> None:
    assert "|" not in json.dumps((await description())["components"]["schemas"]["ChatCompletionRequest"])
