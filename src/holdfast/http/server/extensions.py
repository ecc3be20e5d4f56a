"""What Holdfast adds to the requests of all dialects: tenant and session, and whether the answer is to explain itself."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import msgspec
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from holdfast.http.server.answers import AnswerPlan
from holdfast.http.server.caller import caller_of
from holdfast.http.server.problem import RequestRefused
from holdfast.intake.tenant import tenant_of, tenant_of_key
from holdfast.messages.sessions import LONGEST_SESSION_ID, is_session_id

TENANT_HEADER = "x-holdfast-tenant"
EXPLAIN_HEADER = "x-holdfast-explain"
SESSION_HEADER = "x-session-id"
_YES = frozenset({"1", "true", "yes", "on"})


class HoldfastOptions(BaseModel):
    """Options that only Holdfast has."""

    model_config = ConfigDict(extra="forbid", strict=True)

    explain: bool | None = Field(None, description="Tell in the answer what of the prompt was remembered, and why not more.")


def extended(plan: AnswerPlan, request: Request) -> AnswerPlan:
    """The plan with the tenant and session that key, body and headers name.

    Raises RequestRefused for what cannot be the id of a session.
    """
    headers = request.headers
    tenant = tenant_in(request, cache_salt=plan.cache_salt)
    session_id = _session_id(plan, headers)
    return replace(
        plan,
        requests=tuple(msgspec.structs.replace(request, tenant=tenant, session_id=session_id) for request in plan.requests),
        explains=plan.explains or headers.get(EXPLAIN_HEADER, "").strip().lower() in _YES,
    )


def tenant_in(request: Request, *, cache_salt: str) -> str:
    """Whose memory a request uses."""
    caller, name = caller_of(request), request.headers.get(TENANT_HEADER, "")
    if caller.key is not None:
        return tenant_of_key(caller.key.name, name=name, cache_salt=cache_salt)
    return tenant_of(api_key=caller.server_key, name=name, cache_salt=cache_salt)


def _session_id(plan: AnswerPlan, headers: Mapping[str, str]) -> str:
    if (named := headers.get(SESSION_HEADER)) is not None:
        return checked_session_id(named, field="X-Session-ID")
    if plan.session_id is not None:
        return checked_session_id(plan.session_id, field="session_id")
    key = plan.session_key
    if not key or is_session_id(key):
        return key
    return "key-" + hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def checked_session_id(session_id: str, *, field: str) -> str:
    """The id, if it can be one. Raises RequestRefused."""
    if not is_session_id(session_id):
        reason = f"`{field}`: a session's id has 1 to {LONGEST_SESSION_ID} printable characters, and no slash"
        raise RequestRefused(reason, field=field)
    return session_id
