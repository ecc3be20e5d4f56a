"""The front's end of the link to a worker process: a ZeroMQ PAIR socket in a private folder, read
directly by the event loop.
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
from holdfast.wire.cache_map import CacheMap, CacheMapQuestion
from holdfast.wire.commands import SHUT_DOWN, TELL_STATISTICS, Command
from holdfast.wire.events import (
    Event,
    Heartbeat,
    LoadProgress,
    WorkerFailed,
    WorkerReady,
    WorkerStatistics,
)

# during a long prompt chunk the worker may not answer; then the last known figures are used
STATISTICS_PATIENCE_SECONDS = 1.0
MAP_PATIENCE_SECONDS = 20.0
# for sockets whose path in the folder for temporary files would be too long
SHORT_FOLDER = Path("/tmp")
_SOCKET = "link"


class WorkerLink:
    """The link to one worker process, for the life of that process.

    It does not know which requests the events belong to.

    Only use it on the event loop's thread. A plain reader callback on the file descriptor drains
    the socket: an event costs one wake-up of the loop, with no task in between. The socket is bound
    before the worker starts, so no message of the worker is lost.
    """

    def __init__(
        self,
        *,
        on_progress: Callable[[LoadProgress], None],
        on_events: Callable[[Sequence[Event]], None],
    ) -> None:
        """on_progress: called with the progress of the load. on_events: called with the events of
        each message, in order, until the link is closed.

        Raises OSError if the folder or a socket cannot be created.
        """
        self._loop = asyncio.get_running_loop()
        self._claim = _socket_folder()  # the folder belongs to this process until `close`
        self.endpoint = f"ipc://{self._claim.folder}/{_SOCKET}"
        self.heartbeat_endpoint = f"ipc://{self._claim.folder}/beat"
        # completes when the worker serves or has failed
        self.started: asyncio.Future[WorkerReady | WorkerFailed] = self._loop.create_future()
        # completes when the worker is known to be gone
        self.lost: asyncio.Future[None] = self._loop.create_future()
        self._on_progress = on_progress
        self._on_events = on_events
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[Event])
        self._heartbeat_decoder = msgspec.msgpack.Decoder(Heartbeat)
        # completes with the answer to a question for statistics; None: none is open
        self._statistics_answer: asyncio.Future[WorkerStatistics] | None = None
        self._map_answers: dict[str, asyncio.Future[CacheMap]] = {}  # by call id
        self.last_statistics = WorkerStatistics()  # a busy worker also sends figures unasked
        self._closed = False
        self._context = zmq.Context()
        try:
            self._open_sockets()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            self._claim.give_back()
            raise OSError(
                error.errno, f"the link to a worker cannot be created: {error}"
            ) from error
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._monitor_fd = int(self._monitor.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._loop.add_reader(self._monitor_fd, self._notice_disconnect)
        # a ZeroMQ descriptor signals only what arrived after the last read, so read once now
        self._drain()
        self._notice_disconnect()

    def _open_sockets(self) -> None:
        """Bind the sockets for messages and heartbeats. Raises ZMQError."""
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            self._socket.setsockopt(option, value)
        # the socket keeps only the newest heartbeat
        self.heartbeats: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        for option, value in ((zmq.CONFLATE, 1), (zmq.LINGER, 0)):
            self.heartbeats.setsockopt(option, value)
        self.heartbeats.bind(self.heartbeat_endpoint)
        # receives a message when the worker has closed its socket
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.bind(self.endpoint)

    @property
    def is_open(self) -> bool:
        """True until the worker is known to be gone."""
        return not self._closed and not self.lost.done()

    def send(self, command: Command) -> bool:
        """Send a command. Returns False if the worker is gone."""
        if not self.is_open:
            return False
        try:
            self._socket.send(self._encoder.encode((command,)), zmq.NOBLOCK)
        except zmq.Again:
            return False
        # The descriptor is edge-triggered: sending may swallow the edge of an event that arrives
        # while it runs.
        self._loop.call_soon(self._drain)
        return True

    async def statistics(self) -> WorkerStatistics:
        """Return the worker's current figures, or the last known ones while it is busy with a long
        step.

        Raises WorkerUnavailable if the worker is gone.
        """
        if self._statistics_answer is None:
            if not self.send(TELL_STATISTICS):
                raise WorkerUnavailable("the worker process of the model is gone; please try again")
            self._statistics_answer = self._loop.create_future()
        try:
            async with asyncio.timeout(STATISTICS_PATIENCE_SECONDS):
                return await asyncio.shield(self._statistics_answer)
        except TimeoutError:
            return self.last_statistics

    async def cache_map(self, question: CacheMapQuestion) -> CacheMap:
        """Ask the worker what its prefix cache contains.

        Raises WorkerUnavailable if the worker is gone or busy with a long step.
        """
        answer: asyncio.Future[CacheMap] = self._loop.create_future()
        self._map_answers[question.call_id] = answer
        try:
            if not self.send(question):
                raise WorkerUnavailable("the worker process of the model is gone; please try again")
            async with asyncio.timeout(MAP_PATIENCE_SECONDS):
                return await answer
        except TimeoutError:
            raise WorkerUnavailable("the model's worker is busy; please try again") from None
        finally:
            del self._map_answers[question.call_id]

    def poll_heartbeat(self) -> Heartbeat | None:
        """Return the newest heartbeat; None if none has come since the last poll."""
        newest = None
        while not self.heartbeats.closed and _has_message(self.heartbeats):
            newest = self._heartbeat_decoder.decode(self.heartbeats.recv(zmq.NOBLOCK))
        return newest

    def fail(self, message: str) -> None:
        """Treat the worker as gone: send nothing more, and fail all calls that wait for its
        answers.
        """
        if not self._closed:
            self._drain()  # what the worker sent before it died still counts
        if not self.lost.done():
            self.lost.set_result(None)
        if self._statistics_answer is not None and not self._statistics_answer.done():
            self._statistics_answer.set_result(self.last_statistics)
        for answer in self._map_answers.values():
            if not answer.done():
                answer.set_exception(WorkerUnavailable(message))
        if not self.started.done():
            self.started.set_result(WorkerFailed(message=message, fatal_input=False))

    async def close(self) -> None:
        """Ask the worker to exit, then close the socket and remove its folder."""
        if self._closed:
            return
        self.send(SHUT_DOWN)
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

    def _drain(self) -> None:
        """Handle all messages that have arrived."""
        while not self._closed and _has_message(self._socket):
            self._handle_events(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))

    def _handle_events(self, events: list[Event]) -> None:
        """Complete what waits for the answers among these events, then pass all events on."""
        for event in events:
            if isinstance(event, LoadProgress):
                self._on_progress(event)
            elif isinstance(event, WorkerReady | WorkerFailed):
                if not self.started.done():
                    self.started.set_result(event)
            elif isinstance(event, WorkerStatistics):
                self.last_statistics = event
                if event.in_answer and self._statistics_answer is not None:
                    if not self._statistics_answer.done():
                        self._statistics_answer.set_result(event)
                    self._statistics_answer = None
            elif isinstance(event, CacheMap):
                answer = self._map_answers.get(event.call_id)
                if answer is not None and not answer.done():
                    answer.set_result(event)
        self._on_events(events)

    def _notice_disconnect(self) -> None:
        """Treat the worker as gone when its end of the socket was closed."""
        while not self._closed and _has_message(self._monitor):
            recv_monitor_message(self._monitor)
            self.fail("the worker process of the model died; please try again")


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message can be received without waiting."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _socket_folder() -> Claim:
    """Create a private folder, so that no other user can reach the worker.

    Its path is short enough for sockets.
    """
    claimed = claim(Path(tempfile.gettempdir()), prefix=CLAIM_PREFIX)
    if _takes_sockets(claimed.folder):
        return claimed
    claimed.give_back()
    return claim(SHORT_FOLDER, prefix=CLAIM_PREFIX)


def _takes_sockets(folder: Path) -> bool:
    """Test whether the folder can hold sockets: their paths are limited to 104 bytes (macOS) or 108
    (Linux), and some file systems do not support sockets.
    """
    path = folder / f"{_SOCKET}-?"  # a little longer than the real one
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.bind(str(path))
        path.unlink()
        return True
    return False
