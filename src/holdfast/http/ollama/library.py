"""POST /api/pull, and the operations that change what is served: a served model is there, all else is refused."""

from __future__ import annotations

import msgspec
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from holdfast.http.ollama.answer import OllamaAnswer
from holdfast.http.ollama.names import served_model
from holdfast.http.server.body import parse, read_body
from holdfast.http.server.dialect import Operation, operation
from holdfast.http.server.fields import STRICT
from holdfast.http.server.openapi import answers_of, request_of
from holdfast.http.server.problem import RequestRefused
from holdfast.http.server.services import Services

_CODE = "unsupported_operation"
_WHAT_IT_HAS = "This server serves the model that it was started with (holdfast serve MODEL)"


class PullProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far it is; a line of a stream, or the end of it."""

    status: str


class PullRequest(BaseModel):
    """Which model is wanted."""

    model_config = STRICT

    model: str | None = Field(None, description="Its name, with or without :latest.")
    name: str | None = Field(None, description="Older name of model.")
    insecure: bool | None = Field(None, description="Accepted, without effect.")
    stream: bool | None = Field(None, description="False: the end in one piece. Otherwise as lines of JSON.")


@operation(
    "POST",
    "/api/pull",
    request_of(PullRequest),
    answers_of(PullProgress, chunk=PullProgress, chunk_type=OllamaAnswer.stream_type),
)
async def ollama_pull(request: Request, services: Services) -> Response:
    """Get a model: one that is served is there. Others cannot be got by this version yet."""
    asked = parse(PullRequest, await read_body(request, limit_bytes=services.limits.max_body_bytes))
    name = asked.model or asked.name
    if not name:
        raise RequestRefused("`model` is required", code="missing_required_parameter", field="model")
    try:
        served_model(name, services)
    except RequestRefused:
        raise RequestRefused(f"{_WHAT_IT_HAS}; it cannot pull another one yet", code=_CODE, field="model") from None
    done = msgspec.json.encode(PullProgress(status="success"))
    if asked.stream is False:
        return Response(done, media_type="application/json")
    begun = msgspec.json.encode(PullProgress(status="pulling manifest"))
    return Response(b"%b\n%b\n" % (begun, done), media_type=OllamaAnswer.stream_type)


def _refused(method: str, path: str) -> Operation:
    @operation(method, path, {"responses": {}})
    async def refuse(request: Request, services: Services) -> Response:
        """Not supported: what a server serves is set when it is started."""
        raise RequestRefused(f"{_WHAT_IT_HAS}; {path} is not supported, for what it has is not changed over HTTP", code=_CODE)

    return refuse


REFUSED = tuple(
    _refused(method, path)
    for method, path in (
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("POST", "/api/push"),
        ("DELETE", "/api/delete"),
        ("HEAD", "/api/blobs/{digest}"),
        ("POST", "/api/blobs/{digest}"),
    )
)
