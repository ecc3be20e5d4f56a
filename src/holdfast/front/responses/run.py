"""A Response while it is generated and stored: its items as they are completed, its end, and
what is kept of one whose client is gone.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.errors import ResponsesUnavailable
from holdfast.front.responses.answer import ResponseAnswer
from holdfast.front.responses.shapes import OutputItem, ResponseObject
from holdfast.front.server.following import FollowingResponse
from holdfast.front.server.generation import GenerationResponse, run_alone
from holdfast.front.server.problem import Problem, RequestRefused, problem_of
from holdfast.front.server.request import json_response
from holdfast.front.server.running import EventLog, NumberedEvent, RunningAnswers
from holdfast.front.server.services import Services, is_waited_for
from holdfast.store.response_thread import ResponseStore
from holdfast.store.responses import Item, ResponseFile, StoredRecord

_THOUGHT = "holdfast_thought"  # key of what is kept beside a thought's item, and never shown
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "compaction": "cmp",
}
_CALLS = ("function_call", "custom_tool_call")
RUNNING = ("queued", "in_progress")
# told again to keep a line open
_STATUS_EVENTS = tuple(b"event: response.%b\n" % status.encode() for status in RUNNING)


def kept_input(items: Iterable[Mapping[str, Any]]) -> list[Item]:
    """Items of an input as they were given, with ids and what may be left out.

    A compaction trigger says what to do with the others and is not kept.
    """
    stem = uuid.uuid4().hex
    kept = [item for item in items if item.get("type") != "compaction_trigger"]
    return [_whole(item, f"{stem}{number:02x}") for number, item in enumerate(kept)]


def kept_output(items: Sequence[OutputItem], thoughts: Mapping[str, str]) -> list[Item]:
    """Items of an output. thoughts: by the item's id; kept beside those that do not show theirs."""
    kept: list[Item] = msgspec.to_builtins(items)
    hidden = {item["id"] for item in kept if item["id"] in thoughts and not item.get("content")}
    return [
        {**item, _THOUGHT: thoughts[item["id"]]} if item["id"] in hidden else item for item in kept
    ]


def shown_item(item: Item) -> Item:
    """A kept item as a client may see it."""
    return (
        {key: value for key, value in item.items() if key != _THOUGHT} if _THOUGHT in item else item
    )


def with_sealed_thought(item: Item, seal: Callable[[str], str]) -> Item:
    """An item as a client may see it that wants thoughts to bring back."""
    thought = item.get(_THOUGHT) or "".join(
        part["text"] for part in item.get("content") or () if item["type"] == "reasoning"
    )
    return shown_item({"encrypted_content": seal(thought), **item} if thought else item)


def continued(items: Iterable[Item]) -> list[Any]:
    """Kept items as the beginning of another input: thoughts to be read, without calls that were
    cut off.
    """
    found = []
    for item in items:
        if item.get("type") in _CALLS and item.get("status") == "incomplete":
            continue
        if _THOUGHT in item:
            thought = [{"type": "reasoning_text", "text": item[_THOUGHT]}]
            item = {"type": "reasoning", "id": item["id"], "summary": [], "content": thought}
        found.append(item)
    return found


def _whole(item: Mapping[str, Any], name: str) -> Item:
    kind = item.get("type") or "message"
    whole = {**item, "type": kind, "id": item.get("id") or f"{_PREFIXES.get(kind, 'item')}_{name}"}
    if kind == "message":
        if isinstance(whole.get("content"), str):
            part = (
                {"type": "output_text", "annotations": []}
                if whole.get("role") == "assistant"
                else {"type": "input_text"}
            )
            whole["content"] = [{**part, "text": whole["content"]}]
        whole.setdefault("status", "completed")
    elif kind not in ("reasoning", "compaction"):
        whole.setdefault("status", "completed")
    return whole


class KeptResponse(Response):
    """An answer that is stored as far as it was generated, which may be after its client has left."""

    def __init__(self, response: Response, run: ResponseRun) -> None:
        super().__init__()
        self._response, self._run = response, run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send."""
        try:
            await self._response(scope, receive, send)
        finally:
            self._run.stop()


async def in_background(
    request: Request, services: Services, response: GenerationResponse, run: ResponseRun
) -> Response:
    """Have a response made, and tell what it is so far, or follow its events.

    Raises what it is refused for.
    """
    running, most = services.running, services.responses.limits.max_background
    if len(running.tasks) >= most:
        reason = (
            f"`background`: this server makes at most {most} responses in the background at once; "
            "please try again later"
        )
        raise RequestRefused(reason, status=429, code="rate_limit_exceeded", field="background")
    queued = run.response
    task = asyncio.create_task(
        run_alone(response, request, stopped=run.stopped), name="background response"
    )
    running.tasks.add(task)
    task.add_done_callback(running.tasks.discard)
    task.add_done_callback(lambda ended: _ended(ended, run))
    if is_waited_for(services, queued.model):
        run.form.keep_alive()  # so that it is there already: nobody is to wait for so long
    else:
        beginning = asyncio.create_task(run.begun())
        try:
            await asyncio.wait((task, beginning), return_when=asyncio.FIRST_COMPLETED)
        finally:
            beginning.cancel()
        if not run.events:
            await task
    try:
        await run.put_down()
    except ResponsesUnavailable:  # so nobody could ever ask for it
        run.stop()
        raise
    return FollowingResponse(run, run.form) if run.keeping.streams else json_response(queued)


def _ended(task: asyncio.Task[None], run: ResponseRun) -> None:
    if task.cancelled():
        run.stop()
    elif (error := task.exception()) is not None:
        run.fail(problem_of(error))


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
