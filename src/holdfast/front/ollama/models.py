"""Ollama's names of models, and what it tells of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from typing import Any, Literal, TypeAlias

import msgspec
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from holdfast.errors import UnknownModel, WorkerUnavailable
from holdfast.front.fleet.catalog import CatalogEntry
from holdfast.front.fleet.residency import ModelStatus
from holdfast.front.ollama.answer import timestamp
from holdfast.front.server.dialect import answers_of, operation, request_of
from holdfast.front.server.fields import STRICT
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.request import json_response, parse, read_body
from holdfast.front.server.services import Services, model_of, served_models

Capability: TypeAlias = Literal["completion", "tools", "thinking"]
_LATEST = ":latest"
_HUB = re.compile(r"^(?:hf\.co|huggingface\.co)/", re.IGNORECASE)
_LONGEST_SHOWN = 100
# Of Ollama, whose API of that time is meant: VS Code, Codex and others ask for a version and refuse
# to speak to older ones.
API_VERSION = "0.30.0"
_NEVER = "9999-12-31T23:59:59Z"
_FULL_PRECISION_BITS = 16
_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def shown_name(model_id: str) -> str:
    """A served id as Ollama lists models: with a tag, without which some clients do not find again
    what they read here.
    """
    return model_id if ":" in model_id.rpartition("/")[2] else model_id + _LATEST


def spellings(name: str) -> tuple[str, ...]:
    """The names by which a model may be known here that a client calls so."""
    return tuple(
        spelled
        for own in dict.fromkeys((name, _HUB.sub("", name)))
        for spelled in (own, own.removesuffix(_LATEST), own + _LATEST)
    )


def named_entry(name: str, services: Services) -> CatalogEntry | None:
    """The model of the catalog that has this very name or alias; `server.model_aliases` do not
    count.
    """
    find = services.catalog().find
    return next((entry for known in spellings(name) if (entry := find(known)) is not None), None)


def hub_name(name: str) -> str:
    """A name as the Hub has it."""
    return _HUB.sub("", name).removesuffix(_LATEST)


def digest_of(model_id: str) -> str:
    """What tells the names of models apart; not their weights."""
    return hashlib.sha256(model_id.encode("utf-8", "surrogatepass")).hexdigest()


def served_model(name: str | None, services: Services) -> ModelStatus:
    """The model that is meant; the first one by no name.

    Raises RequestRefused (404) with the words that clients look for.
    """
    models = {model.id: model for model in served_models(services)}
    wanted = name or model_of(services, None)
    for known in spellings(wanted):
        if (meant := model_of(services, known)) in models:
            return models[meant]
    raise not_found(wanted)


def not_found(name: str) -> RequestRefused:
    """The error for a model that is not here, with the words that clients look for."""
    message = (
        f"model {json.dumps(name[:_LONGEST_SHOWN], ensure_ascii=False)} not found, try pulling it "
        "first"
    )
    return RequestRefused(message, status=404, code="model_not_found", field="model")


class NamedModel(BaseModel):
    """Which model is meant."""

    model_config = STRICT

    model: str | None = Field(
        None, description="A served model, with or without :latest, or owner/name of the Hub."
    )
    name: str | None = Field(None, description="Older name of model.")

    def required(self) -> str:
        """The name. Raises RequestRefused for none."""
        if not (name := self.model or self.name):
            raise RequestRefused(
                "`model` is required", code="missing_required_parameter", field="model"
            )
        return name


async def learn_capabilities(model_id: str, services: Services) -> None:
    """Have the files of a model read that say what it can do, if nobody has needed them yet."""
    if model_id not in services.dialects:
        # they are broken: nothing is known of it
        with contextlib.suppress(UnknownModel, WorkerUnavailable):
            await services.tokenizer_of(model_id)


def capabilities(model_id: str, services: Services) -> tuple[Capability, ...]:
    """What a served model can do.

    Not said: that it makes embeddings, of which `ollama run` takes that it does nothing else.
    """
    report = services.dialects.get(model_id)
    can: dict[Capability, bool] = {
        "completion": True,
        "tools": report is not None and report.tools != "none",
        "thinking": report is not None and report.thinking is not None,
    }
    return tuple(name for name, holds in can.items() if holds)


class ModelDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What kind of model it is. Empty until it is loaded."""

    parent_model: str = ""
    format: str = "safetensors"
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A served model. `digest` tells names apart, not weights."""

    name: str
    model: str
    modified_at: str
    size: int  # bytes of its weights
    digest: str
    details: ModelDetails


class ListedModels(msgspec.Struct, frozen=True, kw_only=True):
    """All of them."""

    models: list[ListedModel]


class RunningModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is loaded."""

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str
    size_vram: int
    context_length: int


class RunningModels(msgspec.Struct, frozen=True, kw_only=True):
    """All of them."""

    models: list[RunningModel]


class ShownModel(msgspec.Struct, frozen=True, kw_only=True):
    """All that is told of a model."""

    modelfile: str
    parameters: str
    template: str = ""
    license: str = ""
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class SpokenVersion(msgspec.Struct, frozen=True, kw_only=True):
    """`version` is the one of Ollama whose API is spoken."""

    version: str
    holdfast: str


class ShowRequest(NamedModel):
    """Which model is meant."""

    verbose: bool | None = Field(None, description="Accepted, without effect.")


@operation("GET", "/api/tags", answers_of(ListedModels), summary="models (Ollama)")
async def ollama_tags(request: Request, services: Services) -> Response:
    """The served models."""
    return json_response(ListedModels(models=[_listed(model) for model in served_models(services)]))


@operation("GET", "/api/ps", answers_of(RunningModels))
async def ollama_ps(request: Request, services: Services) -> Response:
    """The models that are loaded, and when they are unloaded if nobody uses them."""
    running = [
        RunningModel(
            name=shown_name(model.id),
            model=shown_name(model.id),
            size=model.info.weight_bytes,
            digest=digest_of(model.id),
            details=_details(model),
            expires_at=_expires_at(model, services),
            size_vram=0 if model.info.is_on_cpu else model.info.weight_bytes,
            context_length=model.info.context_tokens,
        )
        for model in services.statuses()
        if model.info is not None and model.state == "ready"
    ]
    return json_response(RunningModels(models=running))


@operation("POST", "/api/show", request_of(ShowRequest), answers_of(ShownModel))
async def ollama_show(request: Request, services: Services) -> Response:
    """All that is told of one model."""
    asked = parse(ShowRequest, await read_body(request, limit_bytes=services.limits.max_body_bytes))
    model = served_model(asked.required(), services)
    await learn_capabilities(model.id, services)
    shown = ShownModel(
        modelfile=f"FROM {model.id}\n",
        parameters="" if model.context_tokens is None else f"num_ctx {model.context_tokens}",
        details=_details(model),
        model_info=_model_info(model),
        capabilities=[*capabilities(model.id, services)],
        modified_at=timestamp(model.created),
    )
    return json_response(shown)


@operation("GET", "/api/version", answers_of(SpokenVersion))
async def ollama_version(request: Request, services: Services) -> Response:
    """The version of Ollama whose API is spoken, and Holdfast's own."""
    return json_response(SpokenVersion(version=API_VERSION, holdfast=services.version))


def _listed(model: ModelStatus) -> ListedModel:
    return ListedModel(
        name=shown_name(model.id),
        model=shown_name(model.id),
        modified_at=timestamp(model.created),
        size=0 if model.info is None else model.info.weight_bytes,
        digest=digest_of(model.id),
        details=_details(model),
    )


def _expires_at(model: ModelStatus, services: Services) -> str:
    """When it is unloaded if it is not used again. While it is used, as if that ended now."""
    entry, seconds_left = services.catalog().find(model.id), model.idle_seconds_left
    if seconds_left is None and entry is not None and not model.is_pinned:
        seconds_left = entry.idle_seconds
    return _NEVER if seconds_left is None else timestamp(time.time() + seconds_left)


def _details(model: ModelStatus) -> ModelDetails:
    info = model.info
    if info is None:
        return ModelDetails(family="", families=[], parameter_size="", quantization_level="")
    return ModelDetails(
        family=info.model_type,
        families=[info.model_type],
        parameter_size=_in_short(info.parameters),
        quantization_level=_quantization(info.weight_bytes, info.parameters, info.compute_dtype),
    )


def _model_info(model: ModelStatus) -> dict[str, Any]:
    info = model.info
    if info is None:
        return {}
    return {
        "general.architecture": info.model_type,
        "general.basename": model.id,
        "general.parameter_count": info.parameters,
        f"{info.model_type}.context_length": info.context_tokens,
        f"{info.model_type}.vocab_size": info.vocab_size,
    }


def _in_short(number: int) -> str:
    """Such as 7.6B, 494.03M and 812.5K."""
    for size, unit, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 1)):
        if number >= size:
            return f"{number / size:.{digits}f}{unit}"
    return str(number)


def _quantization(weight_bytes: int, parameters: int, compute_dtype: str) -> str:
    """Bits per weight where there are fewer than a number has, such as Q4; else the type."""
    bits = 8 * weight_bytes // max(parameters, 1)
    return (
        f"Q{bits}" if 0 < bits < _FULL_PRECISION_BITS else _TYPES.get(compute_dtype, compute_dtype)
    )
