"""The worker of a real server dies during answers, and readers notice only a delay."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from tests.fakes.server_process import ServerProcess, running_server, until
from tests.fakes.told_streams import OF_EVERY_KIND, answer_to, completion


@pytest.fixture(scope="module")
def watched() -> Iterator[ServerProcess]:
    """A server that soon notices a hanging worker."""
    settings = ("residency.hang_seconds=1.5", "residency.heartbeat_seconds=0.25")
    given = [part for each in settings for part in ("--set", each)]
    with running_server("--name", "demo", "--store", "off", *given) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(watched: ServerProcess) -> list[str]:
    with ThreadPoolExecutor(len(OF_EVERY_KIND)) as threads:
        return list(threads.map(partial(answer_to, watched.url), OF_EVERY_KIND))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_answers_continue_unchanged_on_the_next_worker(
    watched: ServerProcess, undisturbed: list[str], number: signal.Signals
) -> None:
    before, worker = (
        watched.metric("holdfast_resumed_streams_total"),
        psutil.Process(watched.model()["pid"]),
    )
    events, is_due = [0], threading.Event()

    def count() -> None:
        events[0] += 1
        if events[0] >= 40:
            is_due.set()

    with ThreadPoolExecutor(len(OF_EVERY_KIND)) as threads:
        answers = [
            threads.submit(answer_to, watched.url, asked, on_event=count) for asked in OF_EVERY_KIND
        ]
        assert is_due.wait(60)
        worker.send_signal(number)
        assert [each.result() for each in answers] == undisturbed
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
    assert watched.metric("holdfast_resumed_streams_total") - before >= 4


def test_a_worker_death_is_logged_and_reported(server: ServerProcess, state_folder: Path) -> None:
    asked = completion("explained", "Once upon a time", max_tokens=200)
    worker = psutil.Process(server.model()["pid"])
    with httpx.stream(
        "POST",
        f"{server.url}{asked.path}",
        json={**asked.body, "model": "demo", "stream": True, "holdfast": {"explain": True}},
        timeout=60,
    ) as response:
        lines = response.iter_lines()
        next(lines)
        worker.send_signal(signal.SIGABRT)
        (explained,) = [
            json.loads(line[6:])["holdfast"] for line in lines if '"holdfast":{' in line
        ]
    assert explained["resumed"] == 1
    assert "another one continued it" in explained["explanation"]
    assert "(1 mid-answer); those that are not refused continue on the next worker" in server.log()
    until(lambda: "resumed 1 times" in server.log(), "the request is logged")
    report = json.loads(max((state_folder / "holdfast" / "crashes").iterdir()).read_text())
    # writing down the stacks of running threads may itself fail with SIGSEGV
    assert "SIGABRT" in report["how"] or "SIGSEGV" in report["how"]
    assert any("Fatal Python error: Aborted" in line for line in report["log"])
    (had,) = report["requests"]
    assert 0 < had["generated_tokens"] < 200
