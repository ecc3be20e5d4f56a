from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from holdfast.front.server.dialect import ENDLESS_MARK
from tests.fakes.http_clients import CHAT, COMPLETIONS, HELLO, client_of
from tests.fakes.scripted_gateway import MODEL, ScriptedDirectory, ScriptedGateway, model_status

_made: list[Any] = []  # by the first test: a tenth of a second


async def description() -> Any:
    if not _made:
        async with client_of(ScriptedGateway()) as client:
            _made.append((await client.get("/openapi.json")).json())
    return _made[0]


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(value) for value in node.values()))
    return set().union(*(references(value) for value in node)) if isinstance(node, list) else set()


async def test_every_path_is_described() -> None:
    assert set((await description())["paths"]) == {
        CHAT,
        f"{CHAT}/control",
        COMPLETIONS,
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/rerank",
        "/v2/rerank",
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/v1/models",
        "/v1/models/{model_id}",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/responses/compact",
        *(f"/v1/responses/{{response_id}}{rest}" for rest in ("", "/cancel", "/input_items")),
        "/v1/conversations",
        *(
            f"/v1/conversations/{{conversation_id}}{rest}"
            for rest in ("", "/items", "/items/{item_id}")
        ),
        "/v1/sessions",
        "/v1/sessions/import",
        "/v1/sessions/{session_id}",
        "/v1/sessions/{session_id}/export",
        "/v1/sessions/{session_id}/fork",
        "/",
        "/health",
        "/metrics",
        *("/admin/models/events", "/admin/requests", "/admin/requests/{id}", "/admin/store"),
        *("/admin/performance", "/admin/logs", "/admin/logs/events", "/admin/models"),
        *("/admin/activity", "/admin/cache", "/admin/caller", "/admin/clients", "/admin/misses"),
        *(f"/admin/models/{{id}}{rest}" for rest in ("", "/load", "/unload", "/pin")),
        *(
            "/api/chat",
            "/api/generate",
            "/api/tags",
            "/api/show",
            "/api/ps",
            "/api/version",
            "/api/embed",
        ),
        *(
            "/api/embeddings",
            "/api/pull",
            "/api/push",
            "/api/create",
            "/api/copy",
            "/api/delete",
            "/api/blobs/{digest}",
        ),
    }


@pytest.mark.parametrize("state", ["ready", "loading"])
@pytest.mark.parametrize("accept", ["*/*", "text/html"])
async def test_every_get_response_matches_its_description(accept: str, state: str) -> None:
    paths = (await description())["paths"]
    directory = ScriptedDirectory(models=(model_status(state=state),))
    async with client_of(ScriptedGateway(), directory=directory) as client:
        item = {"type": "message", "role": "user", "content": "hello", "id": "msg_1"}
        ids = {
            kind: (await client.post(f"/v1/{kind}s", json={name: [item]})).json()["id"]
            for kind, name in (("response", "input"), ("conversation", "items"))
        }
        for path, methods in paths.items():
            if "get" in methods and ENDLESS_MARK not in methods["get"]:
                filled = path.format(
                    response_id=ids["response"],
                    conversation_id=ids["conversation"],
                    item_id="msg_1",
                    session_id="s",
                    model_id=MODEL,
                )
                response = await client.get(filled, headers={"accept": accept})
                described = methods["get"]["responses"][str(response.status_code)]["content"]
                assert response.headers["content-type"].partition(";")[0] in described, path


STREAMS: dict[str, tuple[dict[str, Any], str]] = {
    CHAT: ({"messages": HELLO}, "text/event-stream"),
    COMPLETIONS: ({"prompt": "hello"}, "text/event-stream"),
    "/v1/responses": ({"input": "hello"}, "text/event-stream"),
    "/v1/messages": ({"messages": HELLO, "max_tokens": 9}, "text/event-stream"),
    "/api/chat": ({"messages": HELLO}, "application/x-ndjson"),
    "/api/generate": ({"prompt": "hello"}, "application/x-ndjson"),
}


async def test_all_streams_are_described() -> None:
    found = await description()
    described = {
        path
        for path, methods in found["paths"].items()
        for operation in methods.values()
        for answer in operation["responses"].values()
        for kind in answer.get("content", {})
        if kind in ("text/event-stream", "application/x-ndjson")
    }
    others = {"/v1/responses/{response_id}", "/api/pull"}
    assert described == {*STREAMS, *others, "/admin/models/events", "/admin/logs/events"}


def events_of(text: str) -> list[dict[str, str]]:
    """Server-sent events, as validators read them."""
    return [
        dict(line.split(": ", 1) for line in event.split("\n"))
        for event in text.split("\n\n")
        if event and not event.startswith(":")
    ]


@pytest.mark.parametrize("path", STREAMS)
async def test_every_event_of_a_stream_matches_its_description(path: str) -> None:
    found = await description()
    body, kind = STREAMS[path]
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(path, json={"model": MODEL, "stream": True, **body})
    schema = found["paths"][path]["post"]["responses"]["200"]["content"][kind]["schema"]
    if kind == "text/event-stream":
        events = events_of(response.text)
        for event in events:
            jsonschema.validate(event, schema)
        texts = [event["data"] for event in events if event["data"] != "[DONE]"]
        schema = schema["properties"]["data"]
    else:
        jsonschema.validate(response.text, schema)
        texts = response.text.splitlines()
    assert len(texts) > 1
    for text in texts:
        content = {**schema["contentSchema"], "components": found["components"]}
        jsonschema.validate(json.loads(text), content)


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("stream", [True, False])
async def test_every_response_to_a_post_matches_its_description(path: str, stream: bool) -> None:
    operation = (await description())["paths"][path]["post"]
    body, kind = STREAMS[path]
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(path, json={"model": MODEL, "stream": stream, **body})
    said = response.headers["content-type"].partition(";")[0]
    assert (response.status_code, said) == (200, kind if stream else "application/json")
    assert said in operation["responses"]["200"]["content"]


@pytest.mark.parametrize(
    ("method", "path"),
    [("post", CHAT), ("post", COMPLETIONS), ("patch", "/v1/sessions/{session_id}")],
)
async def test_bodies_described_as_required_are_required(method: str, path: str) -> None:
    assert (await description())["paths"][path][method]["requestBody"]["required"] is True
    async with client_of(ScriptedGateway()) as client:
        response = await client.request(method, path.replace("{session_id}", "s"))
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/sessions/{session_id}/fork"])
async def test_optional_bodies_are_optional(path: str) -> None:
    assert (await description())["paths"][path]["post"]["requestBody"]["required"] is False
    async with client_of(ScriptedGateway()) as client:
        assert (await client.post(path.replace("{session_id}", "s"))).status_code == 200


async def test_the_form_of_a_sessions_id_is_described() -> None:
    found = await description()
    schema = json.dumps(found["components"]["schemas"]["SessionOpening"]["properties"]["id"])
    (query,) = [
        each
        for each in found["paths"]["/v1/sessions/import"]["post"]["parameters"]
        if each["name"] == "id"
    ]
    for text in (schema, json.dumps(query)):
        assert '"maxLength": 256' in text
        assert '"minLength": 1' in text


async def test_all_ways_to_send_the_key_are_described() -> None:
    schemes = (await description())["components"]["securitySchemes"]
    assert set(schemes) == {"key", "x-api-key", "api-key"}


async def test_every_reference_resolves() -> None:
    found = await description()
    names = {f"#/components/schemas/{name}" for name in found["components"]["schemas"]}
    assert references(found) <= names


async def test_request_fields_have_descriptions_and_bounds() -> None:
    found = await description()
    reference = found["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]["$ref"]
    schema = found["components"]["schemas"][reference.rsplit("/", 1)[1]]
    assert schema["required"] == ["messages"]
    assert schema["properties"]["temperature"]["anyOf"][0]["maximum"] == 2
    assert all(
        "description" in field or "$ref" in json.dumps(field)
        for field in schema["properties"].values()
    )


async def test_internal_union_tags_are_hidden() -> None:
    assert "|" not in json.dumps(
        (await description())["components"]["schemas"]["ChatCompletionRequest"]
    )
