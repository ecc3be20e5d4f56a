"""Lists of kept items, page by page, and what the queries of responses and conversations may say."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from holdfast.front.responses.kept_items import shown_item
from holdfast.front.server.body import json_response
from holdfast.front.server.dialect import Shape
from holdfast.front.server.extensions import tenant_in
from holdfast.front.server.fields import INT64_MAX
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.services import Services
from holdfast.store.responses import Item, Kind, RecordMissing, ResponseFile

MOST_LISTED = 100
_LISTED = 20
_NUMBER = re.compile(r"[0-9]{1,19}")
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
    limit, order = _number(query, "limit", 1, MOST_LISTED) or _LISTED, query.get("order", "desc")
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
    number = _number(query, "starting_after", 0, INT64_MAX)
    return -1 if number is None else number


def truth(query: Mapping[str, str], name: str) -> bool:
    """Whether a query says yes to something. Raises RequestRefused."""
    text = query.get(name, "false").lower()
    if text not in _TRUTHS:
        raise RequestRefused(f"`{name}`: true or false", field=name)
    return _TRUTHS[text]


def _number(query: Mapping[str, str], name: str, least: int, most: int) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    if not (_NUMBER.fullmatch(text) and least <= int(text) <= most):
        raise RequestRefused(f"`{name}`: a number from {least} to {most}", field=name)
    return int(text)
