"""The front's end of the link to a worker process: a ZeroMQ PAIR socket in a private folder, read
straight from the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from holdfast.errors import WorkerUnavailable
from holdfast.files import CLAIM_PREFIX, Claim, claim
from holdfast.wire.commands import (
    SHUT_DOWN,
    TELL_STATISTICS,
    Command,
    ControlAction,
    LogChange,
    MemoryChange,
    ReadAheadRun,
    SchedulerLimits,
    SequenceControl,
    SequenceRequest,
    ThoughtLimit,
)
from holdfast.wire.events import (
    Event,
    Heartbeat,
    LoadProgress,
    ModelInfo,
    WorkerFailed,
    WorkerReady,
    WorkerStatistics,
)
from holdfast.wire.requests import RequestId
from holdfast.wire.sessions import SessionCommand

# a long prompt chunk may keep the worker from answering; then the last known figures serve
STATISTICS_PATIENCE_SECONDS = 1.0
# where sockets go when paths in the folder for temporary files are too long for them
SHORT_FOLDER = Path("/tmp")
_SOCKET = "link"


class WorkerLink:
    """The link to one worker process, for the life of that process.

    Loop's thread only. Whose events come is not known here.

    The socket is drained by a plain reader callback on its file descriptor: an event costs one
    wake-up of the loop, with no task in between. Bound before the worker is started, so that
    nothing the worker says is lost.
    """

    def __init__(
        self,
        *,
        on_progress: Callable[[LoadProgress], None],
        deliver: Callable[[Sequence[Event]], None],
    ) -> None:
        """deliver: is given the events of each message, in order, until the link is closed.

        Raises OSError when there is no folder or no socket to be had.
        """
        self._loop = asyncio.get_running_loop()
        self._claim = _socket_folder()
        self._folder = self._claim.folder
        self.endpoint, self.heartbeat_endpoint = (
            f"ipc://{self._folder}/{_SOCKET}",
            f"ipc://{self._folder}/beat",
        )
        self.started: asyncio.Future[WorkerReady | WorkerFailed] = self._loop.create_future()
        # done when the worker has been seen to be gone
        self.lost: asyncio.Future[None] = self._loop.create_future()
        self._on_progress, self._deliver_events = on_progress, deliver
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder, self._beat_decoder = (
            msgspec.msgpack.Decoder(list[Event]),
            msgspec.msgpack.Decoder(Heartbeat),
        )
        self._statistics: asyncio.Future[WorkerStatistics] | None = None
        self.last_statistics = WorkerStatistics()  # a working worker tells them unasked
        self._closed = False
        self._context = zmq.Context()
        try:
            self._open_sockets()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            self._claim.give_back()
            raise OSError(error.errno, f"the link to a worker cannot be made: {error}") from error
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._monitor_fd = int(self._monitor.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._loop.add_reader(self._monitor_fd, self._notice_disconnect)
        # a ZeroMQ descriptor tells of news only since the last look, so there must be a first one
        self._drain()
        self._notice_disconnect()

    def _open_sockets(self) -> None:
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            self._socket.setsockopt(option, value)
        # only the newest is kept
        self.heartbeats: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        for option, value in ((zmq.CONFLATE, 1), (zmq.LINGER, 0)):
            self.heartbeats.setsockopt(option, value)
        self.heartbeats.bind(self.heartbeat_endpoint)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.bind(self.endpoint)

    @property
    def info(self) -> ModelInfo:
        """What the worker knows of its model. Raises WorkerUnavailable before it is ready."""
        if self.started.done() and not self.started.cancelled():
            outcome = self.started.result()
            if isinstance(outcome, WorkerReady):
                return outcome.model
        raise WorkerUnavailable("the model is not loaded yet; please try again")

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent: the worker has not been seen to be gone."""
        return not self._closed and not self.lost.done()

    def submit(self, request: SequenceRequest) -> None:
        """Send one sequence. Raises WorkerUnavailable when the worker is gone."""
        self._send(request)

    def steer(self, request_id: RequestId, action: ControlAction) -> None:
        """Cancel, pause or resume a sequence; a worker that is gone need not know."""
        with contextlib.suppress(WorkerUnavailable):
            self._send(SequenceControl(request_id=request_id, action=action))

    def limit_thoughts(self, limit: ThoughtLimit) -> None:
        """Give a sequence another thinking budget; a worker that is gone need not know."""
        with contextlib.suppress(WorkerUnavailable):
            self._send(limit)

    async def statistics(self) -> WorkerStatistics:
        """The worker's counters of now, or the last ones known when it is busy with a long step."""
        if self._statistics is None:
            self._send(TELL_STATISTICS)
            self._statistics = self._loop.create_future()
        try:
            async with asyncio.timeout(STATISTICS_PATIENCE_SECONDS):
                return await asyncio.shield(self._statistics)
        except TimeoutError:
            return self.last_statistics

    async def set_limits(self, limits: SchedulerLimits) -> WorkerStatistics:
        """Have other limits of running sequences and of a step; returns what counts then, as
        `statistics` does.
        """
        self._send(limits)
        return await self.statistics()

    def set_log_level(self, level: str) -> None:
        """Have it log what is so severe; a worker that is gone need not know."""
        with contextlib.suppress(WorkerUnavailable):
            self._send(LogChange(level=level))

    def share_memory(self, state_bytes: int) -> None:
        """Tell it how much KV and blocks in RAM may take together; a worker that is gone need not
        know.
        """
        with contextlib.suppress(WorkerUnavailable):
            self._send(MemoryChange(state_bytes=state_bytes))

    def note_read_ahead(self, run: ReadAheadRun) -> None:
        """Tell it what an earlier worker read ahead; a worker that is gone need not know."""
        with contextlib.suppress(WorkerUnavailable):
            self._send(run)

    def send_session(self, command: SessionCommand) -> None:
        """Have a session command carried out; its answer is an event.

        Raises WorkerUnavailable when the worker is gone.
        """
        self._send(command)

    def poll_heartbeat(self) -> Heartbeat | None:
        """The newest heartbeat of the worker, if one has come since the last look.

        Needs no reader on the loop.
        """
        newest = None
        while not self.heartbeats.closed and _readable(self.heartbeats):
            newest = self._beat_decoder.decode(self.heartbeats.recv(zmq.NOBLOCK))
        return newest

    def shut_down_worker(self) -> None:
        """Ask the worker to end in order; its last events still arrive."""
        # it is gone already, which is what was asked for
        with contextlib.suppress(WorkerUnavailable):
            self._send(SHUT_DOWN)

    def fail(self, message: str) -> None:
        """The worker is gone: nothing more is sent, and who waits for its answer is told."""
        if not self._closed:
            self._drain()  # what it said before it died still counts
        if not self.lost.done():
            self.lost.set_result(None)
        if self._statistics is not None and not self._statistics.done():
            self._statistics.set_result(self.last_statistics)
        if not self.started.done():
            self.started.set_result(WorkerFailed(message=message, fatal_input=False))

    async def close(self) -> None:
        """Ask the worker to end and let go of the socket and its folder."""
        if self._closed:
            return
        self.shut_down_worker()
        self.fail("the server is shutting down")
        self._closed = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_reader(self._monitor_fd)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=200)
        self.heartbeats.close()
        self._context.term()
        self._claim.give_back()

    def _send(self, command: Command) -> None:
        if self._closed:
            raise WorkerUnavailable("the server is shutting down")
        if self.lost.done():
            raise WorkerUnavailable("the worker process of the model is gone; please try again")
        try:
            self._socket.send(self._encoder.encode((command,)), zmq.NOBLOCK)
        except zmq.Again:
            raise WorkerUnavailable("the worker process is not there; please try again") from None
        # The descriptor is edge-triggered: sending may swallow the edge of an event that arrived
        # meanwhile.
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        while not self._closed and _readable(self._socket):
            self._deliver(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, LoadProgress):
                self._on_progress(event)
            elif isinstance(event, WorkerReady | WorkerFailed):
                if not self.started.done():
                    self.started.set_result(event)
            elif isinstance(event, WorkerStatistics):
                self.last_statistics = event
                if event.in_answer and self._statistics is not None:
                    if not self._statistics.done():
                        self._statistics.set_result(event)
                    self._statistics = None
        self._deliver_events(events)

    def _notice_disconnect(self) -> None:
        while not self._closed and _readable(self._monitor):
            recv_monitor_message(self._monitor)
            self.fail("the worker process of the model died; please try again")


def _readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _socket_folder() -> Claim:
    """A folder that only we may look into, so that nobody else may speak to the worker, with a path
    that sockets can have.
    """
    claimed = claim(Path(tempfile.gettempdir()), prefix=CLAIM_PREFIX)
    if _takes_sockets(claimed.folder):
        return claimed
    claimed.give_back()
    return claim(SHORT_FOLDER, prefix=CLAIM_PREFIX)


def _takes_sockets(folder: Path) -> bool:
    """Tried out: paths of sockets end at 104 bytes (macOS) or 108 (Linux), and some file systems
    have no sockets.
    """
    path = folder / f"{_SOCKET}-?"  # a little longer than the real one
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.bind(str(path))
        path.unlink()
        return True
    return False
