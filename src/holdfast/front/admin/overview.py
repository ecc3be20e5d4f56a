"""What the page for browsers shows besides the other endpoints: the caller, the steps of the
workers, the models, and how clients are configured.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from holdfast import __version__
from holdfast.agents import AGENTS, LIBRARIES, AgentTarget, shell_text
from holdfast.front.admin.status import ModelHealth, health_of
from holdfast.front.fleet.catalog import CatalogEntry
from holdfast.front.fleet.library import PullStep
from holdfast.front.server.access import caller_of
from holdfast.front.server.dialect import operation
from holdfast.front.server.guard import address_of
from holdfast.front.server.openapi import returns
from holdfast.front.server.request import json_response
from holdfast.front.server.services import Services, served_models
from holdfast.front.telemetry.metrics import PressureFigures
from holdfast.wire.events import Histogram, StepRecord, WorkerStatistics

ACTIVITY_PATH = "/admin/activity"
_KEY_VARIABLE = "$HOLDFAST_SERVER_API_KEY"
_KEY_PLACEHOLDER = "KEY"  # in the settings of agents, which are quoted
_AGENT_FOLDER = Path("holdfast-agent")  # in commands to copy, where an agent's files are expected


class CallerReport(Struct, frozen=True, kw_only=True):
    """The sender of the request. `key` is the name of the API key, if it has one."""

    key: str
    is_admin: bool
    needs_key: bool
    version: str


@operation("GET", "/admin/caller", returns(CallerReport))
async def show_caller(request: Request, services: Services) -> Response:
    """Tell the caller who it is for the server, and whether it may administer the server."""
    caller = caller_of(request)
    return json_response(
        CallerReport(
            key=caller.key_name,
            is_admin=caller.is_admin,
            needs_key=services.needs_key,
            version=__version__,
        )
    )


class WorkerActivity(Struct, frozen=True, kw_only=True):
    """The work of one model. Steps, tokens and `step_seconds` count from its worker's start.

    `recent_steps` has the last steps, at most 120, oldest first. A step is one batched forward pass.
    """

    model: str
    running: int
    queued: int
    max_running: int
    step_tokens: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    kv_reserved_bytes: int
    kv_budget_bytes: int
    step_seconds: Histogram | None
    recent_steps: tuple[StepRecord, ...]


class Activity(Struct, frozen=True, kw_only=True):
    """The work of all loaded models."""

    memory_pressure: PressureFigures
    models: list[WorkerActivity]


@operation("GET", ACTIVITY_PATH, returns(Activity))
async def show_activity(request: Request, services: Services) -> Response:
    """Show what the workers do: running and queued sequences, steps, tokens, and KV memory."""
    statistics = await services.models.statistics()
    models = [_worker_activity(model, figures) for model, figures in statistics.items()]
    pressure = services.models.control.memory.figures()
    return json_response(Activity(memory_pressure=pressure, models=models))


def _worker_activity(model: str, figures: WorkerStatistics) -> WorkerActivity:
    """The fields of a worker's statistics that are shown, with the model's id."""
    names = [name for name in WorkerActivity.__struct_fields__ if name != "model"]
    return WorkerActivity(model=model, **{name: getattr(figures, name) for name in names})


class CatalogModel(Struct, frozen=True, kw_only=True):
    """A model of the catalog, and its state in this server.

    `weight_bytes` is the size of its files, null if they are not on this machine. `fits` says
    whether these fit into the memory that is usable for models, null if one of the two is unknown.
    """

    id: str
    aliases: tuple[str, ...]
    origin: str
    weight_bytes: int | None
    fits: bool | None
    kv_bits: str
    idle_seconds: float | None
    health: ModelHealth


class SkippedModel(Struct, frozen=True, kw_only=True):
    """A model that was found, but is not served, and why."""

    name: str
    origin: str
    reason: str


class ModelCatalog(Struct, frozen=True, kw_only=True):
    """All models that this server knows. `downloads`: the bytes of the stages of running pulls."""

    models: list[CatalogModel]
    left_out: list[SkippedModel]
    downloads: dict[str, dict[str, PullStep]]
    limit_bytes: int


@operation("GET", "/admin/models", returns(ModelCatalog), needs_admin=True)
async def list_catalog(request: Request, services: Services) -> Response:
    """List the models of the catalog with their state, and those that are not served, with the
    reason.
    """
    catalog = services.models.catalog()
    limit_bytes = services.models.control.memory.figures().limit_bytes
    weight_bytes = await asyncio.to_thread(_weight_bytes_by_name, catalog.entries)
    models = [
        CatalogModel(
            id=entry.name,
            aliases=entry.aliases,
            origin=entry.origin,
            weight_bytes=weight_bytes[entry.name],
            fits=_fits_in_memory(weight_bytes[entry.name], limit_bytes),
            kv_bits=entry.model.kv_bits,
            idle_seconds=entry.idle_seconds,
            health=health_of(entry.name, services),
        )
        for entry in catalog.entries
    ]
    left_out = [
        SkippedModel(name=each.name, origin=each.origin, reason=each.reason)
        for each in catalog.excluded
    ]
    downloads: dict[str, dict[str, PullStep]] = {
        name: {step.stage: step for step in steps}
        for name, steps in services.models.library.progress().items()
    }
    return json_response(
        ModelCatalog(models=models, left_out=left_out, downloads=downloads, limit_bytes=limit_bytes)
    )


def _fits_in_memory(weight_bytes: int | None, limit_bytes: int) -> bool | None:
    """Whether weights fit into the memory for models; None if a size is unknown (a limit of 0)."""
    return None if weight_bytes is None or not limit_bytes else weight_bytes < limit_bytes


def _weight_bytes_by_name(entries: tuple[CatalogEntry, ...]) -> dict[str, int | None]:
    """The size of each model's files, by name; None if they are not here. Reads the disk."""
    return {entry.name: entry.weight_bytes(os.environ) for entry in entries}


class ClientRecipe(Struct, frozen=True, kw_only=True):
    """How a client is configured for this server.

    `launch` starts a coding agent on the server's machine, empty for a library. `text` is a command
    or a program, `language` the language that it is written in.
    """

    name: str
    title: str
    launch: str
    install: str
    language: str
    text: str


class ClientRecipes(Struct, frozen=True, kw_only=True):
    """How clients are configured for this server.

    Libraries read the key from `key_variable`. In the settings of agents, `KEY` is a placeholder
    for the key.
    """

    url: str
    model: str
    needs_key: bool
    key_variable: str
    clients: list[ClientRecipe]


@operation("GET", "/admin/clients", returns(ClientRecipes))
async def list_clients(request: Request, services: Services) -> Response:
    """Show how coding agents and libraries are configured for this server.

    The address is the one that the client of this request used.
    """
    url, models = address_of(request.scope), served_models(services)
    model = models[0].id if models else ""
    target = AgentTarget(
        url=url,
        api_key=_KEY_VARIABLE if services.needs_key else "",
        model=model,
        small_model=model,
        context_tokens=models[0].context_tokens if models else None,
        folder=_AGENT_FOLDER,
    )
    recipes = []
    for name, agent in AGENTS.items():
        agent_setup = agent.setup(
            replace(target, api_key=_KEY_PLACEHOLDER if target.api_key else "")
        )
        command = [agent.program, *agent_setup.options]
        recipes.append(
            ClientRecipe(
                name=name,
                title=agent.title,
                launch=f"holdfast launch --url {url} {name}",
                install=agent.install,
                language="sh",
                text=shell_text(command, agent_setup, secret=""),
            )
        )
    recipes += [
        ClientRecipe(
            name=library.name,
            title=library.title,
            launch="",
            install=library.install,
            language=library.language,
            text=library.text(target),
        )
        for library in LIBRARIES
    ]
    return json_response(
        ClientRecipes(
            url=url,
            model=model,
            needs_key=services.needs_key,
            key_variable=_KEY_VARIABLE,
            clients=recipes,
        )
    )


OPERATIONS = (show_caller, show_activity, list_catalog, list_clients)
