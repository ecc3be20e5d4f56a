"""Prefill-only requests end with their client, and say so when the server stops."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from tests.fakes.http_clients import Exchange
from tests.fakes.scripted_gateway import ScriptedGateway

BODY = {"input": "a"}


async def test_a_disconnect_ends_the_work() -> None:
    gateway = ScriptedGateway(accept_when=asyncio.Event())
    exchange = Exchange(gateway)
    running = asyncio.create_task(exchange.run("/v1/embeddings", BODY))
    await gateway.until(lambda: bool(gateway.embedded))
    exchange.gone.set()
    await running
    assert gateway.dropped == [gateway.embedded[0].request_id]
    assert exchange.messages == []


async def test_a_stopping_server_says_so() -> None:
    gateway = ScriptedGateway(accept_when=asyncio.Event())
    exchange = Exchange(gateway)
    running = asyncio.create_task(exchange.run("/v1/embeddings", BODY))
    await gateway.until(lambda: bool(gateway.embedded))
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert exchange.status == 503
    assert "the server stopped" in exchange.text


async def test_an_answer_is_sent_with_its_length() -> None:
    exchange = Exchange(ScriptedGateway())
    await exchange.run("/v1/embeddings", BODY)
    headers = dict(exchange.messages[0]["headers"])
    assert headers[b"content-type"] == b"application/json"
    assert int(headers[b"content-length"]) == len(exchange.text)
