from __future__ import annotations

import asyncio
import errno
import os
import random
import stat
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from holdfast.errors import WorkerUnavailable
from holdfast.front.link.model_client import ModelClient
from holdfast.front.link.worker_link import WorkerLink
from holdfast.wire.cache_map import CacheMap, CacheMapQuestion
from holdfast.wire.commands import (
    SHUT_DOWN,
    TELL_STATISTICS,
    Command,
    SequenceControl,
    SequenceRequest,
)
from holdfast.wire.events import (
    Accepted,
    Event,
    Finished,
    FinishReason,
    TokensGenerated,
    WorkerReady,
    WorkerStatistics,
)
from holdfast.worker.loop.inbox import ZmqInbox
from tests.fakes.fake_worker import a_request
from tests.fakes.script_inbox import cancel
from tests.fakes.scripted_client import model_info

UNREAD_BYTES = 2048


def finished(request_id: str) -> Finished:
    return Finished(
        request_id=request_id, reason=FinishReason.LENGTH, prompt_tokens=3, completion_tokens=0
    )


def answer_at_once(command: Command) -> list[Event]:
    if isinstance(command, SequenceRequest):
        return [Accepted(request_id=command.request_id), finished(command.request_id)]
    return [WorkerStatistics(in_answer=True, steps=7)] if command == TELL_STATISTICS else []


class Peer:
    """The worker's end, on a thread of this process. Records the commands."""

    def __init__(self, endpoint: str, answer: Callable[[Command], list[Event]]) -> None:
        self.commands: list[Command] = []
        self._answer = answer
        self._wake_reader, self.wake_writer = os.pipe()
        self.thread = threading.Thread(target=self._serve, args=(endpoint,))
        self.thread.start()

    def _serve(self, endpoint: str) -> None:
        inbox = ZmqInbox(endpoint, wake_fd=self._wake_reader)
        inbox.send([WorkerReady(pid=os.getpid(), model=model_info())])
        while not any(command == SHUT_DOWN for command in self.commands):
            for command in inbox.receive(timeout_seconds=10):
                self.commands.append(command)
                inbox.send(self._answer(command))
        inbox.close()


@asynccontextmanager
async def linked(
    answer: Callable[[Command], list[Event]] = answer_at_once,
) -> AsyncIterator[tuple[ModelClient, Peer]]:
    client = ModelClient(unread_bytes=UNREAD_BYTES)
    link = WorkerLink(on_progress=lambda event: None, on_events=client.deliver_events)
    peer = Peer(link.endpoint, answer)
    try:
        async with asyncio.timeout(60):
            ready = await link.started
            assert isinstance(ready, WorkerReady)
            client.use_worker(link, ready.model)
            yield client, peer
    finally:
        await link.close()
        client.close("the server is shutting down")
        await asyncio.to_thread(peer.thread.join)


async def test_a_request_is_sent_and_its_events_come_back() -> None:
    async with linked() as (client, peer):
        assert [event async for event in client.submit(a_request("x"))] == [
            Accepted(request_id="x"),
            finished("x"),
        ]
        assert (await client.worker.statistics()).steps == 7
    assert a_request("x") in peer.commands
    assert peer.commands[-1] == SHUT_DOWN


async def test_questions_about_the_cache_get_their_own_answers() -> None:
    def answer(command: Command) -> list[Event]:
        if isinstance(command, CacheMapQuestion):
            return [CacheMap(call_id=command.call_id, blocks=len(command.tenant))]
        return answer_at_once(command)

    async with linked(answer) as (client, _):
        asked = [client.worker.cache_map(CacheMapQuestion(tenant="x" * size)) for size in range(9)]
        assert [found.blocks for found in await asyncio.gather(*asked)] == list(range(9))


async def test_a_cache_question_fails_when_the_worker_dies() -> None:
    async with linked(lambda command: []) as (client, peer):
        link = client.worker
        asking = asyncio.create_task(link.cache_map(CacheMapQuestion(tenant="")))
        while not peer.commands:
            await asyncio.sleep(0)
        os.write(peer.wake_writer, b".")
        with pytest.raises(WorkerUnavailable, match="died"):
            await asking
        with pytest.raises(WorkerUnavailable, match="gone"):
            await link.cache_map(CacheMapQuestion(tenant=""))


async def test_closing_a_stream_early_sends_a_cancel() -> None:
    def accept(command: Command) -> list[Event]:
        if isinstance(command, SequenceRequest):
            return [
                Accepted(request_id=command.request_id),
                TokensGenerated(request_id=command.request_id, token_ids=(1,)),
            ]
        return (
            [finished(command.request_id)]
            if isinstance(command, SequenceControl)
            else answer_at_once(command)
        )

    async with linked(accept) as (client, peer):
        stream = client.submit(a_request("x"))
        await anext(stream)
        await stream.aclose()
        assert client.open_streams == 0
        await client.worker.statistics()  # comes after the cancel
    assert cancel("x") in peer.commands


async def test_a_hundred_concurrent_streams_get_their_own_events() -> None:
    async with linked() as (client, _):
        streams = [client.submit(a_request(str(index))) for index in range(100)]
        for index, stream in enumerate(streams):
            assert [event async for event in stream][-1] == finished(str(index))


async def test_concurrent_requests_arrive_in_order_with_their_own_answers() -> None:
    choose = random.Random(13)
    sent: list[SequenceRequest] = []

    async def ask(number: int) -> None:
        for _ in range(choose.randrange(6)):
            await client.worker.statistics()  # a round trip
        beginning = choose.choice((7, 5000, 9000))
        prompt = tuple(range(beginning, beginning + choose.randrange(3000)))
        sent.append(a_request(str(number), prompt=(*prompt, number)))
        stream = client.submit(sent[-1])
        if choose.random() < 0.3:
            if choose.random() < 0.5:
                await client.worker.statistics()
            await stream.aclose()
        else:
            assert [event async for event in stream] == [
                Accepted(request_id=str(number)),
                finished(str(number)),
            ]

    async with linked() as (client, peer):
        await asyncio.gather(*map(ask, range(200)))
        sent.append(a_request("last"))
        assert [event async for event in client.submit(sent[-1])][-1] == finished("last")
        assert client.open_streams == 0
    assert [command for command in peer.commands if isinstance(command, SequenceRequest)] == sent


async def test_the_peers_exit_is_noticed_through_the_socket() -> None:
    async with linked(
        lambda command: answer_at_once(command) if command == TELL_STATISTICS else []
    ) as (
        client,
        peer,
    ):
        link = client.worker
        os.write(peer.wake_writer, b".")
        await link.lost
        assert not link.is_open
        assert not link.send(a_request("y"))
        with pytest.raises(WorkerUnavailable, match="gone"):
            await link.statistics()
        with pytest.raises(WorkerUnavailable, match="being replaced"):
            await client.worker.statistics()


async def test_the_sockets_folder_is_private_and_removed() -> None:
    async with linked() as (client, _):
        folder = Path(client.worker.endpoint.removeprefix("ipc://")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


async def test_a_round_trip_costs_less_than_a_token() -> None:
    async with linked() as (client, _):
        seconds = []
        for index in range(200):
            started_at = time.perf_counter()
            async for _event in client.submit(a_request(str(index))):
                pass
            seconds.append(time.perf_counter() - started_at)
    # The fastest tenth: the rest depends on other programs. 0.2 ms when idle; both ends share this
    # interpreter's lock.
    assert statistics.quantiles(seconds, n=10)[0] < 0.005, seconds


async def test_a_socket_failure_is_an_oserror_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(zmq.Context, "socket", refuse)
    with pytest.raises(OSError, match="the link to a worker cannot be created") as caught:
        WorkerLink(on_progress=lambda event: None, on_events=lambda events: None)
    assert caught.value.errno == errno.EMFILE
    assert list(tmp_path.iterdir()) == []
