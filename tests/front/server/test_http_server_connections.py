"""What a client may occupy of the server, over real sockets.

Limits are short here; only the client waits for the server.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import httpx
import pytest

from holdfast.config import ServerSettings
from holdfast.front.output import TextDelta
from holdfast.front.server.http_server import MOST_HEAD_BYTES, ConnectionCounter
from tests.fakes.http_clients import CHAT, chat_body, served
from tests.fakes.scripted_gateway import ScriptedGateway, ScriptedStream, answer

SHORT = 0.05  # seconds
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"


def short(**settings: Any) -> ServerSettings:
    return ServerSettings(
        port=0, shutdown_seconds=0, **{"head_seconds": SHORT, "body_seconds": SHORT, **settings}
    )


class Peer:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def rest(self) -> bytes:
        """Everything received until the server closes."""
        got = b""
        with suppress(ConnectionResetError):
            while piece := await self.reader.read(65536):
                got += piece
        return got


@asynccontextmanager
async def peer(url: str) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()


@asynccontextmanager
async def trickle(one: Peer, piece: bytes) -> AsyncIterator[None]:
    """Something is sent continuously in small pieces; the server, on the same loop, runs many times
    between them.
    """

    async def send() -> None:
        with suppress(ConnectionError):
            while True:
                await one.send(piece)
                # few pieces: one that crosses the answer would reset the connection
                for _ in range(2000):
                    await asyncio.sleep(0)

    sending = asyncio.create_task(send())
    try:
        yield
    finally:
        sending.cancel()


@pytest.mark.parametrize("head", [b"P", POST, POST + b"X: ", b"\r\nGET / HTTP/1.1\r\n"])
async def test_an_incomplete_head_times_out_with_an_error(head: bytes) -> None:
    async with served(ScriptedGateway(), settings=short()) as url, peer(url) as one:
        await one.send(head)
        got = await one.rest()
    assert got.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in got


async def test_a_silent_connection_is_closed_without_a_response() -> None:
    async with served(ScriptedGateway(), settings=short()) as url, peer(url) as one:
        assert await one.rest() == b""


@pytest.mark.parametrize("begin", [POST + b"X: ", POST])
async def test_a_trickling_head_gets_no_extra_time(begin: bytes) -> None:
    async with served(ScriptedGateway(), settings=short()) as url, peer(url) as one:
        await one.send(begin)
        async with trickle(one, b"a" if begin != POST else b"A: b\r\n"):
            assert (await one.rest()).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("line", [b"a", b"A: b\r\n"])
async def test_the_size_of_a_head_is_limited(line: bytes) -> None:
    async with served(ScriptedGateway(), settings=short(head_seconds=60)) as url, peer(url) as one:
        with suppress(ConnectionError):
            await one.send(POST + b"X: ")
            await one.send(line * (2 * MOST_HEAD_BYTES // len(line)))
        assert (await one.rest()).startswith(b"HTTP/1.1 431 ")


async def test_a_long_head_in_one_piece_is_too_long_too() -> None:
    async with served(ScriptedGateway(), settings=short(head_seconds=60)) as url, peer(url) as one:
        await one.send(
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "
            + b"a" * (MOST_HEAD_BYTES + 1)
            + b"\r\n\r\n"
        )
        got = await one.rest()
    assert got.startswith(b"HTTP/1.1 431 ")
    assert got.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("body", [b"", b'{"model"'])
@pytest.mark.parametrize(
    "length", [b"Content-Length: 1000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n3e8\r\n"]
)
async def test_an_incomplete_body_times_out_with_an_error(length: bytes, body: bytes) -> None:
    gateway = ScriptedGateway()
    async with served(gateway, settings=short()) as url, peer(url) as one:
        await one.send(POST + length + body)
        got = await one.rest()
    assert got.startswith(b"HTTP/1.1 408 ")
    assert gateway.requests == []


@pytest.mark.parametrize("around", [b";a", b"0"])
async def test_chunk_extensions_do_not_count_as_progress(around: bytes) -> None:
    """Extensions and zeros before a chunk's size could be sent for ever."""
    async with served(ScriptedGateway(), settings=short()) as url, peer(url) as one:
        await one.send(
            POST + b"Transfer-Encoding: chunked\r\n\r\n" + (b"1;" if around == b";a" else b"")
        )
        async with trickle(one, around):
            assert (await one.rest())[:12] in (b"HTTP/1.1 408", b"HTTP/1.1 400")


async def test_trailers_are_ignored_and_bounded() -> None:
    """They would reach the application after all checks: a second tenant, or an endless list."""
    gateway = ScriptedGateway()
    body = httpx.Request("POST", "http://h", json=chat_body()).content
    chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(body), body)
    async with served(gateway, settings=short()) as url:
        async with peer(url) as one:
            await one.send(chunked + b"X-Holdfast-Tenant: forged\r\nConnection: close\r\n\r\n")
            assert (await one.reader.readline()).startswith(b"HTTP/1.1 200 ")
        assert gateway.requests[0].tenant == ""
        async with peer(url) as one:
            await one.send(chunked)
            async with trickle(one, b"A: b\r\n"):
                assert b"HTTP/1.1 408" in await one.rest()


async def test_sending_after_the_answer_is_bounded() -> None:
    async with served(ScriptedGateway(), settings=short()) as url, peer(url) as one:
        await one.send(
            b"POST /nope HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n"
        )
        async with trickle(one, b"x"):
            got = await one.rest()
    assert got.startswith(b"HTTP/1.1 404 ")
    assert got.count(b"HTTP/1.1 ") == 1


async def test_an_answer_may_take_longer_than_a_request() -> None:
    ready = asyncio.Event()
    asyncio.get_running_loop().call_later(4 * SHORT, ready.set)
    gateway = ScriptedGateway(script=[ready, *answer("done")])
    async with (
        served(gateway, settings=short()) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        response = await client.post(CHAT, json=chat_body())
    assert response.json()["choices"][0]["message"]["content"] == "done"


async def test_a_pipelined_incomplete_head_does_not_end_the_first_answer() -> None:
    ready = asyncio.Event()
    asyncio.get_running_loop().call_later(4 * SHORT, ready.set)
    gateway = ScriptedGateway(script=[ready, *answer("done")])
    body = httpx.Request("POST", "http://h", json=chat_body()).content
    async with served(gateway, settings=short()) as url, peer(url) as one:
        await one.send(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body + b"GET /hea")
        got = await one.rest()
    assert got.startswith(b"HTTP/1.1 200 ")
    assert b"done" in got
    assert b"HTTP/1.1 408 " in got


async def test_slow_processing_does_not_time_out_the_client() -> None:
    gateway = ScriptedGateway()
    body = httpx.Request("POST", "http://h", json=chat_body(user="u" * 1_000_000)).content
    async with (
        served(gateway, settings=short()) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        response = await client.post(CHAT, content=body)
    assert response.status_code == 200


NOT_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"hello\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
]


@pytest.mark.parametrize("sent", NOT_HTTP)
async def test_invalid_http_is_a_400(sent: bytes) -> None:
    async with served(ScriptedGateway(), settings=short()) as url, peer(url) as one:
        await one.send(sent)
        got = await one.rest()
    assert got.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"invalid_http"' in got


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 5\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Content-Length: +5\r\n",
        b"Host: evil.example\r\n",
    ],
)
async def test_an_ambiguous_content_length_is_refused(headers: bytes) -> None:
    gateway = ScriptedGateway()
    async with served(gateway, settings=short()) as url, peer(url) as one:
        await one.send(POST + headers + b"Connection: close\r\n\r\n5\r\nhello\r\n0\r\n\r\n")
        got = await one.rest()
    assert got.startswith(b"HTTP/1.1 400 ")
    assert gateway.requests == []


async def test_an_unknown_upgrade_is_silently_ignored(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        served(ScriptedGateway(), settings=short()) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        with caplog.at_level(logging.INFO):
            for upgrade in ("h2c", "websocket"):
                response = await client.get(
                    "/v1/models", headers={"connection": "upgrade", "upgrade": upgrade}
                )
                assert response.status_code == 200
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_connections_per_address_are_limited_and_freed() -> None:
    settings = short(max_connections_per_address=2, head_seconds=60)
    async with served(ScriptedGateway(), settings=settings) as url, peer(url) as first:
        async with peer(url) as second:
            for one in (first, second):
                await one.send(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert (await one.reader.readline()).startswith(b"HTTP/1.1 200 ")
            async with peer(url) as third:
                got = await third.rest()
                assert got.startswith(b"HTTP/1.1 429 ")
                assert b"too_many_connections" in got
            await second.send(
                b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            )
            await second.rest()
        async with peer(url) as fourth:
            await fourth.send(
                b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            )
            assert (await fourth.rest()).startswith(b"HTTP/1.1 200 ")


async def test_an_idle_connection_is_closed_without_a_response() -> None:
    async with (
        served(ScriptedGateway(), settings=short(keep_alive_seconds=SHORT)) as url,
        peer(url) as one,
    ):
        await one.send(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        got = await one.rest()
    assert got.startswith(b"HTTP/1.1 200 ")
    assert got.count(b"HTTP/1.1 ") == 1


async def test_many_bad_connections_of_an_address_are_one_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        async with served(ScriptedGateway(), settings=short()) as url:
            for _ in range(5):
                async with peer(url) as one:
                    await one.send(b"what?\r\n\r\n")
                    await one.rest()
    lines = [record for record in caplog.records if "127.0.0.1" in record.getMessage()]
    assert [record.levelno for record in lines] == [logging.INFO]
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_each_address_is_logged_once_a_minute_in_bounded_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    addresses = ConnectionCounter(1, clock=lambda: now[0])
    with caplog.at_level(logging.INFO):
        for second in (0.0, 59.0, 60.0):
            now[0] = second
            addresses.log("a", "late")
        assert len(caplog.records) == 2
        for number in range(5000):
            addresses.log(f"b{number}", "late")
        assert len(caplog.records) < 1100
        now[0] = 200.0
        addresses.log("c", "late")
    assert "c: " in caplog.records[-1].getMessage()


def test_addresses_are_counted_separately() -> None:
    addresses = ConnectionCounter(1)
    addresses.count_opened("a")
    assert (addresses.has_room("a"), addresses.has_room("b")) == (False, True)
    addresses.count_closed("a")
    assert addresses.has_room("a")


# Clients that do not read, over real sockets.

BODY = b'{"model": "demo/tiny", "messages": [{"role": "user", "content": "x"}], "stream": true}'


class EndlessGateway(ScriptedGateway):
    """Always has more to say; counts how much was taken."""

    def __init__(self) -> None:
        self.taken = 0
        super().__init__()

    async def generate(self, request: object) -> ScriptedStream:
        self.requests.append(request)  # type: ignore[arg-type]

        def script() -> object:
            for self.taken in count():
                yield TextDelta(index=0, text="x" * 1000)

        return ScriptedStream(script(), lambda: self._close("r"))  # type: ignore[arg-type]


def unread(url: str) -> socket.socket:
    """A client that has sent its request and receives as little as the system allows."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-type: "
        f"application/json\r\ncontent-length: {len(BODY)}\r\n\r\n"
    )
    client.sendall(head.encode() + BODY)
    return client


async def test_an_unread_response_is_given_up_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gateway = EndlessGateway()
    async with served(
        gateway,
        settings=ServerSettings(
            port=0, shutdown_seconds=0, stalled_seconds=0.2, reconnect_seconds=0
        ),
    ) as url:
        with caplog.at_level(logging.INFO):
            client = await asyncio.to_thread(unread, url)
            async with asyncio.timeout(60):
                await gateway.all_closed.wait()
        said = list(caplog.records)
        client.close()
    lines = [record for record in said if "has read nothing of" in record.message]
    assert len(lines) == 1
    assert lines[0].levelno == logging.WARNING
    assert [record for record in said if record.levelno >= logging.ERROR] == []


async def test_a_client_that_pauses_reading_loses_nothing() -> None:
    gateway = EndlessGateway()
    async with served(gateway) as url:
        client = await asyncio.to_thread(unread, url)
        async with asyncio.timeout(60):
            before = -1
            while before != gateway.taken:  # until it stops
                before = gateway.taken
                for _ in range(1000):  # iterations of the loop on which the server runs
                    await asyncio.sleep(0)
            client.setblocking(False)
            while gateway.taken < before + 1000:
                await asyncio.get_running_loop().sock_recv(client, 1 << 20)
        assert gateway.closed == []
        client.close()
        async with asyncio.timeout(60):
            await gateway.all_closed.wait()
