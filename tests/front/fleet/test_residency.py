from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from holdfast.config import ResidencySettings
from holdfast.errors import (
    ModelLoadError,
    QueueFull,
    SessionFailure,
    UnknownModel,
    WorkerUnavailable,
)
from holdfast.front.fleet.process import WorkerProcess
from holdfast.front.fleet.worker_files import MOST_REQUESTS, CrashReport
from holdfast.front.link.event_stream import EventStream, RequestEvent
from holdfast.wire.events import Accepted, Finished, FinishReason, PrefillFinished, TokensGenerated
from holdfast.wire.sessions import SessionCommand
from tests.fakes.fake_engine import expected_tokens
from tests.fakes.fake_models import OneModel
from tests.fakes.fake_worker import SETTINGS, a_request, fake_settings


async def collected(stream: EventStream) -> list[RequestEvent]:
    return [event async for event in stream]


def tokens_of(events: Sequence[RequestEvent]) -> list[int]:
    return [
        token for event in events if isinstance(event, TokensGenerated) for token in event.token_ids
    ]


async def kill(made: OneModel) -> None:
    """Kill the serving worker, and wait until the front notices."""
    pid, link = made.statuses()[0].pid, (await made.client("m")).worker
    psutil.Process(pid).kill()
    await link.lost


async def begun(streams: Sequence[EventStream]) -> None:
    """Wait until each of the streams has a new token."""
    known = [len(stream.token_ids) for stream in streams]
    while any(len(stream.token_ids) == count for stream, count in zip(streams, known, strict=True)):
        await asyncio.sleep(0.001)


@asynccontextmanager
async def residency(
    behaviour: str = "good", *, settings: ResidencySettings | None = None
) -> AsyncIterator[OneModel]:
    made = OneModel(fake_settings(behaviour, residency=settings))
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
        (status,) = made.statuses()
        assert (status.state in ("unloaded", "failed"), status.pid) == (True, None)


async def test_a_client_is_available_once_the_model_is_ready() -> None:
    async with residency() as made:
        (loading,) = made.statuses()
        assert loading.state == "loading"
        assert loading.pid is not None
        assert loading.weights_read == 0.0
        read: set[float | None] = set()
        while (status := made.statuses()[0]).state == "loading":
            read.add(status.weights_read)
            await asyncio.sleep(0)
        assert max(filter(None, read)) > 0.0  # its worker's reports
        await made.wait_ready()
        (ready,) = made.statuses()
        assert (ready.state, ready.created) == ("ready", loading.created)
        assert ready.weights_read is None
        events = [event async for event in (await made.client("m")).submit(a_request())]
        assert isinstance(events[-1], Finished)
        assert (await made.statistics())["m"].finished == 1


async def test_a_client_of_an_unknown_model_is_refused() -> None:
    async with residency() as made:
        with pytest.raises(UnknownModel, match="available: m"):
            await made.client("other")


async def test_a_dead_worker_is_replaced_and_its_streams_continue() -> None:
    asked = [a_request(str(index), max_tokens=5_000 + index) for index in range(2)]
    async with residency() as made:
        await made.wait_ready()
        client = await made.client("m")
        streams = [client.submit(each) for each in asked]
        for _ in range(2):
            await begun(streams)
            await kill(made)
        answers = [await collected(stream) for stream in streams]
        assert [tokens_of(events) for events in answers] == [
            expected_tokens(each) for each in asked
        ]
        for each, events in zip(asked, answers, strict=True):
            assert [type(event) for event in events if not isinstance(event, TokensGenerated)] == [
                Accepted,
                PrefillFinished,
                Finished,
            ]
            (end,) = [event for event in events if isinstance(event, Finished)]
            assert (end.reason, end.completion_tokens) == (FinishReason.LENGTH, each.max_tokens)
            assert end.resumptions == 2
        assert made.statuses()[0].restarts == {"died": 2, "hung": 0}
        assert made.statuses()[0].resumed == 4


async def test_the_next_worker_answers_a_dead_workers_session_command() -> None:
    async with residency() as made:
        client = await made.client("m")
        pid = made.statuses()[0].pid
        worker = psutil.Process(pid)
        worker.suspend()
        while worker.status() != psutil.STATUS_STOPPED:  # it could still answer before
            await asyncio.sleep(0.001)
        asked = asyncio.create_task(client.call(SessionCommand(operation="list", tenant="")))
        await asyncio.sleep(0)
        await kill(made)
        assert (await asked).failure is SessionFailure.OFF  # this worker keeps nothing
        assert made.statuses()[0].pid != pid


async def test_streams_end_with_one_error_if_no_worker_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.front.fleet.supervised_worker.LONGEST_BACKOFF_SECONDS", 0.0)
    crashes = tmp_path / "crashes"
    made = OneModel(fake_settings("good-once", place=str(tmp_path), crash_reports=str(crashes)))
    await made.start()
    try:
        client = await made.client("m")
        streams = [
            client.submit(a_request(str(index), max_tokens=900_000))
            for index in range(MOST_REQUESTS + 2)
        ]
        await begun(streams[:2])
        await kill(made)
        for stream in streams:
            *_, end = await collected(stream)
            assert isinstance(end, Finished)
            assert end.reason is FinishReason.FAILED
            assert (
                "has died and cannot be started again: it died while loading (signal SIGKILL)"
                in end.error
            )
    finally:
        await made.stop()
    first, *later = [
        msgspec.json.decode(path.read_bytes(), type=CrashReport)
        for path in sorted(crashes.glob("*.crash.json"))
    ]
    assert [request.prompt_tokens for request in first.requests] == [3] * MOST_REQUESTS
    assert first.more_requests == 2
    assert first.served_seconds is not None
    assert [report.served_seconds for report in later[:2]] == [None, None]


async def test_open_streams_end_when_the_server_stops() -> None:
    async with residency() as made:
        client = await made.client("m")
        running = client.submit(a_request("a", max_tokens=900_000))
        await begun([running])
        await kill(made)
        waiting = client.submit(a_request("b"))
    for stream in (running, waiting):
        *_, end = await collected(stream)
        assert isinstance(end, Finished)
        assert (end.reason, end.error) == (FinishReason.FAILED, "the server is shutting down")


async def test_a_bad_model_is_not_tried_again() -> None:
    async with residency("bad") as made:
        with pytest.raises(ModelLoadError, match="the folder is bad"):
            await made.wait_ready()
        assert made.statuses()[0].state == "failed"


async def test_a_worker_that_never_starts_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.front.fleet.supervised_worker.LONGEST_BACKOFF_SECONDS", 0.0)
    async with residency("dies-loading") as made:
        with pytest.raises(WorkerUnavailable, match="SIGKILL"):
            await made.wait_ready()


async def test_a_lease_waits_until_the_model_serves() -> None:
    async with residency() as made:
        clients = await asyncio.gather(*(made.client("m") for _ in range(20)))
        assert made.statuses()[0].state == "ready"
        events = [event async for event in clients[7].submit(a_request())]
        assert isinstance(events[-1], Finished)


async def test_a_lease_waits_while_a_dead_worker_is_replaced() -> None:
    async with residency() as made:
        await made.client("m")
        first = made.statuses()[0].pid
        await kill(made)
        second = await made.client("m")
        assert made.statuses()[0].pid != first
        assert isinstance([event async for event in second.submit(a_request())][-1], Finished)


@pytest.mark.parametrize("seconds", [0.0, 0.05])
async def test_a_request_waits_no_longer_than_the_settings_allow(seconds: float) -> None:
    async with residency("hangs", settings=ResidencySettings(load_seconds=seconds)) as made:
        with pytest.raises(WorkerUnavailable, match="still loading"):
            await made.client("m")
        assert made.statuses()[0].state == "loading"


async def test_all_requests_for_an_unloadable_model_get_the_reason() -> None:
    async with residency("bad") as made:
        outcomes = await asyncio.gather(
            *(made.client("m") for _ in range(5)), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [WorkerUnavailable] * 5
        assert all("the folder is bad" in str(outcome) for outcome in outcomes)
        with pytest.raises(WorkerUnavailable, match="the folder is bad"):
            await made.client("m")
        with pytest.raises(ModelLoadError):
            await made.wait_ready()


async def test_no_more_requests_wait_than_the_workers_queue_holds() -> None:
    async with residency("hangs") as made:
        places = SETTINGS.max_queued + SETTINGS.max_running
        many = asyncio.create_task(made.client("m", places - 1))
        one = asyncio.create_task(made.client("m"))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as refused:
            await made.client("m")
        assert (refused.value.queued, refused.value.limit) == (places, places)
        one.cancel()  # leaving frees a place
        await asyncio.wait([one])
        another = asyncio.create_task(made.client("m"))
        await asyncio.sleep(0)
        assert not another.done()
    for waiting in (many, another):
        with pytest.raises(WorkerUnavailable, match="shutting down"):
            await waiting


async def test_a_moment_without_sockets_does_not_end_the_supervision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.front.fleet.supervised_worker.LONGEST_BACKOFF_SECONDS", 0.0)
    make, failures = zmq.Context.socket, [zmq.ZMQError(errno.EMFILE)]

    def socket(
        context: zmq.Context[zmq.Socket[bytes]], *arguments: Any, **options: Any
    ) -> zmq.Socket[bytes]:
        if failures:
            raise failures.pop()
        return make(context, *arguments, **options)

    async with residency() as made:
        await made.client("m")
        monkeypatch.setattr(zmq.Context, "socket", socket)
        await kill(made)
        second = await made.client("m")
        assert failures == []
        assert isinstance([event async for event in second.submit(a_request())][-1], Finished)


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), ValueError("a fault of ours")]
)
async def test_an_error_during_a_restart_leaves_nobody_waiting(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(folder: str, report: CrashReport) -> None:
        raise error

    monkeypatch.setattr("holdfast.front.fleet.supervised_worker.write_report", fails)
    async with residency() as made:
        stream = (await made.client("m")).submit(a_request(max_tokens=5_000))
        await begun([stream])
        await kill(made)
        *_, end = await collected(stream)
        assert isinstance(end, Finished)
        assert end.reason is (
            FinishReason.LENGTH if isinstance(error, RuntimeError) else FinishReason.FAILED
        )
        assert ("no longer supervised (ValueError" in end.error) is isinstance(error, ValueError)
        assert str(error) in caplog.text


async def test_stopping_ends_the_wait_for_the_first_load() -> None:
    made = OneModel(fake_settings("hangs"))
    await made.start()
    waiting = asyncio.create_task(made.load("m"))
    await asyncio.sleep(0)
    await made.stop()
    with pytest.raises(WorkerUnavailable, match="shutting down"):
        await waiting


async def test_a_wait_for_the_process_launch_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    begins = asyncio.Event()

    async def never(*arguments: Any, **options: Any) -> None:
        begins.set()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(WorkerProcess, "start", never)
    made = OneModel(fake_settings())
    starting = asyncio.create_task(made.start())
    await begins.wait()
    waiting = asyncio.create_task(made.client("m"))
    await asyncio.sleep(0)
    await made.stop()
    for task in (starting, waiting):
        await asyncio.wait([task])
    assert isinstance(waiting.exception(), WorkerUnavailable)
