"""Who sent a request, for which tenant, and the options in its headers."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import get_args

from starlette.datastructures import Headers
from starlette.requests import Request

from holdfast.front.prompt.limits import tenant_of, tenant_of_key
from holdfast.front.server.access import Caller, Seal, caller_of
from holdfast.front.server.problem import invalid_field
from holdfast.front.server.services import Services
from holdfast.wire.requests import Priority, ServiceClass
from holdfast.wire.sessions import LONGEST_SESSION_ID, is_session_id

TENANT_HEADER = "x-holdfast-tenant"
SESSION_HEADER = "x-session-id"
PRIORITY_HEADER = "x-holdfast-priority"
TIME_LIMIT_HEADER = "x-holdfast-timeout"  # seconds
EXPLAIN_HEADER = "x-holdfast-explain"
_PRIORITIES = get_args(Priority)
_YES = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """The sender, tenant and headers of one request, and the services that answer it.

    A tenant is a group of requests that share cached prefixes. Its name follows from API key,
    header and `cache_salt`.

    Headers are checked only when they are asked for, so that an error in the body comes first.
    """

    services: Services
    headers: Headers
    caller: Caller
    tenant: str  # empty if the request has none of these

    @property
    def seal(self) -> Seal:
        """Encrypts texts so that no other tenant can decrypt them."""
        return self.services.access.seal.for_tenant(self.tenant)

    @property
    def wants_explanation(self) -> bool:
        """Whether a header asks for an explanation of how much was cached."""
        return self.headers.get(EXPLAIN_HEADER, "").strip().lower() in _YES

    def session_id(self, *, named: str | None, key: str) -> str:
        """The session of the request; empty if it has none. Raises RequestRefused if it is invalid.

        named: the session that the body names; the header takes precedence.
        key: any text, which identifies the session if neither header nor body names one.
        """
        if (header := self.headers.get(SESSION_HEADER)) is not None:
            return checked_session_id(header, field="X-Session-ID")
        if named is not None:
            return checked_session_id(named, field="session_id")
        if not key or is_session_id(key):
            return key
        digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16)
        return f"key-{digest.hexdigest()}"

    def service(self, *, is_batch: bool = False) -> ServiceClass:
        """The priority of the request, and its flow. The scheduler shares the model fairly among
        flows.

        Key, header and body can each lower the priority, but not raise it. The flow is named after
        the API key, or else the tenant header, or else the client's address. It ignores salts,
        because otherwise a client with a new salt for each request would get many shares. Raises
        RequestRefused.

        is_batch: whether the body asks for batch priority.
        """
        caller = self.caller
        priority = self.headers.get(PRIORITY_HEADER, "interactive").strip().lower()
        if priority not in _PRIORITIES:
            raise invalid_field(PRIORITY_HEADER, f"must be {' or '.join(_PRIORITIES)}")
        is_batch_key = caller.key is not None and caller.key.priority == "batch"
        is_batch = is_batch or priority == "batch" or is_batch_key
        tenant_name = self.headers.get(TENANT_HEADER, "")
        if caller.key_name:
            flow = f"key {caller.key_name}"
        elif tenant_name:
            flow = f"tenant {tenant_name}"
        else:
            flow = f"address {caller.address}"
        return ServiceClass(flow=flow, priority="batch" if is_batch else "interactive")

    def time_limit_seconds(self) -> float:
        """The time limit of the request, including queueing; 0: no limit.

        The client's limit applies, but cannot exceed the server's. Raises RequestRefused if the
        client's limit is not a positive number.
        """
        limits = self.services.limits
        text = self.headers.get(TIME_LIMIT_HEADER)
        if text is None:
            return limits.request_seconds
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise invalid_field(TIME_LIMIT_HEADER, "must be a number of seconds above 0")
        return min(seconds, limits.request_seconds or seconds)


def context_of(
    request: Request, services: Services, *, cache_salt: str | None = None
) -> RequestContext:
    """The context of a request. cache_salt: from the body or, without a body, from the query."""
    caller = caller_of(request)
    tenant_name = request.headers.get(TENANT_HEADER, "")
    salt = cache_salt or ""
    if caller.key is not None:
        tenant = tenant_of_key(caller.key.name, name=tenant_name, cache_salt=salt)
    else:
        tenant = tenant_of(api_key=caller.server_key, name=tenant_name, cache_salt=salt)
    return RequestContext(services=services, headers=request.headers, caller=caller, tenant=tenant)


def checked_session_id(session_id: str, *, field: str) -> str:
    """Return a session id if it is valid. Raises RequestRefused if it is not."""
    if not is_session_id(session_id):
        raise invalid_field(
            field,
            f"a session id must have 1 to {LONGEST_SESSION_ID} printable characters and no slash",
        )
    return session_id
