from __future__ import annotations

from typing import Any

import openai
import pytest

from holdfast.config import LimitsSettings, ServerSettings
from holdfast.front.application import DIALECTS
from holdfast.front.openai.answer import openai_error
from holdfast.front.server.dialect import DialectTable
from tests.fakes.http_clients import CHAT, client_of, served
from tests.fakes.scripted_gateway import ScriptedGateway

OPENAI = ["/v1/audio/speech", "/v1/images/generations"]


async def called(path: str, **settings: Any) -> Any:
    async with client_of(ScriptedGateway(), server=ServerSettings(**settings)) as client:
        return await client.post(path, json={"model": "x"})


@pytest.mark.parametrize("path", OPENAI)
async def test_openais_clients_are_told_which_api_is_missing(path: str) -> None:
    response = await called(path)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "protocol_not_served")
    assert "OpenAI's" in response.json()["error"]["message"]


async def test_refusals_by_the_guard_have_that_form_too() -> None:
    for path, shown in (
        ("/v1/messages", lambda body: body["error"]["type"]),
        ("/api/chat", lambda body: body["error"]),
    ):
        locked = await called(path, api_key="sesame")
        async with client_of(ScriptedGateway()) as client:
            misdirected = await client.post(path, json={}, headers={"host": "evil.example"})
        assert (locked.status_code, misdirected.status_code) == (401, 421)
        if path == "/api/chat":
            assert shown(locked.json()).startswith("Incorrect API key provided")
        else:
            assert (shown(locked.json()), shown(misdirected.json())) == (
                "authentication_error",
                "invalid_request_error",
            )


async def test_official_clients_show_the_message_and_do_not_retry() -> None:
    asked: list[str] = []
    async with served(ScriptedGateway()) as url:
        count = lambda request: asked.append(str(request.url))  # noqa: E731 - a hook
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="k", http_client=await _counting(openai, count)
        ) as client:
            with pytest.raises(openai.NotFoundError, match="part of OpenAI's API is not served"):
                await client.moderations.create(model="m", input="x")
    assert len(asked) == 1


async def _counting(library: Any, count: Any) -> Any:
    async def hook(request: Any) -> None:
        count(request)

    return library.DefaultAsyncHttpxClient(event_hooks={"request": [hook]})


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/models", "/v1/messagesx", "/apix/chat", "/", "/health"]
)
def test_served_and_unknown_paths_have_openais_form(path: str) -> None:
    dialect = DialectTable(DIALECTS).for_path(path, {})
    assert dialect.operations
    assert dialect.error is openai_error


@pytest.mark.parametrize(
    ("path", "is_nobodys"),
    [("/v1/models", True), ("/", True), ("/nowhere", True), ("/api/chat", False)],
)
def test_an_unknown_path_has_the_form_of_the_clients_protocol(path: str, is_nobodys: bool) -> None:
    spoken = DialectTable(DIALECTS).for_path(path, {"anthropic-version": "2023-06-01"})
    assert (spoken.name == "Anthropic's Messages API") == is_nobodys


async def test_a_body_that_is_too_large_has_openais_form() -> None:
    async with client_of(ScriptedGateway(), limits=LimitsSettings(max_body_bytes=1024)) as client:
        response = await client.post(CHAT, content=b" " * 2000)
    assert response.json()["error"]["code"] == "body_too_large"
