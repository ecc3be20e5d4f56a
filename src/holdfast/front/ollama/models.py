"""Ollama's endpoints for models: list, show, pull, delete and version."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast import __version__
from holdfast.errors import (
    ModelLoadError,
    NoSuchModel,
    UnknownModel,
    UnusableModel,
    WorkerUnavailable,
)
from holdfast.front.fleet.catalog import CatalogEntry, base_name
from holdfast.front.fleet.library import Library, Pull, PullStep
from holdfast.front.fleet.residency import ModelStatus
from holdfast.front.ollama.answer import OllamaAnswer, encode_line, ollama_error, timestamp
from holdfast.front.server.answers import EventWriter, StreamFormat
from holdfast.front.server.dialect import Operation, operation
from holdfast.front.server.fields import STRICT, optional
from holdfast.front.server.openapi import accepts, returns
from holdfast.front.server.problem import (
    Problem,
    RequestRefused,
    invalid_field,
    missing_field,
    problem_of,
    record_problem,
)
from holdfast.front.server.request import json_response, read_json
from holdfast.front.server.services import Services, base_model_id, model_of, served_models
from holdfast.front.server.streams import run_unless_disconnected
from holdfast.front.telemetry.request_log import RECORD, RequestRecord
from holdfast.models.download import hub_source
from holdfast.models.hub import ModelSource

Capability: TypeAlias = Literal["completion", "tools", "thinking", "vision"]
_LATEST = ":latest"
_HUB_PREFIX = re.compile(r"^(?:hf\.co|huggingface\.co)/", re.IGNORECASE)
_LONGEST_SHOWN = 100
# The version of Ollama whose API this server implements: VS Code, Codex and others refuse older
# ones.
API_VERSION = "0.30.0"
_NEVER = "9999-12-31T23:59:59Z"
_FULL_PRECISION_BITS = 16
# number format → its name in Ollama
_FORMAT_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_WHY_REFUSED = (
    "models come from the Hub (/api/pull), or from folders that the server's settings name"
)
_DIGEST_CHARACTERS_SHOWN = 12


def shown_name(model_id: str) -> str:
    """Return a model's id as Ollama lists it: with a tag, which some clients need to find it."""
    return model_id if ":" in model_id.rpartition("/")[2] else model_id + _LATEST


def spellings(name: str) -> tuple[str, ...]:
    """Return the ids that a client may mean by this model name."""
    return tuple(
        spelling
        for base_name in dict.fromkeys((name, _HUB_PREFIX.sub("", name)))
        for spelling in (base_name, base_name.removesuffix(_LATEST), base_name + _LATEST)
    )


def named_entry(name: str, services: Services) -> CatalogEntry | None:
    """Return the catalog's model with this name or alias. Ignores `server.model_aliases`."""
    find = services.models.catalog().find
    entries = (find(spelling) for spelling in spellings(name))
    return next((entry for entry in entries if entry is not None), None)


def hub_name(name: str) -> str:
    """Return a model's name on the Hub, without prefixes and tags."""
    return _HUB_PREFIX.sub("", name).removesuffix(_LATEST)


def digest_of(model_id: str) -> str:
    """Return a hash of a model's name, not of its weights."""
    return hashlib.sha256(model_id.encode("utf-8", "surrogatepass")).hexdigest()


def served_model(name: str | None, services: Services) -> ModelStatus:
    """Return the model with that name, or the first one if None. Raises RequestRefused (404)."""
    models = {model.id: model for model in served_models(services)}
    requested_name = name or model_of(services, None)
    for spelling in spellings(requested_name):
        if (model_id := model_of(services, spelling)) in models:
            return models[model_id]
    reasons = map(services.models.catalog().why_excluded, spellings(requested_name))
    why = next(filter(None, reasons), "")
    raise not_found(requested_name, suggestions=_ids_of_base(requested_name, services), why=why)


def _ids_of_base(name: str, services: Services) -> tuple[str, ...]:
    """Return the ids that a client may use instead of an unknown variant of a served model."""
    entry = named_entry(base_name(name), services)
    return () if entry is None else entry.ids


def not_found(name: str, *, suggestions: Sequence[str] = (), why: str = "") -> RequestRefused:
    """Return the error for an unknown model. Clients search the message for Ollama's words, or for
    "does not exist".

    suggestions: names of models to suggest. why: the reason why a local model is not served.
    """
    quoted_name = json.dumps(name[:_LONGEST_SHOWN], ensure_ascii=False)
    message = (
        f"model {quoted_name} not found, try pulling it first: it does not exist on this server"
    )
    if why:
        message += f": {why}"
    elif suggestions:
        message += f"; available: {', '.join(suggestions)}"
    return RequestRefused(message, status=404, code="model_not_found", field="model")


class NamedModel(BaseModel):
    """A request that names a model."""

    model_config = STRICT

    model: str | None = optional(
        "A served model, with or without :latest, or owner/name on the Hub."
    )
    name: str | None = optional("Older name for `model`.")

    def required_name(self) -> str:
        """Return the model's name. Raises RequestRefused if there is none."""
        if not (name := self.model or self.name):
            raise missing_field("model")
        return name


async def load_capabilities(model_id: str, services: Services) -> None:
    """Read the files that tell what a model can do, unless they were already read."""
    if base_model_id(services, model_id) not in services.models.dialects:
        # suppressed: if the files are broken, the capabilities stay unknown
        with contextlib.suppress(UnknownModel, UnusableModel, WorkerUnavailable):
            await services.gateway.tokenizer_of(model_id)


def capabilities(model_id: str, services: Services) -> tuple[Capability, ...]:
    """Return what a served model can do.

    `embedding` is omitted, because `ollama run` would treat the model as embedding-only.
    """
    report = services.models.dialects.get(base_model_id(services, model_id))
    model_capabilities: list[Capability] = ["completion"]
    if any(model.id == model_id and model.can_see for model in served_models(services)):
        model_capabilities.append("vision")
    if report is not None and report.tools != "none":
        model_capabilities.append("tools")
    if report is not None and report.thinking is not None:
        model_capabilities.append("thinking")
    return tuple(model_capabilities)


class ModelDetails(Struct, frozen=True, kw_only=True):
    """Details of a model. Empty until the model is loaded."""

    parent_model: str = ""
    format: str = "safetensors"
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class ListedModel(Struct, frozen=True, kw_only=True):
    """A served model. `digest` is a hash of the model's name, not of its weights."""

    name: str
    model: str
    modified_at: str
    size: int  # size of the weights in bytes
    digest: str
    details: ModelDetails


class ListedModels(Struct, frozen=True, kw_only=True):
    """All served models."""

    models: list[ListedModel]


class RunningModel(Struct, frozen=True, kw_only=True):
    """A loaded model."""

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str
    size_vram: int
    context_length: int


class RunningModels(Struct, frozen=True, kw_only=True):
    """All loaded models."""

    models: list[RunningModel]


class ShownModel(Struct, frozen=True, kw_only=True):
    """A model in detail."""

    modelfile: str
    parameters: str
    template: str = ""
    license: str = ""
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class SpokenVersion(Struct, frozen=True, kw_only=True):
    """`version` is the version of Ollama whose API this server implements."""

    version: str
    holdfast: str


class ShowRequest(NamedModel):
    """A request for the details of a model."""

    verbose: bool | None = optional("Accepted, but has no effect.")


@operation("GET", "/api/tags", returns(ListedModels), summary="models (Ollama)")
async def ollama_tags(request: Request, services: Services) -> Response:
    """List the served models."""
    return json_response(
        ListedModels(models=[_listed_model(model) for model in served_models(services)])
    )


@operation("GET", "/api/ps", returns(RunningModels))
async def ollama_ps(request: Request, services: Services) -> Response:
    """List the loaded models, and when each will be unloaded if it is not used."""
    running = [
        RunningModel(
            **_common_fields(model),
            expires_at=_expires_at(model, services),
            size_vram=0 if model.info.is_on_cpu else model.info.weight_bytes,
            context_length=model.info.context_tokens,
        )
        for model in services.models.statuses()
        if model.info is not None and model.state == "ready"
    ]
    return json_response(RunningModels(models=running))


@operation("POST", "/api/show", accepts(ShowRequest), returns(ShownModel))
async def ollama_show(request: Request, services: Services) -> Response:
    """Show one model in detail."""
    body = await read_json(request, ShowRequest, services.limits)
    model = served_model(body.required_name(), services)
    await load_capabilities(model.id, services)
    details = ShownModel(
        modelfile=f"FROM {model.id}\n",
        parameters="" if model.context_tokens is None else f"num_ctx {model.context_tokens}",
        details=_details(model),
        model_info=_model_info(model),
        capabilities=[*capabilities(model.id, services)],
        modified_at=timestamp(model.created),
    )
    return json_response(details)


@operation("GET", "/api/version", returns(SpokenVersion))
async def ollama_version(request: Request, services: Services) -> Response:
    """Return the version of Ollama whose API this is, and Holdfast's own version."""
    return json_response(SpokenVersion(version=API_VERSION, holdfast=__version__))


def _listed_model(model: ModelStatus) -> ListedModel:
    return ListedModel(**_common_fields(model), modified_at=timestamp(model.created))


def _common_fields(model: ModelStatus) -> dict[str, Any]:
    """The fields that listed and running models share."""
    return {
        "name": shown_name(model.id),
        "model": shown_name(model.id),
        "size": 0 if model.info is None else model.info.weight_bytes,
        "digest": digest_of(model.id),
        "details": _details(model),
    }


def _expires_at(model: ModelStatus, services: Services) -> str:
    """Return when the model will be unloaded if it is not used from now on, as RFC 3339 time."""
    entry = services.models.catalog().find(model.id)
    seconds_left = model.idle_seconds_left
    if seconds_left is None and entry is not None and not model.is_pinned:
        seconds_left = entry.idle_seconds
    return _NEVER if seconds_left is None else timestamp(time.time() + seconds_left)


def _details(model: ModelStatus) -> ModelDetails:
    info = model.info
    if info is None:
        return ModelDetails(parent_model=model.parent)
    return ModelDetails(
        parent_model=model.parent,
        family=info.model_type,
        families=[info.model_type],
        parameter_size=_abbreviated(info.parameters),
        quantization_level=_quantization(info.weight_bytes, info.parameters, info.compute_dtype),
    )


def _model_info(model: ModelStatus) -> dict[str, Any]:
    """Facts about a model under the keys of GGUF files, which clients look for."""
    info = model.info
    if info is None:
        return {}
    return {
        "general.architecture": info.model_type,
        "general.basename": model.id,
        "general.parameter_count": info.parameters,
        f"{info.model_type}.context_length": info.context_tokens,
        "holdfast.max_context_length": model.own_context_tokens,
        f"{info.model_type}.vocab_size": info.vocab_size,
    }


def _abbreviated(number: int) -> str:
    """Format a number like 7.6B, 494.03M or 812.5K."""
    for size, unit, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 1)):
        if number >= size:
            return f"{number / size:.{digits}f}{unit}"
    return str(number)


def _quantization(weight_bytes: int, parameters: int, compute_dtype: str) -> str:
    """Return the bits per weight, such as Q4; the number format if weights are not quantized."""
    bits = 8 * weight_bytes // max(parameters, 1)
    if 0 < bits < _FULL_PRECISION_BITS:
        return f"Q{bits}"
    return _FORMAT_NAMES.get(compute_dtype, compute_dtype)


class PullProgress(Struct, frozen=True, kw_only=True):
    """The progress of a pull, as one line of its stream.

    `total` and `completed` are in bytes; `digest` is a hash of the model's name.
    """

    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


_FIRST_LINE = PullProgress(status="pulling manifest")
_LAST_LINE = PullProgress(status="success")


class PullRequest(NamedModel):
    """A request to pull a model."""

    insecure: bool | None = optional("Accepted, but has no effect.")
    stream: bool | None = optional("False: only the last line. Otherwise: a stream of JSON lines.")


@operation(
    "POST",
    "/api/pull",
    accepts(PullRequest),
    returns(PullProgress, chunk=PullProgress, chunk_type=OllamaAnswer.stream_type),
    needs_admin=True,
)
async def ollama_pull(request: Request, services: Services) -> Response:
    """Download a model from the Hub into its cache, check the model and serve it.

    For a model from another source, there is nothing to download.
    """
    body = await read_json(request, PullRequest, services.limits)
    streams = body.stream is not False
    source = _pull_source(body.required_name(), services)
    if source is not None:
        return PullResponse(services.models.library, source, streams=streams)
    if not streams:
        return json_response(_LAST_LINE)
    return Response(
        encode_line(_FIRST_LINE) + encode_line(_LAST_LINE), media_type=OllamaAnswer.stream_type
    )


@operation(
    "DELETE",
    "/api/delete",
    accepts(NamedModel),
    {"responses": {"200": {"description": "The model was removed"}}},
    needs_admin=True,
)
async def ollama_delete(request: Request, services: Services) -> Response:
    """Remove a model from the Hub's cache, and unload it unless it is in use."""
    body = await read_json(request, NamedModel, services.limits)
    name = body.required_name()
    if (entry := named_entry(name, services)) is None:
        source = hub_source(hub_name(name))
        if source is None or source.revision:
            raise not_found(name)
    elif (source := services.models.library.source_of(entry)) is None:
        message = (
            f"model {entry.name!r} is not in the Hub's cache; only models in that cache can be "
            "removed over HTTP"
        )
        raise RequestRefused(message, code="not_removable", field="model")
    try:
        await services.models.library.remove(source)
    except NoSuchModel:
        raise not_found(name) from None
    return Response(status_code=200)


def _pull_source(name: str, services: Services) -> ModelSource | None:
    """Return the Hub model to pull; None for a model from elsewhere. Raises RequestRefused."""
    if (entry := named_entry(name, services)) is not None:
        return services.models.library.source_of(entry)
    short_name = hub_name(name)
    if (source := hub_source(short_name)) is None:
        if "/" not in short_name:
            served_model(name, services)
            return None
        reason = (
            "the name of a Hub model is written owner/name or hf.co/owner/name, without a tag: the "
            "server chooses its files"
        )
        raise invalid_field("model", reason)
    if source.revision:
        reason = "set a revision in models.toml or with `holdfast models pull`, not over HTTP"
        raise invalid_field("model", reason)
    return source


class PullResponse(Response):
    """The answer to a pull. The pull is cancelled when the last waiting client disconnects."""

    def __init__(self, library: Library, source: ModelSource, *, streams: bool) -> None:
        super().__init__()
        self._library = library
        self._source = source
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pull and report the progress."""
        record: RequestRecord = scope[RECORD]
        with self._library.pulled(self._source) as pull:
            pull_format = _PullFormat(self._source)
            lines = self._lines(pull, pull_format, record)
            writer = EventWriter(send, pull_format, lines, request_id=record.request_id)
            if not await run_unless_disconnected(
                receive, writer.run() if self._streams else _read_all(lines)
            ):
                raise ClientDisconnect
        if not self._streams:
            await json_response(_LAST_LINE)(scope, receive, send)

    async def _lines(
        self, pull: Pull, pull_format: _PullFormat, record: RequestRecord
    ) -> AsyncIterator[bytes]:
        """Yield the lines of the stream, one for each step. Raises RequestRefused if it fails."""
        yield pull_format.line(_FIRST_LINE)
        try:
            async for step in pull.steps():
                yield pull_format.line(pull_format.progress_event(step))
        except ModelLoadError as error:
            # the Hub, the network or the disk caused the failure
            refusal = (
                error
                if isinstance(error, NoSuchModel)
                else RequestRefused(str(error), status=502, code="pull_failed")
            )
            record_problem(record, problem_of(refusal), refusal)
            raise refusal from None
        yield pull_format.line(PullProgress(status="writing manifest"))
        yield pull_format.line(_LAST_LINE)


async def _read_all(lines: AsyncIterator[bytes]) -> None:
    """Wait until the pull has ended, for a client that gets only the last line."""
    async for _ in lines:
        continue


class _PullFormat(StreamFormat):
    """The format of a pull's stream."""

    stream_type = OllamaAnswer.stream_type

    def __init__(self, source: ModelSource) -> None:
        self._digest = digest_of(source.name)
        self._latest_progress = _FIRST_LINE

    def line(self, progress: PullProgress) -> bytes:
        """A line of the stream."""
        self._latest_progress = progress
        return encode_line(progress)

    def progress_event(self, step: PullStep) -> PullProgress:
        """Return the progress in Ollama's words."""
        checking = PullProgress(
            status="verifying sha256 digest", total=step.total_bytes, completed=step.done_bytes
        )
        if step.stage == "checking":
            return checking
        status = f"pulling {self._digest[:_DIGEST_CHARACTERS_SHOWN]}"
        return msgspec.structs.replace(checking, status=status, digest=f"sha256:{self._digest}")

    def keep_alive(self) -> bytes:
        """Return the last line once more."""
        return encode_line(self._latest_progress)

    def error_event(self, problem: Problem) -> bytes:
        """Return the error as the last line."""
        return encode_line(ollama_error(problem))


def _refused_operation(method: str, path: str) -> Operation:
    """An operation of Ollama that this server does not support, with an error that says why."""

    @operation(method, path, {"responses": {}})
    async def refuse(request: Request, services: Services) -> Response:
        """Not supported: this server does not create models."""
        raise RequestRefused(
            f"{path} is not supported: {_WHY_REFUSED}", code="unsupported_operation"
        )

    return refuse


REFUSED = tuple(
    _refused_operation(method, path)
    for method, path in (
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("POST", "/api/push"),
        ("HEAD", "/api/blobs/{digest}"),
        ("POST", "/api/blobs/{digest}"),
    )
)
