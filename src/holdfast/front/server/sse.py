"""The writer of a stream: events are sent as soon as they exist, all that are ready in one go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from starlette.types import Send

from holdfast.front.server.answers import StreamFormat
from holdfast.front.server.problem import problem_of

KEEP_ALIVE_SECONDS = 5.0  # checked this often: after 5 to 10 silent seconds the line is kept open
MOST_READY_BYTES = 64 << 10  # as much again may be in the socket's buffer
HEADER_GRACE_SECONDS = 0.5  # until then an early failure can still get its own status
_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class EventWriter:
    """Writes the events of one answer in order; while nothing comes, it keeps the line open as the
    dialect does that.
    """

    def __init__(
        self,
        send: Send,
        form: StreamFormat,
        events: AsyncIterator[bytes],
        *,
        request_id: str = "",
        keep_alive: Callable[[], bytes] | None = None,
    ) -> None:
        """events: the first is the answer's opening, which may be empty. request_id: goes into the
        event of an error.

        keep_alive: in place of the form's.
        """
        self._send, self._form, self._events, self._request_id = send, form, events, request_id
        self._keep_alive = keep_alive or form.keep_alive
        self._ready: list[bytes] = []
        self._ready_bytes = 0
        self._taken = asyncio.Event()
        self._wake = asyncio.Event()
        self._quiet = False
        self._started = False
        self._is_detached = False
        self._has_read_all = False
        self._is_sending = False

    @property
    def has_sent_all(self) -> bool:
        """Whether all events have been handed to the connection.

        Many clients close it when they have read the last one.
        """
        return self._has_read_all and not self._ready and not self._is_sending

    def detach(self) -> None:
        """The client is gone: read the events to their end all the same, and write nothing more."""
        self._is_detached = True
        self._ready.clear()
        self._ready_bytes = 0
        self._taken.set()

    async def run(self) -> None:
        """Write until the events end. Raises their error when nothing has been sent by then."""
        reader = asyncio.create_task(self._read())
        reader.add_done_callback(lambda _: self._wake.set())
        self._tick_in(HEADER_GRACE_SECONDS)
        try:
            while not reader.done():
                await self._wake.wait()
                self._wake.clear()
                if not reader.done():
                    await self._flush()
            if (error := reader.exception()) is not None:
                if not self._started:
                    raise error
                self._ready.append(
                    self._form.broken(replace(problem_of(error), request_id=self._request_id))
                )
            await self._flush(more=False)
        finally:
            self._timer.cancel()
            reader.cancel()
            await asyncio.wait((reader,))

    async def _read(self) -> None:
        # it is written with what follows, but at once to a client that has its headers already
        is_opening = True
        async for event in self._events:
            if event and not self._is_detached:
                self._ready.append(event)
                self._ready_bytes += len(event)
                if self._started or not is_opening:
                    self._wake.set()
            is_opening = False
            while self._ready_bytes >= MOST_READY_BYTES:  # the client has left so much unread
                self._taken.clear()
                await self._taken.wait()
        self._has_read_all = True

    async def _flush(self, *, more: bool = True) -> None:
        if self._is_detached:
            return
        if not self._started:
            self._started = True
            headers = [(b"content-type", self._form.stream_type.encode()), *_HEADERS]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        if not self._ready and more:
            self._ready.append(self._keep_alive())
        body = self._ready[0] if len(self._ready) == 1 else b"".join(self._ready)
        self._ready.clear()
        self._ready_bytes = 0
        self._taken.set()
        self._quiet = False
        self._is_sending = True
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._is_sending = False

    def _tick_in(self, seconds: float) -> None:
        # one per stream: it costs nothing per token
        self._timer = asyncio.get_running_loop().call_later(seconds, self._tick)

    def _tick(self) -> None:
        # Writes at the end of a silent interval: headers and opening the first time, what keeps the
        # line open from then on.
        if self._is_detached:
            return
        if self._quiet or not self._started:
            self._wake.set()
        self._quiet = True
        self._tick_in(KEEP_ALIVE_SECONDS)
