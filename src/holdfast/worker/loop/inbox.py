"""The device thread's end of the link: commands in, events out.

The thread that computes also speaks to the socket.
"""

from __future__ import annotations

import contextlib
import math
import resource
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from holdfast.wire.commands import SHUT_DOWN, Command
from holdfast.wire.events import Event, Heartbeat

# the last events (Finished of cancelled requests) must leave before the process does
LINGER_MILLISECONDS = 2_000
# pages brought in from disk between two beats, from which on the process is taken to wait for its
# own memory
PAGING_FAULTS = 16


_RESTING = Heartbeat(activity="resting", expected_seconds=0.0)


Progress = Callable[[str, float], None]  # how far the model is loaded: stage, fraction


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


class Pulse:
    """Written by the device thread, read by the thread of the heartbeat: one reference, replaced
    whole.

    Which heartbeat it is, and not what it says, tells whether the device thread is still at the
    same thing. Time counts only in beats that are really made: a process that was stopped, a
    machine that slept and one that is too busy to let the heart's thread run make fewer beats, and
    so the work seems shorter, never longer, than it is.
    """

    def __init__(self, *, interval_seconds: float = math.inf) -> None:
        """interval_seconds: from one beat to the next; nobody looks without one."""
        self.interval_seconds = interval_seconds
        self._occupation = self._seen = Heartbeat(activity="loading")
        self._lasting_seconds = 0.0

    def rest(self) -> None:
        """From now on the device thread waits for commands."""
        self._occupation = _RESTING

    def work(self, expected_seconds: float | None = None) -> None:
        """From now on it does something that takes so long at most, as far as was measured; None:
        nothing like it was.
        """
        self._occupation = Heartbeat(activity="working", expected_seconds=expected_seconds)

    def beat(self, *, elapsed_seconds: float, page_faults: int) -> Heartbeat:
        """The next heartbeat.

        Its thread only. elapsed_seconds, page_faults (those that read a disk): since the one before
        it.
        """
        occupation = self._occupation
        if occupation is not self._seen:
            self._seen, self._lasting_seconds = occupation, 0.0
        elif page_faults < PAGING_FAULTS:
            self._lasting_seconds += min(elapsed_seconds, self.interval_seconds)
        return msgspec.structs.replace(occupation, lasting_seconds=self._lasting_seconds)


class Heart:
    """Sends a heartbeat at once and then at every interval of the pulse, until it is stopped.

    Only the last one is kept on the way (CONFLATE), so a front that does not read them makes
    nothing pile up.
    """

    def __init__(self, endpoint: str, pulse: Pulse) -> None:
        self._endpoint, self._pulse = endpoint, pulse
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-heart", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """Beat no more; waits for the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            for option, value in ((zmq.CONFLATE, 1), (zmq.LINGER, 0)):
                socket.setsockopt(option, value)
            socket.connect(self._endpoint)
            self._beat(socket)

    def _beat(self, socket: zmq.Socket[bytes]) -> None:
        encoder = msgspec.msgpack.Encoder()
        beaten_at, faults = time.monotonic(), _page_faults()
        while True:
            now, faults_now = time.monotonic(), _page_faults()
            beat = self._pulse.beat(
                elapsed_seconds=now - beaten_at, page_faults=faults_now - faults
            )
            beaten_at, faults = now, faults_now
            socket.send(encoder.encode(beat))  # never blocks: a newer one replaces an older one
            if self._stopped.wait(self._pulse.interval_seconds):
                return


def _page_faults() -> int:
    """Pages of this process that had to be read from a disk so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
