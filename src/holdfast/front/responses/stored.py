"""Stored responses and conversations: how a response is stored while it is generated, and the
endpoints that read, follow, list, change, cancel and delete stored responses and conversations.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, Field, NonNegativeInt
from starlette.requests import Request
from starlette.responses import Response

from holdfast.errors import ResponsesUnavailable
from holdfast.front.records.responses import (
    Item,
    Kind,
    RecordKey,
    RecordMissing,
    ResponseFile,
    StoredRecord,
)
from holdfast.front.responses.answer import (
    ResponseAnswer,
    ResponseEvent,
    ResponseFailure,
    ResponseObject,
)
from holdfast.front.responses.fields import AnyItem, ResponseMetadata, ResponseRequest
from holdfast.front.responses.items import (
    conversation,
    shown_item,
    stored_input,
    stored_output,
    with_sealed_thought,
)
from holdfast.front.server.context import RequestContext, context_of
from holdfast.front.server.dialect import Shape, operation
from holdfast.front.server.fields import INT64_MAX, STRICT, UnsupportedFields, optional
from holdfast.front.server.generation import FollowingResponse
from holdfast.front.server.openapi import accepts, query_shape, returns
from holdfast.front.server.problem import RequestRefused, invalid_field, problem_of
from holdfast.front.server.request import M, json_response, number_in, parse, read_body
from holdfast.front.server.resumable_answers import EventLog, NumberedEvent
from holdfast.front.server.services import Services

_MOST_LISTED = 100  # items on one page of a list
_DEFAULT_LISTED = 20
_MOST_ADDED = 20  # items in one request
_RESPONSE = "/v1/responses/{response_id}"
_CONVERSATION = "/v1/conversations/{conversation_id}"
_EVENT_NUMBER = re.compile(rb'"sequence_number":(\d+)')
_EVENT_STREAM = "text/event-stream; charset=utf-8"
_INTERRUPTED = ResponseFailure(
    code="server_error",
    message="the server stopped before the response was complete",
    advice="wait",
)
# query parameters of the endpoints: name → type and description
_QUERY: Mapping[str, tuple[Any, str]] = {
    "limit": (
        Annotated[int, Field(ge=1, le=_MOST_LISTED)],
        f"Maximum number of items; default: {_DEFAULT_LISTED}.",
    ),
    "order": (Literal["asc", "desc"], "asc: oldest first; desc: newest first (default)."),
    "after": (str, "Begin after the item with this id."),
    "stream": (bool, "Stream the events of the response, including future ones."),
    "starting_after": (NonNegativeInt, "With stream: begin after the event with this number."),
    "include[]": (
        list[str],
        "For a response: reasoning.encrypted_content adds that field. Other values have no effect.",
    ),
    "cache_salt": (str, "The cache_salt of the request that created the record."),
}
_PAGE_PARAMETERS = ("limit", "order", "after", "include[]")
_SALT_BELONGS_IN_THE_QUERY = UnsupportedFields(
    neutral={"cache_salt": ()}, reasons={"cache_salt": "send it in the query: ?cache_salt=…"}
)
_METADATA = "Up to 16 pairs of strings, for your own use."
_Items = Annotated[list[AnyItem], Field(max_length=_MOST_ADDED, fail_fast=True)]


class ConversationChange(BaseModel):
    """A change to a conversation."""

    model_config = STRICT

    metadata: ResponseMetadata | None = Field(description=_METADATA)


class ConversationOpening(BaseModel):
    """A request to create a conversation."""

    model_config = STRICT

    metadata: ResponseMetadata | None = optional(_METADATA)
    items: _Items | None = optional("The first items of the conversation.")


class ConversationAddition(BaseModel):
    """A request to add items to a conversation."""

    model_config = STRICT

    items: Annotated[_Items, Field(min_length=1)] = Field(
        description="The items to add, oldest first."
    )


class ConversationObject(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation, without its items."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int  # seconds since 1970
    metadata: dict[str, str] = {}


class ConversationItem(msgspec.Struct, frozen=True, kw_only=True):
    """An item. Which other fields it has depends on its type."""

    id: str
    type: str


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """Confirms that a response or a conversation was deleted."""

    id: str
    object: Literal["response", "conversation.deleted"]
    deleted: bool = True


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of items."""

    object: Literal["list"] = "list"
    data: Sequence[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseRun(EventLog):
    """The generation of one response that is stored or that belongs to a conversation: its events.

    The first event stores the response as running, the last one stores it as finished.
    """

    def __init__(
        self,
        answer_format: ResponseAnswer,
        body: ResponseRequest,
        tenant: str,
        items: Sequence[Item],
        services: Services,
    ) -> None:
        """body: the body of the request. items: the items of its input."""
        super().__init__()
        self.answer_format = answer_format
        self.body = body
        self.stopped = asyncio.Event()  # set once the response was cancelled
        self._key = RecordKey(tenant, answer_format.id)
        self._items = stored_input(items)  # the input's items, as stored
        self._store = services.answers.responses
        self._resumable = services.answers.resumable
        # done when the response is stored as running; None: it has not begun, or is not stored
        self._stored: asyncio.Future[None] | None = None
        answer_format.record = self._record

    async def wait_until_stored(self) -> None:
        """Wait until the running response is stored. Raises ResponsesUnavailable."""
        if self._stored is not None:
            await asyncio.shield(self._stored)

    def stop(self) -> None:
        """End the response as cancelled, unless it has already ended or has not begun."""
        if self._is_open:
            self.answer_format.cancel()
        self.stopped.set()

    def task_ended(self, task: asyncio.Task[None]) -> None:
        """Note the end of the background task. If it ended with an error, the response fails."""
        if task.cancelled():
            self.stop()
        elif (error := task.exception()) is not None and self._is_open:
            self.answer_format.error_event(problem_of(error))

    @property
    def _is_open(self) -> bool:
        """Whether the response has begun and has not ended."""
        return bool(self.events) and not self.has_ended

    def _record(self, number: int, frame: bytes) -> None:
        """Add an event. The first and last event store the response before a client sees them."""
        if self.has_ended:
            return
        if not self.events and self.body.stores:
            self._store_as_running()
        self.add(NumberedEvent(number, frame))
        if self.answer_format.response.status not in ("queued", "in_progress"):
            self.end()
            self._store_as_finished()

    def _store_as_running(self) -> None:
        """Store the response, and let clients find its events until it has ended."""
        self._resumable.named[self._key] = self
        self._stored = self._store.call(
            ResponseFile.put,
            self._key,
            self._stored_body(),
            items=self._items,
            previous=self.body.previous_response_id,
            is_running=True,
        )
        self._stored.add_done_callback(_ignore_failure)

    def _store_as_finished(self) -> None:
        """Store the final response and its events, and add its items to its conversation."""
        response = self.answer_format.response
        output = stored_output(response.output, self.answer_format.hidden_thoughts)
        if self.body.stores:
            was_deleted = self._resumable.named.pop(self._key, None) is None
            events = b"".join([event.frame for event in self.events])
            written = self._store.call(
                ResponseFile.finish, self._key, self._stored_body(), output=output, events=events
            )
            written.add_done_callback(_ignore_failure if was_deleted else self._end_written)
        if self.body.conversation_id and response.status in ("completed", "incomplete"):
            key = RecordKey(self._key.tenant, self.body.conversation_id, "conversation")
            appended = self._store.call(ResponseFile.append, key, [*self._items, *output])
            appended.add_done_callback(_ignore_failure)

    def _end_written(self, call: asyncio.Future[None]) -> None:
        """Keep the response in memory if its end could not be written, because the store still
        shows it as running.
        """
        if call.cancelled() or isinstance(call.exception(), ResponsesUnavailable):
            self._resumable.keep_unwritten(self._key, self)

    def _stored_body(self) -> dict[str, Any]:
        # the output is stored separately
        return {**msgspec.to_builtins(self.answer_format.response), "output": []}


def _ignore_failure(call: asyncio.Future[Any]) -> None:
    """Retrieve the exception, so that asyncio does not log it. The store has already logged it."""
    if not call.cancelled():
        call.exception()


def _query_shape(*names: str) -> Shape:
    """Return the OpenAPI description of query parameters; `cache_salt` is always included."""
    return query_shape({name: _QUERY[name] for name in (*names, "cache_salt")})


@operation(
    "GET",
    _RESPONSE,
    _query_shape("stream", "starting_after", "include[]"),
    returns(ResponseObject, chunk=ResponseEvent),
)
async def get_response(request: Request, services: Services) -> Response:
    """Return a stored response in its current state, or its events after a given number."""
    query = request.query_params
    streams = _boolean_in(query, "stream")
    starting_after = number_in(query, "starting_after", 0, INT64_MAX)
    after = -1 if starting_after is None else starting_after
    run = _response_run(request, services)
    if run is not None:
        if streams:
            return FollowingResponse(run.events_after(after), run.answer_format)
        return json_response(run.answer_format.response)
    record = await _response_record(request, services)
    if not streams:
        included = (*query.getlist("include[]"), *query.getlist("include"))
        if "reasoning.encrypted_content" not in included:
            return _fields_response(_response_fields(record))
        return _fields_response(
            _response_fields(record, seal=_context(request, services).seal.encrypt)
        )
    _refuse_if_running(record)
    events = await _call_store(request, services, "response", ResponseFile.events)
    if not events:  # only the final state was stored
        return Response(_last_event(record, number=after + 1), media_type=_EVENT_STREAM)
    frames = [frame + b"\n\n" for frame in events.split(b"\n\n")[:-1]]
    later_frames = b"".join([frame for frame in frames if _number_of(frame) > after])
    return Response(later_frames, media_type=_EVENT_STREAM)


@operation("DELETE", _RESPONSE, _query_shape(), returns(Deleted))
async def delete_response(request: Request, services: Services) -> Response:
    """Delete a response. If it runs in the background, it is ended.

    Responses that continue the deleted response can no longer be continued.
    """
    run = _response_run(request, services)
    await _call_store(request, services, "response", ResponseFile.delete)
    key = _key(request, services, "response")
    services.answers.resumable.named.pop(key, None)
    if run is not None and run.body.background:
        run.stop()
    return json_response(Deleted(id=key.id, object="response"))


@operation("POST", _RESPONSE + "/cancel", _query_shape(), returns(ResponseObject))
async def cancel_response(request: Request, services: Services) -> Response:
    """End a response that runs in the background. A finished response does not change."""
    run = _response_run(request, services)
    if run is not None and run.body.background:
        run.stop()
        return json_response(run.answer_format.response)
    record = await _response_record(request, services)
    if not record.body.get("background"):
        raise RequestRefused(
            "only a response that was created with `background` can be cancelled",
            field="response_id",
        )
    _refuse_if_running(record)
    return _fields_response(_response_fields(record))


@operation("GET", _RESPONSE + "/input_items", _query_shape(*_PAGE_PARAMETERS), returns(ItemList))
async def list_input_items(request: Request, services: Services) -> Response:
    """List the input items of a response, without those of the responses that it continues."""
    return await _item_page(request, services, "response")


@operation(
    "POST",
    "/v1/conversations",
    _query_shape(),
    accepts(ConversationOpening, required=False),
    returns(ConversationObject),
)
async def create_conversation(request: Request, services: Services) -> Response:
    """Create a conversation."""
    body = await _read_body_as(ConversationOpening, request, services, if_empty=b"{}")
    new_conversation = ConversationObject(
        id=f"conv_{uuid.uuid4().hex}", created_at=int(time.time()), metadata=body.metadata or {}
    )
    key = RecordKey(_context(request, services).tenant, new_conversation.id, "conversation")
    items = _checked_items(body.items or [])
    fields = msgspec.to_builtins(new_conversation)
    await services.answers.responses.call(ResponseFile.put, key, fields, items=items)
    return json_response(new_conversation)


@operation("GET", _CONVERSATION, _query_shape(), returns(ConversationObject))
async def get_conversation(request: Request, services: Services) -> Response:
    """Return a conversation."""
    return json_response(await _conversation_object(request, services))


@operation(
    "POST", _CONVERSATION, _query_shape(), accepts(ConversationChange), returns(ConversationObject)
)
async def update_conversation(request: Request, services: Services) -> Response:
    """Replace the metadata of a conversation."""
    body = await _read_body_as(ConversationChange, request, services)
    stored = await _conversation_object(request, services)
    changed = msgspec.structs.replace(stored, metadata=body.metadata or {})
    fields = msgspec.to_builtins(changed)
    await _call_store(request, services, "conversation", ResponseFile.change, fields)
    return json_response(changed)


@operation("DELETE", _CONVERSATION, _query_shape(), returns(Deleted))
async def delete_conversation(request: Request, services: Services) -> Response:
    """Delete a conversation and its items. Responses that continued the conversation are kept."""
    await _call_store(request, services, "conversation", ResponseFile.delete)
    deleted_id = request.path_params["conversation_id"]
    return json_response(Deleted(id=deleted_id, object="conversation.deleted"))


@operation(
    "POST",
    _CONVERSATION + "/items",
    _query_shape("include[]"),
    accepts(ConversationAddition),
    returns(ItemList),
)
async def create_conversation_items(request: Request, services: Services) -> Response:
    """Add items to a conversation."""
    body = await _read_body_as(ConversationAddition, request, services)
    items = _checked_items(body.items)
    await _call_store(request, services, "conversation", ResponseFile.append, items)
    return _item_list(items)


@operation("GET", _CONVERSATION + "/items", _query_shape(*_PAGE_PARAMETERS), returns(ItemList))
async def list_conversation_items(request: Request, services: Services) -> Response:
    """List the items of a conversation."""
    return await _item_page(request, services, "conversation")


@operation(
    "GET", _CONVERSATION + "/items/{item_id}", _query_shape("include[]"), returns(ConversationItem)
)
async def get_conversation_item(request: Request, services: Services) -> Response:
    """Return an item of a conversation."""
    item_id = request.path_params["item_id"]
    for item in reversed(await _call_store(request, services, "conversation", ResponseFile.items)):
        if item["id"] == item_id:
            return _fields_response(shown_item(item))
    raise _not_found("item", item_id)


@operation(
    "DELETE", _CONVERSATION + "/items/{item_id}", _query_shape(), returns(ConversationObject)
)
async def delete_conversation_item(request: Request, services: Services) -> Response:
    """Delete an item of a conversation."""
    item_id = request.path_params["item_id"]
    if not await _call_store(request, services, "conversation", ResponseFile.delete_item, item_id):
        raise _not_found("item", item_id)
    return json_response(await _conversation_object(request, services))


OPERATIONS = (
    get_response,
    delete_response,
    cancel_response,
    list_input_items,
    create_conversation,
    get_conversation,
    update_conversation,
    delete_conversation,
    create_conversation_items,
    list_conversation_items,
    get_conversation_item,
    delete_conversation_item,
)


async def _call_store(
    request: Request, services: Services, kind: Kind, method: Callable[..., Any], *args: Any
) -> Any:
    """Call a method of ResponseFile with the key of the record that the path names.

    Raises RequestRefused if the record does not exist.
    """
    key = _key(request, services, kind)
    try:
        return await services.answers.responses.call(method, key, *args)
    except RecordMissing:
        raise _not_found(kind, key.id) from None


def _key(request: Request, services: Services, kind: Kind) -> RecordKey:
    """The key of the record that the path names, among those of the client's tenant."""
    return RecordKey(_context(request, services).tenant, request.path_params[f"{kind}_id"], kind)


def _context(request: Request, services: Services) -> RequestContext:
    return context_of(request, services, cache_salt=request.query_params.get("cache_salt"))


def _response_run(request: Request, services: Services) -> ResponseRun | None:
    """The response that the path names; None unless this server generates it, or could not store
    its end.
    """
    log = services.answers.resumable.named.get(_key(request, services, "response"))
    return log if isinstance(log, ResponseRun) else None


async def _response_record(request: Request, services: Services) -> StoredRecord:
    record: StoredRecord = await _call_store(request, services, "response", ResponseFile.record)
    return record


async def _conversation_object(request: Request, services: Services) -> ConversationObject:
    record = await _call_store(request, services, "conversation", ResponseFile.record)
    return msgspec.convert(record.body, ConversationObject)


async def _item_page(request: Request, services: Services, kind: Kind) -> Response:
    """Return a page of the items of a conversation, or of the input items of a response."""
    query = request.query_params
    limit = number_in(query, "limit", 1, _MOST_LISTED) or _DEFAULT_LISTED
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid_field("order", "must be asc or desc")
    items = await _call_store(request, services, kind, ResponseFile.items)
    if order == "desc":
        items.reverse()
    begin = 0
    if (after := query.get("after")) is not None:
        # if several items have the id, continue after the last one, so that paging always ends
        indices = [index for index, item in enumerate(items) if item["id"] == after]
        if not indices:
            raise invalid_field("after", "no item of this list has this id")
        begin = indices[-1] + 1
    end = begin + limit
    return _item_list(items[begin:end], has_more=len(items) > end)


def _item_list(items: Sequence[Item], *, has_more: bool = False) -> Response:
    client_items = [dict(shown_item(item)) for item in items]
    first_id, last_id = (
        (client_items[0]["id"], client_items[-1]["id"]) if client_items else (None, None)
    )
    return json_response(
        ItemList(data=client_items, first_id=first_id, last_id=last_id, has_more=has_more)
    )


async def _read_body_as(
    model: type[M], request: Request, services: Services, *, if_empty: bytes = b""
) -> M:
    """Read and parse the body. Raises RequestRefused. if_empty: replaces an empty body."""
    body_bytes = await read_body(request, limit_bytes=services.limits.max_body_bytes)
    body = parse(model, body_bytes or if_empty)
    _SALT_BELONGS_IN_THE_QUERY.refuse(body.model_extra)
    return body


def _checked_items(items: list[AnyItem]) -> list[Item]:
    """Return the items in their stored form.

    Raises RequestRefused for items that no response could continue.
    """
    conversation(items, field="items")
    return stored_input(map(shown_item, items))


def _boolean_in(query: Mapping[str, str], name: str) -> bool:
    """The truth value that a query has under this name; default: false. Raises RequestRefused."""
    text = query.get(name, "false").lower()
    if text not in ("true", "1", "false", "0"):
        raise invalid_field(name, "must be true or false")
    return text in ("true", "1")


def _not_found(kind: str, record_id: str) -> RequestRefused:
    """The error for an unknown id. kind: of the record, as error messages and codes call it."""
    message = (
        f"there is no {kind} {record_id[:100]!r}; it may have been deleted or may no longer be "
        "stored"
    )
    return RequestRefused(message, status=404, code=f"{kind}_not_found", field=f"{kind}_id")


def _refuse_if_running(record: StoredRecord) -> None:
    """Raise RequestRefused if another server generates the response: only that has its events."""
    if record.is_running:
        message = "this response is being generated by another server that shares this store"
        raise RequestRefused(message, status=409, code="response_elsewhere", field="response_id")


def _response_fields(
    record: StoredRecord, *, seal: Callable[[str], str] | None = None
) -> dict[str, Any]:
    """Return the fields of a stored response as a client sees it.

    seal: encrypts thoughts, which are then included as `encrypted_content`.
    """
    if seal is None:
        output = [shown_item(item) for item in record.output]
    else:
        output = [with_sealed_thought(item, seal) for item in record.output]
    fields = {**record.body, "output": output}
    return fields | {"status": "failed", "error": _INTERRUPTED} if record.is_lost else fields


def _number_of(frame: bytes) -> int:
    """The sequence number of an event, from its bytes."""
    match = _EVENT_NUMBER.search(frame)
    return int(match[1]) if match else 0


def _last_event(record: StoredRecord, *, number: int) -> bytes:
    """Create the last event of a finished response from its stored state."""
    fields = _response_fields(record)
    kind = fields["status"].replace("cancelled", "incomplete")
    data = msgspec.json.encode(
        {"type": f"response.{kind}", "sequence_number": number, "response": fields}
    )
    return b"event: response.%b\ndata: %b\n\n" % (kind.encode(), data)


def _fields_response(fields: Mapping[str, Any]) -> Response:
    """The response whose body is these fields as JSON."""
    return Response(msgspec.json.encode(fields), media_type="application/json")
