"""/v1/sessions: named branches of what is kept, to open, look at, fork, pin, close and carry elsewhere."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from holdfast.http.admin import session_files
from holdfast.http.admin.session_fields import (
    SessionChange,
    SessionDeleted,
    SessionForking,
    SessionList,
    SessionObject,
    SessionOpening,
    session_object,
)
from holdfast.http.server import openapi
from holdfast.http.server.body import parse, read_body
from holdfast.http.server.dialect import operation
from holdfast.http.server.disconnect import unless_disconnected
from holdfast.http.server.extensions import TENANT_HEADER, checked_session_id
from holdfast.http.server.problem import RequestRefused
from holdfast.http.server.services import Services, first_model, is_loading
from holdfast.intake.tenant import tenant_of
from holdfast.messages.sessions import (
    CloseSession,
    ExportSession,
    ForkSession,
    GetSession,
    ImportSession,
    ListSessions,
    OpenSession,
    SessionCommand,
    SessionInfo,
    UpdateSession,
)

_MOST_LISTED = 1000
_OF_ONE = openapi.query_of("model", "cache_salt")
_YES = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class _Asked:
    """Whose sessions a request is about."""

    request: Request
    services: Services
    model: str
    tenant: str

    async def one(self, command: SessionCommand) -> SessionObject:
        """The session that a command is about."""
        (info,) = await self.found(command)
        return session_object(info, model=self.model)

    async def found(self, command: SessionCommand) -> tuple[SessionInfo, ...]:
        """All sessions that a command is about. While the model is being loaded, who goes away is waited for no more."""
        found: tuple[SessionInfo, ...] = ()

        async def carry_out() -> None:
            nonlocal found
            found = await self.services.sessions.carry_out(self.model, command)

        if not is_loading(self.services, self.model):
            await carry_out()
        elif not await unless_disconnected(self.request.receive, carry_out()):
            raise ClientDisconnect
        return found


@operation(
    "GET",
    "/v1/sessions",
    openapi.answers_of(SessionList),
    openapi.query_of("model", "limit", "cache_salt"),
    summary="what is kept, by name",
)
async def list_sessions(request: Request, services: Services) -> Response:
    """The sessions of a model, the last used first."""
    asked, limit = _asked(request, services), _limit(request.query_params)
    found = await asked.found(ListSessions(call_id=_call_id(), tenant=asked.tenant, limit=limit + 1))
    data = [session_object(info, model=asked.model) for info in found[:limit]]
    return _json(SessionList(data=data, has_more=len(found) > limit))


@operation("POST", "/v1/sessions", openapi.answers_of(SessionObject), openapi.request_of(SessionOpening, required=False))
async def open_session(request: Request, services: Services) -> Response:
    """Begin a session."""
    fields = parse(SessionOpening, await _body(request, services))
    asked = _asked(request, services, model=fields.model)
    command = OpenSession(
        call_id=_call_id(),
        tenant=asked.tenant,
        session_id=fields.id or _new_id(),
        ttl_seconds=fields.ttl,
        pinned=fields.pinned,
        metadata=fields.metadata,
    )
    return _json(await asked.one(command))


@operation(
    "POST",
    "/v1/sessions/import",
    openapi.answers_of(SessionObject),
    openapi.query_of("id", "model", "cache_salt"),
    openapi.file_request(),
)
async def import_session(request: Request, services: Services) -> Response:
    """Take in a session from a file that was exported; it keeps its name unless `id` gives another one."""
    asked = _asked(request, services)
    session_id = request.query_params.get("id")
    if session_id is not None:
        checked_session_id(session_id, field="id")
    with session_files.private_path() as path:
        await session_files.take_in(request, path, limit_bytes=services.limits.max_import_bytes)
        command = ImportSession(call_id=_call_id(), tenant=asked.tenant, path=str(path), session_id=session_id or "")
        return _json(await asked.one(command))


@operation("GET", "/v1/sessions/{session_id}/export", openapi.file_answer(), openapi.query_of("model", "cache_salt"))
async def export_session(request: Request, services: Services) -> Response:
    """A session as one file, for another server with the same model, or to be kept."""
    asked = _asked(request, services)
    with session_files.private_path() as path:
        await asked.one(ExportSession(call_id=_call_id(), tenant=asked.tenant, session_id=_session_id(request), path=str(path)))
        return session_files.sent(path, name=_session_id(request))


@operation("GET", "/v1/sessions/{session_id}", openapi.answers_of(SessionObject), _OF_ONE)
async def get_session(request: Request, services: Services) -> Response:
    """One session."""
    asked = _asked(request, services)
    return _json(await asked.one(GetSession(call_id=_call_id(), tenant=asked.tenant, session_id=_session_id(request))))


@operation("PATCH", "/v1/sessions/{session_id}", openapi.answers_of(SessionObject), _OF_ONE, openapi.request_of(SessionChange))
async def change_session(request: Request, services: Services) -> Response:
    """Pin or unpin a session, or change how long it lives or its metadata."""
    fields = parse(SessionChange, await read_body(request, limit_bytes=services.limits.max_body_bytes))
    asked = _asked(request, services)
    command = UpdateSession(
        call_id=_call_id(),
        tenant=asked.tenant,
        session_id=_session_id(request),
        ttl_seconds=fields.ttl,
        pinned=fields.pinned if fields.said("pinned") else msgspec.UNSET,
        metadata=fields.metadata if fields.said("metadata") else msgspec.UNSET,
    )
    return _json(await asked.one(command))


@operation(
    "POST",
    "/v1/sessions/{session_id}/fork",
    openapi.answers_of(SessionObject),
    _OF_ONE,
    openapi.request_of(SessionForking, required=False),
)
async def fork_session(request: Request, services: Services) -> Response:
    """Begin a session where another one is; both go on from there, and share what they have in common."""
    fields = parse(SessionForking, await _body(request, services))
    asked = _asked(request, services)
    command = ForkSession(
        call_id=_call_id(),
        tenant=asked.tenant,
        session_id=_session_id(request),
        new_session_id=fields.id or _new_id(),
        ttl_seconds=fields.ttl,
        pinned=fields.pinned,
    )
    return _json(await asked.one(command))


@operation(
    "DELETE", "/v1/sessions/{session_id}", openapi.answers_of(SessionDeleted), openapi.query_of("model", "forget", "cache_salt")
)
async def close_session(request: Request, services: Services) -> Response:
    """End a session. What it has read stays while there is room; with `forget`, what nobody else needs of it is deleted."""
    asked, forget = _asked(request, services), _truth(request.query_params, "forget")
    await asked.one(CloseSession(call_id=_call_id(), tenant=asked.tenant, session_id=_session_id(request), forget=forget))
    return _json(SessionDeleted(id=_session_id(request)))


def _asked(request: Request, services: Services, *, model: str | None = None) -> _Asked:
    salt = request.query_params.get("cache_salt", "")
    tenant = tenant_of(api_key=services.server.api_key, name=request.headers.get(TENANT_HEADER, ""), cache_salt=salt)
    return _Asked(request, services, model or request.query_params.get("model") or first_model(services), tenant)


async def _body(request: Request, services: Services) -> bytes:
    return await read_body(request, limit_bytes=services.limits.max_body_bytes) or b"{}"


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


def _call_id() -> str:
    return uuid.uuid4().hex


def _new_id() -> str:
    return f"sess_{uuid.uuid4().hex}"


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _session_id(request: Request) -> str:
    return str(request.path_params["session_id"])


OPERATIONS = (
    list_sessions,
    open_session,
    import_session,
    export_session,
    get_session,
    change_session,
    fork_session,
    close_session,
)
