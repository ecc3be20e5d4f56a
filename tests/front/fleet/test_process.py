from __future__ import annotations

import asyncio
import logging
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from holdfast.front.fleet.process import WorkerProcess, describe_exit
from holdfast.front.link import worker_link
from holdfast.front.link.model_client import ModelClient
from holdfast.wire.events import (
    Finished,
    FinishReason,
    LoadProgress,
    TokensGenerated,
    WorkerFailed,
    WorkerReady,
)
from tests.fakes.fake_engine import expected_tokens
from tests.fakes.fake_worker import a_request, fake_settings

ENDLESS = 900_000


@asynccontextmanager
async def worker(
    behaviour: str = "good",
    *,
    on_progress: Callable[[LoadProgress], None] = lambda event: None,
    client: ModelClient | None = None,
) -> AsyncIterator[WorkerProcess]:
    on_events = (client or ModelClient(unread_bytes=1 << 20)).deliver_events
    process = await WorkerProcess.start(
        fake_settings(behaviour), on_progress=on_progress, on_events=on_events
    )
    try:
        yield process
    finally:
        await process.stop()
        assert not process.is_alive


@asynccontextmanager
async def serving(
    behaviour: str = "good", *, on_progress: Callable[[LoadProgress], None] = lambda event: None
) -> AsyncIterator[tuple[WorkerProcess, ModelClient]]:
    """A serving worker and its client."""
    client = ModelClient(unread_bytes=1 << 20)
    async with worker(behaviour, on_progress=on_progress, client=client) as process:
        ready = await process.wait_started(timeout_seconds=30)
        assert isinstance(ready, WorkerReady)
        assert ready.pid == process.pid
        client.use_worker(process.link, ready.model)
        yield process, client


async def exited(process: WorkerProcess) -> None:
    """Wait until the process has exited on its own."""
    while process.is_alive:
        await asyncio.sleep(0.005)


async def test_a_start_that_fails_before_the_process_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_long = tmp_path / ("x" * 120)  # for sockets, and there is no other place for them
    too_long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(too_long))
    monkeypatch.setattr(worker_link, "SHORT_FOLDER", tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        await WorkerProcess.start(
            fake_settings("good"), on_progress=lambda event: None, on_events=lambda events: None
        )
    assert list(too_long.iterdir()) == []


async def test_a_worker_reports_that_it_is_ready_and_serves() -> None:
    stages: list[str] = []
    async with serving(on_progress=lambda event: stages.append(event.stage)) as (process, client):
        events = [event async for event in client.submit(a_request())]
    tokens = [
        token for event in events if isinstance(event, TokensGenerated) for token in event.token_ids
    ]
    assert tokens == expected_tokens(a_request())
    assert stages == ["reading"]
    assert await process.stop() == 0


async def test_a_worker_inherits_the_environment_with_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENBLAS_THREAD_TIMEOUT", "20")
    monkeypatch.delenv("MLX_ENABLE_CACHE_THRASHING_CHECK", raising=False)
    async with worker() as process:
        environment = psutil.Process(process.pid).environ()
    assert environment["OPENBLAS_THREAD_TIMEOUT"] == "20"
    assert environment["MLX_ENABLE_CACHE_THRASHING_CHECK"] == "0"


async def test_a_stop_signal_during_a_workers_exit_changes_nothing() -> None:
    async with worker("signalled-at-exit") as process:
        await process.wait_started(timeout_seconds=30)
        assert await process.stop() == 0


async def test_a_bad_model_is_reported_as_such() -> None:
    async with worker("bad") as process:
        outcome = await process.wait_started(timeout_seconds=30)
        assert outcome == WorkerFailed(message="the folder is bad", fatal_input=True)


async def test_a_worker_that_dies_while_loading_is_reported() -> None:
    async with worker("dies-loading") as process:
        outcome = await process.wait_started(timeout_seconds=30)
        assert isinstance(outcome, WorkerFailed)
        assert "SIGKILL" in outcome.message
        assert not outcome.fatal_input


async def test_a_worker_that_is_not_ready_in_time_is_killed() -> None:
    async with worker("hangs") as process:
        outcome = await process.wait_started(timeout_seconds=0.3)
        assert isinstance(outcome, WorkerFailed)
        assert "not loaded within" in outcome.message
        assert not process.is_alive


async def test_a_killed_worker_ends_no_stream() -> None:
    async with serving() as (process, client):
        streams = [client.submit(a_request(str(index), max_tokens=ENDLESS)) for index in range(3)]
        for stream in streams:
            while not isinstance(await anext(stream), TokensGenerated):
                continue
        psutil.Process(process.pid).kill()
        await process.wait_lost()
        assert await process.stop() == -signal.SIGKILL
        loss = client.worker_lost()
        assert (len(loss.requests), loss.had_progress, loss.refused) == (3, True, ())
        assert all(loss.generated_tokens)
        assert client.open_streams == 3
        assert not process.link.send(a_request("late"))


async def test_a_broken_device_ends_the_process_but_not_its_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="holdfast.worker"):
        async with serving("broken-device") as (process, client):
            for index in range(4):
                client.submit(a_request(str(index)))
            await exited(process)
            assert await process.stop() == 1
            assert client.open_streams == 4
    assert any("the device refuses the step" in record.message for record in caplog.records)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_worker_ignores_signals_to_the_whole_process_group(number: signal.Signals) -> None:
    async with serving() as (process, client):
        psutil.Process(process.pid).send_signal(number)
        events = [event async for event in client.submit(a_request())]
        assert isinstance(events[-1], Finished)
        assert events[-1].reason is FinishReason.LENGTH


async def test_a_worker_ends_when_the_link_is_cut() -> None:
    async with serving() as (process, _):
        await process.link.close()
        async with asyncio.timeout(60):
            await exited(process)
            assert await process.stop() == 0


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit code 0"), (-9, "signal SIGKILL"), (-99, "signal 99")]
)
def test_an_exit_is_described_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


async def test_a_child_that_outlives_the_worker_delays_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.front.fleet.process.LOG_SECONDS", 0.05)
    async with serving("has-a-child") as (process, _):
        worker = psutil.Process(process.pid)
        (child,) = worker.children()
        worker.kill()
        await process.wait_lost()
        assert await process.stop() == -signal.SIGKILL
        assert child.is_running()
        child.kill()
