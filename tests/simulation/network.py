"""The simulated network between clients and the server: HTTP requests to the real application,
without sockets. It has latency, broken connections and slow readers.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Mapping
from typing import Any

from starlette.types import Message

from holdfast.front.telemetry.request_log import RECORD, RequestRecord
from tests.simulation.front import SimulatedFront
from tests.simulation.world import Task, World

BUFFER_BYTES = 64 << 10  # the server may write this much before the client reads
LEAST_SECONDS, MOST_SECONDS = 0.0002, 0.02


class Broken(Exception):
    """The connection is gone: it was reset, the server is down, or its process died."""


class Exchange:
    """One request and its answer, from the client's side."""

    def __init__(
        self,
        front: SimulatedFront,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        self.front, self.world = front, front.world
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self.is_broken = False
        self.has_begun = False  # the application has the request
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._reader: Task | None = None
        self._arrives_at = 0.0
        self._gone: asyncio.Event | None = None
        self._drained: asyncio.Event | None = None
        path, _, query = path.partition("?")
        content = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        sent = {"host": "127.0.0.1:8321", "content-type": "application/json", **(headers or {})}
        self._scope: dict[str, Any] = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in sent.items()],
            "client": (address, 40_000),
            "server": ("127.0.0.1", 8321),
            "scheme": "http",
            "http_version": "1.1",
            "root_path": "",
            "state": {},
        }
        self._content = content
        if front.process.is_dead or front.app is None:
            self.is_broken = True
            return
        front.process.ends.append(self._break)
        self.world.after(self._latency(), self._begin)

    @property
    def record(self) -> RequestRecord | None:
        """The server's record of the request; None before the server has got it."""
        return self._scope.get(RECORD)

    # -- the client's side, called from the client's task

    def read(self, *, seconds: float | None = None) -> bytes | None:
        """The next piece of the answer; None at its end. Raises Broken, and TimeoutError."""
        while not self._unread:
            if self.is_complete:
                return None
            if self.is_broken:
                raise Broken
            self._reader = self.world.current
            is_news = self.world.block(seconds)
            self._reader = None
            if not is_news and not self._unread and not self.is_complete and not self.is_broken:
                raise TimeoutError
        piece = self._unread.popleft()
        self._unread_bytes -= len(piece)
        if self._unread_bytes < BUFFER_BYTES and self._drained is not None:
            self._in_front(self._drained.set)
        return piece

    def whole(self, *, seconds: float | None = None) -> bytes:
        """The rest of the answer. Raises Broken."""
        pieces = []
        while (piece := self.read(seconds=seconds)) is not None:
            pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        """Close the connection, whether or not the answer has ended."""
        self.is_broken = self.is_broken or not self.is_complete
        if self._gone is not None:
            gone = self._gone
            self.world.after(self._latency(), lambda: self._in_front(gone.set))

    # -- the server's side

    def _in_front(self, act: Any) -> None:
        if not self.front.process.is_dead and not self.front.loop.is_closed():
            self.front.loop.call_soon_threadsafe(act)

    def _begin(self) -> None:
        if self.front.process.is_dead or self.front.app is None:
            self._break()
            return
        self._in_front(lambda: self.front.accept(self))

    async def serve(self) -> None:
        """Let the application answer."""
        app = self.front.app
        if app is None:
            self._break()
            return
        self.has_begun = True
        self._gone, self._drained = asyncio.Event(), asyncio.Event()
        if self.is_broken:  # the client has closed the connection before
            self._gone.set()
        has_body = False

        async def receive() -> Message:
            nonlocal has_body
            assert self._gone is not None
            if not has_body:
                has_body = True
                return {"type": "http.request", "body": self._content, "more_body": False}
            await self._gone.wait()
            return {"type": "http.disconnect"}

        try:
            self._scope["app"] = app
            await app(self._scope, receive, self._send)
        finally:
            if not self._has_sent_all:
                self._deliver(b"", is_last=False, breaks=True)
            else:
                self._gone.set()

    _has_sent_all = False

    async def _send(self, message: Message) -> None:
        assert self._gone is not None and self._drained is not None
        if self._gone.is_set() and not self._has_sent_all:
            return  # as uvicorn does after a disconnect
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = {name.decode(): value.decode() for name, value in message["headers"]}
            self._later(lambda: self._head(status, headers))
            return
        is_last = not message.get("more_body", False)
        self._has_sent_all = is_last
        self._unread_bytes += len(message.get("body", b""))
        self._deliver(message.get("body", b""), is_last=is_last)
        while self._unread_bytes >= BUFFER_BYTES and not self._gone.is_set():
            self._drained.clear()
            waits = [asyncio.ensure_future(each.wait()) for each in (self._drained, self._gone)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for each in waits:
                each.cancel()

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers

    def _deliver(self, piece: bytes, *, is_last: bool, breaks: bool = False) -> None:
        def arrive() -> None:
            if self.is_broken:
                return
            if piece:
                self._unread.append(piece)
            self.is_complete = self.is_complete or is_last
            self.is_broken = self.is_broken or breaks
            self._wake()

        self._later(arrive)

    def _later(self, act: Any) -> None:
        """Schedule a delivery to the client, after all earlier ones."""
        self._arrives_at = max(self._arrives_at, self.world.now + self._latency())
        self.world.after(self._arrives_at - self.world.now, act)

    def _break(self) -> None:
        if not self.is_complete:
            self.is_broken = True
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None:
            self.world.wake(self._reader)

    def _latency(self) -> float:
        return self.world.random.uniform(LEAST_SECONDS, MOST_SECONDS)


def ask(
    front: SimulatedFront, method: str, path: str, body: Any = None, **more: Any
) -> tuple[int, Any]:
    """One short request and its whole answer. Raises Broken."""
    exchange = Exchange(front, method, path, body, **more)
    content = exchange.whole(seconds=600.0)
    return exchange.status, json.loads(content) if content else None


_ = World
