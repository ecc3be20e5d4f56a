"""Clients that do not read, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import socket
from itertools import count

import pytest

from holdfast.config import ServerSettings
from holdfast.front.output import TextDelta
from tests.fakes.http_clients import CHAT, served
from tests.fakes.scripted_gateway import ScriptedGateway, ScriptedStream

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
