"""/health, /metrics, /openapi.json and /admin/store."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from holdfast import __version__
from holdfast.config import StoreSettings
from holdfast.front.fleet.residency import ModelStatus
from holdfast.front.prompt.dialects import DialectReport
from holdfast.front.server.access import caller_of
from holdfast.front.server.dialect import operation
from holdfast.front.server.openapi import description, response_shape, returns
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.request import json_response
from holdfast.front.server.services import Services, base_model_id
from holdfast.front.telemetry.metrics import CONTENT_TYPE, PressureFigures
from holdfast.front.telemetry.request_log import RequestRecord
from holdfast.store.block import StoreRefused
from holdfast.store.folder import is_folder
from holdfast.store.inspect import ModelHoldings, list_store, summarize_store
from holdfast.store.maintenance import store_limits
from holdfast.wire.events import ModelInfo, WaitReason
from holdfast.wire.kv import KVHealth

_STOPPING = "stopping"


class StoreOverview(Struct, frozen=True, kw_only=True):
    """The store's folder. Without a store, `folder` is null and all counts are 0."""

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
    "GET", "/admin/store", returns(StoreOverview), summary="the store on disk", needs_admin=True
)
async def show_store(request: Request, services: Services) -> Response:
    """Show the cached blocks on disk: their size, the size limit, and their models."""
    settings = services.settings.store
    if not is_folder(settings):
        return json_response(StoreOverview())
    try:
        return json_response(await asyncio.to_thread(_store_overview, settings))
    except (StoreRefused, OSError) as error:
        raise RequestRefused(
            f"the store cannot be read: {error}", status=503, code="store_unavailable"
        ) from None


def _store_overview(settings: StoreSettings) -> StoreOverview:
    """Read the store's folder. Raises StoreRefused or OSError."""
    folder = Path(settings.folder)
    summary = asdict(summarize_store(folder, limits=store_limits(settings)))
    return StoreOverview(**(summary | {"folder": str(folder)}), models=list_store(folder))


class StoreHealth(Struct, frozen=True, kw_only=True):
    """The prefix cache of a model on disk.

    `mode` is `writing`, or `memory-only` while the folder cannot be written or its volume is full.
    `model` is the model's name in `holdfast store ls`. All sizes in bytes are those of the whole
    folder. `written_today_bytes` counts from midnight UTC and is limited by
    `store.daily_write_bytes`.
    """

    model: str
    mode: str
    blocks: int
    stored_bytes: int
    allowed_bytes: int
    written_today_bytes: int


class MemoryHealth(Struct, frozen=True, kw_only=True):
    """The prefix cache of a model. `store` is null if the cache is only in RAM.

    `parked_sequences` is the number of sequences that have ended but keep their live state. That
    state takes `parked_bytes`, in addition to the `ram_bytes` of blocks.
    """

    kept_tokens: int
    ram_bytes: int
    ram_budget_bytes: int
    parked_sequences: int
    parked_bytes: int
    store: StoreHealth | None


class WaitingRequest(Struct, frozen=True, kw_only=True):
    """A waiting request, with the reason for its wait.

    waits_for: place (memory on the machine for its model), load (its model is being loaded), lookup
        (the cache is searched again), disk (cached blocks are being read), images (they are being
        processed), twin (another request prefills the same prefix), memory (KV memory, and a slot
        among the running sequences), or reader (its client does not read).
    id: null unless an admin sends the request for /health.
    """

    id: str | None
    waits_for: WaitReason
    age_seconds: float


class VisionHealth(Struct, frozen=True, kw_only=True):
    """How a model with vision is served.

    `refused` says why the model cannot be given images; null: it can. `reuse_refused` says why
    prompts with images are not cached; null: they are.
    """

    refused: str | None
    reuse_refused: str | None


class ModelHealth(Struct, frozen=True, kw_only=True):
    """The state of one model.

    `adapters` are the names of the LoRA adapters; requests name one as `MODEL:NAME`. `pid` is the
    worker process, or null. `leases` is the number of requests that use the model.
    `idle_seconds_left` is the time until the model is unloaded if no request comes; null: it is not
    unloaded. `footprint_bytes` is the model's memory, 0 if it is not loaded. `failure` says why it
    could not be loaded. `memory` is null if the model has no prefix cache, or has not reported one
    yet. `dialect` describes how the model writes tool calls and reasoning, as far as its chat
    template proves it. A sequence takes `kv_bytes_per_token` for each token and, for windows and
    recurrent states, `fixed_bytes_per_sequence`. These and `kv` are null until the model is loaded.
    `speculation_refused` says why drafts are not used although the setting allows them; null: they
    are used, or the model is not loaded. `draft_model` is the model that drafts, besides other
    drafters; null: none, or it has failed. `vision` is null if the model reads text only, or is not
    loaded.
    `context_length` and `max_context_length` are the same as in /v1/models.
    """

    id: str
    state: str
    adapters: tuple[str, ...]
    pid: int | None
    pinned: bool
    leases: int
    idle_seconds_left: float | None
    footprint_bytes: int
    failure: str | None
    layout: str | None = None
    layout_reason: str | None = None
    running: int
    queued: int
    waiting: list[WaitingRequest]
    memory: MemoryHealth | None
    dialect: DialectReport | None
    kv_bytes_per_token: int | None = None
    fixed_bytes_per_sequence: int | None = None
    kv: KVHealth | None = None
    speculation_refused: str | None = None
    vision: VisionHealth | None = None
    draft_model: str | None
    context_length: int | None
    max_context_length: int | None


class Health(Struct, frozen=True, kw_only=True):
    """The state of the server. If a key is needed, only `status` is shown without one.

    `memory_pressure` is about all loaded models together. Above `first_watermark_bytes`, its
    `level` is `warning`: idle state goes to disk, and new sequences start in 8 bits. Above
    `second_watermark_bytes`, it is `critical`: running sequences are converted to 8 bits, and
    requests wait until no other one runs. `changes` counts how often each level has begun.
    """

    status: str
    version: str | UnsetType = UNSET
    memory_pressure: PressureFigures | UnsetType = UNSET
    models: list[ModelHealth] | UnsetType = UNSET


@operation(
    "GET",
    "/health",
    returns(Health, statuses=("200", "503")),
    summary="state of the server and its models",
    needs_key=False,
)
async def health(request: Request, services: Services) -> Response:
    """Show the state of the server and its models; without a key, if one is needed, only whether
    the server accepts requests.
    """
    statuses = services.models.statuses()
    status = _server_status(statuses, services.models.awaited_tokenizers)
    if services.access.drain.is_on:
        status = _STOPPING
    caller = caller_of(request)
    shown = Health(status=status)
    if caller.is_let_in:
        shown = Health(
            status=status,
            version=__version__,
            memory_pressure=services.models.control.memory.figures(),
            models=[
                _model_health(model, services, shows_ids=caller.is_admin) for model in statuses
            ],
        )
    return json_response(shown, status=200 if status == "ok" else 503)


def _server_status(models: Sequence[ModelStatus], awaited: Collection[str]) -> str:
    """The status of the server.

    It is `ok` as soon as requests are accepted, even if no model is loaded, but not while a model
    that is required from the start still loads. awaited: models whose tokenizer has not been read
    yet.
    """
    if not models or any(
        (model.is_awaited and model.state == "loading")
        or (model.id in awaited and model.state == "ready")
        for model in models
    ):
        return "loading"
    return "failed" if all(model.state == "failed" for model in models) else "ok"


@operation("GET", "/metrics", response_shape({"text/plain": str}), summary="metrics for Prometheus")
async def metrics(request: Request, services: Services) -> Response:
    """Show the metrics in Prometheus' text format."""
    models = services.models.statuses()
    text = services.telemetry.metrics.exposition(
        await services.models.statistics(),
        load_seconds={
            model.id: model.info.load_seconds for model in models if model.info is not None
        },
        restarts={model.id: model.restarts for model in models},
        resumed={model.id: model.resumed for model in models},
        residency={model.id: model.figures for model in models},
        pressure=services.models.control.memory.figures(),
    )
    return Response(text, headers={"content-type": CONTENT_TYPE})


@operation("GET", "/openapi.json", summary="the schema of all paths")
async def openapi_document(request: Request, services: Services) -> Response:
    """Show this description of the API."""
    return JSONResponse(description(request.app.state.dialects, version=__version__))


def health_of(model_id: str, services: Services) -> ModelHealth:
    """The state of a served model."""
    (model,) = [model for model in services.models.statuses() if model.id == model_id]
    return _model_health(model, services, shows_ids=True)


def wait_reason(record: RequestRecord, model: ModelStatus | None) -> WaitReason | None:
    """The reason why a request waits, in the front or in its worker; None if it does not wait."""
    if record.waits_for is not None or record.generation is None or model is None:
        return record.waits_for
    # the ids of its sequences in the worker begin with the id of the request
    id_prefix = f"{record.generation.request_id}/"
    reasons = (reason for name, reason in model.waits.items() if name.startswith(id_prefix))
    return next(reasons, None)


def _waiting_requests(
    model: ModelStatus, services: Services, *, shows_ids: bool
) -> list[WaitingRequest]:
    """The requests that wait for this model, or in its worker. shows_ids: also their ids."""
    waiting: list[WaitingRequest] = []
    for active in services.answers.active:
        record = active.record
        is_of_model = base_model_id(services, record.model) == model.id
        reason = wait_reason(record, model) if is_of_model else None
        if reason is not None:
            name = active.id if shows_ids else None
            age_seconds = round(record.seconds, 3)
            waiting.append(WaitingRequest(id=name, waits_for=reason, age_seconds=age_seconds))
    return waiting


def _model_health(model: ModelStatus, services: Services, *, shows_ids: bool) -> ModelHealth:
    """The state of a model. shows_ids: whether the caller may see the ids of waiting requests."""
    return ModelHealth(
        id=model.id,
        state=model.state,
        adapters=model.adapters,
        pid=model.pid,
        pinned=model.is_pinned,
        leases=model.figures.leases,
        idle_seconds_left=model.idle_seconds_left,
        footprint_bytes=model.figures.footprint_bytes,
        failure=model.failure or None,
        running=model.running,
        queued=model.queued,
        waiting=_waiting_requests(model, services, shows_ids=shows_ids),
        memory=msgspec.convert(model.cache, MemoryHealth | None, from_attributes=True),
        dialect=services.models.dialects.get(model.id),
        draft_model=model.draft_model or None,
        context_length=model.context_tokens,
        max_context_length=model.own_context_tokens,
        **({} if model.info is None else _fields_of_loaded(model.info)),
    )


def _fields_of_loaded(info: ModelInfo) -> dict[str, Any]:
    """The fields that are null until the model is loaded."""
    return {
        "layout": info.layout,
        "layout_reason": info.layout_reason,
        "kv_bytes_per_token": info.kv.bytes_per_token,
        "fixed_bytes_per_sequence": info.fixed_bytes_per_sequence,
        "kv": info.kv,
        "speculation_refused": info.speculation_refused or None,
        "vision": _vision_health(info),
    }


def _vision_health(info: ModelInfo) -> VisionHealth | None:
    """How a model with vision is served; None if the model reads text only."""
    if info.vision is None:
        return None
    return VisionHealth(
        refused=info.vision.refused or None, reuse_refused=info.vision.reuse_refused or None
    )
