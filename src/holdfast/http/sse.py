"""Server-sent events: their bytes, and the task that writes them as soon as they exist."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from starlette.types import Send

from holdfast.http.answers import AnswerHead
from holdfast.http.errors import Problem, problem_of
from holdfast.http.explanation import Explanation
from holdfast.http.openai_shapes import Usage

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_SECONDS = 5.0  # checked this often: after 5 to 10 silent seconds a comment is sent
MOST_READY_BYTES = 64 << 10  # as much again may be in the socket's buffer
HEADER_GRACE_SECONDS = 0.5  # until then an early failure can still get its own status
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event_prefix(head: AnswerHead, kind: str) -> bytes:
    """The bytes with which every chunk of an answer begins, up to and including the bracket of `choices`."""
    fields = {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.system_fingerprint,
    }
    return b"data: " + msgspec.json.encode(fields)[:-1] + b',"choices":['


def closing_event(prefix: bytes, *, usage: Usage | None, explanation: Explanation | None) -> bytes:
    """A chunk that has no choices, only the token counts and the explanation, what there is of both; empty without either."""
    parts = {b"usage": usage, b"holdfast": explanation}
    said = b"".join(b',"%b":%b' % (name, msgspec.json.encode(part)) for name, part in parts.items() if part is not None)
    return b"%b]%b}\n\n" % (prefix, said) if said else b""


class ChunkEnd:
    """The bytes with which every chunk of an answer ends, after its choices: no `usage`, null, or the counts so far."""

    def __init__(self, *, shows_usage: bool, shows_counts: bool) -> None:
        self._fixed = b'],"usage":null}\n\n' if shows_usage else b"]}\n\n"
        self._shows_counts = shows_counts
        self._prompt_tokens = self._completion_tokens = 0

    def begin(self, *, prompt_tokens: int) -> None:
        """What is known before the first text."""
        self._prompt_tokens = prompt_tokens

    def __call__(self, new_tokens: int = 0) -> bytes:
        """The end of a chunk that brings so many tokens."""
        if not self._shows_counts:
            return self._fixed
        self._completion_tokens += new_tokens
        counts = (self._prompt_tokens, self._completion_tokens, self._prompt_tokens + self._completion_tokens)
        return b'],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n' % counts


def error_event(problem: Problem) -> bytes:
    """An error inside a stream that has been begun."""
    return b"data: %b\n\n" % problem.body


class EventWriter:
    """Writes events in order, all that are ready in one go; while nothing comes, comments keep the line open."""

    def __init__(self, send: Send, *, opening: bytes = b"") -> None:
        self._send = send
        self._ready: list[bytes] = [opening] if opening else []
        self._ready_bytes = len(opening)
        self._taken = asyncio.Event()
        self._wake = asyncio.Event()
        self._ended = False
        self._quiet = False
        self._started = False

    def begin_with(self, opening: bytes) -> None:
        """What comes before the first event. It is written with it, but at once to a client that has its headers already."""
        if opening:
            self._ready.append(opening)
            self._ready_bytes += len(opening)
        if opening and self._started:
            self._wake.set()

    def put(self, event: bytes) -> None:
        """Queue one event; never waits. See `is_full`."""
        self._ready.append(event)
        self._ready_bytes += len(event)
        self._wake.set()

    @property
    def is_full(self) -> bool:
        """Whether the client has left so much unread that nothing more should be put before `wait_for_room` returns."""
        return self._ready_bytes >= MOST_READY_BYTES

    async def wait_for_room(self) -> None:
        """Wait until the client reads on."""
        while self.is_full:
            self._taken.clear()
            await self._taken.wait()

    def end(self) -> None:
        """Say that nothing more comes."""
        self._ended = True
        self._wake.set()

    async def run(self, producer: asyncio.Task[None]) -> None:
        """Write until the producer, which calls `put`, is done. Raises its error when nothing has been sent by then."""
        producer.add_done_callback(lambda _: self.end())
        timer = _Timer(HEADER_GRACE_SECONDS, KEEP_ALIVE_SECONDS, self._tick)
        try:
            while not self._ended:
                await self._wake.wait()
                self._wake.clear()
                if not self._ended:
                    await self._flush()
        finally:
            timer.stop()
        await self._close(producer)

    async def _close(self, producer: asyncio.Task[None]) -> None:
        await asyncio.wait((producer,))
        error = None if producer.cancelled() else producer.exception()
        if producer.cancelled():
            raise asyncio.CancelledError
        if error is not None:
            if not self._started:
                raise error
            self._ready.append(error_event(problem_of(error)))
        await self._flush(more=False)

    async def _flush(self, *, more: bool = True) -> None:
        if not self._started:
            self._started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        if not self._ready and more:
            self._ready.append(KEEP_ALIVE)
        body = self._ready[0] if len(self._ready) == 1 else b"".join(self._ready)
        self._ready.clear()
        self._ready_bytes = 0
        self._taken.set()
        self._quiet = False
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def _tick(self) -> None:
        # Writes at the end of a silent interval: the headers and the opening the first time, comments from then on.
        if self._quiet or not self._started:
            self._wake.set()
        self._quiet = True


class _Timer:
    """Calls back after `first` seconds and then every `interval`; one timer per stream costs nothing per token."""

    def __init__(self, first: float, interval: float, call: Callable[[], None]) -> None:
        self._interval, self._call = interval, call
        self._handle = asyncio.get_running_loop().call_later(first, self._fire)

    def _fire(self) -> None:
        self._call()
        self._handle = asyncio.get_running_loop().call_later(self._interval, self._fire)

    def stop(self) -> None:
        self._handle.cancel()
