"""POST /v1/responses, and how many tokens one would read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from holdfast.front.responses.codex import OverflowInStream, is_codex
from holdfast.front.responses.compaction import TRIGGER, CompactedFormat, CompactionAnswer
from holdfast.front.responses.context import continuation_of
from holdfast.front.responses.fields import ResponseRequest
from holdfast.front.responses.items import items_of
from holdfast.front.responses.kept import KeptResponse, in_background
from holdfast.front.responses.run import ResponseRun
from holdfast.front.responses.shapes import (
    CompactedResponse,
    InputTokens,
    ResponseEvent,
    ResponseObject,
)
from holdfast.front.responses.tools import offered_tools
from holdfast.front.server.body import json_response, parse, read_body
from holdfast.front.server.dialect import operation
from holdfast.front.server.extensions import extended, tenant_in
from holdfast.front.server.following import rejoined
from holdfast.front.server.generation import GenerationResponse
from holdfast.front.server.held_answers import identity_of
from holdfast.front.server.openapi import answers_of, request_of
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.services import Services, salted
from holdfast.telemetry.requests import AnswerRecord

_SESSION_HEADERS = ("session-id", "session_id")  # of Codex, today's and earlier


@operation(
    "POST",
    "/v1/responses",
    request_of(ResponseRequest),
    answers_of(ResponseObject, chunk=ResponseEvent),
    summary="responses (OpenAI)",
)
async def create_response(request: Request, services: Services) -> Response:
    """Answer the items of an input."""
    answer = AnswerRecord(services.metrics)
    body = await read_body(request, limit_bytes=services.limits.max_body_bytes)
    identity = identity_of(request, body, services.server)
    if (taken := rejoined(identity, request, services)) is not None:
        return taken
    asked = parse(ResponseRequest, body)
    services = salted(services, asked.cache_salt)
    tenant = tenant_in(request, cache_salt=asked.cache_salt or "")
    continued = await continuation_of(asked, services, tenant=tenant)
    keeping = continued.keeping
    run = (
        ResponseRun(keeping, store=services.responses, running=services.running)
        if keeping.keeps
        else None
    )
    key = session_key(request.headers)
    plan = continued.asked.plan(services, session_key=key, before=continued.before, run=run)
    plan = extended(plan, request, limits=services.limits)
    if run is not None and keeping.in_background:
        return await in_background(
            request,
            services,
            GenerationResponse(services, replace(plan, streams=True), answer),
            run,
        )
    response: Response = GenerationResponse(services, plan, answer, identity=identity)
    if run is not None:
        response = KeptResponse(response, run)
    return (
        OverflowInStream(response, plan.form)
        if plan.streams and is_codex(request.headers)
        else response
    )


@operation(
    "POST", "/v1/responses/compact", request_of(ResponseRequest), answers_of(CompactedResponse)
)
async def compact_response(request: Request, services: Services) -> Response:
    """Have the model summarize a conversation.

    The answer is what to send in place of it; nothing is kept here.
    """
    answer = AnswerRecord(services.metrics)
    body = await read_body(request, limit_bytes=services.limits.max_body_bytes)
    identity = identity_of(request, body, services.server)
    if (taken := rejoined(identity, request, services)) is not None:
        return taken
    asked = parse(ResponseRequest, body)
    for field in ("stream", "background"):
        if getattr(asked, field):
            raise RequestRefused(
                f"`{field}`: a compaction is answered whole, while its client waits", field=field
            )
    services = salted(services, asked.cache_salt)
    items = items_of(asked.input)
    asked = asked.model_copy(update={"input": [*items, {"type": TRIGGER}], "store": False})
    tenant = tenant_in(request, cache_salt=asked.cache_salt or "")
    continued = await continuation_of(asked, services, tenant=tenant)
    before, asked = continued.before, continued.asked
    plan = asked.plan(services, session_key=session_key(request.headers), before=before)
    assert isinstance(plan.form, CompactionAnswer), "the input ends with a trigger"
    form = CompactedFormat(plan.form, [*before, *items_of(asked.input)])
    plan = extended(replace(plan, form=form), request, limits=services.limits)
    return GenerationResponse(services, plan, answer, identity=identity)


@operation(
    "POST", "/v1/responses/input_tokens", request_of(ResponseRequest), answers_of(InputTokens)
)
async def count_input_tokens(request: Request, services: Services) -> Response:
    """Count the tokens of an input, tools and all."""
    asked = parse(
        ResponseRequest, await read_body(request, limit_bytes=services.limits.max_body_bytes)
    )
    services = salted(services, asked.cache_salt)
    tenant = tenant_in(request, cache_salt=asked.cache_salt or "")
    continued = await continuation_of(asked, services, tenant=tenant)
    offered = offered_tools(asked.tools or (), limits=services.limits)
    counted = continued.asked.request(services, "", offered=offered, before=continued.before)
    encoded = await services.encode(msgspec.structs.replace(counted, tenant=tenant))
    return json_response(InputTokens(input_tokens=len(encoded.token_ids)))


def session_key(headers: Mapping[str, str]) -> str:
    """What names the session of a request beside its body; empty: nothing does."""
    return next((headers[name] for name in _SESSION_HEADERS if headers.get(name)), "")
