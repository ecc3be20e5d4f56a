"""Conversations: items that are kept under one name, and grow with the responses that go on from
them.
"""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from holdfast.front.responses.fields import ResponseMetadata
from holdfast.front.responses.items import InputItem, conversation
from holdfast.front.responses.run import kept_input, shown_item
from holdfast.front.responses.stored import (
    PAGE,
    ItemList,
    described_query,
    item_list,
    not_found,
    page_of,
    tenant_asking,
)
from holdfast.front.server.dialect import answers_of, operation, request_of
from holdfast.front.server.fields import STRICT, UnsupportedFields
from holdfast.front.server.request import M, json_response, parse, read_body
from holdfast.front.server.services import Services
from holdfast.store.responses import Item, RecordMissing, ResponseFile, StoredRecord

_MOST_ITEMS = 20
_PATH = "/v1/conversations/{conversation_id}"
_ELSEWHERE = UnsupportedFields(
    neutral={"cache_salt": ()},
    reasons={"cache_salt": "here it belongs in the query: ?cache_salt=…"},
)
Items = Annotated[list[InputItem], Field(max_length=_MOST_ITEMS, fail_fast=True)]


class ConversationChange(BaseModel):
    """What can be said of a conversation at any time."""

    model_config = STRICT

    metadata: ResponseMetadata | None = Field(
        description="Up to 16 pairs of strings, for your own use."
    )


class ConversationOpening(BaseModel):
    """A new conversation."""

    model_config = STRICT

    metadata: ResponseMetadata | None = Field(
        None, description="Up to 16 pairs of strings, for your own use."
    )
    items: Items | None = Field(None, description="What it begins with.")


class ConversationAddition(BaseModel):
    """Items for a conversation."""

    model_config = STRICT

    items: Annotated[Items, Field(min_length=1)] = Field(description="What was said, oldest first.")


class ConversationObject(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation, without its items."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int  # seconds since 1970
    metadata: dict[str, str] = {}


class ConversationDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """What is left of a deleted conversation."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


class ConversationItem(msgspec.Struct, frozen=True, kw_only=True):
    """An item; which further fields it has depends on its type."""

    id: str
    type: str


@operation(
    "POST",
    "/v1/conversations",
    described_query(),
    request_of(ConversationOpening, required=False),
    answers_of(ConversationObject),
)
async def create_conversation(request: Request, services: Services) -> Response:
    """Open a conversation."""
    asked = await _parsed(ConversationOpening, request, services, empty=b"{}")
    opened = ConversationObject(
        id=f"conv_{uuid.uuid4().hex}", created_at=int(time.time()), metadata=asked.metadata or {}
    )
    record = StoredRecord(id=opened.id, body=msgspec.to_builtins(opened))
    items = _checked(asked.items or [])
    await services.responses.call(
        ResponseFile.put, tenant_asking(request, services), record, kind="conversation", items=items
    )
    return json_response(opened)


@operation("GET", _PATH, described_query(), answers_of(ConversationObject))
async def get_conversation(request: Request, services: Services) -> Response:
    """A conversation."""
    return json_response(await _found(request, services))


@operation(
    "POST", _PATH, described_query(), request_of(ConversationChange), answers_of(ConversationObject)
)
async def update_conversation(request: Request, services: Services) -> Response:
    """Give a conversation other metadata."""
    asked = await _parsed(ConversationChange, request, services)
    changed = msgspec.structs.replace(
        await _found(request, services), metadata=asked.metadata or {}
    )
    record = StoredRecord(id=changed.id, body=msgspec.to_builtins(changed))
    await _call(request, services, ResponseFile.change, record, kind="conversation")
    return json_response(changed)


@operation("DELETE", _PATH, described_query(), answers_of(ConversationDeleted))
async def delete_conversation(request: Request, services: Services) -> Response:
    """Forget a conversation with its items. Responses that went on from it stay."""
    conversation_id = request.path_params["conversation_id"]
    await _call(request, services, ResponseFile.delete, conversation_id, kind="conversation")
    return json_response(ConversationDeleted(id=conversation_id))


@operation(
    "POST",
    _PATH + "/items",
    described_query("include[]"),
    request_of(ConversationAddition),
    answers_of(ItemList),
)
async def create_conversation_items(request: Request, services: Services) -> Response:
    """Add items to a conversation."""
    items = _checked((await _parsed(ConversationAddition, request, services)).items)
    await _call(
        request, services, ResponseFile.append, request.path_params["conversation_id"], items
    )
    return item_list(items)


@operation("GET", _PATH + "/items", described_query(*PAGE), answers_of(ItemList))
async def list_conversation_items(request: Request, services: Services) -> Response:
    """The items of a conversation."""
    return await page_of(
        request, services, request.path_params["conversation_id"], kind="conversation"
    )


@operation(
    "GET", _PATH + "/items/{item_id}", described_query("include[]"), answers_of(ConversationItem)
)
async def get_conversation_item(request: Request, services: Services) -> Response:
    """An item of a conversation."""
    item = await _call(
        request,
        services,
        ResponseFile.item,
        request.path_params["conversation_id"],
        request.path_params["item_id"],
    )
    return Response(msgspec.json.encode(shown_item(item)), media_type="application/json")


@operation("DELETE", _PATH + "/items/{item_id}", described_query(), answers_of(ConversationObject))
async def delete_conversation_item(request: Request, services: Services) -> Response:
    """Take an item out of a conversation."""
    await _call(
        request,
        services,
        ResponseFile.delete_item,
        request.path_params["conversation_id"],
        request.path_params["item_id"],
    )
    return json_response(await _found(request, services))


async def _parsed(model: type[M], request: Request, services: Services, *, empty: bytes = b"") -> M:
    body = await read_body(request, limit_bytes=services.limits.max_body_bytes)
    asked = parse(model, body or empty)
    _ELSEWHERE.refuse(asked.model_extra)
    return asked


def _checked(items: list[InputItem]) -> list[Item]:
    """The items as they are kept. Raises RequestRefused for what a response could not go on from."""
    conversation(items, field="items")
    return kept_input(map(shown_item, items))


async def _found(request: Request, services: Services) -> ConversationObject:
    record = await _call(
        request,
        services,
        ResponseFile.record,
        request.path_params["conversation_id"],
        kind="conversation",
    )
    return msgspec.convert(record.body, ConversationObject)


async def _call(
    request: Request, services: Services, method: Any, *given: Any, **named: Any
) -> Any:
    """Do something with a conversation that is there. Raises RequestRefused."""
    try:
        return await services.responses.call(
            method, tenant_asking(request, services), *given, **named
        )
    except RecordMissing as missing:
        if missing.item_id:
            raise not_found("item", missing.item_id) from None
        raise not_found("conversation", request.path_params["conversation_id"]) from None


CONVERSATIONS = (
    create_conversation,
    get_conversation,
    update_conversation,
    delete_conversation,
    create_conversation_items,
    list_conversation_items,
    get_conversation_item,
    delete_conversation_item,
)
