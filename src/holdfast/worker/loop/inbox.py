"""The worker's end of the link to the front: commands in, events and heartbeats out.

The thread that computes also reads and writes the socket; only heartbeats have their own thread.
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

from holdfast.machine.process_time import own_queue_times, share_of_core
from holdfast.wire.commands import SHUT_DOWN, Command
from holdfast.wire.events import Event, Heartbeat

# the last events (Finished of cancelled requests) must be sent before the process exits
LINGER_MILLISECONDS = 2_000
# with this many major page faults between two heartbeats, the process is assumed to be paging
PAGING_FAULTS = 16
_RESTING = Heartbeat(activity="resting", expected_seconds=0.0)

Progress = Callable[[str, float], None]  # called while a model loads, with stage and fraction


class Inbox(Protocol):
    """The source of the worker loop's commands, and the sink of its events. Device thread only."""

    def receive(self, *, timeout_seconds: float) -> list[Command]:
        """Return all commands that have arrived. If there are none, wait for the first one, at most
        for the timeout.
        """
        ...

    def send(self, events: Sequence[Event]) -> None:
        """Send the events of one step as one message."""
        ...

    def close(self) -> None:
        """Close the link; nothing may be sent afterwards."""
        ...


class ZmqInbox:
    """Inbox over a ZeroMQ PAIR socket.

    If the front ends, or a byte arrives on the file descriptor `wake_fd`, `receive` returns
    `SHUT_DOWN`.
    """

    def __init__(self, endpoint: str, *, wake_fd: int) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        # a front that closed does not come back; a new front starts a new worker
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        # tells when the front has closed its end
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(endpoint)
        self._wake_fd = wake_fd
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor, wake_fd):
            self._poller.register(source, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(list[Command])
        self._encoder = msgspec.msgpack.Encoder()
        self._is_link_over = False

    def receive(self, *, timeout_seconds: float) -> list[Command]:
        if self._is_link_over:
            return [SHUT_DOWN]
        ready = dict(self._poller.poll(int(timeout_seconds * 1000)))
        commands: list[Command] = []
        if self._socket in ready:
            with contextlib.suppress(zmq.Again):
                while True:
                    commands += self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
        if self._monitor in ready:
            self._monitor.recv_multipart()
            self._is_link_over = True
        if self._wake_fd in ready:
            self._is_link_over = True
        if self._is_link_over:
            commands.append(SHUT_DOWN)
        return commands

    def send(self, events: Sequence[Event]) -> None:
        if not events:
            return
        try:
            self._socket.send(self._encoder.encode(events), zmq.NOBLOCK)
        except zmq.Again:
            # without a high-water mark, sending fails only without a peer
            self._is_link_over = True

    def close(self) -> None:
        """Close the link; waits until the last message is sent, at most for the linger time."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()


class Pulse:
    """The activity of the device thread, and its duration: the content of a heartbeat.

    The device thread writes the activity and the heartbeat thread reads it: a single reference,
    replaced as a whole. The identity of the object tells whether the device thread is still in the
    same activity. At most one heartbeat interval is counted between two heartbeats, and only the
    share in which the process did not wait for a core. So if the process is stopped, or the
    machine sleeps or is busy, work seems shorter than it is, never longer.
    """

    def __init__(self, *, interval_seconds: float = math.inf) -> None:
        """interval_seconds: time between two heartbeats; infinite if none are sent."""
        self.interval_seconds = interval_seconds
        self._occupation = Heartbeat(activity="loading")  # what the device thread does now
        self._last_beaten = self._occupation  # at the last heartbeat
        self._lasting_seconds = 0.0  # how long that has lasted

    def rest(self) -> None:
        """Record that the device thread waits for commands from now on."""
        self._occupation = _RESTING

    def work(self, expected_seconds: float | None = None) -> None:
        """Record that the thread works. expected_seconds: upper bound; None: unknown."""
        self._occupation = Heartbeat(activity="working", expected_seconds=expected_seconds)

    def beat(
        self, *, elapsed_seconds: float, page_faults: int, share_of_core: float = 1.0
    ) -> Heartbeat:
        """Create the next heartbeat. Heartbeat thread only.

        elapsed_seconds, page_faults: the time and the major page faults since the last heartbeat.
        share_of_core: how much of that time the process could use (`process_time`).
        """
        occupation = self._occupation
        if occupation is not self._last_beaten:
            self._last_beaten = occupation
            self._lasting_seconds = 0.0
        elif page_faults < PAGING_FAULTS:
            counted = min(elapsed_seconds, self.interval_seconds)
            self._lasting_seconds += counted * share_of_core
        return msgspec.structs.replace(occupation, lasting_seconds=self._lasting_seconds)


class Heart:
    """Sends a heartbeat immediately, and then at every interval of the pulse.

    The socket keeps only the latest heartbeat (CONFLATE), so heartbeats do not pile up if the front
    does not read them.
    """

    def __init__(self, endpoint: str, pulse: Pulse) -> None:
        self._endpoint = endpoint
        self._pulse = pulse
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-heart", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.setsockopt(zmq.CONFLATE, 1)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._endpoint)
            self._beat(socket)

    def _beat(self, socket: zmq.Socket[bytes]) -> None:
        """Send heartbeats until told to stop; each reports the page faults and the processor time
        since the last.
        """
        encoder = msgspec.msgpack.Encoder()
        last_beat_at = time.monotonic()
        faults_before = _major_page_faults()
        times_before = own_queue_times()
        while True:
            now = time.monotonic()
            faults = _major_page_faults()
            times = own_queue_times()
            elapsed = now - last_beat_at
            beat = self._pulse.beat(
                elapsed_seconds=elapsed,
                page_faults=faults - faults_before,
                share_of_core=share_of_core(times_before, times, elapsed_seconds=elapsed),
            )
            last_beat_at = now
            faults_before = faults
            times_before = times
            socket.send(encoder.encode(beat))  # never blocks, because of CONFLATE
            if self._stopped.wait(self._pulse.interval_seconds):
                return


def _major_page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
