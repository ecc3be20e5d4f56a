"""Who sends a request: the key that lets it in, the address it comes from, and what it may do."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Scope

from holdfast.front.server.hosts import is_loopback
from holdfast.front.server.keys import ApiKey, KeyRing, given_keys
from holdfast.front.server.problem import RequestRefused

CALLER = "holdfast.caller"  # key of a request's Caller in its ASGI scope
# Of what proxies say of themselves: such a request is nobody's on this machine, wherever its
# connection comes from.
_SIGNS_OF_PROXIES = (
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-forwarded-proto",
    b"forwarded",
    b"x-real-ip",
    b"via",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One request's sender, as the guard has found it."""

    address: str = ""
    key: ApiKey | None = None  # the named key that it was let in by
    server_key: str = ""  # `server.api_key`, where that let it in
    is_admin: bool = False
    is_let_in: bool = True  # else it may see what is open to all, and nothing more

    @property
    def has_key(self) -> bool:
        """Whether a key has let it in."""
        return self.key is not None or bool(self.server_key)

    @property
    def key_name(self) -> str:
        """The name of its key; empty where it has none, or the server's single one."""
        return self.key.name if self.key is not None else ""


def caller_in(
    scope: Scope, headers: Mapping[bytes, bytes], *, server_key: str, keys: KeyRing
) -> Caller | None:
    """Who sends a request that may come in; None for one that needs a key and has not the right
    one.
    """
    address = scope["client"][0] if scope.get("client") else ""
    if not server_key and not keys.is_needed:
        is_local = is_loopback(address) and not any(name in headers for name in _SIGNS_OF_PROXIES)
        return Caller(address=address, is_admin=is_local)
    given = set(given_keys(headers).values())
    if len(given) != 1:
        return None
    (secret,) = given
    if server_key and hmac.compare_digest(secret, server_key.encode()):
        return Caller(address=address, server_key=server_key, is_admin=not keys.names_an_admin)
    key = keys.find(secret)
    return None if key is None else Caller(address=address, key=key, is_admin=key.is_admin)


def caller_of(request: Request) -> Caller:
    """Who sends a request that the guard has let in."""
    caller: Caller = request.scope[CALLER]
    return caller


def check_admin(request: Request) -> None:
    """Raise RequestRefused for a request that may not administer the server.

    As soon as any key is set, it takes an admin's: a named one that `holdfast keys add --admin`
    made, or `server.api_key` as long as no named one is an admin's. Without any key, it takes a
    connection from this machine that came through no proxy, and from no web page that only
    `server.cors_origins = *` lets in.
    """
    caller = caller_of(request)
    if caller.is_admin:
        return
    if caller.has_key:
        message = (
            "this takes an admin's key: `holdfast keys add NAME --admin` on the server's machine "
            "makes one"
        )
    else:
        message = (
            "without API keys the server is administered from its own machine only; `holdfast keys "
            "add NAME --admin` makes one"
        )
    raise RequestRefused(message, status=403, code="admin_only")
