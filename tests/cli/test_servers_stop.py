"""`holdfast stop` with processes in place of servers."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from holdfast.front.run.running_servers import RunningServer
from tests.fakes.command_line import invoked

SERVER = RunningServer(
    pid=os.getpid(),
    url="http://here",
    port=1,
    started_at=0.0,
    version="",
    store_folder="",
    log_file="",
    certificate="",
)


class Stage:
    """A server that ends a few polls after the signal."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, healths: list[dict[str, Any] | None]
    ) -> None:
        self.signals: list[int] = []
        self.healths = healths
        running = "holdfast.front.run.running_servers.running_servers"
        monkeypatch.setattr(running, lambda environ: [SERVER] if self.healths else [])
        monkeypatch.setattr(
            "holdfast.cli.servers.health_of", lambda server, seconds: self.healths.pop(0) or {}
        )
        monkeypatch.setattr("holdfast.cli.servers._POLL_SECONDS", 0)
        monkeypatch.setattr(os, "kill", lambda pid, number: self.signals.append(number))


def stopping(leases: int) -> dict[str, Any]:
    """With two sequences for each request."""
    return {
        "status": "stopping",
        "models": [{"leases": leases, "running": 2 * leases, "queued": 0}],
    }


def test_requests_are_counted_not_their_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(
        monkeypatch,
        [{"status": "ok", "models": [{"leases": 2}]}, stopping(2), stopping(2), stopping(1), None],
    )
    said = invoked(["stop"]).stdout.splitlines()
    assert said == [
        "http://here waits for 2 requests",
        "http://here waits for 1 request",
        f"stopped http://here (pid {os.getpid()})",
    ]
    assert stage.signals == [signal.SIGTERM]


def test_now_cuts_answers_off_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(
        monkeypatch, [{"status": "ok", "models": []}, stopping(1), stopping(1), stopping(0), None]
    )
    assert invoked(["stop", "--now"]).exit_code == 0
    assert stage.signals == [signal.SIGTERM] * 2


def test_now_cuts_answers_although_counting_them_needs_a_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unknown = {"status": "stopping"}
    stage = Stage(monkeypatch, [{"status": "ok"}, unknown, unknown, None])
    done = invoked(["stop", "--now"])
    assert (done.exit_code, stage.signals) == (0, [signal.SIGTERM] * 2)
    assert done.stdout.splitlines() == [f"stopped http://here (pid {os.getpid()})"]


def test_a_port_and_all_cannot_be_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, [None])
    refused = invoked(["stop", "1", "--all"])
    assert (refused.exit_code, stage.signals) == (2, [])
    assert "use --all, not both" in refused.output
