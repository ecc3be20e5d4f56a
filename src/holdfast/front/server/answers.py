"""What the answers of all protocols have in common: the interface of the formats, and the writer of a
stream, with its keep-alives.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import ClassVar, TypeAlias

from starlette.types import Send

from holdfast.front.output import (
    ChoiceFinished,
    OutputDelta,
    OutputEvent,
    PromptProgress,
    TokenCounts,
)
from holdfast.front.request import GenerationRequest
from holdfast.front.server.explanation import Explanation
from holdfast.front.server.problem import Problem, problem_of
from holdfast.wire.requests import SamplingParams

# time between two checks for silence; a keep-alive is therefore sent after 5 to 10 silent seconds
KEEP_ALIVE_SECONDS = 5.0
# Bounds one write, and the events that wait for the next one: if a stream was not read for a while,
# or is the complete answer to an earlier request, all its events come at once. The socket's buffer
# may hold the same number in addition.
MOST_READY_BYTES = 64 << 10
HEADER_GRACE_SECONDS = 0.5  # delay of the headers, so that an early failure gets its own status
KEEP_ALIVE_COMMENT = b": keep-alive\n\n"  # a comment, which readers of server-sent events ignore
_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class StreamFormat(abc.ABC):
    """What a protocol defines so that `EventWriter` can write a stream in the protocol's format."""

    stream_type: ClassVar[str] = "text/event-stream; charset=utf-8"

    def keep_alive(self) -> bytes:
        """The bytes that keep a silent connection open; empty if the protocol has none.

        They may be sent before the opening, too.
        """
        return KEEP_ALIVE_COMMENT

    def follower_keep_alive(self) -> bytes:
        """The keep-alive for one of several clients that read the same stream.

        It must not be an event: events are numbered, and the other clients would not get this one.
        """
        return self.keep_alive()

    @abc.abstractmethod
    def error_event(self, problem: Problem) -> bytes:
        """The bytes that end a stream that failed after it had begun."""


class AnswerFormat(StreamFormat):
    """The format of one answer: the events of a stream, or the whole answer as JSON.

    The bytes that the methods return are complete, for example whole server-sent events.
    """

    def set_sampling(self, sampling: SamplingParams) -> None:
        """Record the sampling parameters that the worker uses for the request.

        Does nothing in a format that does not show them; only that of the Responses API does.
        """

    def stream_start(self, *, prompt_tokens: int) -> bytes:
        """The bytes of the events before the first text; may be empty."""
        return b""

    @abc.abstractmethod
    def delta_event(self, event: OutputDelta) -> bytes:
        """The bytes for new text, reasoning or calls; empty if the protocol has no such event."""

    def progress_event(self, event: PromptProgress) -> bytes:
        """The bytes for the progress of prefill.

        Empty unless the client asked for progress and the protocol has an event for it.
        """
        return b""

    @abc.abstractmethod
    def choice_end(self, event: ChoiceFinished) -> bytes:
        """The bytes that end a choice."""

    def event_bytes(self, event: OutputEvent) -> bytes:
        """The bytes for any event: from `delta_event`, `progress_event` or `choice_end`."""
        if isinstance(event, ChoiceFinished):
            return self.choice_end(event)
        return (
            self.progress_event(event)
            if isinstance(event, PromptProgress)
            else self.delta_event(event)
        )

    @abc.abstractmethod
    def stream_end(self, counts: TokenCounts, explanation: Explanation | None) -> bytes:
        """The bytes that end a stream, with its end mark.

        Token counts and explanation are included if the client asked for them.
        """

    @abc.abstractmethod
    def complete_body(
        self, events: Iterable[OutputEvent], counts: TokenCounts, explanation: Explanation | None
    ) -> bytes:
        """The whole answer as JSON, made from all events of the answer as its stream is."""


GenerationPlan: TypeAlias = tuple[Sequence[GenerationRequest], AnswerFormat]
"""What a checked request asks for: one generation for each of its prompts, all with the same number
of choices, and the format of the answer.
"""


class EventWriter:
    """Writes the events of one answer in order, and keep-alives while no events come.

    One task reads the events and collects them; `run` sends what was collected.
    """

    def __init__(
        self,
        send: Send,
        stream_format: StreamFormat,
        events: AsyncIterator[bytes],
        *,
        request_id: str = "",
        keep_alive: Callable[[], bytes] | None = None,
    ) -> None:
        """Prepare to write; `run` writes.

        events: the events; the first one is the opening of the answer and may be empty.
        request_id: the id to show in an error event.
        keep_alive: replaces `stream_format.keep_alive`.
        """
        self._send = send
        self._format = stream_format
        self._events = events
        self._request_id = request_id
        self._keep_alive = keep_alive or stream_format.keep_alive
        self._ready: list[bytes] = []  # events that are not sent yet
        self._ready_bytes = 0
        self._ready_taken = asyncio.Event()  # set when `_ready` was sent or dropped
        self._must_send = asyncio.Event()  # wakes `run` when there is something to send
        self._is_silent = False  # nothing was sent since the last tick of the timer
        self._has_started = False  # the headers were sent
        self._is_detached = False  # the client is gone: events are read but not sent
        self._has_read_all = False  # the events have ended
        self._is_sending = False  # a send is under way

    @property
    def has_sent_all(self) -> bool:
        """Whether all events have been handed to the connection.

        Many clients close the connection once they have read the last event.
        """
        return self._has_read_all and not self._ready and not self._is_sending

    def detach(self) -> None:
        """Note that the client is gone: read the remaining events, but write nothing more."""
        self._is_detached = True
        self._ready.clear()
        self._ready_bytes = 0
        self._ready_taken.set()

    async def run(self) -> None:
        """Write until the events end.

        If reading the events fails before anything was sent, raises that error.
        """
        reader = asyncio.create_task(self._read())
        reader.add_done_callback(lambda _: self._must_send.set())
        self._tick_in(HEADER_GRACE_SECONDS)
        try:
            while not reader.done():
                await self._must_send.wait()
                self._must_send.clear()
                if not reader.done():
                    await self._flush()
            if (error := reader.exception()) is not None:
                if not self._has_started:
                    raise error
                self._ready.append(
                    self._format.error_event(
                        replace(problem_of(error), request_id=self._request_id)
                    )
                )
            await self._flush(is_last=True)
        finally:
            self._timer.cancel()
            reader.cancel()
            await asyncio.wait((reader,))

    async def _read(self) -> None:
        """Read all events. Waits while too many bytes have not been sent yet."""
        # The opening is sent together with the next event, unless the headers were sent already.
        is_opening = True
        async for event in self._events:
            if event and not self._is_detached:
                self._ready.append(event)
                self._ready_bytes += len(event)
                if self._has_started or not is_opening:
                    self._must_send.set()
            is_opening = False
            while self._ready_bytes >= MOST_READY_BYTES:  # backpressure
                self._ready_taken.clear()
                await self._ready_taken.wait()
        self._has_read_all = True

    async def _flush(self, *, is_last: bool = False) -> None:
        """Send the ready events, or a keep-alive if there are none. is_last: the body ends."""
        if self._is_detached:
            return
        if not self._has_started:
            self._has_started = True
            headers = [(b"content-type", self._format.stream_type.encode()), *_HEADERS]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        if not self._ready and not is_last:
            self._ready.append(self._keep_alive())
        body = self._ready[0] if len(self._ready) == 1 else b"".join(self._ready)
        self._ready.clear()
        self._ready_bytes = 0
        self._ready_taken.set()
        self._is_silent = False
        self._is_sending = True
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})
        self._is_sending = False

    def _tick_in(self, seconds: float) -> None:
        """Start the timer that checks for silence."""
        # one timer at a time for the whole stream, because one for each token would cost too much
        self._timer = asyncio.get_running_loop().call_later(seconds, self._tick)

    def _tick(self) -> None:
        """Timer: have something sent if the connection was silent."""
        # After the first silent interval, write the headers and the opening; from then on, write
        # keep-alives.
        if self._is_detached:
            return
        if self._is_silent or not self._has_started:
            self._must_send.set()
        self._is_silent = True
        self._tick_in(KEEP_ALIVE_SECONDS)
