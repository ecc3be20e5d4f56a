"""POST /api/pull and DELETE /api/delete: models of the Hub come and go.

What else changes models is refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from pydantic import Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.errors import ModelLoadError, NoSuchModel
from holdfast.front.fleet.library import Library, Pull, PullStep
from holdfast.front.ollama.answer import OllamaAnswer, OllamaError, written
from holdfast.front.ollama.models import (
    NamedModel,
    digest_of,
    hub_name,
    named_entry,
    not_found,
    served_model,
)
from holdfast.front.server.answers import EventWriter, StreamFormat
from holdfast.front.server.dialect import Operation, answers_of, operation, request_of
from holdfast.front.server.in_progress import unless_disconnected
from holdfast.front.server.problem import Problem, RequestRefused, problem_of, record_problem
from holdfast.front.server.request import json_response, parse, read_body
from holdfast.front.server.services import Services
from holdfast.models.download import ModelSource, hub_source
from holdfast.telemetry.request_log import RECORD, RequestRecord

_WHY_NOT = "models come from the Hub (/api/pull), or from folders that the server's settings name"
_SHOWN_OF_DIGEST = 12


class PullProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far it is; a line of a stream, or the end of it.

    `total` and `completed` are bytes; `digest` tells names apart.
    """

    status: str
    digest: str | msgspec.UnsetType = msgspec.UNSET
    total: int | msgspec.UnsetType = msgspec.UNSET
    completed: int | msgspec.UnsetType = msgspec.UNSET


_BEGUN, _DONE = PullProgress(status="pulling manifest"), PullProgress(status="success")


class PullRequest(NamedModel):
    """Which model is wanted."""

    insecure: bool | None = Field(None, description="Accepted, without effect.")
    stream: bool | None = Field(
        None, description="False: the end in one piece. Otherwise as lines of JSON."
    )


@operation(
    "POST",
    "/api/pull",
    request_of(PullRequest),
    answers_of(PullProgress, chunk=PullProgress, chunk_type=OllamaAnswer.stream_type),
    needs_admin=True,
)
async def ollama_pull(request: Request, services: Services) -> Response:
    """Fetch a model of the Hub into its cache, check it and serve it.

    One that comes from elsewhere is there.
    """
    asked = parse(PullRequest, await read_body(request, limit_bytes=services.limits.max_body_bytes))
    streams, source = asked.stream is not False, _wanted(asked.required(), services)
    if source is not None:
        return PullResponse(services.library, source, streams=streams)
    if not streams:
        return json_response(_DONE)
    return Response(written(_BEGUN) + written(_DONE), media_type=OllamaAnswer.stream_type)


@operation(
    "DELETE",
    "/api/delete",
    request_of(NamedModel),
    {"responses": {"200": {"description": "It is removed"}}},
    needs_admin=True,
)
async def ollama_delete(request: Request, services: Services) -> Response:
    """Remove a model from the Hub's cache, and from memory if it is loaded and nobody uses it."""
    asked = parse(NamedModel, await read_body(request, limit_bytes=services.limits.max_body_bytes))
    name = asked.required()
    if (entry := named_entry(name, services)) is None:
        source = hub_source(hub_name(name))
        if source is None or source.revision:
            raise not_found(name)
    elif (source := services.library.source_of(entry)) is None:
        message = (
            f"model {entry.name!r} does not lie in the Hub's cache, and only what lies there is "
            "removed over HTTP"
        )
        raise RequestRefused(message, code="not_removable", field="model")
    try:
        await services.library.remove(source)
    except NoSuchModel:
        raise not_found(name) from None
    return Response(status_code=200)


def _wanted(name: str, services: Services) -> ModelSource | None:
    """The model of the Hub that is to be pulled; None for one that is here in another way.

    Raises RequestRefused.
    """
    if (entry := named_entry(name, services)) is not None:
        return services.library.source_of(entry)
    wanted = hub_name(name)
    if (source := hub_source(wanted)) is None:
        if "/" not in wanted:
            served_model(name, services)
            return None
        message = (
            "`model`: a model of the Hub is written owner/name, or hf.co/owner/name; its files are "
            "chosen here, so it has no tag"
        )
        raise RequestRefused(message, field="model")
    if source.revision:
        message = (
            "`model`: a revision is named in models.toml, or to `holdfast models pull`, not over "
            "HTTP"
        )
        raise RequestRefused(message, field="model")
    return source


class PullResponse(Response):
    """The answer to a pull, which is stopped when the last client that waits for it has left."""

    def __init__(self, library: Library, source: ModelSource, *, streams: bool) -> None:
        super().__init__()
        self._library, self._source, self._streams = library, source, streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pull, and tell how far it is."""
        record: RequestRecord = scope[RECORD]
        with self._library.pulled(self._source) as pull:
            form = _PullLines(self._source)
            lines = self._lines(pull, form, record)
            writer = EventWriter(send, form, lines, request_id=record.request_id)
            if not await unless_disconnected(
                receive, writer.run() if self._streams else _read(lines)
            ):
                raise ClientDisconnect
        if not self._streams:
            await json_response(_DONE)(scope, receive, send)

    async def _lines(
        self, pull: Pull, form: _PullLines, record: RequestRecord
    ) -> AsyncIterator[bytes]:
        yield form.line(_BEGUN)
        try:
            async for step in pull.steps():
                yield form.line(form.progress(step))
        except ModelLoadError as error:
            # it is the Hub, the network or the disk that does not do what it should
            refused = (
                error
                if isinstance(error, NoSuchModel)
                else RequestRefused(str(error), status=502, code="pull_failed")
            )
            record_problem(record, problem_of(refused), refused)
            raise refused from None
        yield form.line(PullProgress(status="writing manifest"))
        yield form.line(_DONE)


async def _read(lines: AsyncIterator[bytes]) -> None:
    async for _ in lines:
        continue


class _PullLines(StreamFormat):
    """How the stream of a pull looks."""

    stream_type = OllamaAnswer.stream_type

    def __init__(self, source: ModelSource) -> None:
        self._digest = digest_of(source.name)
        self._last = _BEGUN

    def line(self, progress: PullProgress) -> bytes:
        """News as a line."""
        self._last = progress
        return written(progress)

    def progress(self, step: PullStep) -> PullProgress:
        """How far it is, in Ollama's words."""
        so_far = PullProgress(
            status="verifying sha256 digest", total=step.total_bytes, completed=step.done_bytes
        )
        if step.stage == "checking":
            return so_far
        status = f"pulling {self._digest[:_SHOWN_OF_DIGEST]}"
        return msgspec.structs.replace(so_far, status=status, digest=f"sha256:{self._digest}")

    def keep_alive(self) -> bytes:
        """The last line once more."""
        return written(self._last)

    def broken(self, problem: Problem) -> bytes:
        """The error as the last line."""
        return written(OllamaError(error=problem.message_with_field))


def _refused(method: str, path: str) -> Operation:
    @operation(method, path, {"responses": {}})
    async def refuse(request: Request, services: Services) -> Response:
        """Not supported: models are not made here."""
        raise RequestRefused(f"{path} is not supported: {_WHY_NOT}", code="unsupported_operation")

    return refuse


REFUSED = tuple(
    _refused(method, path)
    for method, path in (
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("POST", "/api/push"),
        ("HEAD", "/api/blobs/{digest}"),
        ("POST", "/api/blobs/{digest}"),
    )
)
