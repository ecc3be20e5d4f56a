"""Who may speak to the server: Host, Origin and API key are checked first, and every answer gets its request id."""

from __future__ import annotations

import hmac
import ipaddress
import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.config import ServerSettings
from holdfast.http.errors import RequestRefused, problem_of
from holdfast.telemetry.metrics import Metrics

_CLIENT_GONE = 499  # booked when the client left before the answer was begun
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_OPEN_PATHS = frozenset({"/health"})
_WELL_FORMED_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_WATCHED = frozenset({b"host", b"authorization", b"origin", b"x-request-id"})


class Guard:
    """Outermost ASGI middleware. Refusals come out in OpenAI's form, like all errors."""

    def __init__(self, app: ASGIApp, *, server: ServerSettings, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics
        self._api_key = server.api_key.encode()
        self._any_host = "*" in server.allowed_hosts
        names = {server.host, *server.allowed_hosts}
        self._hosts = _LOOPBACK | {name.strip("[]").rstrip(".").lower() for name in names}
        self._any_address = _is_wildcard(server.host)
        self._origins = frozenset(origin.rstrip("/").lower() for origin in server.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = {name: value for name, value in scope["headers"] if name in _WATCHED}
        request_id = headers.get(b"x-request-id", b"")
        if not _WELL_FORMED_ID.fullmatch(request_id):
            request_id = b"req_" + uuid.uuid4().hex.encode()
        status = _CLIENT_GONE

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            refusal = self._refusal(scope["path"], headers)
            if refusal is None:
                await self._app(scope, receive, send_with_id)
            else:
                await problem_of(refusal).response()(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.http_requests.labels(scope["method"], route, str(status)).inc()

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> RequestRefused | None:
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._knows_host(host):
            message = f"this server does not answer to the name {host[:100]!r}; name it in server.allowed_hosts if it should"
            return RequestRefused(message, status=421, code="host_not_allowed")
        origin = headers.get(b"origin")
        if origin is not None and not self._knows_origin(origin.decode("latin-1"), host):
            message = f"web pages of {origin.decode('latin-1')[:100]!r} may not call this server; see server.cors_origins"
            return RequestRefused(message, status=403, code="origin_not_allowed")
        if self._api_key and path not in _OPEN_PATHS and not self._knows_key(headers.get(b"authorization", b"")):
            return RequestRefused(
                "the API key is missing or wrong; send it as Authorization: Bearer KEY", status=401, code="invalid_api_key"
            )
        return None

    def _knows_host(self, host: str) -> bool:
        # A page that rebinds its name to 127.0.0.1 gets past the browser's same-origin rule, but sends its own name here.
        if self._any_host:
            return True
        name = _without_port(host)
        return name in self._hosts or (self._any_address and _is_address(name))

    def _knows_origin(self, origin: str, host: str) -> bool:
        # Browsers send simple cross-origin POSTs without asking first, so not answering the preflight is not enough.
        origin = origin.rstrip("/").lower()
        return "*" in self._origins or origin in self._origins or origin.partition("://")[2] == host.lower()

    def _knows_key(self, authorization: bytes) -> bool:
        scheme, _, key = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._api_key)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    name = host if host.count(":") > 1 else host.partition(":")[0]
    return name.rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_wildcard(host: str) -> bool:
    return host == "" or (_is_address(host) and ipaddress.ip_address(host).is_unspecified)
