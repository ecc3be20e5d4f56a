"""What Holdfast adds to the requests of all dialects: tenant and session, and whether the answer is
to explain itself.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import msgspec
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from holdfast.config import LimitsSettings
from holdfast.front.prompt.tenant import tenant_of, tenant_of_key
from holdfast.front.server.answers import AnswerPlan
from holdfast.front.server.caller import caller_of
from holdfast.front.server.fields import STRICT, CacheSalt
from holdfast.front.server.problem import RequestRefused
from holdfast.wire.requests import Priority, ServiceClass
from holdfast.wire.sessions import LONGEST_SESSION_ID, is_session_id

TENANT_HEADER = "x-holdfast-tenant"
PRIORITY_HEADER = "x-holdfast-priority"
TIME_LIMIT_HEADER = "x-holdfast-timeout"  # seconds
EXPLAIN_HEADER = "x-holdfast-explain"
SESSION_HEADER = "x-session-id"
_PRIORITIES = get_args(Priority)
_YES = frozenset({"1", "true", "yes", "on"})


class HoldfastOptions(BaseModel):
    """Options that only Holdfast has."""

    model_config = ConfigDict(extra="forbid", strict=True)

    explain: bool | None = Field(
        None, description="Tell in the answer what of the prompt was remembered, and why not more."
    )


class SaltField(BaseModel):
    """The salt, which every body may carry whose prompt is looked up in the prefix cache."""

    model_config = STRICT

    cache_salt: CacheSalt | None = Field(
        None, description="What is read under a salt is reused by requests with the same salt only."
    )


class SharedFields(SaltField):
    """The fields that the generating requests of all protocols share: salt, session and Holdfast's
    own options.
    """

    session_id: str | None = Field(
        None, description="The session that the request belongs to; a new one is opened."
    )
    prompt_cache_key: str | None = Field(
        None, description="Names the session, if neither X-Session-ID nor session_id does."
    )
    holdfast: HoldfastOptions | None = Field(None, description="Options that only Holdfast has.")

    def plan_options(self, *, session_key: str = "") -> dict[str, Any]:
        """Fields of an AnswerPlan. session_key: names the session where the body and X-Session-ID
        do not.
        """
        return {
            "cache_salt": self.cache_salt or "",
            "session_id": self.session_id,
            "session_key": self.prompt_cache_key or session_key,
            "explains": bool(self.holdfast and self.holdfast.explain),
        }


def extended(plan: AnswerPlan, request: Request, *, limits: LimitsSettings) -> AnswerPlan:
    """The plan with what key, body and headers say of tenant, session, priority and time.

    Raises RequestRefused for what cannot be the id of a session, a priority or a time.
    """
    headers = request.headers
    tenant = tenant_in(request, cache_salt=plan.cache_salt)
    session_id = _session_id(plan, headers)
    service = service_in(request, can_wait=plan.can_wait)
    return replace(
        plan,
        requests=tuple(
            msgspec.structs.replace(asked, tenant=tenant, session_id=session_id, service=service)
            for asked in plan.requests
        ),
        caller=caller_of(request),
        time_limit_seconds=time_limit_in(headers, limits=limits),
        explains=plan.explains or headers.get(EXPLAIN_HEADER, "").strip().lower() in _YES,
    )


def tenant_in(request: Request, *, cache_salt: str) -> str:
    """Whose memory a request uses."""
    caller, name = caller_of(request), request.headers.get(TENANT_HEADER, "")
    if caller.key is not None:
        return tenant_of_key(caller.key.name, name=name, cache_salt=cache_salt)
    return tenant_of(api_key=caller.server_key, name=name, cache_salt=cache_salt)


def service_in(request: Request, *, can_wait: bool = False) -> ServiceClass:
    """How a request stands among others. can_wait: its body says that nobody waits for the answer.

    Its flow is who asks: the name of its key; without one, the tenant that it names, or else its
    address. Salts make no flow: with a new one for each request, a client would be many. Key,
    header and body may each make it wait; none can undo another's word. Raises RequestRefused.
    """
    caller, said = (
        caller_of(request),
        request.headers.get(PRIORITY_HEADER, "interactive").strip().lower(),
    )
    if said not in _PRIORITIES:
        reason = f"`{PRIORITY_HEADER}`: it is {' or '.join(_PRIORITIES)}"
        raise RequestRefused(reason, field=PRIORITY_HEADER)
    waits = (
        can_wait or said == "batch" or (caller.key is not None and caller.key.priority == "batch")
    )
    tenant = request.headers.get(TENANT_HEADER, "")
    who = (
        ("key", caller.key_name)
        if caller.key_name
        else ("tenant", tenant)
        if tenant
        else ("address", caller.address)
    )
    return ServiceClass(flow=" ".join(who), priority="batch" if waits else "interactive")


def time_limit_in(headers: Mapping[str, str], *, limits: LimitsSettings) -> float:
    """How long a request may take, in seconds: as its client says, but no longer than the server
    allows; 0: no bound.

    Raises RequestRefused.
    """
    text = headers.get(TIME_LIMIT_HEADER)
    if text is None:
        return limits.request_seconds
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        reason = f"`{TIME_LIMIT_HEADER}`: it is a number of seconds above 0"
        raise RequestRefused(reason, field=TIME_LIMIT_HEADER)
    return min(seconds, limits.request_seconds or seconds)


def _session_id(plan: AnswerPlan, headers: Mapping[str, str]) -> str:
    if (named := headers.get(SESSION_HEADER)) is not None:
        return checked_session_id(named, field="X-Session-ID")
    if plan.session_id is not None:
        return checked_session_id(plan.session_id, field="session_id")
    key = plan.session_key
    if not key or is_session_id(key):
        return key
    return (
        "key-" + hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    )


def checked_session_id(session_id: str, *, field: str) -> str:
    """The id, if it can be one. Raises RequestRefused."""
    if not is_session_id(session_id):
        reason = (
            f"`{field}`: a session's id has 1 to {LONGEST_SESSION_ID} printable characters, and no "
            "slash"
        )
        raise RequestRefused(reason, field=field)
    return session_id
