"""/health, /metrics and /openapi.json; and /admin/store, what the store on disk holds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from holdfast.config import StoreSettings
from holdfast.front.fleet.residency import ModelStatus
from holdfast.front.prompt.dialects import DialectReport
from holdfast.front.server.dialect import answers_of, description, operation, text_answer
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.request import json_response
from holdfast.front.server.services import Services
from holdfast.store.block import StoreRefused
from holdfast.store.budget import store_limits
from holdfast.store.folder import is_folder
from holdfast.store.inspect import ModelHoldings, list_store, summarize_store
from holdfast.telemetry.metrics import CONTENT_TYPE

_STOPPING = "stopping"


class StoreOverview(msgspec.Struct, frozen=True, kw_only=True):
    """The folder as a whole; without a store, `folder` is null and all else is nothing."""

    folder: str | None = None
    blocks: int = 0
    file_bytes: int = 0
    allowed_bytes: int = 0
    unreachable_blocks: int = 0
    pinned_blocks: int = 0
    written_today_bytes: int = 0
    quarantined_files: int = 0
    quarantined_bytes: int = 0
    volume_bytes: int = 0
    volume_free_bytes: int = 0
    models: tuple[ModelHoldings, ...] = ()


@operation(
    "GET",
    "/admin/store",
    answers_of(StoreOverview),
    summary="what is kept on disk",
    needs_admin=True,
)
async def show_store(request: Request, services: Services) -> Response:
    """What is kept on disk, how much of it may be, and of which models."""
    settings = services.store
    if not is_folder(settings):
        return json_response(StoreOverview())
    try:
        return json_response(await asyncio.to_thread(_figures, settings))
    except (StoreRefused, OSError) as error:
        raise RequestRefused(
            f"the store cannot be read: {error}", status=503, code="store_unavailable"
        ) from None


def _figures(settings: StoreSettings) -> StoreOverview:
    folder = Path(settings.folder)
    summary, models = summarize_store(folder, limits=store_limits(settings)), list_store(folder)
    shown = {
        name: getattr(summary, name)
        for name in StoreOverview.__struct_fields__
        if name not in ("folder", "models")
    }
    return StoreOverview(folder=str(folder), models=models, **shown)


class StoreHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The disk side of a model's memory.

    `mode` is writing, or memory-only while the folder cannot be written or has no room.

    `model` is the name under which `holdfast store ls` lists the model; the sizes are those of the
    whole folder. So is what was written to it since midnight (UTC), which counts against
    `store.daily_write_bytes`.
    """

    model: str
    mode: str
    blocks: int
    stored_bytes: int
    allowed_bytes: int
    written_today_bytes: int


class MemoryHealth(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's worker keeps of what it has read. `store` is null when no folder is set.

    `parked_sequences` have ended and keep their state as it was, which takes `parked_bytes` beside
    `ram_bytes` of blocks.
    """

    kept_tokens: int
    ram_bytes: int
    ram_budget_bytes: int
    parked_sequences: int
    parked_bytes: int
    store: StoreHealth | None


class ModelHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How one model is doing.

    `pid` is the process that has it, null without one; `memory` is null when it keeps nothing, or
    has not told yet. `leases` are the requests that use it; `idle_seconds_left` says when it is
    unloaded if nobody does, null: it is not; `footprint_bytes` is the memory that it takes, 0 when
    it is not loaded; `failure` says why it could not be loaded.

    `dialect` is how it writes calls of tools and thoughts, as far as its chat template proves it.
    The last two are what the state of a sequence takes: for each token, and once for windows and
    recurrent states; null until the model is loaded.
    """

    id: str
    state: str
    pid: int | None
    pinned: bool
    leases: int
    idle_seconds_left: float | None
    footprint_bytes: int
    failure: str | None
    layout: str | None
    layout_reason: str | None
    running: int
    queued: int
    memory: MemoryHealth | None
    dialect: DialectReport | None
    kv_bytes_per_token: int | None
    fixed_bytes_per_sequence: int | None


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How the server is doing."""

    status: str
    version: str
    models: list[ModelHealth]


@operation(
    "GET",
    "/health",
    answers_of(Health, statuses=("200", "503")),
    summary="how the models are doing",
    needs_key=False,
)
async def health(request: Request, services: Services) -> Response:
    """How the server and its models are doing. Needs no key."""
    statuses = services.statuses()
    status = _STOPPING if services.drain.is_on else _status(statuses)
    models = [_health(model, services.dialects.get(model.id)) for model in statuses]
    return json_response(
        Health(status=status, version=services.version, models=models),
        status=200 if status == "ok" else 503,
    )


def _status(models: Sequence[ModelStatus]) -> str:
    """`ok` as soon as requests are taken, also for models that are not loaded; not while one loads
    that was to be there.
    """
    if any(model.is_awaited and model.state == "loading" for model in models) or not models:
        return "loading"
    return "failed" if all(model.state == "failed" for model in models) else "ok"


@operation("GET", "/metrics", text_answer("text/plain"), summary="figures for Prometheus")
async def metrics(request: Request, services: Services) -> Response:
    """Metrics in Prometheus' text format."""
    models = services.statuses()
    text = services.metrics.exposition(
        await services.statistics(),
        load_seconds={
            model.id: model.info.load_seconds for model in models if model.info is not None
        },
        restarts={model.id: model.restarts for model in models},
        resumed={model.id: model.resumed for model in models},
        residency={model.id: model.figures for model in models},
    )
    return Response(text, headers={"content-type": CONTENT_TYPE})


@operation("GET", "/openapi.json", summary="every field of every path")
async def openapi_document(request: Request, services: Services) -> Response:
    """This description."""
    return JSONResponse(description(request.app.state.dialects, version=services.version))


def health_of(model_id: str, services: Services) -> ModelHealth:
    """How a served model is doing now."""
    (model,) = [model for model in services.statuses() if model.id == model_id]
    return _health(model, services.dialects.get(model_id))


def _health(model: ModelStatus, dialect: DialectReport | None) -> ModelHealth:
    info = model.info
    return ModelHealth(
        id=model.id,
        state=model.state,
        pid=model.pid,
        pinned=model.is_pinned,
        leases=model.figures.leases,
        idle_seconds_left=model.idle_seconds_left,
        footprint_bytes=model.figures.footprint_bytes,
        failure=model.failure or None,
        layout=info.layout if info else None,
        layout_reason=info.layout_reason if info else None,
        running=model.running,
        queued=model.queued,
        memory=msgspec.convert(model.memory, MemoryHealth | None, from_attributes=True),
        dialect=dialect,
        kv_bytes_per_token=info.kv_bytes_per_token if info else None,
        fixed_bytes_per_sequence=info.fixed_bytes_per_sequence if info else None,
    )
