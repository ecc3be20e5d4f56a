"""One response while it is made: its events are kept for whoever comes back to them, and in the end
it goes to the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.front.responses.answer import ResponseAnswer
from holdfast.front.responses.kept_items import kept_output
from holdfast.front.responses.shapes import ResponseObject
from holdfast.front.server.problem import Problem
from holdfast.front.server.running import EventLog, NumberedEvent, RunningAnswers
from holdfast.store.response_thread import ResponseStore
from holdfast.store.responses import Item, ResponseFile, StoredRecord

RUNNING = ("queued", "in_progress")
# told again to keep a line open
_STATUS_EVENTS = tuple(b"event: response.%b\n" % status.encode() for status in RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Where a response belongs, and what becomes of it."""

    tenant: str
    input: Sequence[Item] = ()  # of this response alone
    previous: str | None = None
    conversation: str | None = None
    stores: bool = True
    in_background: bool = False
    streams: bool = False  # the client wants the events

    @property
    def keeps(self) -> bool:
        """Whether anything of it is kept."""
        return self.stores or self.conversation is not None


class ResponseRun(EventLog):
    """The events of one response, and its way into the store: put down with its first event,
    finished with its last.
    """

    def __init__(self, keeping: Keeping, *, store: ResponseStore, running: RunningAnswers) -> None:
        super().__init__()
        self.keeping, self._store, self._running = keeping, store, running
        self._form: ResponseAnswer | None = None
        self.stopped = asyncio.Event()
        self._told: set[bytes | None] = set()
        self._beginning: asyncio.Future[None] | None = None

    def told_by(self, form: ResponseAnswer) -> None:
        """Take the form whose events these are."""
        self._form = form

    @property
    def form(self) -> ResponseAnswer:
        """The form whose events these are."""
        assert self._form is not None, "a run has a form before anything happens"
        return self._form

    @property
    def response(self) -> ResponseObject:
        """The response as it stands."""
        return self.form.response

    def hear(self, number: int, frame: bytes) -> None:
        """Take down one event. The first and the last are written down before a client sees them."""
        if self.has_ended:
            return
        response = self.response
        if not self.events:
            self._begin(response)
        told = next((event for event in _STATUS_EVENTS if frame.startswith(event)), None)
        if told is None or told not in self._told:
            self.add(NumberedEvent(number, frame))
        self._told.add(told)
        if response.status not in RUNNING:
            self.end()
            self._finish(response)

    async def put_down(self) -> None:
        """Wait until the store has it. Raises ResponsesUnavailable."""
        if self._beginning is not None:
            await asyncio.shield(self._beginning)

    def stop(self) -> None:
        """Nobody wants the rest: the response stays as it is, cancelled.

        Does nothing when it has ended or not begun.
        """
        if self._is_open:
            self.form.cancel()
        self.stopped.set()

    def fail(self, problem: Problem) -> None:
        """It cannot be made. Does nothing when it has ended or not begun."""
        if self._is_open:
            self.form.broken(problem)

    @property
    def _is_open(self) -> bool:
        return bool(self.events) and not self.has_ended

    def _begin(self, response: ResponseObject) -> None:
        if self.keeping.stores:
            keeping = self.keeping
            self._running.logs[keeping.tenant, response.id] = self
            record = StoredRecord(id=response.id, body=_body(response), is_running=True)
            self._beginning = self._store.call(
                ResponseFile.put,
                keeping.tenant,
                record,
                kind="response",
                previous=keeping.previous,
                items=keeping.input,
            )
            _unawaited(self._beginning)

    def _finish(self, response: ResponseObject) -> None:
        keeping, output = self.keeping, kept_output(response.output, self.form.thoughts)
        if keeping.stores:
            # it has not been deleted
            is_there = self._running.logs.pop((keeping.tenant, response.id), None) is not None
            record = StoredRecord(id=response.id, body=_body(response), output=output)
            events = b"".join([event.frame for event in self.events])
            finished = self._store.call(ResponseFile.finish, keeping.tenant, record, events=events)
            finished.add_done_callback(self._finished if is_there else _heard)
        if keeping.conversation is not None and response.status in ("completed", "incomplete"):
            items = [*keeping.input, *output]
            _unawaited(
                self._store.call(ResponseFile.append, keeping.tenant, keeping.conversation, items)
            )

    def _finished(self, done: asyncio.Future[bool]) -> None:
        """Go on to have it here if it could not be written: in the store it seems to be running."""
        if done.cancelled() or done.exception() is not None:
            self._running.keep_unwritten((self.keeping.tenant, self.response.id), self)


def _body(response: ResponseObject) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.to_builtins(response)
    return body | {"output": []}


def _unawaited(future: asyncio.Future[Any]) -> None:
    """Leave it to be done."""
    future.add_done_callback(_heard)


def _heard(done: asyncio.Future[Any]) -> None:
    """Take note of its failure: the store has said in the log what went wrong."""
    _ = done.cancelled() or done.exception()
