"""/v1/sessions: named branches of what is kept, to open, look at, fork, pin, close and carry
elsewhere.

Made from the table of what can be done with sessions; what only some of it takes is read here.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from holdfast.front.admin import session_files
from holdfast.front.admin.session_fields import (
    SessionChange,
    SessionDeleted,
    SessionForking,
    SessionList,
    SessionObject,
    SessionOpening,
    session_object,
)
from holdfast.front.server import openapi
from holdfast.front.server.body import json_response, parse, read_body
from holdfast.front.server.dialect import Operation, Shape
from holdfast.front.server.dialect import operation as described
from holdfast.front.server.disconnect import unless_disconnected
from holdfast.front.server.extensions import checked_session_id, tenant_in
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.services import Services, first_model, is_waited_for
from holdfast.wire.sessions import (
    SESSION_OPERATIONS,
    SESSIONS_PATH,
    SessionCommand,
    SessionInfo,
    SessionOperation,
)

_MOST_LISTED = 1000
_YES = {"true": True, "1": True, "false": False, "0": False}
_BODIES: dict[str, type[BaseModel]] = {
    "open": SessionOpening,
    "update": SessionChange,
    "fork": SessionForking,
}
# what the body's `id` names; made up if it is left out
_NAMED = {"open": "session_id", "fork": "new_session_id"}
_ANSWERS: dict[str, type[msgspec.Struct]] = {"list": SessionList, "close": SessionDeleted}


def _operation(operation: SessionOperation) -> Operation:
    async def handle(request: Request, services: Services) -> Response:
        model, command = await _command(operation, request, services)
        if "path" not in operation.takes:
            return _answer(command, await _objects(request, services, model, command))
        with session_files.private_path() as path:
            command = msgspec.structs.replace(command, path=str(path))
            if operation.name == "import":
                await session_files.take_in(
                    request, path, limit_bytes=services.limits.max_import_bytes
                )
                return _answer(command, await _objects(request, services, model, command))
            await _objects(request, services, model, command)
            return session_files.sent(path, name=command.session_id)

    handle.__name__, handle.__doc__ = operation.title, operation.summary
    page = "what is kept, by name" if operation.name == "list" else ""
    return described(
        operation.method, SESSIONS_PATH + operation.path, *_shapes(operation), summary=page
    )(handle)


def _shapes(operation: SessionOperation) -> Iterator[Shape]:
    """What the description of the API says of its query, its body and its answer."""
    name, takes = operation.name, operation.takes
    yield (
        openapi.file_answer()
        if name == "export"
        else openapi.answers_of(_ANSWERS.get(name, SessionObject))
    )
    if name != "open":  # its body says of which model it is
        own = (["id"] if name == "import" else []) + [
            field for field in ("limit", "forget") if field in takes
        ]
        yield openapi.query_of("model", *own, "cache_salt")
    if name in _BODIES:
        yield openapi.request_of(_BODIES[name], required=name not in _NAMED)
    if name == "import":
        yield openapi.file_request()


async def _command(
    operation: SessionOperation, request: Request, services: Services
) -> tuple[str, SessionCommand]:
    """The model whose sessions are meant, and what is to be done with them."""
    query = request.query_params
    given = (
        await _from_body(operation, request, services)
        if operation.name in _BODIES
        else _from_query(operation, query)
    )
    model = given.pop("model", None) or query.get("model") or first_model(services)
    tenant = tenant_in(request, cache_salt=query.get("cache_salt", ""))
    return model, SessionCommand(
        operation=operation.name, tenant=tenant, **given, **request.path_params
    )


async def _from_body(
    operation: SessionOperation, request: Request, services: Services
) -> dict[str, Any]:
    """Fields of the command that the body has, and the model if it names one."""
    body = await read_body(request, limit_bytes=services.limits.max_body_bytes)
    fields = parse(_BODIES[operation.name], body or (b"{}" if operation.name in _NAMED else b""))
    given = fields.model_dump(exclude_unset=True)
    if operation.name in _NAMED:
        given[_NAMED[operation.name]] = given.pop("id", None) or f"sess_{uuid.uuid4().hex}"
    return given


def _from_query(operation: SessionOperation, query: Mapping[str, str]) -> dict[str, Any]:
    """Fields of the command that the query has."""
    given: dict[str, Any] = {}
    if "limit" in operation.takes:
        given["limit"] = _limit(query) + 1  # one more than is shown tells whether there are more
    if "forget" in operation.takes:
        given["forget"] = _truth(query, "forget")
    if operation.name == "import" and "id" in query:
        given["session_id"] = checked_session_id(query["id"], field="id")
    return given


async def _objects(
    request: Request, services: Services, model: str, command: SessionCommand
) -> list[SessionObject]:
    """All sessions that a command is about.

    While the model is being loaded, who goes away is waited for no more.
    """
    found: tuple[SessionInfo, ...] = ()

    async def carry_out() -> None:
        nonlocal found
        found = await services.sessions(model, command)

    if not is_waited_for(services, model):
        await carry_out()
    elif not await unless_disconnected(request.receive, carry_out()):
        raise ClientDisconnect
    return [session_object(info, model=model) for info in found]


def _answer(command: SessionCommand, objects: list[SessionObject]) -> Response:
    """The sessions that a command was about, as clients see them."""
    shown: msgspec.Struct
    if command.operation == "list":
        shown = SessionList(
            data=objects[: command.limit - 1], has_more=len(objects) >= command.limit
        )
    elif command.operation == "close":
        shown = SessionDeleted(id=command.session_id)
    else:
        (shown,) = objects
    return json_response(shown)


def _limit(query: Mapping[str, str]) -> int:
    text = query.get("limit", str(_MOST_LISTED))
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= _MOST_LISTED):
        raise RequestRefused(f"`limit`: a number from 1 to {_MOST_LISTED}", field="limit")
    return int(text[:9])


def _truth(query: Mapping[str, str], name: str) -> bool:
    text = query.get(name, "false")
    if text.lower() not in _YES:
        raise RequestRefused(f"`{name}`: true or false", field=name)
    return _YES[text.lower()]


OPERATIONS = tuple(map(_operation, SESSION_OPERATIONS.values()))
