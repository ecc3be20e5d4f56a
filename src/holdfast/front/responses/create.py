"""POST /v1/responses: the conversation that a new Response continues, and its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from holdfast.front.responses.codex import OverflowInStream, is_codex
from holdfast.front.responses.compaction import TRIGGER, CompactedFormat, CompactionAnswer
from holdfast.front.responses.fields import ResponseRequest
from holdfast.front.responses.items import items_of
from holdfast.front.responses.run import (
    Keeping,
    KeptResponse,
    ResponseRun,
    continued,
    in_background,
    kept_input,
    shown_item,
)
from holdfast.front.responses.shapes import (
    CompactedResponse,
    InputTokens,
    ResponseEvent,
    ResponseObject,
)
from holdfast.front.responses.tools import offered_tools
from holdfast.front.server.dialect import answers_of, operation, request_of
from holdfast.front.server.following import rejoined
from holdfast.front.server.generation import GenerationResponse
from holdfast.front.server.held_answers import identity_of
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.request import extended, json_response, parse, read_body, tenant_in
from holdfast.front.server.services import Services, salted
from holdfast.store.responses import Item, RecordMissing, ResponseFile
from holdfast.telemetry.requests import AnswerRecord

_SESSION_HEADERS = ("session-id", "session_id")  # of Codex, today's and earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A request with all that it refers to, and where its response belongs."""

    asked: ResponseRequest
    before: Sequence[Any]  # items
    keeping: Keeping


async def continuation_of(
    asked: ResponseRequest, services: Services, *, tenant: str
) -> Continuation:
    """The request and what it goes on from. Raises RequestRefused for what is not there."""
    asked.refuse_what_cannot_be_served(services.limits)
    items = await _referred(asked, services, tenant)
    if any(map(_is_reference, items_of(asked.input))):
        asked = asked.model_copy(update={"input": continued(items)})
    before: list[Item] = []
    if asked.previous_response_id is not None:
        before = await _chain(services, tenant, asked.previous_response_id)
    elif asked.conversation_id is not None:
        before = await _conversation(services, tenant, asked.conversation_id)
    keeping = Keeping(
        tenant=tenant,
        previous=asked.previous_response_id,
        conversation=asked.conversation_id,
        stores=asked.store is not False,
        in_background=bool(asked.background),
        streams=bool(asked.stream),
    )
    if keeping.keeps:
        keeping = replace(keeping, input=kept_input(items))
    return Continuation(asked=asked, before=continued(before), keeping=keeping)


async def _referred(
    asked: ResponseRequest, services: Services, tenant: str
) -> list[Mapping[str, Any]]:
    """The items of the input; in place of references what they refer to."""
    items: list[Mapping[str, Any]] = [shown_item(item) for item in items_of(asked.input)]
    wanted = {
        place: item.get("id") or "" for place, item in enumerate(items) if _is_reference(item)
    }
    if not wanted:
        return items
    found = await services.responses.call(ResponseFile.find_items, tenant, tuple(wanted.values()))
    for place, item_id in wanted.items():
        if item_id not in found:
            reason, field = (
                "there is no such item; it may not be kept any more",
                f"input.{place}.id",
            )
            raise RequestRefused(
                f"`{field}`: {reason}", status=404, code="item_not_found", field=field
            )
        items[place] = found[item_id]
    return items


def _is_reference(item: Mapping[str, Any]) -> bool:
    return item.get("type") == "item_reference" or (
        item.get("type") is None and "id" in item and "role" not in item
    )


async def _chain(services: Services, tenant: str, response_id: str) -> list[Item]:
    field = "previous_response_id"
    try:
        record = await services.responses.call(
            ResponseFile.record, tenant, response_id, kind="response"
        )
        if record.is_running:
            reason = f"`{field}`: that response is still being made"
            raise RequestRefused(reason, code="previous_response_in_progress", field=field)
        if record.body.get("conversation"):
            reason = (
                f"`{field}`: that response belongs to a conversation; go on with `conversation`"
            )
            raise RequestRefused(reason, field=field)
        return await services.responses.call(ResponseFile.chain, tenant, response_id)
    except RecordMissing as missing:
        what = (
            "there is no such response"
            if missing.record_id == response_id
            else "a response that it continues is gone"
        )
        reason = f"`{field}`: {what}; it may have been deleted, or not be kept any more"
        raise RequestRefused(
            reason, status=404, code="previous_response_not_found", field=field
        ) from None


async def _conversation(services: Services, tenant: str, conversation_id: str) -> list[Item]:
    try:
        return await services.responses.call(
            ResponseFile.items, tenant, conversation_id, kind="conversation"
        )
    except RecordMissing:
        reason = (
            "`conversation`: there is no such conversation; it may have been deleted, or not be "
            "kept any more"
        )
        raise RequestRefused(
            reason, status=404, code="conversation_not_found", field="conversation"
        ) from None


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
