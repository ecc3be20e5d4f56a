"""Clients that request much and read nothing: bounded in the front, paused in the worker, finally
cancelled.
"""

from __future__ import annotations

import json
import re
import socket
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.fakes.server_process import ServerProcess, running_server, until

GREEDY: dict[str, Any] = {
    "model": "demo",
    "prompt": "once upon",
    "ignore_eos": True,
    "stream": True,
    "temperature": 0,
}
SEEDED = {**GREEDY, "temperature": 1.0, "seed": 7}
HEAVY = {**SEEDED, "n": 16, "logprobs": 20, "max_tokens": 500}


@pytest.fixture
def patient(model_folder: Path) -> Iterator[ServerProcess]:
    settings = (
        "server.shutdown_seconds=0",
        "server.reconnect_seconds=0",
        "residency.unread_bytes=16384",
    )
    given = [argument for setting in settings for argument in ("--set", setting)]
    with running_server(str(model_folder), "--name", "demo", *given) as server:
        yield server


class Unread:
    """A client that has sent its request and reads nothing until told to."""

    def __init__(self, server: ServerProcess, body: dict[str, Any]) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        raw = json.dumps(body).encode()
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect((host, int(port)))
        self.socket.settimeout(60)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: "
            "application/json\r\nconnection: close\r\n"
        )
        self.socket.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)

    def read_all(self) -> str:
        parts = []
        while part := self.socket.recv(1 << 16):
            parts.append(part)
        _, _, body = b"".join(parts).partition(b"\r\n\r\n")
        return _unchunked(body).decode()


def _unchunked(body: bytes) -> bytes:
    whole = b""
    while match := re.match(rb"([0-9a-f]+)\r\n", body):
        size = int(match[1], 16)
        whole += body[match.end() : match.end() + size]
        body = body[match.end() + size + 2 :]
    return whole


def texts(stream: str) -> dict[int, str]:
    assert stream.endswith("data: [DONE]\n\n"), stream[-300:]
    found: dict[int, str] = defaultdict(str)
    for line in stream.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                found[choice["index"]] += choice["text"]
    return found


def stands_still(server: ServerProcess) -> None:
    """Wait until the worker stops drawing although the request has not ended."""
    seen: list[float] = []

    def has_stopped() -> bool:
        seen.append(server.metric("holdfast_worker_generated_tokens_total"))
        return len(seen) > 20 and seen[-1] == seen[-20] > 0

    until(has_stopped, "the worker has paused what nobody reads")
    model = server.model()
    assert model["running"] + model["queued"] > 0, "all was drawn: there was nothing to be paused"


@pytest.mark.slow
def test_unread_streams_are_bounded_and_block_nobody(
    patient: ServerProcess,
) -> None:
    front = psutil.Process(patient.process.pid)
    httpx.post(f"{patient.url}/v1/completions", json={**GREEDY, "max_tokens": 3}, timeout=60)
    before = front.memory_info().rss
    clients = [Unread(patient, HEAVY) for _ in range(2)]  # 32 answers: the maximum of running ones
    stands_still(patient)
    assert patient.metric("holdfast_worker_generated_tokens_total") < 2 * 16 * 500 / 2
    assert front.memory_info().rss - before < 40e6
    answer = httpx.post(
        f"{patient.url}/v1/completions", json={**GREEDY, "max_tokens": 20}, timeout=60
    )
    assert len(texts(answer.text)[0]) > 0
    for client in clients:
        client.socket.close()
    until(
        lambda: (patient.model()["running"], patient.model()["queued"]) == (0, 0),
        "what they asked for is dropped",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        {**GREEDY, "logprobs": 20, "max_tokens": 600},
        {**SEEDED, "logprobs": 20, "n": 3, "max_tokens": 300},
    ],
)
def test_a_stream_resumed_after_a_pause_has_the_same_text(
    patient: ServerProcess, body: dict[str, Any]
) -> None:
    undisturbed = texts(httpx.post(f"{patient.url}/v1/completions", json=body, timeout=120).text)
    client = Unread(patient, body)
    stands_still(patient)
    assert texts(client.read_all()) == undisturbed
    client.socket.close()


def test_a_stream_unread_for_too_long_is_cancelled(
    strict_server: ServerProcess,
) -> None:
    before = len(strict_server.log())
    stalled = Unread(strict_server, {**HEAVY, "n": 3, "max_tokens": 3000})
    answer = httpx.post(
        f"{strict_server.url}/v1/completions", json={**GREEDY, "max_tokens": 100}, timeout=60
    )
    assert len(texts(answer.text)[0]) > 0
    until(lambda: "has read nothing of" in strict_server.log()[before:], "the client is given up")
    until(
        lambda: (strict_server.model()["running"], strict_server.model()["queued"]) == (0, 0),
        "its work is cancelled",
    )
    told = strict_server.log()[before:]
    assert told.count("has read nothing of") == 1
    assert "ERROR" not in told
    stalled.socket.close()
