"""/v1/sessions: opens, lists, forks, pins, closes, exports and imports sessions, which are named
branches of the prefix cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import msgspec
from msgspec import Struct
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from holdfast.errors import SessionFailure, SessionRefused
from holdfast.front.server.context import checked_session_id, context_of
from holdfast.front.server.dialect import Operation, Shape
from holdfast.front.server.dialect import operation as describe_operation
from holdfast.front.server.fields import optional
from holdfast.front.server.openapi import accepts, query_shape, response_shape, returns
from holdfast.front.server.problem import invalid_field
from holdfast.front.server.request import body_pieces, json_response, parse, read_body
from holdfast.front.server.services import Services, first_model, needs_load
from holdfast.front.server.streams import run_unless_disconnected
from holdfast.wire.sessions import (
    LONGEST_METADATA_KEY,
    LONGEST_METADATA_VALUE,
    LONGEST_SESSION_ID,
    LONGEST_TTL_SECONDS,
    MOST_METADATA_PAIRS,
    SESSION_OPERATIONS,
    SESSIONS_PATH,
    SessionCommand,
    SessionInfo,
    SessionOperation,
    is_session_id,
)

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)
MEDIA_TYPE = "application/octet-stream"
_FILE_SCHEMA = {MEDIA_TYPE: {"type": "string", "format": "binary"}}  # media type → schema
_ID_LIMITS = {"minLength": 1, "maxLength": LONGEST_SESSION_ID, "pattern": "^[^/]+$"}
_PIECE_BYTES = 1 << 20
_DISK_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT}
_MOST_LISTED = 1000
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def _valid_session_id(text: str) -> str:
    """Return the id. Raises ValueError if it is not valid."""
    if not is_session_id(text):
        raise ValueError(
            f"a session id must have 1 to {LONGEST_SESSION_ID} printable characters and no slash"
        )
    return text


SessionId = Annotated[str, AfterValidator(_valid_session_id), Field(json_schema_extra=_ID_LIMITS)]
_QUERY_PARAMETERS: Mapping[str, tuple[Any, str]] = {
    "id": (SessionId, "A name for the session."),
    "model": (str, "The model of the sessions. Default: the first model."),
    "limit": (Annotated[int, Field(ge=1, le=_MOST_LISTED)], "Maximum number of sessions."),
    "forget": (bool, "Also delete its cached tokens."),
    "cache_salt": (str, "The salt of the session's requests."),
}
TtlSeconds = Annotated[float, Field(gt=0, le=LONGEST_TTL_SECONDS)]
Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=LONGEST_METADATA_KEY)],
        Annotated[str, Field(max_length=LONGEST_METADATA_VALUE)],
    ],
    Field(max_length=MOST_METADATA_PAIRS),
]


class SessionTerms(BaseModel):
    """Settings that determine how long a session is kept."""

    model_config = _STRICT

    ttl_seconds: TtlSeconds | None = optional(
        "How many seconds the session is kept after its last use; null: until it is closed."
    )
    pinned: bool = Field(False, description="Whether to protect its cached tokens from eviction.")


class SessionForking(SessionTerms):
    """A request to fork a session. By default, the new session has the lifetime of the original."""

    id: SessionId | None = optional("The name of the new session. Default: a generated name.")


class SessionChange(SessionTerms):
    """The changes to a session. Omitted fields do not change."""

    metadata: Metadata = Field({}, description="Up to 16 pairs of strings, for your own use.")


class SessionOpening(SessionChange):
    """A request to open a new session."""

    id: SessionId | None = optional("The name of the session. Default: a generated name.")
    model: Annotated[str, Field(min_length=1)] | None = optional(
        "Id of the session's model. Default: the first model of /v1/models."
    )


class SessionObject(Struct, frozen=True, kw_only=True):
    """A session. Times are in Unix seconds. Token counts are those of its last used branch."""

    id: str
    object: Literal["session"] = "session"
    model: str
    created_at: float
    last_used_at: float
    expires_at: float | None
    pinned: bool
    pin_state: Literal["none", "kept", "over_quota", "incomplete"]
    requests: int
    branches: int
    tokens: int
    kept_tokens: int
    ram_tokens: int
    disk_tokens: int
    live_tokens: int
    kept_bytes: int
    metadata: dict[str, str]
    forked_from: str | None


class SessionList(Struct, frozen=True, kw_only=True):
    """Sessions, the last used first."""

    object: Literal["list"] = "list"
    data: list[SessionObject]
    has_more: bool


class SessionDeleted(Struct, frozen=True, kw_only=True):
    """A closed session."""

    id: str
    object: Literal["session.deleted"] = "session.deleted"
    deleted: bool = True


def session_object(info: SessionInfo, *, model: str) -> SessionObject:
    """Convert a session into the object that clients get."""
    fields = msgspec.to_builtins(info)
    fields["id"] = fields.pop("session_id")
    return msgspec.convert(
        {**fields, "model": model, "forked_from": info.forked_from or None}, SessionObject
    )


@contextlib.contextmanager
def private_path() -> Iterator[Path]:
    """Yield a path for one file in a private folder, which is deleted at the end."""
    with tempfile.TemporaryDirectory(
        prefix="holdfast-session-", ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder) / "session"


async def receive_file(request: Request, path: Path, *, limit_bytes: int) -> None:
    """Write a request's body into a file.

    Raises RequestRefused (413) if the body exceeds the limit, and SessionRefused if the disk is
    full.
    """
    try:
        with path.open("wb") as file:
            async for piece in body_pieces(request, limit_bytes=limit_bytes):
                await asyncio.to_thread(file.write, piece)
    except OSError as error:
        failure = (
            SessionFailure.NO_ROOM if error.errno in _DISK_FULL_ERRORS else SessionFailure.FAILED
        )
        raise SessionRefused(
            failure, f"the file cannot be stored for validation: {error.strerror}"
        ) from None


def file_response(path: Path, *, name: str) -> StreamingResponse:
    """Create a response that sends the file.

    The file is already open when this function returns, so the path may be deleted immediately.
    """
    file = path.open("rb")
    safe_name = "".join(
        character if character.isascii() and (character.isalnum() or character in "._-") else "_"
        for character in name
    )
    headers = {
        "content-length": str(os.fstat(file.fileno()).st_size),
        "content-disposition": f'attachment; filename="{safe_name}.holdfast-session"',
    }
    return StreamingResponse(_file_pieces(file), headers=headers, media_type=MEDIA_TYPE)


async def _file_pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    """Yield the content of a file, and close it."""
    with file:
        while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
            yield piece


_BODY_TYPES: dict[str, type[BaseModel]] = {
    "open": SessionOpening,
    "update": SessionChange,
    "fork": SessionForking,
}
# operation → field of its command that gets the `id` of the body; a missing `id` is generated
_ID_FIELDS = {"open": "session_id", "fork": "new_session_id"}
_ANSWER_TYPES: dict[str, type[Struct]] = {"list": SessionList, "close": SessionDeleted}


def _build_operation(operation: SessionOperation) -> Operation:
    """The endpoint of one session command, which the model's worker carries out."""

    async def handle(request: Request, services: Services) -> Response:
        model, command = await _model_and_command(operation, request, services)
        if "path" not in operation.takes:
            return _response(command, await _run_command(request, services, model, command))
        with private_path() as path:
            command = msgspec.structs.replace(command, path=str(path))
            if operation.name == "import":
                await receive_file(request, path, limit_bytes=services.limits.max_import_bytes)
                return _response(command, await _run_command(request, services, model, command))
            await _run_command(request, services, model, command)
            return file_response(path, name=command.session_id)

    handle.__name__, handle.__doc__ = operation.title, operation.summary
    page = "named branches of the prefix cache" if operation.name == "list" else ""
    return describe_operation(
        operation.method, SESSIONS_PATH + operation.path, *_openapi_shapes(operation), summary=page
    )(handle)


def _openapi_shapes(operation: SessionOperation) -> Iterator[Shape]:
    """The parts of an operation's description in /openapi.json: query, body and answer."""
    name, takes = operation.name, operation.takes
    if name == "export":
        yield response_shape(_FILE_SCHEMA)
    else:
        yield returns(_ANSWER_TYPES.get(name, SessionObject))
    if name != "open":  # the body of `open` names the model
        own_parameters = (["id"] if name == "import" else []) + [
            field for field in ("limit", "forget") if field in takes
        ]
        yield query_shape(
            {name: _QUERY_PARAMETERS[name] for name in ("model", *own_parameters, "cache_salt")}
        )
    if name in _BODY_TYPES:
        yield accepts(_BODY_TYPES[name], required=name not in _ID_FIELDS)
    if name == "import":
        yield {
            "requestBody": {
                "required": True,
                "content": {MEDIA_TYPE: {"schema": _FILE_SCHEMA[MEDIA_TYPE]}},
            }
        }


async def _model_and_command(
    operation: SessionOperation, request: Request, services: Services
) -> tuple[str, SessionCommand]:
    """The model of a request, and the command for the model's worker."""
    query = request.query_params
    fields = (
        await _fields_of_body(operation, request, services)
        if operation.name in _BODY_TYPES
        else _fields_of_query(operation, query)
    )
    model = fields.pop("model", None) or query.get("model") or first_model(services)
    tenant = context_of(request, services, cache_salt=query.get("cache_salt")).tenant
    return model, SessionCommand(
        operation=operation.name, tenant=tenant, **fields, **request.path_params
    )


async def _fields_of_body(
    operation: SessionOperation, request: Request, services: Services
) -> dict[str, Any]:
    """The command's fields from the body, and the model if the body names one."""
    body = await read_body(request, limit_bytes=services.limits.max_body_bytes)
    body_model = parse(
        _BODY_TYPES[operation.name], body or (b"{}" if operation.name in _ID_FIELDS else b"")
    )
    fields = body_model.model_dump(exclude_unset=True)
    if operation.name in _ID_FIELDS:
        fields[_ID_FIELDS[operation.name]] = fields.pop("id", None) or f"sess_{uuid.uuid4().hex}"
    return fields


def _fields_of_query(operation: SessionOperation, query: Mapping[str, str]) -> dict[str, Any]:
    """The command's fields from the query parameters."""
    fields: dict[str, Any] = {}
    if "limit" in operation.takes:
        fields["limit"] = _limit_in(query) + 1  # one more, to find out whether there are more
    if "forget" in operation.takes:
        fields["forget"] = _boolean_in(query, "forget")
    if operation.name == "import" and "id" in query:
        fields["session_id"] = checked_session_id(query["id"], field="id")
    return fields


async def _run_command(
    request: Request, services: Services, model: str, command: SessionCommand
) -> list[SessionObject]:
    """Run a command, and return the sessions in the worker's answer.

    Raises ClientDisconnect if the client disconnects while the model loads.
    """
    infos: tuple[SessionInfo, ...] = ()

    async def send_command() -> None:
        nonlocal infos
        infos = await services.gateway.sessions(model, command)

    if not needs_load(services, model):
        await send_command()
    elif not await run_unless_disconnected(request.receive, send_command()):
        raise ClientDisconnect
    return [session_object(info, model=model) for info in infos]


def _response(command: SessionCommand, sessions: list[SessionObject]) -> Response:
    """Create the HTTP response to a session command. sessions: the sessions in the answer."""
    content: Struct
    if command.operation == "list":
        content = SessionList(
            data=sessions[: command.limit - 1], has_more=len(sessions) >= command.limit
        )
    elif command.operation == "close":
        content = SessionDeleted(id=command.session_id)
    else:
        (content,) = sessions
    return json_response(content)


def _limit_in(query: Mapping[str, str]) -> int:
    """The number of sessions to list. Raises the error of an invalid field."""
    text = query.get("limit", str(_MOST_LISTED))
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= _MOST_LISTED):
        raise invalid_field("limit", f"must be a number from 1 to {_MOST_LISTED}")
    return int(text[:9])


def _boolean_in(query: Mapping[str, str], name: str) -> bool:
    """The value of a parameter, by default false. Raises the error of an invalid field."""
    text = query.get(name, "false")
    if text.lower() not in _BOOLEANS:
        raise invalid_field(name, "must be true or false")
    return _BOOLEANS[text.lower()]


OPERATIONS = tuple(map(_build_operation, SESSION_OPERATIONS.values()))
