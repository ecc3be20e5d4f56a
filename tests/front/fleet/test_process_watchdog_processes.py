"""Real worker processes that are suspended or hang: they are killed and replaced, and requests get
their answers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from holdfast.config import ResidencySettings
from holdfast.front.fleet.process import WorkerProcess
from holdfast.front.link.event_stream import EventStream
from holdfast.wire.events import (
    Finished,
    FinishReason,
    Heartbeat,
    TokensGenerated,
    WorkerFailed,
    WorkerReady,
)
from tests.fakes.fake_engine import HANGS, HOLDS_THE_LOCK, expected_tokens
from tests.fakes.fake_models import OneModel
from tests.fakes.fake_worker import IMPATIENT, ROOT, a_request, fake_settings

LIMIT_SECONDS = 60.0
ENDLESS = 900_000


@asynccontextmanager
async def residency(
    behaviour: str = "good", *, settings: ResidencySettings = IMPATIENT
) -> AsyncIterator[OneModel]:
    made = OneModel(fake_settings(behaviour, residency=settings))
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def pid_of(made: OneModel) -> int:
    pid = made.statuses()[0].pid
    assert pid is not None
    return pid


async def replaced(made: OneModel, *, old: int) -> None:
    """Wait for the next worker after the old one is lost, and check that the old one was reaped."""
    async with asyncio.timeout(LIMIT_SECONDS):
        await made.client("m")
    assert pid_of(made) != old
    assert not psutil.pid_exists(old)


async def last_of(stream: EventStream) -> Finished:
    """The only end of a stream."""
    ends = [event async for event in stream if isinstance(event, Finished)]
    assert len(ends) == 1
    return ends[0]


async def assert_answers(made: OneModel) -> None:
    events = [event async for event in (await made.client("m")).submit(a_request("next"))]
    tokens = [
        token for event in events if isinstance(event, TokensGenerated) for token in event.token_ids
    ]
    assert tokens == expected_tokens(a_request("next"))


async def test_a_worker_suspended_at_rest_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    async with residency() as made:
        await made.wait_ready()
        old = pid_of(made)
        client = await made.client("m")
        os.kill(old, signal.SIGSTOP)
        async with asyncio.timeout(LIMIT_SECONDS):
            await client.worker.lost
        await replaced(made, old=old)
        await assert_answers(made)
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "sent no heartbeat" in line.message
    assert "restarting in 0 s" in line.message


@pytest.mark.slow
async def test_requests_of_a_suspended_worker_get_the_same_answers() -> None:
    asked = [a_request(str(index), max_tokens=20_000) for index in range(3)]
    async with residency() as made:
        await made.wait_ready()
        old = pid_of(made)
        client = await made.client("m")
        streams = [client.submit(each) for each in asked]
        for stream in streams:
            while not isinstance(await anext(stream), TokensGenerated):
                continue
        os.kill(old, signal.SIGSTOP)
        asked.append(a_request("never accepted"))
        streams.append(client.submit(asked[-1]))
        for end in await asyncio.gather(*map(last_of, streams)):
            assert end.reason is FinishReason.LENGTH
        assert [stream.token_ids for stream in streams] == [expected_tokens(each) for each in asked]
        await replaced(made, old=old)
        assert made.statuses()[0].restarts == {"died": 0, "hung": 1}


async def test_a_running_worker_that_holds_the_gil_is_left_alone() -> None:
    """Native code that builds a tokenizer does this: 15 s without heartbeats on a busy machine."""
    hasty = ResidencySettings(heartbeat_seconds=0.05, hang_seconds=0.4)
    async with residency("holds-the-lock", settings=hasty) as made:
        async with asyncio.timeout(LIMIT_SECONDS):
            await made.wait_ready()
        old = pid_of(made)
        client = await made.client("m")
        stream = client.submit(a_request("native", prompt=(1, HOLDS_THE_LOCK)))
        assert (await last_of(stream)).reason is FinishReason.LENGTH
        assert pid_of(made) == old


async def test_a_worker_suspended_while_loading_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    hasty = ResidencySettings(heartbeat_seconds=0.05, hang_seconds=0.2)
    worker = await WorkerProcess.start(
        fake_settings("hangs", residency=hasty),
        on_progress=lambda event: None,
        on_events=lambda events: None,
    )
    look, was_heard = worker.watchdog.judge, asyncio.Event()

    def observed(beat: Heartbeat | None, **measured: Any) -> str | None:
        if beat is not None:
            was_heard.set()
        return look(beat, **measured)

    monkeypatch.setattr(worker.watchdog, "judge", observed)
    async with asyncio.timeout(LIMIT_SECONDS):
        await was_heard.wait()
    os.kill(worker.pid, signal.SIGSTOP)
    outcome = await worker.wait_started(timeout_seconds=10 * LIMIT_SECONDS)
    assert isinstance(outcome, WorkerFailed)
    assert "while loading, it has sent no heartbeat" in outcome.message
    assert not outcome.fatal_input
    assert not psutil.pid_exists(worker.pid)


async def test_a_serving_worker_without_any_heartbeat_is_killed() -> None:
    """Suspended just as it becomes ready, before its first heartbeat arrives."""
    worker = await WorkerProcess.start(
        fake_settings(residency=IMPATIENT),
        on_progress=lambda event: None,
        on_events=lambda events: None,
    )
    worker.link.heartbeats.close()
    assert isinstance(await worker.wait_started(timeout_seconds=LIMIT_SECONDS), WorkerReady)
    async with asyncio.timeout(LIMIT_SECONDS):
        await worker.wait_lost()
        await worker.stop()
    assert worker.hang is not None
    assert "has sent no heartbeat" in worker.hang


async def test_a_worker_with_a_hanging_device_call_is_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with residency() as made:
        await made.wait_ready()
        old = pid_of(made)
        await assert_answers(made)  # the durations of such steps are known from now on
        client = await made.client("m")
        asked = a_request("bystander", max_tokens=5_000)
        bystander = client.submit(asked)
        while not isinstance(await anext(bystander), TokensGenerated):
            continue
        hanging = client.submit(a_request("hanging", prompt=(1, HANGS)))
        async with asyncio.timeout(LIMIT_SECONDS):
            await client.worker.lost
        await hanging.aclose()
        await replaced(made, old=old)
        assert (await last_of(bystander)).reason is FinishReason.LENGTH
        assert bystander.token_ids == expected_tokens(asked)
    assert any("in the same step" in record.message for record in caplog.records)


@pytest.mark.slow
async def test_a_request_that_hangs_every_worker_is_refused() -> None:
    async with residency(
        settings=ResidencySettings(heartbeat_seconds=0.05, hang_seconds=0.5)
    ) as made:
        await made.wait_ready()
        client = await made.client("m")
        asked = [a_request(str(index), max_tokens=20_000) for index in range(3)]
        others = [client.submit(each) for each in asked[:2]]
        hanging = client.submit(a_request("hanging", prompt=(1, HANGS)))
        others.append(client.submit(asked[2]))
        async with asyncio.timeout(LIMIT_SECONDS):
            end = await last_of(hanging)
            assert end.reason is FinishReason.FAILED
            assert "while the request ran alone" in end.error
            for stream in others:
                assert (await last_of(stream)).reason is FinishReason.LENGTH
        assert [stream.token_ids for stream in others] == [expected_tokens(each) for each in asked]


async def test_a_busy_worker_is_left_alone() -> None:
    async with residency() as made:
        await made.wait_ready()
        old = pid_of(made)
        # many intervals long, made of short steps
        stream = (await made.client("m")).submit(a_request(max_tokens=10_000))
        assert (await last_of(stream)).reason is FinishReason.LENGTH
        assert pid_of(made) == old


@pytest.mark.slow
def test_a_front_and_a_worker_suspended_together_continue_together() -> None:
    """As with Ctrl-Z, or on a sleeping laptop. In a separate process."""
    front = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.front_main"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    )
    assert front.stdin is not None
    assert front.stdout is not None
    try:
        worker = int(front.stdout.readline())
        for pid in (worker, front.pid):
            os.kill(pid, signal.SIGSTOP)
        # neither of the two may count this time
        threading.Event().wait(2 * IMPATIENT.hang_seconds)
        for pid in (front.pid, worker):
            os.kill(pid, signal.SIGCONT)
        front.stdin.write("\n")
        front.stdin.flush()
        assert front.stdout.readline() == f"{worker} answers\n"
    finally:
        front.kill()
        front.wait()
