"""Simulated ZeroMQ sockets: messages between two processes take virtual time, and each side learns
when the other is gone.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq
import zmq.utils.monitor

from tests.simulation.world import Killed, Process, world

LEAST_SECONDS = 20e-6
MOST_SECONDS = 300e-6
_READERS: dict[int, Callable[[], None]] = {}  # callbacks of the event loop, by descriptor
_descriptors = itertools.count(1_000_000)


class Socket:
    """A PAIR, PUSH, PULL or monitor socket."""

    def __init__(self, context: Context, kind: int) -> None:
        self._context, self.kind = context, kind
        self.owner: Process = world().here
        self.closed = False
        self.descriptor = next(_descriptors)
        self.inbox: deque[bytes] = deque()
        self.peer: Socket | None = None
        self.endpoint = ""
        self.keeps_latest = False
        self.on_news: Callable[[], None] = lambda: None
        self._monitor: Socket | None = None
        self._arrives_at = 0.0
        self.owner.ends.append(self.close)

    # -- setup

    def setsockopt(self, option: int, value: object) -> None:
        if option == zmq.CONFLATE:
            self.keeps_latest = bool(value)

    def getsockopt(self, option: int) -> int:
        if option == zmq.FD:
            return self.descriptor
        assert option == zmq.EVENTS
        return zmq.POLLIN if self.inbox else 0

    get = getsockopt

    def bind(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._context.bound[endpoint] = self

    def connect(self, endpoint: str) -> None:
        other = _endpoints().get(endpoint)
        if other is None or other.closed:
            return
        self.peer = other
        if self.kind == zmq.PAIR:
            other.peer = self

    def get_monitor_socket(self, events: int = 0) -> Socket:
        self._monitor = Socket(self._context, -1)
        return self._monitor

    def disable_monitor(self) -> None:
        self._monitor = None

    # -- messages

    def send(self, message: bytes, flags: int = 0) -> None:
        if self.owner.is_dead:
            raise Killed
        peer = self.peer
        found = world()
        if peer is not None and self.kind == zmq.PAIR and found.fails("message"):
            found.tell(f"the link of {self.owner.name} breaks")
            self.peer = peer.peer = None
            found.after(LEAST_SECONDS, peer.notice_end)
            found.after(LEAST_SECONDS, self.notice_end)
            raise zmq.Again
        if peer is None or peer.closed:
            if self.keeps_latest:
                return  # with a real socket, the next message would replace it
            raise zmq.Again
        at = found.now + found.random.uniform(LEAST_SECONDS, MOST_SECONDS)
        self._arrives_at = at = max(at, self._arrives_at)  # in order
        found.after(at - found.now, lambda: peer.arrive(bytes(message)))

    def arrive(self, message: bytes) -> None:
        if self.closed:
            return
        if self.keeps_latest:
            self.inbox.clear()
        self.inbox.append(message)
        self.signal()

    def signal(self) -> None:
        """Wake the task that waits for this socket."""
        self.on_news()
        if (call := _READERS.get(self.descriptor)) is not None:
            call()

    def recv(self, flags: int = 0) -> bytes:
        if not self.inbox:
            raise zmq.Again
        return self.inbox.popleft()

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        return [self.recv(flags), b""]

    # -- the end

    def close(self, linger: int | None = None) -> None:
        if self.closed:
            return
        self.closed = True
        _READERS.pop(self.descriptor, None)
        peer = self.peer
        if peer is not None and self.kind == zmq.PAIR:
            # messages that were sent before still arrive
            delay = max(LEAST_SECONDS, self._arrives_at - world().now)
            world().after(delay, peer.notice_end)

    def notice_end(self) -> None:
        if self._monitor is not None and not self.closed:
            self._monitor.arrive(b"disconnected")

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Context:
    """In place of `zmq.Context`."""

    def __init__(self) -> None:
        self.bound = _endpoints()

    def socket(self, kind: int) -> Socket:
        return Socket(self, kind)

    def term(self) -> None:
        pass

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Poller:
    """In place of `zmq.Poller`, for one task."""

    def __init__(self) -> None:
        self._sources: list[Any] = []

    def register(self, source: Any, flags: int = zmq.POLLIN) -> None:
        self._sources.append(source)

    def poll(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        found = world()
        ready = self._ready()
        if ready or timeout == 0:
            found.yield_now()
            return ready or self._ready()
        task = found.current
        assert task is not None
        for source in self._sources:
            source.on_news = lambda: found.wake(task)
        found.block(None if timeout is None else timeout / 1000)
        return self._ready()

    def _ready(self) -> list[tuple[Any, int]]:
        return [(each, zmq.POLLIN) for each in self._sources if each.inbox]


class Wake:
    """In place of the pipe by which a worker's main thread wakes the device thread."""

    def __init__(self) -> None:
        self.inbox: deque[bytes] = deque()
        self.on_news: Callable[[], None] = lambda: None

    def ring(self) -> None:
        self.inbox.append(b".")
        self.on_news()


def _endpoints() -> dict[str, Socket]:
    found = world()
    if not hasattr(found, "endpoints"):
        found.endpoints = {}  # type: ignore[attr-defined]
    endpoints: dict[str, Socket] = found.endpoints  # type: ignore[attr-defined]
    return endpoints


def add_reader(descriptor: int, call: Callable[[], None]) -> None:
    """Call a function when a message arrives, as an event loop does."""
    _READERS[descriptor] = call


def remove_reader(descriptor: int) -> bool:
    """Undo `add_reader`. Returns whether there was a callback."""
    return _READERS.pop(descriptor, None) is not None


def install() -> None:
    """Replace the classes of pyzmq."""
    zmq.Context = Context  # type: ignore[assignment, misc]
    zmq.Poller = Poller  # type: ignore[assignment, misc]
    zmq.utils.monitor.recv_monitor_message = lambda socket, flags=0: socket.recv()  # type: ignore[assignment]
