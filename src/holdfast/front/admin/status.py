"""/health, /metrics, /openapi.json, /admin/store, and the start page."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import html
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from holdfast.config import StoreSettings
from holdfast.front.fleet.residency import ModelStatus
from holdfast.front.prompt.dialects import DialectReport
from holdfast.front.server.access import caller_of
from holdfast.front.server.dialect import (
    DialectTable,
    answers_of,
    description,
    operation,
    response_of,
)
from holdfast.front.server.guard import host_name
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.request import json_response
from holdfast.front.server.services import Services
from holdfast.store.block import StoreRefused
from holdfast.store.budget import store_limits
from holdfast.store.folder import is_folder
from holdfast.store.inspect import ModelHoldings, list_store, summarize_store
from holdfast.telemetry.metrics import CONTENT_TYPE

_STOPPING = "stopping"
_TEXT = {"type": "string"}  # schema
Rows: TypeAlias = Sequence[tuple[str, str]]

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 44rem; margin: 3rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
p { margin: .2rem 0; } .quiet { opacity: .7; }
code, pre { font: .9rem/1.5 ui-monospace, monospace; } pre { background: var(--soft); padding: .8rem 1rem; border-radius: .5rem;
overflow-x: auto; } table { border-collapse: collapse; width: 100%; } td { padding: .35rem .8rem .35rem 0;
border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
""".strip()
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "vary": "accept, user-agent",
}
_DOCUMENTS = "The documentation is in docs/ of the repository; begin with README.md."
_HIDDEN = "shown to who sends the API key"
_OLLAMA = "Ollama is running"  # what Ollama's clients look for at this place


class StoreOverview(Struct, frozen=True, kw_only=True):
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


class StoreHealth(Struct, frozen=True, kw_only=True):
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


class MemoryHealth(Struct, frozen=True, kw_only=True):
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


class ModelHealth(Struct, frozen=True, kw_only=True):
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


class Health(Struct, frozen=True, kw_only=True):
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


@operation("GET", "/metrics", response_of({"text/plain": _TEXT}), summary="figures for Prometheus")
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


@operation("HEAD", "/", response_of({"text/plain": _TEXT}), needs_key=False)
async def head_of_front_page(request: Request, services: Services) -> Response:
    """Whether a server is there, as Ollama's clients ask."""
    return Response(media_type="text/plain", headers=_HEADERS)


@operation("GET", "/", response_of({"text/html": _TEXT, "text/plain": _TEXT}), needs_key=False)
async def front_page(request: Request, services: Services) -> Response:
    """What this server is: a page for browsers, lines for others.

    Needs no key, but tells of models only to who has it.
    """
    if _is_ollamas(request):
        return Response(_OLLAMA, media_type="text/plain", headers=_HEADERS)
    is_locked = not caller_of(request).is_let_in
    models = [] if is_locked else [(model.id, _state(model)) for model in services.statuses()]
    table: DialectTable = request.app.state.dialects
    paths = [
        (operation.path, operation.summary) for operation in table.operations if operation.summary
    ]
    example = _example(_address(request), needs_key=services.needs_key)
    wants_page = "text/html" in request.headers.get("accept", "")
    text = (_page if wants_page else _lines)(
        f"{services.version} at {_address(request)}",
        models=models,
        no_models=_HIDDEN if is_locked else "none",
        paths=paths,
        example=example,
    )
    return Response(text, media_type="text/html" if wants_page else "text/plain", headers=_HEADERS)


def _is_ollamas(request: Request) -> bool:
    """Whether a client of Ollama asks: by its name, or from within a page or an extension of a
    browser, which want no page.
    """
    agent, accepts = (request.headers.get(name, "").lower() for name in ("user-agent", "accept"))
    return "text/html" not in accepts and ("ollama" in agent or "mozilla" in agent)


def _example(address: str, *, needs_key: bool) -> str:
    """A command that works as it is, once the key is in the variable."""
    body = {"messages": [{"role": "user", "content": "Hello!"}]}
    key = ' -H "Authorization: Bearer $HOLDFAST_SERVER_API_KEY"' if needs_key else ""
    url = shlex.quote(f"{address}/v1/chat/completions")
    return (
        f"curl {url}{key} -H 'Content-Type: application/json' \\\n  -d "
        f"{shlex.quote(json.dumps(body))}"
    )


def _address(request: Request) -> str:
    """The address by which the client came, so that what is shown can be used where it is read."""
    host = request.headers.get("host", "")
    if host_name(host) is None:
        place, port = request.scope.get("server") or ("127.0.0.1", 80)
        host = f"[{place}]:{port}" if ":" in place else f"{place}:{port}"
    return f"{request.scope['scheme']}://{host}"


def _state(model: ModelStatus) -> str:
    context = (
        "" if model.context_tokens is None else f", {model.context_tokens:,} tokens of context"
    )
    return f"{model.state}{context}"


def _lines(place: str, *, models: Rows, no_models: str, paths: Rows, example: str) -> str:
    served = [f"  {model}: {state}" for model, state in models] or [f"  {no_models}"]
    listed = [f"  {path:22}{summary}" for path, summary in paths]
    parts = (
        f"Holdfast {place}",
        "",
        "models",
        *served,
        "",
        "paths",
        *listed,
        "",
        "try",
        example,
        "",
        _DOCUMENTS,
        "",
    )
    return "\n".join(parts)


def _page(place: str, *, models: Rows, no_models: str, paths: Rows, example: str) -> str:
    parts = (
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Holdfast</title><style>{_STYLE}</style></head><body>",
        f"<h1>Holdfast</h1><p class=quiet>version {html.escape(place)}</p>",
        "<h2>Models</h2>",
        _table(models) if models else f"<p class=quiet>{no_models}</p>",
        "<h2>Paths</h2>",
        _table(paths),
        f"<h2>Try</h2><pre>{html.escape(example)}</pre>",
        f"<p class=quiet>{_DOCUMENTS}</p>",
        "</body></html>",
    )
    return "\n".join(parts)


def _table(rows: Rows) -> str:
    shown = (
        f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(about)}</td></tr>"
        for name, about in rows
    )
    return f"<table>{''.join(shown)}</table>"
