"""The device thread's end of the link: commands in, events out.

The thread that computes also speaks to the socket.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from holdfast.wire.commands import SHUT_DOWN, Command
from holdfast.wire.events import Event

# the last events (Finished of cancelled requests) must leave before the process does
LINGER_MILLISECONDS = 2_000


class Inbox(Protocol):
    """Where the worker's loop gets its commands from. Device thread only."""

    def receive(self, *, timeout_seconds: float) -> list[Command]:
        """All commands that are there; waits for the first one up to the timeout (0: polls)."""
        ...

    def send(self, events: Sequence[Event]) -> None:
        """Give the front all events of one step as one message."""
        ...

    def close(self) -> None:
        """Let go of the link; nothing may be sent afterwards."""
        ...


class ZmqInbox:
    """Inbox over a ZeroMQ PAIR socket.

    A front that is gone, and a byte on `wake_fd`, read as `SHUT_DOWN`.
    """

    def __init__(self, endpoint: str, *, wake_fd: int) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        # a front that closed is gone for good; a new one starts a new worker
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(endpoint)
        self._wake_fd = wake_fd
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor, wake_fd):
            self._poller.register(source, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(list[Command])
        self._encoder = msgspec.msgpack.Encoder()
        self._over = False

    def receive(self, *, timeout_seconds: float) -> list[Command]:
        """All commands that are there; waits for the first one up to the timeout (0: polls)."""
        if self._over:
            return [SHUT_DOWN]
        ready = dict(self._poller.poll(int(timeout_seconds * 1000)))
        commands: list[Command] = []
        if self._socket in ready:
            commands = self._drain()
        if self._monitor in ready:
            recv_monitor_message(self._monitor)
            self._over = True
        if self._wake_fd in ready:
            self._over = True
        if self._over:
            commands.append(SHUT_DOWN)
        return commands

    def send(self, events: Sequence[Event]) -> None:
        """Give the front all events of one step as one message."""
        if not events:
            return
        try:
            self._socket.send(self._encoder.encode(events), zmq.NOBLOCK)
        except zmq.Again:
            self._over = True  # without a high-water mark only a missing peer refuses a message

    def close(self) -> None:
        """Let go of the link; waits until the last message has left, bounded by the linger time."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()

    def _drain(self) -> list[Command]:
        commands: list[Command] = []
        with contextlib.suppress(zmq.Again):
            while True:
                commands += self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
        return commands
