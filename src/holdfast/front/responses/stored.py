"""Stored Responses: read, followed, listed in pages, cancelled and deleted."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from holdfast.front.responses.run import ResponseRun, shown_item, with_sealed_thought
from holdfast.front.responses.shapes import ResponseEvent, ResponseFailure, ResponseObject
from holdfast.front.server.dialect import Shape, answers_of, operation
from holdfast.front.server.fields import INT64_MAX
from holdfast.front.server.following import FollowingResponse
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.request import json_response, tenant_in
from holdfast.front.server.services import Services, salted
from holdfast.store.responses import Item, Kind, RecordMissing, ResponseFile, StoredRecord

MOST_LISTED = 100
_LISTED = 20
_DIGITS = re.compile(r"[0-9]{1,19}")
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}
_SCHEMAS: Mapping[str, Shape] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MOST_LISTED},
    "order": {"type": "string", "enum": ["asc", "desc"]},
    "after": {"type": "string"},
    "stream": {"type": "boolean"},
    "starting_after": {"type": "integer", "minimum": 0},
    "include[]": {"type": "array", "items": {"type": "string"}},
    "cache_salt": {"type": "string"},
}
_MEANINGS = {
    "limit": f"At most so many; {_LISTED} if not given.",
    "order": "The oldest or the newest first; the newest if not given.",
    "after": "The id of the item behind which to go on.",
    "stream": "Send the events of the response, those to come too.",
    "starting_after": "With stream: only the events behind the one of this number.",
    "include[]": "Of a response: reasoning.encrypted_content adds it. What others would add is there, or is not served.",
    "cache_salt": "The salt of the request that made it.",
}
PAGE = ("limit", "order", "after", "include[]")
_NUMBER = re.compile(rb'"sequence_number":(\d+)')
_STREAM = "text/event-stream; charset=utf-8"
_LOST = ResponseFailure(
    code="server_error", message="the server stopped before the response was done"
)


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of items."""

    object: Literal["list"] = "list"
    data: Sequence[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def described_query(*names: str) -> Shape:
    """Shape of an operation that reads these of its query, and the salt."""
    return {
        "parameters": [
            {
                "name": name,
                "in": "query",
                "required": False,
                "description": _MEANINGS[name],
                "schema": _SCHEMAS[name],
            }
            for name in (*names, "cache_salt")
        ]
    }


def tenant_asking(request: Request, services: Services) -> str:
    """Whose responses a request without a body is about."""
    return tenant_in(request, cache_salt=request.query_params.get("cache_salt", ""))


def not_found(what: str, record_id: str) -> RequestRefused:
    """The refusal of a request about something that is not there, or is somebody else's."""
    message = (
        f"there is no {what} {record_id[:100]!r}; it may have been deleted, or not be kept any more"
    )
    return RequestRefused(message, status=404, code=f"{what}_not_found", field=f"{what}_id")


async def page_of(request: Request, services: Services, record_id: str, *, kind: Kind) -> Response:
    """A page of the items that went into a record. Raises RequestRefused."""
    query = request.query_params
    limit, order = (
        _query_number(query, "limit", 1, MOST_LISTED) or _LISTED,
        query.get("order", "desc"),
    )
    if order not in ("asc", "desc"):
        raise RequestRefused("`order`: asc or desc", field="order")
    try:
        page = await services.responses.call(
            ResponseFile.page,
            tenant_asking(request, services),
            record_id,
            kind=kind,
            limit=limit,
            newest_first=order == "desc",
            after=query.get("after"),
        )
    except RecordMissing as missing:
        if missing.item_id:
            raise RequestRefused("`after`: there is no such item here", field="after") from None
        raise not_found(kind, record_id) from None
    return item_list(page.items, has_more=page.has_more)


def item_list(items: Sequence[Item], *, has_more: bool = False) -> Response:
    """Items as a list."""
    shown = [dict(shown_item(item)) for item in items]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return json_response(ItemList(data=shown, first_id=first, last_id=last, has_more=has_more))


def starting_after(query: Mapping[str, str]) -> int:
    """The number of the last event that a client has seen; -1: none. Raises RequestRefused."""
    number = _query_number(query, "starting_after", 0, INT64_MAX)
    return -1 if number is None else number


def truth(query: Mapping[str, str], name: str) -> bool:
    """Whether a query says yes to something. Raises RequestRefused."""
    text = query.get(name, "false").lower()
    if text not in _TRUTHS:
        raise RequestRefused(f"`{name}`: true or false", field=name)
    return _TRUTHS[text]


def _query_number(query: Mapping[str, str], name: str, least: int, most: int) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    if not (_DIGITS.fullmatch(text) and least <= int(text) <= most):
        raise RequestRefused(f"`{name}`: a number from {least} to {most}", field=name)
    return int(text)


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
