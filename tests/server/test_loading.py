"""A server whose worker is suspended while loading: requests wait and are answered in the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.fakes.server_process import ServerProcess, until

BODY = {
    "model": "demo",
    "prompt": "one",
    "max_tokens": 3,
    "ignore_eos": True,
    "holdfast": {"explain": True},
}


@pytest.fixture
def held_up(model_folder: Path) -> Iterator[tuple[ServerProcess, psutil.Process]]:
    """A listening server and its worker, suspended before it can have loaded anything."""
    server = ServerProcess(
        str(model_folder), "--name", "demo", "--set", "residency.hang_seconds=600"
    )
    try:
        front = psutil.Process(server.process.pid)
        until(lambda: bool(_workers(front)), "the worker is started")
        (worker,) = _workers(front)
        worker.suspend()
        until(lambda: bool(_ports(front)), "the server listens")
        server.url = f"http://127.0.0.1:{_ports(front)[0]}"
        yield server, worker
        assert server.stop() == 0, server.log()
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def _workers(front: psutil.Process) -> list[psutil.Process]:
    """Not a child that is still a copy of the front: wait until it runs its own program."""
    return [each for each in front.children() if "holdfast.worker" in each.cmdline()]


def _ports(process: psutil.Process) -> list[int]:
    return [
        found.laddr.port
        for found in process.net_connections("tcp")
        if found.status == psutil.CONN_LISTEN
    ]


def test_requests_during_loading_wait_and_are_answered(
    held_up: tuple[ServerProcess, psutil.Process],
) -> None:
    server, worker = held_up
    headers = threading.Event()

    def stream() -> str:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**BODY, "stream": True}, timeout=60
        ) as response:
            assert response.status_code == 200
            headers.set()
            return "".join(response.iter_text())

    with ThreadPoolExecutor() as threads:
        streamed = threads.submit(stream)
        whole = threads.submit(httpx.post, f"{server.url}/v1/completions", json=BODY, timeout=60)
        sessions = threads.submit(httpx.get, f"{server.url}/v1/sessions", timeout=60)
        with pytest.raises(httpx.ReadTimeout):  # and is dropped
            httpx.post(
                f"{server.url}/v1/completions", json={**BODY, "max_tokens": 5000}, timeout=0.3
            )
        assert headers.wait(60)
        health = httpx.get(f"{server.url}/health", timeout=60)
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        assert not whole.done()
        assert not sessions.done()
        worker.resume()
        answer = whole.result()
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 3
        # the stream's headers came earlier
        assert answer.json()["holdfast"]["seconds"]["accept"] > 0.5
        assert streamed.result().endswith("data: [DONE]\n\n")
        assert sessions.result().json()["data"] == []
    server.wait_ready()
    assert server.model()["running"] == 0
    assert server.metric("holdfast_worker_finished_total") == 2
