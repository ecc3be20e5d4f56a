from __future__ import annotations

from typing import Any

import openai
import pytest

from holdfast.config import LimitsSettings, ServerSettings
from holdfast.front.application import DIALECTS
from holdfast.front.openai.answers import openai_error
from holdfast.front.server.dialect import DialectTable
from tests.fakes.http_clients import CHAT, client_of, served
from tests.fakes.scripted_gateway import ScriptedGateway

OPENAI = ["/v1/audio/speech", "/v1/images/generations"]


async def called(path: str, **settings: Any) -> Any:
    async with client_of(ScriptedGateway(), server=ServerSettings(**settings)) as client:
        return await client.post(path, json={"model": "x"})


@pytest.mark.parametrize("path", OPENAI)
async def test_openais_clients_are_told_what_part_is_missing(path: str) -> None:
    response = await called(path)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "protocol_not_served")
    assert "OpenAI's" in response.json()["error"]["message"]


async def test_refusals_at_the_door_have_that_form_as_well() -> None:
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


async def test_the_official_clients_show_the_sentence_and_do_not_try_again() -> None:
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
def test_what_is_served_or_nobodys_has_openais_form(path: str) -> None:
    dialect = DialectTable(DIALECTS).dialect_of(path, {})
    assert dialect.operations
    assert dialect.error is openai_error


@pytest.mark.parametrize(
    ("path", "is_nobodys"),
    [("/v1/models", True), ("/", True), ("/nowhere", True), ("/api/chat", False)],
)
def test_what_is_nobodys_has_the_form_of_the_clients_own_protocol(
    path: str, is_nobodys: bool
) -> None:
    spoken = DialectTable(DIALECTS).dialect_of(path, {"anthropic-version": "2023-06-01"})
    assert (spoken.name == "Anthropic's Messages API") == is_nobodys


async def test_too_large_a_body_is_told_in_openais_form_on_the_paths_that_read_one() -> None:
    async with client_of(ScriptedGateway(), limits=LimitsSettings(max_body_bytes=1024)) as client:
        response = await client.post(CHAT, content=b" " * 2000)
    assert response.json()["error"]["code"] == "body_too_large"
