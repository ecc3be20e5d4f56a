"""/admin/models: load, unload and pin models, and change how many sequences one runs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from holdfast.front.admin.status import ModelHealth, health_of
from holdfast.front.server.body import json_response, parse, read_body
from holdfast.front.server.dialect import operation
from holdfast.front.server.disconnect import unless_disconnected
from holdfast.front.server.openapi import answers_of, request_of
from holdfast.front.server.services import Services, named_model

_STRICT = ConfigDict(extra="forbid", strict=True)


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


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
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
    asked = parse(
        LimitsChange, await read_body(request, limit_bytes=services.limits.max_body_bytes)
    )
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
