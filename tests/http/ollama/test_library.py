from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes.http_clients import client_of
from tests.fakes.ollama_bodies import asked, lines_of
from tests.fakes.scripted_gateway import MODEL, ScriptedGateway

PULL = "/api/pull"


@pytest.mark.parametrize("fields", [{}, {"model": None, "name": MODEL}, {"model": f"{MODEL}:latest", "insecure": True}])
async def test_a_served_model_is_there_when_it_is_pulled(fields: dict[str, Any]) -> None:
    streamed = lines_of(await asked(ScriptedGateway(), PULL, **fields))
    whole = await asked(ScriptedGateway(), PULL, stream=False, **fields)
    assert [line["status"] for line in streamed] == ["pulling manifest", "success"]
    assert whole.json() == {"status": "success"}


@pytest.mark.parametrize("name", ["llama3", ""])
async def test_another_one_cannot_be_had_and_it_is_said_why(name: str) -> None:
    response = await asked(ScriptedGateway(), PULL, model=name)
    assert response.status_code == 400
    assert ("cannot pull another one yet" if name else "`model` is required") in response.json()["error"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("POST", "/api/push"),
        ("DELETE", "/api/delete"),
        ("POST", "/api/blobs/sha256:00"),
    ],
)
async def test_what_a_server_has_is_not_changed_over_http(method: str, path: str) -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.request(method, path, content=json.dumps({"model": MODEL}))
    assert response.status_code == 400
    assert "is not supported" in response.json()["error"]
