"""POST /v1/responses: what a new Response continues, its generation, and its way into the store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.errors import PromptTooLong, ResponsesUnavailable
from holdfast.front.responses.answer import ResponseAnswer, ResponseEvent, ResponseObject
from holdfast.front.responses.compaction import CompactedResponse, CompactionAnswer
from holdfast.front.responses.fields import ResponseRequest
from holdfast.front.responses.items import (
    TRIGGER,
    continued,
    items_of,
    shown_item,
    stored_input,
    stored_output,
)
from holdfast.front.responses.tools import missing, offered_tools
from holdfast.front.server.dialect import answers_of, operation, request_of
from holdfast.front.server.generation import (
    FollowingResponse,
    GenerationResponse,
    rejoined,
    run_alone,
)
from holdfast.front.server.held_answers import EventLog, NumberedEvent, identity_of
from holdfast.front.server.problem import RequestRefused, problem_of, record_problem
from holdfast.front.server.request import extended, json_response, parse, read_body, tenant_in
from holdfast.front.server.services import Services, is_waited_for, salted
from holdfast.store.responses import Item, RecordKey, RecordMissing, ResponseFile
from holdfast.telemetry.request_log import RECORD, AnswerRecord

_SESSION_HEADERS = ("session-id", "session_id")  # current and earlier Codex


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The number of tokens of an input."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


@operation(
    "POST",
    "/v1/responses",
    request_of(ResponseRequest),
    answers_of(ResponseObject, chunk=ResponseEvent),
    summary="responses (OpenAI)",
)
async def create_response(request: Request, services: Services) -> Response:
    """Answer the items of an input."""
    answer = AnswerRecord(services.metrics)
    body = await read_body(request, limit_bytes=services.limits.max_body_bytes)
    identity = identity_of(request, body, services.server)
    if (taken := rejoined(identity, request, services)) is not None:
        return taken
    asked = parse(ResponseRequest, body)
    services = salted(services, asked.cache_salt)
    resolved = await _resolved(asked, request, services)
    asked = resolved.asked
    plan = asked.plan(services, session_key=_session_key(request), before=resolved.before)
    plan = extended(plan, request, limits=services.limits)
    form = plan.form
    assert isinstance(form, ResponseAnswer)
    run = None
    if asked.stores or asked.conversation_id is not None:
        run = ResponseRun(form, resolved, services)
    if run is not None and asked.background:
        generation = GenerationResponse(services, replace(plan, streams=True), answer)
        return await _in_background(request, services, generation, run)
    return _AttendedResponse(
        GenerationResponse(services, plan, answer, identity=identity),
        form,
        run,
        streams_overflow=plan.streams and is_codex(request.headers),
    )


@operation(
    "POST", "/v1/responses/compact", request_of(ResponseRequest), answers_of(CompactedResponse)
)
async def compact_response(request: Request, services: Services) -> Response:
    """Have the model summarize a conversation.

    The answer is what to send in place of it. Nothing is stored.
    """
    answer = AnswerRecord(services.metrics)
    body = await read_body(request, limit_bytes=services.limits.max_body_bytes)
    identity = identity_of(request, body, services.server)
    if (taken := rejoined(identity, request, services)) is not None:
        return taken
    asked = parse(ResponseRequest, body)
    if asked.model is None:  # sealed summaries belong to one model
        raise missing("model")
    for field in ("stream", "background"):
        if getattr(asked, field):
            raise RequestRefused(
                f"`{field}`: a compaction is answered whole, while its client waits", field=field
            )
    services = salted(services, asked.cache_salt)
    items = [*items_of(asked.input), {"type": TRIGGER}]
    asked = asked.model_copy(update={"input": items, "store": False})
    resolved = await _resolved(asked, request, services)
    plan = resolved.asked.plan(services, session_key=_session_key(request), before=resolved.before)
    assert isinstance(plan.form, CompactionAnswer), "the input ends with a trigger"
    plan.form.replaces = [*resolved.before, *items_of(resolved.asked.input)]
    plan = extended(plan, request, limits=services.limits)
    return GenerationResponse(services, plan, answer, identity=identity)


@operation(
    "POST", "/v1/responses/input_tokens", request_of(ResponseRequest), answers_of(InputTokens)
)
async def count_input_tokens(request: Request, services: Services) -> Response:
    """Count the tokens of an input, tools included."""
    body = await read_body(request, limit_bytes=services.limits.max_body_bytes)
    asked = parse(ResponseRequest, body)
    services = salted(services, asked.cache_salt)
    resolved = await _resolved(asked, request, services)
    offered = offered_tools(asked.tools or (), limits=services.limits)
    counted = resolved.asked.request(services, "", offered=offered, before=resolved.before)
    encoded = await services.encode(msgspec.structs.replace(counted, tenant=resolved.tenant))
    return json_response(InputTokens(input_tokens=len(encoded.token_ids)))


def is_codex(headers: Mapping[str, str]) -> bool:
    """Whether a request comes from Codex."""
    names = [headers.get(name, "").lower() for name in ("originator", "user-agent")]
    return any(name.startswith("codex") for name in names)


def _session_key(request: Request) -> str:
    """The session that the headers name; empty: none."""
    named = (request.headers.get(name) for name in _SESSION_HEADERS)
    return next(filter(None, named), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resolved:
    """A request and the stored items that it refers to."""

    tenant: str
    asked: ResponseRequest  # its input without references
    items: Sequence[Item]  # of the input, in stored form
    before: Sequence[Any]  # the items that it continues


async def _resolved(asked: ResponseRequest, request: Request, services: Services) -> _Resolved:
    """Look up what a request refers to. Raises RequestRefused for what does not exist."""
    asked.refuse_what_cannot_be_served(services.limits)
    tenant = tenant_in(request, cache_salt=asked.cache_salt or "")
    items: list[Item] = [shown_item(item) for item in items_of(asked.input)]
    references = [place for place, item in enumerate(items) if _is_reference(item)]
    if references:
        names = [items[place].get("id") or "" for place in references]
        found = await services.responses.call(ResponseFile.find_items, tenant, names)
        for place, name in zip(references, names, strict=True):
            if name not in found:
                what = "there is no such item; it may not be kept any more"
                raise _not_found(f"input.{place}.id", what, "item_not_found")
            items[place] = found[name]
        asked = asked.model_copy(update={"input": continued(items)})
    before: list[Item] = []
    if asked.previous_response_id is not None:
        before = await _chain(services, RecordKey(tenant, asked.previous_response_id))
    elif asked.conversation_id is not None:
        key = RecordKey(tenant, asked.conversation_id, "conversation")
        before = await _conversation(services, key)
    return _Resolved(tenant=tenant, asked=asked, items=items, before=continued(before))


def _is_reference(item: Mapping[str, Any]) -> bool:
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and "role" not in item)


def _not_found(field: str, what: str, code: str) -> RequestRefused:
    return RequestRefused(f"`{field}`: {what}", status=404, code=code, field=field)


async def _chain(services: Services, key: RecordKey) -> list[Item]:
    field = "previous_response_id"
    try:
        record = await services.responses.call(ResponseFile.record, key)
        if record.is_running:
            reason = f"`{field}`: that response is still being generated"
            raise RequestRefused(reason, code="previous_response_in_progress", field=field)
        if record.body.get("conversation"):
            reason = f"`{field}`: that response belongs to a conversation; continue `conversation`"
            raise RequestRefused(reason, field=field)
        return await services.responses.call(ResponseFile.chain, key)
    except RecordMissing as lost:
        what = "there is no such response"
        if lost.record_id != key.id:
            what = "a response that it continues is gone"
        what += "; it may have been deleted, or not be kept any more"
        raise _not_found(field, what, "previous_response_not_found") from None


async def _conversation(services: Services, key: RecordKey) -> list[Item]:
    try:
        return await services.responses.call(ResponseFile.items, key)
    except RecordMissing:
        what = "there is no such conversation; it may have been deleted, or not be kept any more"
        raise _not_found("conversation", what, "conversation_not_found") from None


class _AttendedResponse(Response):
    """A response whose client waits for it. What was generated when the client leaves is stored."""

    def __init__(
        self,
        generation: GenerationResponse,
        form: ResponseAnswer,
        run: ResponseRun | None,
        *,
        streams_overflow: bool,
    ) -> None:
        """streams_overflow: an input that is too long fails within the stream. Codex then compacts
        its conversation; a status of 400 would end its turn.
        """
        super().__init__()
        self._generation = generation
        self._form = form
        self._run = run
        self._streams_overflow = streams_overflow

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send."""
        try:
            await self._generation(scope, receive, send)
        except PromptTooLong as error:  # raised before anything was sent
            if not self._streams_overflow:
                raise
            problem = problem_of(error)
            record_problem(scope[RECORD], problem, error)
            failed = Response(self._form.broken(problem), media_type=self._form.stream_type)
            await failed(scope, receive, send)
        finally:
            if self._run is not None:
                self._run.stop()


async def _in_background(
    request: Request, services: Services, generation: GenerationResponse, run: ResponseRun
) -> Response:
    """Start a background response, and answer with what it is so far or with its events.

    Raises what the response is refused for.
    """
    tasks = services.running.tasks
    most = services.responses.limits.max_background
    if len(tasks) >= most:
        reason = (
            f"`background`: this server runs at most {most} responses in the background at once; "
            "please try again later"
        )
        raise RequestRefused(reason, status=429, code="rate_limit_exceeded", field="background")
    queued = run.form.response
    task = asyncio.create_task(
        run_alone(generation, request, stopped=run.stopped), name="background response"
    )
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    task.add_done_callback(run.task_ended)
    if is_waited_for(services, queued.model):
        run.form.keep_alive()  # stores the response now: loading the model may take minutes
    else:
        beginning = asyncio.create_task(run.begun())
        try:
            await asyncio.wait((task, beginning), return_when=asyncio.FIRST_COMPLETED)
        finally:
            beginning.cancel()
        if not run.events:
            await task
    try:
        await run.stored()
    except ResponsesUnavailable:  # the client could never retrieve it
        run.stop()
        raise
    return FollowingResponse(run.after(-1), run.form) if run.asked.stream else json_response(queued)


class ResponseRun(EventLog):
    """The events of one response. The first one stores it as running, the last one as finished."""

    def __init__(self, form: ResponseAnswer, resolved: _Resolved, services: Services) -> None:
        super().__init__()
        self.form = form
        self.asked = resolved.asked
        self.stopped = asyncio.Event()
        self._key = RecordKey(resolved.tenant, form.id)
        self._items = stored_input(resolved.items)
        self._store = services.responses
        self._running = services.running
        self._stored: asyncio.Future[None] | None = None
        form.record = self._record

    async def stored(self) -> None:
        """Wait until the running response is stored. Raises ResponsesUnavailable."""
        if self._stored is not None:
            await asyncio.shield(self._stored)

    def stop(self) -> None:
        """End the response as cancelled, unless it has ended or not begun."""
        if self._is_open:
            self.form.cancel()
        self.stopped.set()

    def task_ended(self, task: asyncio.Task[None]) -> None:
        """The background task has ended: with an error, the response fails."""
        if task.cancelled():
            self.stop()
        elif (error := task.exception()) is not None and self._is_open:
            self.form.broken(problem_of(error))

    @property
    def _is_open(self) -> bool:
        return bool(self.events) and not self.has_ended

    def _record(self, number: int, frame: bytes) -> None:
        """Add an event. The response is stored before a client sees its first or last event."""
        if self.has_ended:
            return
        if not self.events and self.asked.stores:
            self._begin()
        self.add(NumberedEvent(number, frame))
        if self.form.response.status not in ("queued", "in_progress"):
            self.end()
            self._finish()

    def _begin(self) -> None:
        self._running.logs[self._key] = self
        self._stored = self._store.call(
            ResponseFile.put,
            self._key,
            self._body(),
            items=self._items,
            previous=self.asked.previous_response_id,
            is_running=True,
        )
        self._stored.add_done_callback(_ignore_failure)

    def _finish(self) -> None:
        response = self.form.response
        output = stored_output(response.output, self.form.hidden_thoughts)
        if self.asked.stores:
            was_deleted = self._running.logs.pop(self._key, None) is None
            events = b"".join([event.frame for event in self.events])
            finished = self._store.call(
                ResponseFile.finish, self._key, self._body(), output=output, events=events
            )
            finished.add_done_callback(_ignore_failure if was_deleted else self._finished)
        if self.asked.conversation_id and response.status in ("completed", "incomplete"):
            key = RecordKey(self._key.tenant, self.asked.conversation_id, "conversation")
            appended = self._store.call(ResponseFile.append, key, [*self._items, *output])
            appended.add_done_callback(_ignore_failure)

    def _finished(self, done: asyncio.Future[None]) -> None:
        """Keep the response in memory if its end could not be written: the store shows it as
        running.
        """
        if done.cancelled() or isinstance(done.exception(), ResponsesUnavailable):
            self._running.keep_unwritten(self._key, self)

    def _body(self) -> dict[str, Any]:
        return {**msgspec.to_builtins(self.form.response), "output": []}


def _ignore_failure(done: asyncio.Future[Any]) -> None:
    """The store has logged it; reading the exception keeps asyncio from logging it again."""
    if not done.cancelled():
        done.exception()
