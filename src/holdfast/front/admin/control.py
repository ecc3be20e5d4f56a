"""/admin/models: load, unload and pin models, and follow their state; /admin/requests: list and
cancel the requests in progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from functools import partial
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from holdfast.front.admin import cache, logs, overview, performance, sessions
from holdfast.front.admin.status import (
    ModelHealth,
    health,
    health_of,
    metrics,
    openapi_document,
    show_store,
    wait_reason,
)
from holdfast.front.fleet.memory_watch import level_name
from holdfast.front.fleet.residency import ModelStatus
from holdfast.front.openai.answer import ErrorBody, EventFormat, openai_error
from holdfast.front.server.access import caller_of, check_admin
from holdfast.front.server.dialect import ENDLESS_MARK, Dialect, operation
from holdfast.front.server.generation import FollowingResponse
from holdfast.front.server.openapi import accepts, response_shape, returns
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.request import json_response, parse, read_body, read_json
from holdfast.front.server.services import (
    ActiveRequest,
    RequestState,
    Services,
    base_model_id,
    named_model,
)
from holdfast.front.server.streams import run_unless_disconnected
from holdfast.wire.events import WaitReason

POLL_SECONDS = 0.25
_LLAMA_CPP_WORDS = {  # llama.cpp's words, where they differ from our states
    "ready": "loaded",
    "stopping": "unloading",
    "failed": "unloaded",
}
_STRICT_MODEL = ConfigDict(extra="forbid", strict=True, defer_build=True)
REQUESTS_PATH = "/admin/requests"
EventName: TypeAlias = Literal[
    "model_status", "model_remove", "download_progress", "download_end", "memory_pressure"
]


class ModelEvent(Struct, frozen=True, kw_only=True):
    """A change of one model, or of the memory pressure of all models together.

    model_status: `data.status` is unloaded, loading, loaded or unloading. After a failed load, it
        is unloaded, `failed` is true, and `message` has the reason.
    model_remove: the model is no longer served.
    download_progress: `data` has the `done` and `total` bytes of each stage (`download` and
        `checking`).
    download_end: the download has ended. If it succeeded, a model_status of the model follows.
    memory_pressure: `data.level` is normal, warning or critical, `data.reason` has the arithmetic,
        and `model` is empty. No such event is sent before the first change of the level.
    """

    model: str
    event: EventName
    data: dict[str, Any] = {}


async def _model_events(services: Services) -> AsyncIterator[bytes]:
    """Yield the state of all models, then every change, until the server stops."""
    yield b""  # so that the response begins at once
    statuses: dict[str, dict[str, Any]] = {}
    downloads: dict[str, dict[str, Any]] = {}
    memory: dict[str, dict[str, Any]] = {}
    while not services.access.drain.is_on:
        previous, statuses = (
            statuses,
            {model.id: _status_data(model) for model in services.models.statuses()},
        )
        for event in _change_events(previous, statuses, "model_status", "model_remove"):
            yield event
        previous, downloads = downloads, _progress_data(services)
        for event in _change_events(previous, downloads, "download_progress", "download_end"):
            yield event
        previous, memory = memory, {"": _pressure_data(services)}
        for event in _change_events(previous, memory, "memory_pressure", "memory_pressure"):
            yield event
        await asyncio.sleep(POLL_SECONDS)


def _pressure_data(services: Services) -> dict[str, Any]:
    """The `data` of a memory_pressure event; empty until the pressure level has changed once."""
    watch = services.models.control.memory
    return {"level": level_name(watch.pressure), "reason": watch.reason} if watch.reason else {}


def _status_data(model: ModelStatus) -> dict[str, Any]:
    """The `data` of a model_status event."""
    status = {"status": _LLAMA_CPP_WORDS.get(model.state, model.state)}
    return (
        {**status, "failed": True, "message": model.failure} if model.state == "failed" else status
    )


def _progress_data(services: Services) -> dict[str, dict[str, Any]]:
    """The `data` of download_progress events, by model."""
    return {
        name: {step.stage: {"done": step.done_bytes, "total": step.total_bytes} for step in steps}
        for name, steps in services.models.library.progress().items()
    }


def _change_events(
    previous: Mapping[str, dict[str, Any]],
    current: Mapping[str, dict[str, Any]],
    changed_event: EventName,
    removed_event: EventName,
) -> Iterator[bytes]:
    """Yield an event for each name whose data is new or different, or that is gone."""
    for name, data in current.items():
        if data and previous.get(name) != data:
            yield _event_bytes(ModelEvent(model=name, event=changed_event, data=data))
    for name in previous.keys() - current.keys():
        yield _event_bytes(ModelEvent(model=name, event=removed_event))


def _event_bytes(event: ModelEvent) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(event)


@operation(
    "GET",
    "/admin/models/events",
    response_shape({"text/event-stream": ModelEvent}),
    {ENDLESS_MARK: True},
    needs_admin=True,
)
async def follow_models(request: Request, services: Services) -> Response:
    """Follow loads, unloads, downloads and memory pressure, as server-sent events.

    The first events give the state of every model. The stream ends when the server stops.
    """
    return FollowingResponse(_model_events(services), EventFormat())


class PinChange(BaseModel):
    """Whether to pin a model."""

    model_config = _STRICT_MODEL

    pinned: bool = Field(
        True, description="Whether the model stays loaded. If false, another model may evict it."
    )


class LimitsChange(BaseModel):
    """The limits to change. Omitted limits do not change."""

    model_config = _STRICT_MODEL

    max_running: int | None = Field(None, ge=1, description="Maximum number of running sequences.")
    step_tokens: int | None = Field(
        None, ge=1, description="Maximum number of tokens to prefill per step."
    )


class ModelLimits(Struct, frozen=True, kw_only=True):
    """The limits that now apply. `step_tokens` is null until the worker has chosen it."""

    id: str
    max_running: int
    step_tokens: int | None


@operation(
    "PATCH",
    "/admin/models/{id:path}",
    accepts(LimitsChange),
    returns(ModelLimits),
    needs_admin=True,
)
async def change_limits(request: Request, services: Services) -> Response:
    """Change the scheduler's limits of a loaded model until the server stops.

    No stream is lost: sequences beyond a lowered limit wait and keep their state.
    """
    change = await read_json(request, LimitsChange, services.limits)
    model = base_model_id(services, named_model(services, request.path_params["id"]).id)
    limits = await services.models.control.set_limits(
        model, max_running=change.max_running, step_tokens=change.step_tokens
    )
    return json_response(
        ModelLimits(
            id=model, max_running=limits.max_running, step_tokens=limits.step_tokens or None
        )
    )


@operation("POST", "/admin/models/{id:path}/load", returns(ModelHealth), needs_admin=True)
async def load_model(request: Request, services: Services) -> Response:
    """Load a model, and respond when it is ready. Like a request, this may evict other models."""
    return await _run_on_model(request, services, services.models.control.load)


@operation("POST", "/admin/models/{id:path}/unload", returns(ModelHealth), needs_admin=True)
async def unload_model(request: Request, services: Services) -> Response:
    """Unload a model when its requests have ended, and respond when it is unloaded.

    Its cache on disk is kept.
    """
    return await _run_on_model(request, services, services.models.control.unload)


@operation(
    "POST",
    "/admin/models/{id:path}/pin",
    accepts(PinChange, required=False),
    returns(ModelHealth),
    needs_admin=True,
)
async def pin_model(request: Request, services: Services) -> Response:
    """Pin a model, which loads it and keeps it loaded, or unpin it."""
    change = parse(
        PinChange, await read_body(request, limit_bytes=services.limits.max_body_bytes) or b"{}"
    )
    return await _run_on_model(
        request, services, partial(services.models.control.pin, pinned=change.pinned)
    )


async def _run_on_model(
    request: Request, services: Services, work: Callable[[str], Coroutine[Any, Any, None]]
) -> Response:
    """Run `work` on the model that the path names, and respond with the state of the model.

    Raises ClientDisconnect if the client leaves first.
    """
    model = base_model_id(services, named_model(services, request.path_params["id"]).id)
    if not await run_unless_disconnected(request.receive, work(model)):
        raise ClientDisconnect
    return json_response(health_of(model, services))


class RunningRequest(Struct, frozen=True, kw_only=True):
    """A request in progress.

    state: waiting (for its model, or to be accepted), reading (queued, or in prefill), writing, or
        abandoned (its client is gone, but may come back for the answer).
    answer_id: the id that the client gets with its answer; empty until the request is checked.
    key: the name of the request's API key, or empty.
    client: the client's address.
    prefilled_tokens, cached_tokens: progress of a long prefill, and how many tokens were
        cached; 0 until progress is reported.
    tokens_per_second: speed of the answer; null until it can be measured.
    waits_for: as in /health; null if the request does not wait.
    """

    id: str
    model: str
    state: RequestState
    waits_for: WaitReason | None
    answer_id: str
    path: str
    key: str
    client: str
    session_id: str
    age_seconds: float
    prompt_tokens: int
    prefilled_tokens: int
    cached_tokens: int
    answer_tokens: int
    tokens_per_second: float | None


class RunningRequests(Struct, frozen=True, kw_only=True):
    """The requests in progress, the oldest first."""

    requests: list[RunningRequest]


class CancelledRequest(Struct, frozen=True, kw_only=True):
    """A cancelled request. Its client gets an error that says that it was cancelled."""

    id: str
    cancelled: bool = True


@operation("GET", REQUESTS_PATH, returns(RunningRequests), summary="the requests in progress")
async def list_requests(request: Request, services: Services) -> Response:
    """List the requests in progress.

    With an ordinary API key, lists only the requests of that key. If no keys are set, requires a
    connection from this machine.
    """
    caller = caller_of(request)
    if not caller.has_key:
        check_admin(request)
    models = {model.id: model for model in services.models.statuses()}
    requests = [
        _running_request(active, models.get(base_model_id(services, active.record.model)))
        for active in services.answers.active
        if caller.is_admin or active.record.key == caller.key_name
    ]
    return json_response(RunningRequests(requests=requests))


@operation("DELETE", REQUESTS_PATH + "/{id}", returns(CancelledRequest), needs_admin=True)
async def cancel_request(request: Request, services: Services) -> Response:
    """Cancel a request.

    Its client gets an error that says so. The prefilled part of the prompt stays cached.
    """
    request_id: str = request.path_params["id"]
    if services.answers.active.cancel(request_id) is None:
        raise RequestRefused(
            f"no request {request_id[:200]!r} is in progress",
            status=404,
            code="request_not_found",
            field="id",
        )
    return json_response(CancelledRequest(id=request_id))


def _running_request(active: ActiveRequest, model: ModelStatus | None) -> RunningRequest:
    """A request as shown to clients. model: None if it is not served, or not known yet."""
    record, answer = active.record, active.record.answer
    return RunningRequest(
        id=active.id,
        model=record.model,
        state=active.state,
        waits_for=wait_reason(record, model),
        answer_id=record.generation.request_id if record.generation is not None else "",
        path=record.path,
        key=record.key,
        client=record.client,
        session_id=record.generation.session_id if record.generation is not None else "",
        age_seconds=round(record.seconds, 3),
        prompt_tokens=0 if answer is None else answer.prompt_tokens,
        prefilled_tokens=0 if answer is None else answer.prefilled_tokens,
        cached_tokens=_cached_tokens(active),
        answer_tokens=0 if answer is None else answer.tokens,
        tokens_per_second=None if answer is None else answer.tokens_per_second,
    )


def _cached_tokens(active: ActiveRequest) -> int:
    """How many prompt tokens were cached, as last reported; 0 until then."""
    if active.stream is not None and active.stream.cached_tokens is not None:
        return active.stream.cached_tokens
    answer = active.record.answer
    return 0 if answer is None else answer.known_cached_tokens


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
        health,
        metrics,
        openapi_document,
        *OPERATIONS,
        *overview.OPERATIONS,
        *performance.OPERATIONS,
        *logs.OPERATIONS,
        *cache.OPERATIONS,
    ),
)
