"""What Holdfast adds to OpenAI's requests: whose memory it is, and whether the answer is to explain itself."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from holdfast.http.answers import AnswerPlan
from holdfast.http.errors import RequestRefused
from holdfast.intake.tenant import tenant_of
from holdfast.messages.sessions import LONGEST_SESSION_ID, is_session_id

TENANT_HEADER = "x-holdfast-tenant"
EXPLAIN_HEADER = "x-holdfast-explain"
SESSION_HEADER = "x-session-id"
_YES = frozenset({"1", "true", "yes", "on"})


class MemoryFields(Protocol):
    """What a request's body says of whose memory it is."""

    @property
    def cache_salt(self) -> str | None:
        """Keeps what is read under it for requests with the same one."""
        ...

    @property
    def session_id(self) -> str | None:
        """The session."""
        ...

    @property
    def prompt_cache_key(self) -> str | None:
        """OpenAI's name for about the same."""
        ...


class HoldfastOptions(BaseModel):
    """Options that only Holdfast has."""

    model_config = ConfigDict(extra="forbid", strict=True)

    explain: bool | None = Field(None, description="Tell in the answer what of the prompt was remembered, and why not more.")


def extended(plan: AnswerPlan, headers: Mapping[str, str], fields: MemoryFields, *, api_key: str) -> AnswerPlan:
    """The plan with what the request's headers and fields say of tenant and session. `api_key`: the one it was let in with.

    Raises RequestRefused for what cannot be the id of a session.
    """
    tenant = tenant_of(api_key=api_key, name=headers.get(TENANT_HEADER, ""), cache_salt=fields.cache_salt or "")
    session_id = _session_id(headers, fields)
    return replace(
        plan,
        requests=tuple(msgspec.structs.replace(request, tenant=tenant, session_id=session_id) for request in plan.requests),
        explains=plan.explains or headers.get(EXPLAIN_HEADER, "").strip().lower() in _YES,
    )


def _session_id(headers: Mapping[str, str], fields: MemoryFields) -> str:
    if (named := headers.get(SESSION_HEADER)) is not None:
        return checked_session_id(named, field="X-Session-ID")
    if fields.session_id is not None:
        return checked_session_id(fields.session_id, field="session_id")
    key = fields.prompt_cache_key or ""
    if not key or is_session_id(key):
        return key
    return "key-" + hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def checked_session_id(session_id: str, *, field: str) -> str:
    """The id, if it can be one. Raises RequestRefused."""
    if not is_session_id(session_id):
        reason = f"`{field}`: a session's id has 1 to {LONGEST_SESSION_ID} printable characters, and no slash"
        raise RequestRefused(reason, field=field)
    return session_id
