"""Disconnects: in every phase, only the client's own work is cancelled, immediately."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx
import pytest

from tests.fakes.http_clients import (
    CHAT,
    COMPLETIONS,
    Exchange,
    chat_body,
    completion_body,
    events_of,
    served,
)
from tests.fakes.scripted_gateway import ScriptedGateway, answer


def endless() -> list[Any]:
    return [*answer("Hel")[:1], asyncio.Event()]


async def test_leaving_a_stream_ends_its_work() -> None:
    gateway = ScriptedGateway(script=endless())
    exchange = Exchange(gateway)
    running = asyncio.create_task(exchange.run(CHAT, chat_body(stream=True)))
    await exchange.first_body.wait()
    assert gateway.closed == []
    exchange.gone.set()
    await running
    assert gateway.closed == [gateway.request.request_id]


async def test_leaving_before_a_whole_answer_ends_its_work() -> None:
    gateway = ScriptedGateway(script=endless())
    exchange = Exchange(gateway)
    exchange.gone.set()
    await exchange.run(CHAT, chat_body())
    assert gateway.closed in ([], [gateway.request.request_id])
    assert exchange.messages == []


async def test_leaving_before_acceptance_ends_the_request() -> None:
    gateway = ScriptedGateway(accept_when=asyncio.Event())
    exchange = Exchange(gateway)
    running = asyncio.create_task(exchange.run(CHAT, chat_body(stream=True)))
    while not gateway.requests:
        await asyncio.sleep(0)
    exchange.gone.set()
    await running
    assert exchange.messages == []


async def test_leaving_during_an_upload_is_not_an_error(caplog: pytest.LogCaptureFixture) -> None:
    gateway = ScriptedGateway()
    exchange = Exchange(gateway)
    exchange.gone.set()
    await exchange.run(CHAT, chat_body(), upload_breaks_off=True)
    assert (gateway.requests, exchange.messages, caplog.text) == ([], [], "")


async def test_leaving_a_batch_ends_all_its_prompts() -> None:
    gateway = ScriptedGateway(script=lambda _: endless())
    exchange = Exchange(gateway)
    running = asyncio.create_task(
        exchange.run(COMPLETIONS, completion_body(prompt=["a", "b", "c"], stream=True))
    )
    await exchange.first_body.wait()
    exchange.gone.set()
    await running
    assert sorted(gateway.closed) == sorted(request.request_id for request in gateway.requests)


async def test_every_answer_is_closed_when_it_has_ended() -> None:
    for stream in (False, True):
        gateway = ScriptedGateway()
        await Exchange(gateway).run(CHAT, chat_body(stream=stream))
        assert gateway.closed == [gateway.request.request_id]


async def test_a_server_stop_ends_streams_with_an_error() -> None:
    gateway = ScriptedGateway(script=endless())
    exchange = Exchange(gateway)
    running = asyncio.create_task(exchange.run(CHAT, chat_body(stream=True)))
    await exchange.first_body.wait()
    running.cancel()
    await running
    assert gateway.closed == [gateway.request.request_id]
    assert events_of(exchange.text)[-1]["error"]["code"] == "model_unavailable"
    assert exchange.messages[-1]["more_body"] is False


async def test_a_server_stop_ends_whole_answers_with_503() -> None:
    gateway = ScriptedGateway(script=endless())
    exchange = Exchange(gateway)
    running = asyncio.create_task(exchange.run(CHAT, chat_body()))
    while not gateway.requests:
        await asyncio.sleep(0)
    running.cancel()
    await running
    assert exchange.status == 503


async def test_a_server_stop_is_bounded_and_ends_every_response() -> None:
    gateway = ScriptedGateway(script=lambda _: endless())
    async with httpx.AsyncClient(timeout=60) as client:
        async with served(gateway) as url:
            answers = [
                asyncio.create_task(client.post(url + CHAT, json=chat_body(stream=stream)))
                for stream in (True, False)
            ]
            await gateway.until(lambda: len(gateway.requests) == 2)
        streamed, whole = await asyncio.gather(*answers)
    assert "model_unavailable" in streamed.text
    assert whole.status_code == 503


def raw_request(url: str, body: bytes) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-type: "
        f"application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("stream", [b"true", b"false"])
async def test_a_closed_socket_ends_only_its_own_request(stream: bytes) -> None:
    gateway = ScriptedGateway(script=lambda _: endless())
    body = (
        b'{"model": "demo/tiny", "messages": [{"role": "user", "content": "x"}], "stream": '
        + stream
        + b"}"
    )
    async with served(gateway) as url:
        connections = [await asyncio.to_thread(raw_request, url, body) for _ in range(2)]
        async with asyncio.timeout(60):
            await gateway.until(lambda: len(gateway.requests) == 2)
            connections[0].close()
            await gateway.until(lambda: bool(gateway.closed))
        assert len(gateway.closed) == 1
        connections[1].close()
        async with asyncio.timeout(60):
            await gateway.all_closed.wait()
