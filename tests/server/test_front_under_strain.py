"""Clients that keep connections open, against a real server."""

from __future__ import annotations

import contextlib
import socket

import openai

from tests.fakes.server_process import LIMIT_SECONDS, ServerProcess, until

HALF = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX: ",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{",
)


def test_half_open_connections_are_closed_while_others_are_served(
    strict_server: ServerProcess,
) -> None:
    before = len(strict_server.log())
    address = ("127.0.0.1", int(strict_server.url.rpartition(":")[2]))
    with (
        contextlib.ExitStack() as opened,
        openai.OpenAI(base_url=f"{strict_server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        held = []
        # each sends its half immediately: a silent connection is closed without a response
        for place in range(400):
            held.append(
                opened.enter_context(socket.create_connection(address, timeout=LIMIT_SECONDS))
            )
            held[-1].sendall(HALF[place % 2])
        answer = client.completions.create(
            model="demo", prompt="one", max_tokens=3, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
        ends = [b"".join(iter(lambda one=one: one.recv(4096), b"")) for one in held]  # type: ignore[misc]
        assert {end[:12] for end in ends} == {b"HTTP/1.1 408"}
        further = [
            opened.enter_context(socket.create_connection(address, timeout=LIMIT_SECONDS))
            for _ in range(400)
        ]
        assert len(further) == 400  # closed ones are not counted
        assert client.models.list().data[0].id == "demo"
    until(lambda: "connection closed" in strict_server.log()[before:], "it is in the log")
    told = strict_server.log()[before:]
    assert told.count("connection closed") == 1
    assert "ERROR" not in told
