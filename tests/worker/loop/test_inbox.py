from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from holdfast.wire.commands import SHUT_DOWN, TELL_STATISTICS, Command
from holdfast.wire.events import Accepted, Event
from holdfast.worker.loop.inbox import ZmqInbox
from tests.fakes.script_inbox import cancel


class Front:
    """The front's end, without asyncio."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(endpoint)

    def send(self, *commands: Command) -> None:
        self.socket.send(msgspec.msgpack.encode(commands))

    def receive(self) -> list[Event]:
        assert self.socket.poll(10_000)
        return msgspec.msgpack.decode(self.socket.recv(), type=list[Event])

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def wake() -> tuple[int, int]:
    return os.pipe()


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    made = Front(f"ipc://{tmp_path}/link")
    yield made
    if not made.socket.closed:
        made.close()


@pytest.fixture
def inbox(front: Front, tmp_path: Path, wake: tuple[int, int]) -> Iterator[ZmqInbox]:
    made = ZmqInbox(f"ipc://{tmp_path}/link", wake_fd=wake[0])
    made.send([Accepted(request_id="hello")])
    assert front.receive() == [Accepted(request_id="hello")]
    yield made
    made.close()


def test_a_poll_without_news_returns_nothing(inbox: ZmqInbox) -> None:
    assert inbox.receive(timeout_seconds=0) == []


def test_commands_of_several_messages_are_received_together(front: Front, inbox: ZmqInbox) -> None:
    commands: list[Command] = [
        cancel("a"),
        TELL_STATISTICS,
        cancel("b"),
    ]
    front.send(commands[0], commands[1])
    front.send(commands[2])
    got: list[Command] = []
    while len(got) < 3:
        got += inbox.receive(timeout_seconds=10)
    assert got == commands


def test_the_events_of_a_step_are_one_message(front: Front, inbox: ZmqInbox) -> None:
    events: list[Event] = [Accepted(request_id="a"), Accepted(request_id="b")]
    inbox.send(events)
    inbox.send([])  # an empty list is not sent
    inbox.send(events[:1])
    assert front.receive() == events
    assert front.receive() == events[:1]


def test_a_closed_front_reads_as_shutdown(front: Front, inbox: ZmqInbox) -> None:
    front.close()
    assert inbox.receive(timeout_seconds=10) == [SHUT_DOWN]
    assert inbox.receive(timeout_seconds=10) == [SHUT_DOWN]
    inbox.send([Accepted(request_id="nobody hears it")])


def test_a_wake_byte_reads_as_shutdown(inbox: ZmqInbox, wake: tuple[int, int]) -> None:
    os.write(wake[1], b".")
    assert inbox.receive(timeout_seconds=10) == [SHUT_DOWN]
