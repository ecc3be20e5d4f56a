from __future__ import annotations

import asyncio

import pytest

from holdfast.config import LimitsSettings
from holdfast.front.output import TextDelta
from holdfast.front.server.context import TIME_LIMIT_HEADER
from tests.fakes.http_clients import CHAT, chat_body, client_of
from tests.fakes.scripted_gateway import ScriptedGateway


@pytest.mark.parametrize("said_by", ["client", "server"])
async def test_a_request_that_takes_too_long_ends_with_an_error(said_by: str) -> None:
    gateway = ScriptedGateway([TextDelta(index=0, text="a"), asyncio.Event()])
    limits = LimitsSettings(request_seconds=0.01) if said_by == "server" else LimitsSettings()
    headers = {TIME_LIMIT_HEADER: "0.01" if said_by == "client" else "3600"}
    async with client_of(gateway, limits=limits) as client:
        response = await client.post(CHAT, json=chat_body(), headers=headers)
    assert response.status_code == 504
    assert response.headers["x-should-retry"] == "false"
    assert "limit of 0.01 s" in response.json()["error"]["message"]


async def test_a_stream_that_takes_too_long_ends_with_an_error() -> None:
    gateway = ScriptedGateway([TextDelta(index=0, text="a"), asyncio.Event()])
    async with client_of(gateway) as client:
        response = await client.post(
            CHAT, json=chat_body(stream=True), headers={TIME_LIMIT_HEADER: "0.01"}
        )
    assert response.status_code == 200
    assert '"content":"a"' in response.text
    assert "time_limit_exceeded" in response.text


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan", ""])
async def test_an_invalid_time_limit_is_refused_by_name(text: str) -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(CHAT, json=chat_body(), headers={TIME_LIMIT_HEADER: text})
    assert response.status_code == 400
    assert TIME_LIMIT_HEADER in response.text
