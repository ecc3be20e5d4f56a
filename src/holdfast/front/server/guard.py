"""Who may speak to the server: Host, Origin and API key are checked first, and that none of them is
said twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.config import ServerSettings
from holdfast.front.server.admission import Drain
from holdfast.front.server.caller import CALLER, Caller, caller_in
from holdfast.front.server.dialect import DialectTable
from holdfast.front.server.errors import RECORD, answer_of
from holdfast.front.server.extensions import SESSION_HEADER, TENANT_HEADER
from holdfast.front.server.hosts import host_name, is_address, is_loopback, normal_name
from holdfast.front.server.keys import KEY_HEADERS, KeyRing, given_keys
from holdfast.front.server.problem import RequestRefused

# Origins that no page of the web can have: pages that the caller's own machine serves, and apps
# that are installed on it. `null` is not among them, since any page can put itself into a sandbox
# that has it; nor are extensions of browsers.
LOCAL_ORIGIN = re.compile(
    r"https?://(?:localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\])(?::[0-9]{1,5})?"
    r"|(?:app|capacitor|tauri|vscode-file|vscode-webview)://[a-z0-9._-]*"
    r"|file://"
)
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
# What containers call the machine that they run on. Somebody who answers a browser's DNS queries
# could rebind these names, so they are for programs only: browsers send an Origin with every
# request that makes the server work.
_CONTAINERS_HOST = frozenset({"host.docker.internal", "host.containers.internal"})
# Of two of these, one reader would take the first and another the last: a gateway's word would be
# overruled by its client's.
_ONCE = frozenset(
    {
        b"host",
        b"origin",
        b"content-length",
        b"transfer-encoding",
        SESSION_HEADER.encode(),
        TENANT_HEADER.encode(),
        *KEY_HEADERS,
    }
)


class Guard:
    """ASGI middleware that stands before all endpoints, and that gives them the path that was meant
    and who calls.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        server: ServerSettings,
        dialects: DialectTable,
        keys: KeyRing,
        drain: Drain,
    ) -> None:
        self._app, self._dialects, self._keys, self._drain = app, dialects, keys, drain
        self._api_key = server.api_key
        self._any_host = "*" in server.allowed_hosts
        self._hosts = _LOOPBACK | {
            normal_name(name) for name in (server.host, *server.allowed_hosts)
        }
        # Only a name can be made to point here by somebody else, so where others may come in at
        # all, any address may be written.
        self._any_address = not is_loopback(server.host)
        self._origins = frozenset(origin.rstrip("/").lower() for origin in server.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = self._dialects.served_path(scope["path"])
        refusal = self._refusal(path, scope) or self._drain.refusal(scope["method"], path)
        if refusal is None:
            scope["path"] = path
            await self._app(scope, receive, send)
        else:
            await answer_of(refusal, scope)(scope, receive, send)

    def _refusal(self, path: str, scope: Scope) -> RequestRefused | None:
        """Why a request may not come in. One that may has its caller in the scope."""
        headers: dict[bytes, bytes] = {}
        sent: Iterable[tuple[bytes, bytes]] = scope["headers"]
        for name, value in sent:
            if name in _ONCE and name in headers:
                message = f"the header {name.decode()} was sent twice; it must be sent once"
                return RequestRefused(message, code="repeated_header", field=name.decode())
            headers[name] = value
        if (misdirected := self._misdirected(headers)) is not None:
            return misdirected
        caller = caller_in(scope, headers, server_key=self._api_key, keys=self._keys)
        if caller is None and path not in self._dialects.open_paths:
            return _locked_out(headers)
        caller = caller or Caller(is_let_in=False)
        if caller.is_admin and not caller.has_key and not self._is_at_the_machine(headers):
            caller = replace(caller, is_admin=False)
        scope[CALLER] = caller
        scope[RECORD].key = caller.key_name
        return None

    def _misdirected(self, headers: dict[bytes, bytes]) -> RequestRefused | None:
        host = headers.get(b"host", b"").decode("latin-1")
        is_of_container = host_name(host) in _CONTAINERS_HOST and b"origin" not in headers
        if not is_of_container and not self._knows_host(host):
            message = (
                f"this server does not answer to the name {host[:100]!r}; if it should, start it "
                "with --allowed-hosts "
                "and the name (server.allowed_hosts)"
            )
            return RequestRefused(message, status=421, code="host_not_allowed")
        # Browsers send simple cross-origin POSTs without asking first, so not answering the
        # preflight is not enough.
        if (
            "*" not in self._origins
            and not self._is_own_page(headers)
            and not _is_local_page(headers)
        ):
            message = (
                f"web pages of {headers[b'origin'].decode('latin-1')[:100]!r} may not call this "
                "server; if they should, "
                "start it with --cors and the origin (server.cors_origins)"
            )
            return RequestRefused(message, status=403, code="origin_not_allowed")
        return None

    def _knows_host(self, header: str) -> bool:
        # A page that rebinds its name to 127.0.0.1 gets past the browser's same-origin rule, but
        # sends its own name here.
        name = host_name(header)
        if name is None:
            return self._any_host and header == ""  # HTTP/1.0 has no Host
        return self._any_host or name in self._hosts or (self._any_address and is_address(name))

    def _is_own_page(self, headers: dict[bytes, bytes]) -> bool:
        """Whether a request comes from no web page, from one of this server, or of an origin that
        the settings name.
        """
        origin, host = (
            headers.get(name, b"").decode("latin-1").lower() for name in (b"origin", b"host")
        )
        origin = origin.rstrip("/")
        return (
            b"origin" not in headers
            or origin in self._origins
            or origin.partition("://")[2] == host
        )

    def _is_at_the_machine(self, headers: dict[bytes, bytes]) -> bool:
        """Whether a local request comes from a program or a trusted page, and not from a container,
        an app or any other page.
        """
        host = host_name(headers.get(b"host", b"").decode("latin-1"))
        return self._is_own_page(headers) and (host in self._hosts or host not in _CONTAINERS_HOST)


def _is_local_page(headers: dict[bytes, bytes]) -> bool:
    return LOCAL_ORIGIN.fullmatch(headers.get(b"origin", b"").decode("latin-1").lower()) is not None


def _locked_out(headers: dict[bytes, bytes]) -> RequestRefused:
    keys = given_keys(headers)
    if len(set(keys.values())) > 1:
        names = " and ".join(name.decode() for name in keys)
        return RequestRefused(
            f"the headers {names} bring different API keys; send one", code="repeated_header"
        )
    what = "it is not this server's" if keys else "there is none"
    message = (
        f"Incorrect API key provided: {what}. Send the key as Authorization: Bearer KEY, x-api-key "
        "or api-key."
    )
    return RequestRefused(message, status=401, code="invalid_api_key")
