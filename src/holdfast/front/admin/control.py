"""/admin/models: load, unload and pin models, and follow their loading; /admin/requests: requests in
progress, and how to cancel one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.front.admin import sessions
from holdfast.front.admin.status import (
    ModelHealth,
    front_page,
    head_of_front_page,
    health,
    health_of,
    metrics,
    openapi_document,
    show_store,
)
from holdfast.front.openai.answers import ErrorBody, openai_error
from holdfast.front.server.answers import EventWriter, StreamFormat
from holdfast.front.server.dialect import (
    ENDLESS_MARK,
    Dialect,
    answers_of,
    operation,
    request_of,
    response_of,
)
from holdfast.front.server.in_progress import ActiveRequest, RequestState, unless_disconnected
from holdfast.front.server.problem import Problem, RequestRefused
from holdfast.front.server.request import json_response, parse, read_body, read_json
from holdfast.front.server.services import Services, named_model

POLL_SECONDS = 0.25
_STATUS_WORDS = {  # llama.cpp's words where they differ from our states
    "ready": "loaded",
    "stopping": "unloading",
    "failed": "unloaded",
}
_STRICT = ConfigDict(extra="forbid", strict=True)
REQUESTS_PATH = "/admin/requests"


class ModelEvent(Struct, frozen=True, kw_only=True):
    """A change of one model.

    model_status: `data.status` is unloaded, loading, loaded or unloading. After a failed load it is
        unloaded, with `failed` true and the reason in `message`.
    model_remove: the model is no longer served.
    download_progress: `data` has the `done` and `total` bytes of each stage, `download` and
        `checking`.
    download_end: the download has ended. If it succeeded, a model_status of the model follows.
    """

    model: str
    event: Literal["model_status", "model_remove", "download_progress", "download_end"]
    data: dict[str, Any] = {}


class _Events(StreamFormat):
    """Server-sent events; comments keep the connection open."""

    def broken(self, problem: Problem) -> bytes:
        """The error as an event."""
        return b"data: %b\n\n" % msgspec.json.encode(openai_error(problem))


class ModelEventsResponse(Response):
    """Events until the client leaves or the server stops."""

    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services = services
        self._statuses: dict[str, dict[str, Any]] = {}
        self._downloads: dict[str, dict[str, Any]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the state of all models, then every change."""
        writer = EventWriter(send, _Events(), self._frames())
        await unless_disconnected(receive, writer.run())

    async def _frames(self) -> AsyncIterator[bytes]:
        yield b""
        while not self._services.drain.is_on:
            for event in self._model_changes():
                yield _frame(event)
            for event in self._download_changes():
                yield _frame(event)
            await asyncio.sleep(POLL_SECONDS)

    def _model_changes(self) -> Iterator[ModelEvent]:
        before = self._statuses
        self._statuses = {}
        for model in self._services.statuses():
            status: dict[str, Any] = {"status": _STATUS_WORDS.get(model.state, model.state)}
            if model.state == "failed":
                status["failed"] = True
                status["message"] = model.failure
            self._statuses[model.id] = status
            if before.get(model.id) != status:
                yield ModelEvent(model=model.id, event="model_status", data=status)
        for name in before.keys() - self._statuses.keys():
            yield ModelEvent(model=name, event="model_remove")

    def _download_changes(self) -> Iterator[ModelEvent]:
        before = self._downloads
        self._downloads = {}
        for name, steps in self._services.library.progress().items():
            progress: dict[str, Any] = {}
            for step in steps:
                progress[step.stage] = {"done": step.done_bytes, "total": step.total_bytes}
            self._downloads[name] = progress
            if progress and before.get(name) != progress:
                yield ModelEvent(model=name, event="download_progress", data=progress)
        for name in before.keys() - self._downloads.keys():
            yield ModelEvent(model=name, event="download_end")


def _frame(event: ModelEvent) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(event)


@operation(
    "GET",
    "/admin/models/events",
    response_of({"text/event-stream": ModelEvent}),
    {ENDLESS_MARK: True},
    needs_admin=True,
)
async def follow_models(request: Request, services: Services) -> Response:
    """Follow loads, unloads and downloads of models, as server-sent events.

    The first events give the state of every model. The stream ends when the server stops.
    """
    return ModelEventsResponse(services)


class PinChange(BaseModel):
    """Whether a model is to be pinned."""

    model_config = _STRICT

    pinned: bool = Field(
        True, description="False: it may be unloaded when another one needs its place."
    )


class LimitsChange(BaseModel):
    """What is to be changed; what is left out stays as it is."""

    model_config = _STRICT

    max_running: int | None = Field(None, ge=1, description="Sequences that run at once.")
    step_tokens: int | None = Field(None, ge=1, description="Tokens that one step reads at most.")


class ModelLimits(Struct, frozen=True, kw_only=True):
    """What counts from now on.

    `step_tokens` is null while it is not known what the worker will choose.
    """

    id: str
    max_running: int
    step_tokens: int | None


@operation(
    "PATCH",
    "/admin/models/{id:path}",
    request_of(LimitsChange),
    answers_of(ModelLimits),
    needs_admin=True,
)
async def change_limits(request: Request, services: Services) -> Response:
    """Change how many sequences of a loaded model run at once, and how much one step reads, until
    the server ends.

    No stream is lost: what runs beyond a lower limit waits, with its state, until there is a place
    again.
    """
    asked = await read_json(request, LimitsChange, services.limits)
    model = named_model(services, request.path_params["id"]).id
    limits = await services.control.set_limits(
        model, max_running=asked.max_running, step_tokens=asked.step_tokens
    )
    return json_response(
        ModelLimits(
            id=model, max_running=limits.max_running, step_tokens=limits.step_tokens or None
        )
    )


@operation("POST", "/admin/models/{id:path}/load", answers_of(ModelHealth), needs_admin=True)
async def load_model(request: Request, services: Services) -> Response:
    """Load a model, and answer when it serves. Others are unloaded for it as for a request."""
    return await _done(request, services, services.control.load)


@operation("POST", "/admin/models/{id:path}/unload", answers_of(ModelHealth), needs_admin=True)
async def unload_model(request: Request, services: Services) -> Response:
    """Unload a model when those who use it are served, and answer when it is gone.

    What it has read stays.
    """
    return await _done(request, services, services.control.unload)


@operation(
    "POST",
    "/admin/models/{id:path}/pin",
    request_of(PinChange, required=False),
    answers_of(ModelHealth),
    needs_admin=True,
)
async def pin_model(request: Request, services: Services) -> Response:
    """Load a model and keep it loaded, or no longer keep it."""
    asked = parse(
        PinChange, await read_body(request, limit_bytes=services.limits.max_body_bytes) or b"{}"
    )
    return await _done(request, services, partial(services.control.pin, pinned=asked.pinned))


async def _done(
    request: Request, services: Services, work: Callable[[str], Coroutine[Any, Any, None]]
) -> Response:
    """How the model is doing when that is done. Raises ClientDisconnect when nobody waits any more."""
    model = named_model(services, request.path_params["id"]).id
    if not await unless_disconnected(request.receive, work(model)):
        raise ClientDisconnect
    return json_response(health_of(model, services))


class RunningRequest(Struct, frozen=True, kw_only=True):
    """A request that is being answered.

    state: waiting (for its model, or to be taken), reading (in the queue, or its prompt is read),
    writing, or abandoned (its client is gone and may come back for the answer). key: the name of
    the API key that it came with, empty for none. client: its address. prefilled_tokens: how much
    of a prompt that takes long is read, 0 as long as nothing is known.
    """

    id: str
    model: str
    state: RequestState
    path: str
    key: str
    client: str
    session_id: str
    age_seconds: float
    prompt_tokens: int
    prefilled_tokens: int
    answer_tokens: int


class RunningRequests(Struct, frozen=True, kw_only=True):
    """All of them, the oldest first."""

    requests: list[RunningRequest]


class CancelledRequest(Struct, frozen=True, kw_only=True):
    """A request that was ended. Its client gets an error that says so."""

    id: str
    cancelled: bool = True


@operation(
    "GET",
    REQUESTS_PATH,
    answers_of(RunningRequests),
    summary="what is being answered, for whom",
    needs_admin=True,
)
async def list_requests(request: Request, services: Services) -> Response:
    """The requests that are being answered.

    Needs an admin's key, or without any keys a connection from this machine.
    """
    return json_response(RunningRequests(requests=[_shown(active) for active in services.active]))


@operation("DELETE", REQUESTS_PATH + "/{id}", answers_of(CancelledRequest), needs_admin=True)
async def cancel_request(request: Request, services: Services) -> Response:
    """Cancel a request; its client gets an error that says so.

    What was read of its prompt stays in memory.
    """
    request_id: str = request.path_params["id"]
    if services.active.cancel(request_id) is None:
        raise RequestRefused(
            f"no request {request_id[:200]!r} is being answered",
            status=404,
            code="request_not_found",
            field="id",
        )
    return json_response(CancelledRequest(id=request_id))


def _shown(active: ActiveRequest) -> RunningRequest:
    record, answer = active.record, active.record.answer
    return RunningRequest(
        id=active.id,
        model=record.model,
        state=active.state,
        path=record.path,
        key=record.key,
        client=record.client,
        session_id=record.asked.session_id if record.asked is not None else "",
        age_seconds=round(record.seconds, 3),
        prompt_tokens=0 if answer is None else answer.prompt_tokens,
        prefilled_tokens=0 if answer is None else answer.prefilled_tokens,
        answer_tokens=0 if answer is None else answer.tokens,
    )


OPERATIONS = (
    list_requests,
    cancel_request,
    show_store,
    follow_models,
    load_model,
    unload_model,
    pin_model,
    change_limits,
)
ADMIN = Dialect(
    name="The server's own",
    error=openai_error,
    error_shape=ErrorBody,
    prefixes=("/health", "/metrics", "/openapi.json", "/v1/sessions", "/admin"),
    operations=(
        *sessions.OPERATIONS,
        front_page,
        head_of_front_page,
        health,
        metrics,
        openapi_document,
        *OPERATIONS,
    ),
)
