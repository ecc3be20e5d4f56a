"""Headers that every response has, whichever component sends it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.config import ServerSettings
from tests.fakes.http_clients import CHAT, HELLO, client_of, served
from tests.fakes.scripted_gateway import MODEL, ScriptedGateway

BODY = {"model": MODEL, "messages": HELLO}


@pytest.mark.parametrize(
    ("method", "path", "sent"),
    [
        ("GET", "/v1/models", {}),
        ("GET", "/health", {}),
        ("GET", "/metrics", {}),
        ("GET", "/openapi.json", {}),
        ("GET", "/", {"headers": {"accept": "text/html"}}),
        ("GET", "/page/files/app.js", {}),
        ("GET", "/page/files/nothing.js", {}),
        ("HEAD", "/", {}),
        ("GET", "/nothing", {}),
        ("DELETE", CHAT, {}),
        ("POST", CHAT, {"json": BODY}),
        ("POST", CHAT, {"json": {**BODY, "stream": True}}),
        ("POST", CHAT, {"content": b"{"}),
        ("POST", CHAT, {"json": {**BODY, "model": "<script>"}}),
        ("POST", "/v1/messages", {"json": {**BODY, "max_tokens": 9, "stream": True}}),
        ("POST", "/v1/responses", {"json": {"input": "x", "stream": True}}),
        ("POST", "/api/chat", {"json": BODY}),
        ("GET", "/v1/models", {"headers": {"host": "evil.example"}}),
        ("GET", "/v1/models", {"headers": {"origin": "https://evil.example"}}),
        (
            "OPTIONS",
            CHAT,
            {
                "headers": {
                    "origin": "http://localhost:3000",
                    "access-control-request-method": "POST",
                }
            },
        ),
    ],
)
async def test_browsers_are_told_not_to_guess_the_type(
    method: str, path: str, sent: dict[str, Any]
) -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.request(method, path, **sent)
    assert response.headers.get_list("x-content-type-options") == ["nosniff"]


async def test_browsers_are_told_so_without_a_key() -> None:
    async with client_of(ScriptedGateway(), server=ServerSettings(api_key="k")) as client:
        response = await client.post(CHAT, json=BODY)
    assert (response.status_code, response.headers["x-content-type-options"]) == (401, "nosniff")


@pytest.mark.parametrize(
    "sent", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"y" * (1 << 17) + b"\r\n\r\n"]
)
async def test_browsers_are_told_so_for_invalid_http(sent: bytes) -> None:
    async with served(ScriptedGateway()) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        writer.close()
    assert head.count(b"x-content-type-options: nosniff") == 1
