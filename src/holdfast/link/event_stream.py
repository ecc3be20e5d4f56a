"""Events of one request on an asyncio loop, and the table that leads each event to its request: no task, no lock per token."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable

from holdfast.errors import WorkerUnavailable
from holdfast.messages.commands import ControlAction
from holdfast.messages.events import Accepted, Finished, FinishReason, LinkEvent, Rejected, Started, TokensGenerated
from holdfast.messages.requests import RequestId

RequestEvent = Accepted | Rejected | Started | TokensGenerated | Finished


_TOKEN_BYTES = 256  # of an event as a chunk of JSON or as objects here, about the same
_RIVAL_BYTES = 100  # for each log-probability beside it


Control = Callable[[RequestId, ControlAction], None]


class EventStream:
    """Asynchronous iterator over the events of one request. One consumer; `aclose` (or its cancellation) cancels the request.

    A sequence of which more than `unread_bytes` wait here is paused, and resumed when half of them are read; `control` is told.
    """

    def __init__(
        self, request_id: RequestId, *, control: Control, unread_bytes: float = math.inf, prompt_tokens: int = 0
    ) -> None:
        self.request_id, self.prompt_tokens = request_id, prompt_tokens
        self.completion_tokens = 0
        self.was_accepted = False
        self._control, self._most_unread_bytes, self._unread_bytes = control, unread_bytes, 0
        self._is_paused = False
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

    def push(self, event: RequestEvent) -> None:
        """Add an event from the worker. Loop's thread only."""
        if self._over:
            return
        if isinstance(event, TokensGenerated):
            self.completion_tokens += len(event.token_ids)
        elif isinstance(event, Accepted):
            self.was_accepted = True
        elif isinstance(event, Finished | Rejected):
            self._over = True
        self._events.append(event)
        self._wake()
        self._count_unread(event)

    def _count_unread(self, event: RequestEvent) -> None:
        self._unread_bytes += _size_of(event)
        if self._unread_bytes > self._most_unread_bytes and not self._is_paused and not self._over:
            self._is_paused = True
            self._control(self.request_id, "pause")

    def _count_read(self, event: RequestEvent) -> None:
        self._unread_bytes -= _size_of(event)
        if self._is_paused and self._unread_bytes <= self._most_unread_bytes / 2:
            self._is_paused = False
            if not self._over:
                self._control(self.request_id, "resume")

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


class EventRouter:
    """The open streams of one worker by request id."""

    def __init__(self) -> None:
        self._streams: dict[RequestId, EventStream] = {}
        self._death = ""

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def is_dead(self) -> bool:
        """Whether the worker is gone and nothing can be opened any more."""
        return bool(self._death)

    def open(self, request_id: RequestId, *, prompt_tokens: int, control: Control, unread_bytes: float = math.inf) -> EventStream:
        """Make the stream of a new request. Raises WorkerUnavailable after the worker's death, ValueError for an id in use."""
        if self._death:
            raise WorkerUnavailable(self._death)
        if request_id in self._streams:
            raise ValueError(f"request id {request_id!r} is in use")
        stream = EventStream(request_id, control=control, unread_bytes=unread_bytes, prompt_tokens=prompt_tokens)
        self._streams[request_id] = stream
        return stream

    def detach(self, request_id: RequestId) -> bool:
        """Drop a stream that nobody reads any more. False when it had ended already."""
        return self._streams.pop(request_id, None) is not None

    def route(self, events: Iterable[LinkEvent]) -> None:
        """Give each event to its stream; events of detached requests are dropped."""
        for event in events:
            if not isinstance(event, RequestEvent):
                continue
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            if isinstance(event, Finished | Rejected):
                self.detach(event.request_id)
            stream.push(event)

    def fail_all(self, message: str) -> None:
        """The worker is gone: each open stream ends with one FAILED, and nothing can be opened any more."""
        self._death = message
        for request_id, stream in list(self._streams.items()):
            if not stream.was_accepted:
                stream.push(Accepted(request_id=request_id))
            self.detach(request_id)
            stream.push(
                Finished(
                    request_id=request_id,
                    reason=FinishReason.FAILED,
                    prompt_tokens=stream.prompt_tokens,
                    completion_tokens=stream.completion_tokens,
                    error=message,
                )
            )
