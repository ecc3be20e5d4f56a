"""What can be done with a response that is kept: read, follow, cancel, delete."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from holdfast.front.responses.kept_items import shown_item, with_sealed_thought
from holdfast.front.responses.pages import (
    PAGE,
    ItemList,
    described_query,
    not_found,
    page_of,
    starting_after,
    tenant_asking,
    truth,
)
from holdfast.front.responses.run import ResponseRun
from holdfast.front.responses.shapes import ResponseEvent, ResponseFailure, ResponseObject
from holdfast.front.server.body import json_response
from holdfast.front.server.dialect import operation
from holdfast.front.server.following import FollowingResponse
from holdfast.front.server.openapi import answers_of
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.services import Services, salted
from holdfast.store.responses import RecordMissing, ResponseFile, StoredRecord

_NUMBER = re.compile(rb'"sequence_number":(\d+)')
_STREAM = "text/event-stream; charset=utf-8"
_LOST = ResponseFailure(
    code="server_error", message="the server stopped before the response was done"
)


class ResponseDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """What is left of a deleted response."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


@operation(
    "GET",
    "/v1/responses/{response_id}",
    described_query("stream", "starting_after", "include[]"),
    answers_of(ResponseObject, chunk=ResponseEvent),
)
async def get_response(request: Request, services: Services) -> Response:
    """A response that is kept, as it stands; or its events, from some place on."""
    query, response_id = request.query_params, request.path_params["response_id"]
    streams, after = truth(query, "stream"), starting_after(query)
    run = _running(request, services)
    if run is not None:
        return (
            FollowingResponse(run, run.form, after=after)
            if streams
            else json_response(run.response)
        )
    record = await _record(request, services)
    if not streams:
        included = (*query.getlist("include[]"), *query.getlist("include"))
        seals = "reasoning.encrypted_content" in included
        seal = salted(services, request.query_params.get("cache_salt")).seal
        return _json(_shown(record, seal=seal.close if seals else None))
    _refuse_elsewhere(record)
    events = await services.responses.call(
        ResponseFile.events, tenant_asking(request, services), response_id
    )
    if not events:
        return Response(_last_event(record, number=after + 1), media_type=_STREAM)
    frames = [frame + b"\n\n" for frame in events.split(b"\n\n")[:-1]]
    return Response(
        b"".join([frame for frame in frames if _number(frame) > after]), media_type=_STREAM
    )


@operation("DELETE", "/v1/responses/{response_id}", described_query(), answers_of(ResponseDeleted))
async def delete_response(request: Request, services: Services) -> Response:
    """Forget a response.

    One that is made in the background is ended; what goes on from it cannot be continued any more.
    """
    response_id = request.path_params["response_id"]
    run = _running(request, services)
    try:
        await services.responses.call(
            ResponseFile.delete, tenant_asking(request, services), response_id, kind="response"
        )
    except RecordMissing:
        raise not_found("response", response_id) from None
    services.running.logs.pop((tenant_asking(request, services), response_id), None)
    if run is not None and run.keeping.in_background:
        run.stop()
    return json_response(ResponseDeleted(id=response_id))


@operation(
    "POST", "/v1/responses/{response_id}/cancel", described_query(), answers_of(ResponseObject)
)
async def cancel_response(request: Request, services: Services) -> Response:
    """End a response that is made in the background. What has ended stays as it is."""
    run = _running(request, services)
    if run is not None and run.keeping.in_background:
        run.stop()
        return json_response(run.response)
    record = await _record(request, services)
    if not record.body.get("background"):
        raise RequestRefused(
            "only a response that was created with `background` can be cancelled",
            field="response_id",
        )
    _refuse_elsewhere(record)
    return _json(_shown(record))


@operation(
    "GET", "/v1/responses/{response_id}/input_items", described_query(*PAGE), answers_of(ItemList)
)
async def list_input_items(request: Request, services: Services) -> Response:
    """The items that were given as input of a response; not those of the responses that it
    continues.
    """
    return await page_of(request, services, request.path_params["response_id"], kind="response")


def _running(request: Request, services: Services) -> ResponseRun | None:
    name = tenant_asking(request, services), request.path_params["response_id"]
    found = services.running.logs.get(name)
    return found if isinstance(found, ResponseRun) else None


async def _record(request: Request, services: Services) -> StoredRecord:
    response_id = request.path_params["response_id"]
    try:
        return await services.responses.call(
            ResponseFile.record, tenant_asking(request, services), response_id, kind="response"
        )
    except RecordMissing:
        raise not_found("response", response_id) from None


def _refuse_elsewhere(record: StoredRecord) -> None:
    if record.is_running:
        message = "this response is being made by another server of this store"
        raise RequestRefused(message, status=409, code="response_elsewhere", field="response_id")


def _shown(record: StoredRecord, *, seal: Callable[[str], str] | None = None) -> dict[str, Any]:
    """A kept response as a client sees it. seal: of thoughts, which are to be added in that form."""
    output = [
        shown_item(item) if seal is None else with_sealed_thought(item, seal)
        for item in record.output
    ]
    shown = {**record.body, "output": output}
    return shown | {"status": "failed", "error": _LOST} if record.is_lost else shown


def _number(frame: bytes) -> int:
    found = _NUMBER.search(frame)
    return int(found[1]) if found else 0


def _last_event(record: StoredRecord, *, number: int) -> bytes:
    """How a response has ended, where its events are not kept."""
    shown = _shown(record)
    kind = shown["status"].replace("cancelled", "incomplete")
    data = msgspec.json.encode(
        {"type": f"response.{kind}", "sequence_number": number, "response": shown}
    )
    return b"event: response.%b\ndata: %b\n\n" % (kind.encode(), data)


def _json(shown: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(shown), media_type="application/json")


STORED = (get_response, delete_response, cancel_response, list_input_items)
