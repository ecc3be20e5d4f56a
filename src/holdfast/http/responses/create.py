"""POST /v1/responses, and how many tokens one would read."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from holdfast.http.responses.fields import ResponseRequest
from holdfast.http.responses.shapes import InputTokens, ResponseEvent, ResponseObject
from holdfast.http.responses.tools import offered_tools
from holdfast.http.server.body import json_response, parse, read_body
from holdfast.http.server.dialect import operation
from holdfast.http.server.generation import generate
from holdfast.http.server.openapi import answers_of, request_of
from holdfast.http.server.services import Services

_SESSION_HEADERS = ("session-id", "session_id")  # of Codex, today's and earlier


@operation(
    "POST",
    "/v1/responses",
    request_of(ResponseRequest),
    answers_of(ResponseObject, chunk=ResponseEvent),
    summary="responses, as OpenAI's",
)
async def create_response(request: Request, services: Services) -> Response:
    """Answer the items of an input."""
    key = session_key(request.headers)
    return await generate(
        request, services, lambda body: parse(ResponseRequest, body).plan(services, unseal=lambda _: None, session_key=key)
    )


@operation("POST", "/v1/responses/input_tokens", request_of(ResponseRequest), answers_of(InputTokens))
async def count_input_tokens(request: Request, services: Services) -> Response:
    """Count the tokens of an input, tools and all."""
    body = await read_body(request, limit_bytes=services.limits.max_body_bytes)
    asked = parse(ResponseRequest, body)
    asked.refuse_what_cannot_be_served(services.limits)
    offered = offered_tools(asked.tools or (), limits=services.limits)
    encoded = await services.encode(asked.request(services, "", offered=offered, unseal=lambda _: None))
    return json_response(InputTokens(input_tokens=len(encoded.token_ids)))


def session_key(headers: Mapping[str, str]) -> str:
    """What names the session of a request beside its body; empty: nothing does."""
    return next((headers[name] for name in _SESSION_HEADERS if headers.get(name)), "")
