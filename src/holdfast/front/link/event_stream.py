"""Events of one request on an asyncio loop: no task, no lock per token."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

import msgspec

from holdfast.wire.commands import ControlAction, ThinkingBudget
from holdfast.wire.events import (
    Accepted,
    Finished,
    FinishReason,
    PromptRead,
    Rejected,
    Started,
    TokensGenerated,
)
from holdfast.wire.requests import RequestId

RequestEvent = Accepted | Rejected | PromptRead | Started | TokensGenerated | Finished


_TOKEN_BYTES = 256  # of an event as a chunk of JSON or as objects here, about the same
_RIVAL_BYTES = 100  # for each log-probability beside it


Control = Callable[[RequestId, ControlAction], None]
LimitThoughts = Callable[[RequestId, ThinkingBudget], None]


def _unlimited(request_id: RequestId, budget: ThinkingBudget) -> None:
    """Of a stream whose thoughts nobody limits."""


class EventStream:
    """Asynchronous iterator over the events of one request.

    One consumer; `aclose` (or its cancellation) cancels the request.

    A sequence of which more than `unread_bytes` wait here is paused, and resumed when half of them
    are read; `control` is told. Its reader may pause it as well (`pause`, `go_on`). Several workers
    may serve it one after the other (`resume`); who reads it sees one sequence of events.
    """

    def __init__(
        self,
        request_id: RequestId,
        *,
        control: Control,
        limit_thoughts: LimitThoughts = _unlimited,
        unread_bytes: float = math.inf,
        prompt_tokens: int = 0,
    ) -> None:
        self.request_id, self.prompt_tokens = request_id, prompt_tokens
        self.token_ids: list[int] = []  # of the answer, whether or not they were read
        self.was_accepted = False
        self.started: Started | None = None
        self.resumptions = 0
        self._is_full = False  # too much of it is unread
        self._is_set_aside = False  # by its reader
        self._opened_at, self._started_at, self._lost_seconds = time.monotonic(), 0.0, 0.0
        self._limit_thoughts = limit_thoughts
        self._control, self._most_unread_bytes, self._unread_bytes = control, unread_bytes, 0
        self._events: deque[RequestEvent] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._over = False

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> RequestEvent:
        while not self._events:
            if self._over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                await self.aclose()
                raise
            finally:
                self._waiter = None
        event = self._events.popleft()
        self._count_read(event)
        return event

    async def aclose(self) -> None:
        """Stop listening; tells the worker to stop if it has not finished."""
        self._events.clear()
        if not self._over:
            self._over = True
            self._control(self.request_id, "cancel")
        self._wake()

    @property
    def is_paused(self) -> bool:
        """Whether nothing is drawn for it at present."""
        return self._is_full or self._is_set_aside

    def pause(self) -> None:
        """Stop generating until `go_on`. It keeps its memory as long as nobody else needs it."""
        was_paused = self.is_paused
        self._is_set_aside = True
        self._tell_if_changed(was_paused=was_paused)

    def go_on(self) -> None:
        """Undo `pause`."""
        was_paused = self.is_paused
        self._is_set_aside = False
        self._tell_if_changed(was_paused=was_paused)

    def limit_thoughts(self, budget: ThinkingBudget) -> None:
        """Give it another thinking budget, of all that it has thought."""
        if not self._over:
            self._limit_thoughts(self.request_id, budget)

    def push(self, event: RequestEvent) -> None:
        """Add an event from the worker. Loop's thread only."""
        if self._over:
            return
        if isinstance(event, TokensGenerated):
            self.token_ids += event.token_ids
        elif isinstance(event, PromptRead):
            if self.started is not None:
                return  # another worker reads it once more, for an answer that has begun
        else:
            known = self._noted(event)
            if known is None:
                return
            event = known
        self._events.append(event)
        self._wake()
        self._count_unread(event)

    def resume(self) -> None:
        """Another worker goes on with the request, behind what came so far."""
        self.resumptions += 1
        if self.started is None:
            self._lost_seconds = time.monotonic() - self._opened_at

    def fail(self, message: str, *, is_deadly: bool = False) -> None:
        """End it as failed: nobody serves it any more. is_deadly: because workers died of it."""
        if not self.was_accepted:
            self.push(Accepted(request_id=self.request_id))
        self.push(self._failed(message, is_deadly=is_deadly))

    def _noted(self, event: Accepted | Rejected | Started | Finished) -> RequestEvent | None:
        """An event as the reader is to see it, who may have been told the same of an earlier
        worker: then None.
        """
        if isinstance(event, Accepted):
            is_new, self.was_accepted = not self.was_accepted, True
            return event if is_new else None
        if isinstance(event, Started):
            if self.started is not None:
                return None
            self.started, self._started_at = self._with_waiting(event), time.monotonic()
            return self.started
        self._over = True
        if isinstance(event, Finished):
            return self._joined(event) if self.resumptions else event
        return self._failed(event.message) if self.was_accepted else event

    def _with_waiting(self, event: Started) -> Started:
        """With the time that it had with earlier workers."""
        waited = event.timings.queue_seconds + self._lost_seconds
        return msgspec.structs.replace(
            event, timings=msgspec.structs.replace(event.timings, queue_seconds=waited)
        )

    def _joined(self, event: Finished) -> Finished:
        """The end of an answer that several workers gave: what it began from is told by the one
        that began it.
        """
        if self.started is None:
            return msgspec.structs.replace(event, resumptions=self.resumptions)
        timings = msgspec.structs.replace(
            self.started.timings, decode_seconds=time.monotonic() - self._started_at
        )
        return msgspec.structs.replace(
            event, memory=self.started.memory, timings=timings, resumptions=self.resumptions
        )

    def _failed(self, message: str, *, is_deadly: bool = False) -> Finished:
        return Finished(
            request_id=self.request_id,
            reason=FinishReason.FAILED,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(self.token_ids),
            error=message,
            is_deadly=is_deadly,
            resumptions=self.resumptions,
        )

    def _count_unread(self, event: RequestEvent) -> None:
        self._unread_bytes += _size_of(event)
        if self._unread_bytes > self._most_unread_bytes and not self._over:
            was_paused = self.is_paused
            self._is_full = True
            self._tell_if_changed(was_paused=was_paused)

    def _count_read(self, event: RequestEvent) -> None:
        self._unread_bytes -= _size_of(event)
        if self._is_full and self._unread_bytes <= self._most_unread_bytes / 2:
            was_paused = self.is_paused
            self._is_full = False
            self._tell_if_changed(was_paused=was_paused)

    def _tell_if_changed(self, *, was_paused: bool) -> None:
        if self._over or self.is_paused == was_paused:
            return
        self._control(self.request_id, "pause" if self.is_paused else "resume")

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _size_of(event: RequestEvent) -> int:
    """About what an event takes, here and on its way to the client."""
    if not isinstance(event, TokensGenerated | Started):
        return 0
    rivals = sum(1 + len(scored.top) for scored in event.logprobs)
    tokens = len(event.token_ids) if isinstance(event, TokensGenerated) else len(event.logprobs)
    return tokens * _TOKEN_BYTES + rivals * _RIVAL_BYTES
