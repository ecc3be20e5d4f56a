"""Limits of a model are lowered and raised while it answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.fakes.server_process import ServerProcess, until

pytestmark = pytest.mark.slow

AGENTS = 6
TOKENS = 250


def change(server: ServerProcess, **limits: int) -> dict[str, Any]:
    answer = httpx.patch(f"{server.url}/admin/models/demo", json=limits, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def text_of(client: openai.OpenAI, number: int) -> str:
    stream = client.completions.create(
        model="demo",
        prompt=f"{number} said: once",
        max_tokens=TOKENS,
        temperature=0.8 if number % 2 else 0.0,
        seed=number,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    chunks = [chunk.choices[0] for chunk in stream]
    assert chunks[-1].finish_reason == "length"
    return "".join(chunk.text for chunk in chunks)


def test_changed_limits_lose_no_stream_and_reach_new_workers(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    before = change(server)
    with ThreadPoolExecutor(AGENTS) as threads:
        undisturbed = list(threads.map(lambda number: text_of(client, number), range(AGENTS)))
        streams = [threads.submit(text_of, client, number) for number in range(AGENTS)]
        until(lambda: server.model()["running"] == AGENTS, "all of them run")
        assert change(server, max_running=1, step_tokens=64) == {
            "id": "demo",
            "max_running": 1,
            "step_tokens": 64,
        }
        until(lambda: server.model()["running"] == 1, "one runs, the others wait")
        psutil.Process(server.model()["pid"]).kill()
        until(
            lambda: server.model()["state"] == "ready" and server.model()["running"] == 1,
            "another worker goes on with one",
        )
        assert change(server)["max_running"] == 1
        assert (
            change(server, **{name: before[name] for name in ("max_running", "step_tokens")})[
                "max_running"
            ]
            > 1
        )
        assert [stream.result() for stream in streams] == undisturbed
