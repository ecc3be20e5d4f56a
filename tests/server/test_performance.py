"""The performance history over two lives of a server, and the log of the running one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.command_line import holdfast
from tests.fakes.server_process import ServerProcess, running_server, unused_port

MESSAGES = [{"role": "user", "content": "Count to ten."}]


def ask(server: ServerProcess) -> None:
    body = {"messages": MESSAGES, "max_tokens": 30, "stream": True, "ignore_eos": True}
    answered = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answered.status_code == 200, answered.text


def shown(server: ServerProcess) -> Any:
    return httpx.get(f"{server.url}/admin/performance", params={"range": "24h"}).json()["total"]


@pytest.mark.slow
def test_the_cli_shows_a_history_that_survives_restarts(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = (str(model_folder), "--name", "demo")
    port = unused_port()
    with running_server(*arguments, port=port) as server:
        ask(server)
        ask(server)
        before = shown(server)
        assert before["answers"] == 2
        assert before["generated_tokens"] == 60
        assert before["cached_tokens"] > 0  # the second prompt equals the first one
        assert before["gap"]["count"] > 0
        assert before["lookup"]["count"] == before["prefill"]["count"] == 2
    with running_server(*arguments, port=port) as server:
        assert shown(server) == before
        ask(server)
        done = holdfast("performance", "--range", "24h", "--json", cwd=tmp_path)
        assert json.loads(done.stdout)["total"]["answers"] == 3, done.stderr
        text = holdfast("performance", "--range", "24h", "--over-time", cwd=tmp_path).stdout
        assert "first token" in text
        lines = holdfast("logs", "--text", "chat/completions 200", cwd=tmp_path).stdout.splitlines()
        assert len(lines) == 1
        none = holdfast("logs", "--level", "error", cwd=tmp_path)
        assert (none.returncode, none.stdout) == (0, "")
    states = holdfast("state", "ls", "--json", cwd=tmp_path).stdout
    (kept,) = [each for each in json.loads(states) if each["name"] == "performance"]
    assert 0 < kept["bytes"] < 10_000
