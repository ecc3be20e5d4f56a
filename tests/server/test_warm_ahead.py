"""A model with long thoughts, whose template drops earlier ones: its next turn finds its history
prefilled.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.http_clients import CHAT
from tests.fakes.server_process import ServerProcess, until
from tests.fakes.thinking_model import write_thinking

TURNS, ANSWER_TOKENS = 3, 150


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = write_thinking(
        tmp_path_factory.mktemp("thinking"), turns=TURNS, answer_tokens=ANSWER_TOKENS
    )
    server = ServerProcess(str(folder), "--name", "scripted", "--store", "off")
    server.wait_ready()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    assert server.stop() == 0, server.log()


def figure(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return next(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(f"holdfast_prefix_cache_{name}_tokens_total{{")
    )


def ask(client: httpx.Client, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {
        "model": "scripted",
        "messages": messages,
        "session_id": "s",
        "holdfast": {"explain": True},
    }
    answer: dict[str, Any] = client.post(CHAT, json=body).raise_for_status().json()
    return answer


@pytest.mark.slow
def test_the_next_turn_prefills_and_bills_only_its_question(
    client: httpx.Client,
) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Where is it? " * 20}]
    expected = 0.0
    for turn in range(TURNS):
        answer = ask(client, messages)
        memory, usage = answer["holdfast"], answer["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] >= 450
        if turn:
            without = memory["read_tokens"] + memory["read_ahead_tokens"]
            assert without > ANSWER_TOKENS
            assert memory["read_tokens"] <= 0.2 * without
            assert "in advance" in memory["explanation"]
            assert usage["prompt_tokens"] == memory["prompt_tokens"] < 2000, (
                "a prompt is what is in it, thoughts are not"
            )
        said = answer["choices"][0]["message"]["content"]
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": f"And number {turn}?"},
        ]
        expected += ANSWER_TOKENS
        until(
            lambda least=expected: figure(client, "read_ahead") >= least, "the history to be read"
        )  # type: ignore[misc]
    assert figure(client, "used_ahead") >= (TURNS - 1) * ANSWER_TOKENS
    models = client.get("/health").json()["models"]
    assert (models[0]["running"], models[0]["queued"]) == (0, 0)


def is_on_disk(client: httpx.Client) -> bool:
    """Whether the store has the first answer and the tokens prefilled ahead after it."""
    is_committed = client.get("/v1/sessions/s").json()["requests"] == 2
    lines = client.get("/metrics").text.splitlines()
    queued = next(line for line in lines if line.startswith("holdfast_store_queued_blocks{"))
    return is_committed and float(queued.rpartition(" ")[2]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_prefill_ahead_is_counted_even_if_the_worker_dies(is_killed: bool, tmp_path: Path) -> None:
    folder = write_thinking(tmp_path / "thinking", turns=2, answer_tokens=ANSWER_TOKENS)
    server = ServerProcess(str(folder), "--name", "scripted", "--store", str(tmp_path / "store"))
    server.wait_ready()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Where is it? " * 20}]
        said = ask(client, messages)["choices"][0]["message"]["content"]
        until(lambda: figure(client, "read_ahead") >= ANSWER_TOKENS, "the history to be read")
        ahead = figure(client, "read_ahead")
        if is_killed:
            until(lambda: is_on_disk(client), "all of it to be on disk")
            os.kill(server.model()["pid"], signal.SIGKILL)
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": "And now?"},
        ]
        memory = ask(client, messages)["holdfast"]
        assert memory["read_ahead_tokens"] == ahead
        assert (memory["disk_tokens"] > 0) == is_killed
        assert figure(client, "used_ahead") == ahead
    assert server.stop() == 0, server.log()
