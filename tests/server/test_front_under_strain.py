"""Clients that hold on to connections, against a real server."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import openai
import pytest

from tests.fakes.served_model import served_model_folder
from tests.fakes.server_process import LIMIT_SECONDS, ServerProcess, until

HALF = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX: ",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{",
)


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    limits = (
        "--set",
        "server.head_seconds=1",
        "--set",
        "server.body_seconds=1",
        "--set",
        "server.max_connections_per_address=500",
    )
    server = ServerProcess(str(served_model_folder()), "--name", "demo", *limits)
    server.wait_ready()
    yield server
    assert server.stop() == 0, server.log()


def test_four_hundred_half_open_connections_are_closed_while_others_are_served(
    server: ServerProcess,
) -> None:
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    with (
        contextlib.ExitStack() as opened,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        held = []
        # each says its half at once: one that says nothing is closed without a word
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
        assert len(further) == 400  # the closed ones do not count
        assert client.models.list().data[0].id == "demo"
    until(lambda: server.log().count("connection closed") >= 1, "it is in the log")
    assert server.log().count("connection closed") == 1
    assert "ERROR" not in server.log()
