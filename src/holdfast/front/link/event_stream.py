"""The interface of a loaded model, and the stream of events of one request, for the rest of the
front.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol, TypeAlias

import msgspec

from holdfast.errors import (
    HoldfastError,
    InvalidRequest,
    QueueFull,
    TooLargeForMemory,
    WorkerUnavailable,
)
from holdfast.wire.commands import (
    ControlAction,
    Question,
    SequenceControl,
    SequenceRequest,
    ThinkingBudget,
    ThoughtLimit,
)
from holdfast.wire.events import (
    Accepted,
    Answer,
    Finished,
    FinishReason,
    ModelInfo,
    PrefillFinished,
    PromptRead,
    Rejected,
    TokensGenerated,
)
from holdfast.wire.requests import RequestId

RequestEvent = Accepted | Rejected | PromptRead | PrefillFinished | TokensGenerated | Finished
# unread: too many events are unread. reader: the consumer called `pause`
_PauseReason: TypeAlias = Literal["unread", "reader"]

_TOKEN_BYTES = 256  # memory of a token in an event; about the same as JSON and as Python objects
_LOGPROB_BYTES = 100  # memory of each log-probability of a token


class WorkerClient(Protocol):
    """A loaded model, as code on the event loop uses it."""

    @property
    def info(self) -> ModelInfo:
        """What the worker knows about the model."""
        ...

    def submit(self, request: SequenceRequest) -> EventStream:
        """Send one sequence and return its events.

        The first event is Accepted or Rejected. Nothing follows Rejected; the last event after
        Accepted is Finished. If the worker dies and another one takes its place, the stream
        continues. Closing the stream early cancels the request. Raises WorkerUnavailable if no
        worker will come.
        """
        ...

    async def call(self, command: Question) -> Answer:
        """Send a command that the worker answers once.

        If the worker dies before it answers, the command is sent to the next worker. If it fails
        there, but the first worker may already have carried it out, the message of the answer says
        so. Raises WorkerUnavailable if no worker comes, or if both die.
        """
        ...


LeaseOf: TypeAlias = Callable[[str, int], AbstractAsyncContextManager[WorkerClient]]
"""Leases a model by name for a number of sequences: waits for the model's client, and keeps the
model loaded.

Raises UnknownModel, WorkerUnavailable and QueueFull.
"""


class EventStream:
    """Asynchronous iterator over the events of one request, for one consumer.

    Calling `aclose` or cancelling the consumer cancels the request.

    Backpressure: a sequence with more than `unread_bytes` of unread events is paused, and resumed
    when half of these are read. The consumer may pause it as well (`pause`, `unpause`). If the worker
    dies, another one continues the sequence (`resume`); the consumer sees one uninterrupted series
    of events.
    """

    def __init__(
        self,
        request_id: RequestId,
        *,
        control: Callable[[SequenceControl | ThoughtLimit], None],
        unread_bytes: float = math.inf,
        prompt_tokens: int = 0,
    ) -> None:
        """control: function that sends a command about this request to its worker."""
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.token_ids: list[int] = []  # tokens of the answer, read by the consumer or not
        self.was_accepted = False  # the worker has taken it into its queue
        self.prefill_finished: PrefillFinished | None = (
            None  # None: the prompt is not prefilled yet
        )
        self.resumptions = 0  # how often another worker has continued the answer
        self._pauses: set[_PauseReason] = set()  # reasons for which the sequence is paused now
        self._opened_at = time.monotonic()
        self._first_token_at = 0.0  # time of `prefill_finished`, which comes with the first token
        self._lost_seconds = 0.0  # time spent before the request started, with workers that died
        self._control = control
        self._most_unread_bytes = unread_bytes
        self._unread_bytes = 0  # estimated size of `_events`
        self._events: deque[RequestEvent] = deque()
        # completes when events come; set while the consumer waits
        self._waiter: asyncio.Future[None] | None = None
        self._is_over = False  # no more events will come

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> RequestEvent:
        while not self._events:
            if self._is_over:
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
        self._unread_bytes -= _size_of(event)
        if "unread" in self._pauses and self._unread_bytes <= self._most_unread_bytes / 2:
            self._set_pause("unread", is_on=False)
        return event

    async def aclose(self) -> None:
        """Stop listening, and cancel the request unless it has finished."""
        self._events.clear()
        if not self._is_over:
            self._is_over = True
            self._control(SequenceControl(request_id=self.request_id, action="cancel"))
        self._wake()

    @property
    def is_ready(self) -> bool:
        """Whether the stream has an event that is not read yet, or is over."""
        return bool(self._events) or self._is_over

    @property
    def is_paused(self) -> bool:
        """Whether generation is paused at present."""
        return bool(self._pauses)

    def pause(self) -> None:
        """Pause generation until `unpause`.

        The sequence keeps its memory as long as nobody else needs it.
        """
        self._set_pause("reader", is_on=True)

    def unpause(self) -> None:
        """Undo `pause`."""
        self._set_pause("reader", is_on=False)

    def limit_thoughts(self, budget: ThinkingBudget) -> None:
        """Change the reasoning budget of the request.

        Reasoning tokens that were already generated count towards the new budget.
        """
        if not self._is_over:
            self._control(ThoughtLimit(request_id=self.request_id, budget=budget))

    def push(self, event: RequestEvent) -> None:
        """Add an event from the worker. Only call this on the event loop's thread."""
        if self._is_over:
            return
        if isinstance(event, TokensGenerated):
            self.token_ids += event.token_ids
        elif isinstance(event, PromptRead):
            if self.prefill_finished is not None:
                # another worker has prefilled the prompt again, for an answer that had already
                # begun
                return
        else:
            new_event = self._deduplicated(event)
            if new_event is None:
                return
            event = new_event
        self._events.append(event)
        self._wake()
        self._unread_bytes += _size_of(event)
        if self._unread_bytes > self._most_unread_bytes and not self._is_over:
            self._set_pause("unread", is_on=True)

    def resume(self) -> None:
        """Record that another worker continues the request after the tokens received so far."""
        self.resumptions += 1
        if self.prefill_finished is None:
            self._lost_seconds = time.monotonic() - self._opened_at

    def fail(self, message: str, *, is_deadly: bool = False) -> None:
        """End the request as failed, because no worker serves it.

        is_deadly: whether the reason is that the request killed workers.
        """
        if not self.was_accepted:
            self.push(Accepted(request_id=self.request_id))
        self.push(self._failed_event(message, is_deadly=is_deadly))

    def _deduplicated(
        self, event: Accepted | Rejected | PrefillFinished | Finished
    ) -> RequestEvent | None:
        """Return the event for the consumer; None if an earlier worker has already sent the same
        event.
        """
        if isinstance(event, Accepted):
            is_new = not self.was_accepted
            self.was_accepted = True
            return event if is_new else None
        if isinstance(event, PrefillFinished):
            if self.prefill_finished is not None:
                return None
            self._first_token_at = time.monotonic()
            queue_seconds = event.timings.queue_seconds + self._lost_seconds
            timings = msgspec.structs.replace(event.timings, queue_seconds=queue_seconds)
            self.prefill_finished = msgspec.structs.replace(event, timings=timings)
            return self.prefill_finished
        self._is_over = True
        if isinstance(event, Finished):
            return self._merged_finish(event) if self.resumptions else event
        return self._failed_event(event.message) if self.was_accepted else event

    def _merged_finish(self, event: Finished) -> Finished:
        """The end of an answer that several workers generated, with the cache hits and timings that
        only the first worker knows.
        """
        if self.prefill_finished is None:
            return msgspec.structs.replace(event, resumptions=self.resumptions)
        timings = msgspec.structs.replace(
            self.prefill_finished.timings, decode_seconds=time.monotonic() - self._first_token_at
        )
        return msgspec.structs.replace(
            event,
            cache_report=self.prefill_finished.cache_report,
            timings=timings,
            resumptions=self.resumptions,
        )

    def _failed_event(self, message: str, *, is_deadly: bool = False) -> Finished:
        """The end of the request when no worker can send one."""
        return Finished(
            request_id=self.request_id,
            reason=FinishReason.FAILED,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(self.token_ids),
            error=message,
            is_deadly=is_deadly,
            resumptions=self.resumptions,
        )

    def _set_pause(self, reason: _PauseReason, *, is_on: bool) -> None:
        """Add or remove a reason to pause. The worker is told when the first comes or the last
        goes.
        """
        was_paused = self.is_paused
        if is_on:
            self._pauses.add(reason)
        else:
            self._pauses.discard(reason)
        if not self._is_over and self.is_paused != was_paused:
            action: ControlAction = "pause" if self.is_paused else "resume"
            self._control(SequenceControl(request_id=self.request_id, action=action))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def wait_for_any(streams: Sequence[EventStream]) -> None:
    """Wait until one of the streams is ready. Each of them may have only one such waiter."""
    if any(stream.is_ready for stream in streams):
        return
    assert all(stream._waiter is None for stream in streams), "a stream has a waiter already"
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    for stream in streams:
        stream._waiter = waiter
    try:
        await waiter
    finally:
        for stream in streams:
            stream._waiter = None


def _size_of(event: RequestEvent) -> int:
    """The approximate memory that an event takes, here and on its way to the client."""
    if not isinstance(event, TokensGenerated | PrefillFinished):
        return 0
    logprobs = sum(1 + len(scored.top) for scored in event.logprobs)
    tokens = len(event.token_ids) if isinstance(event, TokensGenerated) else len(event.logprobs)
    return tokens * _TOKEN_BYTES + logprobs * _LOGPROB_BYTES


def refusal(event: Rejected) -> HoldfastError:
    """The error that a client gets when a worker refuses its request."""
    match event.kind:
        case "queue_full":
            return QueueFull(
                queued=event.queued,
                limit=event.queue_limit,
                retry_after_seconds=event.retry_after_seconds,
            )
        case "shutting_down":
            return WorkerUnavailable(event.message)
        case "too_large":
            return TooLargeForMemory(
                needed_bytes=event.needed_bytes, budget_bytes=event.budget_bytes
            )
        case "invalid":
            return InvalidRequest(event.message, field=event.field)
