from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.config import ServerSettings
from holdfast.front.ollama.generation import ollama_error
from holdfast.front.server.problem import Problem
from tests.fakes.http_clients import client_of
from tests.fakes.scripted_gateway import ScriptedGateway


async def answer(method: str, path: str, **sent: Any) -> Any:
    async with client_of(
        ScriptedGateway(), server=ServerSettings(**sent.pop("settings", {}))
    ) as client:
        return await client.request(method, path, **sent)


@pytest.mark.parametrize(
    ("message", "shown"), [("no", "`stop`: no"), ("`stop` is odd", "`stop` is odd")]
)
def test_an_error_is_a_sentence_with_the_field(message: str, shown: str) -> None:
    error = ollama_error(Problem(status=404, code="odd", message=message, field="stop"))
    assert msgspec.json.decode(msgspec.json.encode(error)) == {
        "error": shown,
        "advice": "fix_request",
    }


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/api/chat", 400),
        ("GET", "/api/chat", 405),
        ("POST", "/api/tags", 405),
        ("GET", "/api/nothing", 404),
        ("POST", "/v1/api/chat", 400),
    ],
)
async def test_every_error_on_its_paths_has_its_form(method: str, path: str, status: int) -> None:
    response = await answer(method, path, content=b"[1]" if method == "POST" else None)
    assert (response.status_code, list(response.json())) == (status, ["error", "advice"])


async def test_the_key_is_required_as_everywhere() -> None:
    locked = await answer("GET", "/api/tags", settings={"api_key": "sesame"})
    opened = await answer(
        "GET",
        "/api/tags",
        settings={"api_key": "sesame"},
        headers={"authorization": "Bearer sesame"},
    )
    assert (locked.status_code, opened.status_code) == (401, 200)
    assert locked.json()["error"].startswith("Incorrect API key provided")
