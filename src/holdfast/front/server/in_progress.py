"""Requests in progress: their state, cancellation by id, and work that ends when its client
disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from starlette.types import Receive

from holdfast.errors import HoldfastError, WorkerUnavailable
from holdfast.front.server.held_answers import HeldAnswer
from holdfast.front.server.problem import RequestRefused
from holdfast.telemetry.request_log import RequestRecord, current_record

RequestState: TypeAlias = Literal["waiting", "reading", "writing", "abandoned"]
_STOPPED = "the server stopped before the answer was done"


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`, but cancel it if the client disconnects first.

    Returns whether the work ended; raises its error.
    """
    return await unless_first(disconnected(receive), work)


async def unless_first(other: Coroutine[Any, Any, None], work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`, but cancel it if `other` ends first.

    Returns whether the work ended; raises its error.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(other)
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait((working, watching))


async def disconnected(receive: Receive) -> None:
    """Wait until the connection is closed."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Thinker(Protocol):
    """An answer whose thoughts can be ended."""

    def end_thoughts(self) -> bool:
        """End its thought. Returns whether this model allows that."""
        ...


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request in progress."""

    id: str  # the request's id, with a number if several requests have the same one
    record: RequestRecord
    task: asyncio.Task[object]
    is_cancelled: bool = False
    thinker: Thinker | None = None  # once the model has accepted the request
    makes: HeldAnswer | None = None  # the answer that it generates and that a retry may get
    follows: HeldAnswer | None = None  # the answer to an earlier request, which it gets instead

    @property
    def is_abandoned(self) -> bool:
        """Whether its answer is generated although no client is connected."""
        return self.makes is not None and self.makes.clients == 0

    @property
    def state(self) -> RequestState:
        """waiting: for its model or a place in the queue. reading: queued, or in prefill.
        writing: in decode. abandoned: its client is gone, but a retry may get the answer.
        """
        if self.is_abandoned:
            return "abandoned"
        if self.follows is not None:
            return "writing" if self.follows.next_place else "reading"
        if self.record.answer is None:
            return "waiting" if self.record.asked is not None else "reading"
        return "reading" if self.record.answer.first_text_at is None else "writing"

    def ended_by(self) -> HoldfastError:
        """The error for its client after its task was cancelled, by an administrator or because the
        server stops.
        """
        if self.is_cancelled:
            return RequestRefused(
                "the server's administrator has cancelled this request",
                status=403,
                code="request_cancelled",
            )
        return WorkerUnavailable(_STOPPED)


class ActiveRequests:
    """All requests in progress, the oldest first. Only call it from the event loop's thread."""

    def __init__(self, *, on_change: Callable[[int], None] = lambda count: None) -> None:
        """on_change: called with the number of requests whenever it has changed."""
        self._active: dict[str, ActiveRequest] = {}
        self._on_change = on_change

    def __iter__(self) -> Iterator[ActiveRequest]:
        return iter(tuple(self._active.values()))

    @contextmanager
    def entered(self, record: RequestRecord) -> Iterator[ActiveRequest]:
        """A context in which the current task answers this request."""
        task = asyncio.current_task()
        assert task is not None
        active = ActiveRequest(self._free_id(record.request_id), record, task)
        self._active[active.id] = active
        self._on_change(len(self._active))
        try:
            with current_record(record):
                yield active
        finally:
            del self._active[active.id]
            self._on_change(len(self._active))

    def answering(self, answer_id: str, *, key: str) -> ActiveRequest | None:
        """The request of this API key whose answer has this id, if there is one."""
        for each in self:
            asked = each.record.asked
            if asked is not None and asked.request_id == answer_id and each.record.key == key:
                return each
        return None

    @property
    def has_clients(self) -> bool:
        """Whether any client is waiting for an answer."""
        return not all(active.is_abandoned for active in self._active.values())

    def cancel(self, request_id: str) -> ActiveRequest | None:
        """End a request with an error for its client. None: there is no request with this id."""
        found = self._active.get(request_id)
        if found is not None and not found.is_cancelled:
            found.is_cancelled = True
            found.task.cancel()
        return found

    def _free_id(self, request_id: str) -> str:
        number = 1
        free = request_id
        while free in self._active:
            number += 1
            free = f"{request_id}.{number}"
        return free
