"""Makes the first checks of every request (Host, Origin and API key), and finds the client's
address behind a trusted proxy.

Headers are parsed strictly: none of these headers may be repeated, and a Host header must be a name
or an address with an optional port.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.config import ServerSettings
from holdfast.errors import ConfigError
from holdfast.front.server.access import (
    CALLER,
    KEY_HEADERS,
    Caller,
    Drain,
    KeyRing,
    given_keys,
)
from holdfast.front.server.context import SESSION_HEADER, TENANT_HEADER
from holdfast.front.server.dialect import DialectTable, answer_of
from holdfast.front.server.problem import RequestRefused
from holdfast.front.telemetry.request_log import RECORD

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

# RFC 7239, section 4
_FOR = re.compile(r'(?:^|[;,])\s*for\s*=\s*("[^"]*"|[^;,\s]*)', re.IGNORECASE)
_MOST_HOPS = 32  # addresses that are read of the list in one header

_LONGEST_NAME = 253
_PORT = r"(?::([0-9]{1,5}))?"
# a Host header: (1) the name or address, (2) the port
_NAMED = re.compile(rf"((?:[A-Za-z0-9_-]{{1,63}}\.)*[A-Za-z0-9_-]{{1,63}})\.?{_PORT}")
_BRACKETED = re.compile(rf"\[([0-9A-Fa-f:.]{{2,45}})\]{_PORT}")
_LAST_PORT = 65535
# Origins that no foreign web page can have: those of pages served by the client's own machine, and
# of apps installed on it. `null` is not included, because any page can get it in a sandbox. Browser
# extensions are not included either.
LOCAL_ORIGIN = re.compile(
    r"https?://(?:localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\])(?::[0-9]{1,5})?"
    r"|(?:app|capacitor|tauri|vscode-file|vscode-webview)://[a-z0-9._-]*"
    r"|file://"
)
# Headers that proxies add: a request with one of them does not count as local, even if the
# connection comes from this machine.
_SIGNS_OF_PROXIES = (
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-forwarded-proto",
    b"forwarded",
    b"x-real-ip",
    b"via",
)
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
# Names by which containers reach their host. An attacker who controls a browser's DNS could rebind
# these names, so only programs may use them: browsers send an Origin with every request that makes
# the server work.
_HOST_NAMES_IN_CONTAINERS = frozenset({"host.docker.internal", "host.containers.internal"})
# Headers that must not be repeated: some parsers take the first value and others the last, so a
# client could override the value that its gateway has set.
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


@lru_cache(maxsize=256)
def host_name(header: str) -> str | None:
    """The name or address in a Host header, as `normal_name` writes it; None if it is malformed.

    The whole header has to match: a lenient parser could read either host from
    `localhost:80@evil.com`.
    """
    match = _NAMED.fullmatch(header) or _BRACKETED.fullmatch(header)
    if match is None or int(match[2] or 0) > _LAST_PORT or len(match[1]) > _LONGEST_NAME:
        return None
    if header.startswith("[") and not (":" in match[1] and is_address(match[1])):
        return None
    return normal_name(match[1])


def address_of(scope: Scope) -> str:
    """The server's URL by which the client came, so that examples work on the client's machine."""
    host = Headers(scope=scope).get("host", "")
    if host_name(host) is None:
        address, port = scope.get("server") or ("127.0.0.1", 80)
        host = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return f"{scope['scheme']}://{host}"


def normal_name(name: str) -> str:
    """A name in the form used for comparison: lower case, no brackets, no final dot, addresses
    in short form.
    """
    name = name.strip("[]").rstrip(".").lower()
    return str(ipaddress.ip_address(name)) if is_address(name) else name


def is_address(name: str) -> bool:
    """Whether the name is an IP address, without brackets and without a zone."""
    return _address(name) is not None


def is_wildcard(name: str) -> bool:
    """Whether a server that is bound to this name listens on all addresses."""
    address = _address(name.strip("[]"))
    return name == "" or (address is not None and address.is_unspecified)


def is_loopback(name: str) -> bool:
    """Whether a server that is bound to this name can be reached only from this machine."""
    address = _address(normal_name(name))
    return normal_name(name) == "localhost" or (address is not None and address.is_loopback)


@lru_cache(maxsize=256)
def _address(name: str) -> Address | None:
    """The IP address that a name is, without a zone; None for any other name."""
    try:
        return None if "%" in name else ipaddress.ip_address(name)
    except ValueError:
        return None


def trusted_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Parse the networks in `server.trusted_proxies`. Raises ConfigError if one is invalid."""
    networks: list[Network] = []
    for text in texts:
        try:
            networks.append(ipaddress.ip_network(text.strip(), strict=False))
        except ValueError:
            raise ConfigError(
                f"server.trusted_proxies: {text!r} is neither an address nor a network such as "
                "10.0.0.0/8"
            ) from None
    return tuple(networks)


class ForwardedAddresses:
    """ASGI middleware that replaces a trusted proxy's address with the client's address.

    The headers Forwarded and X-Forwarded-For count only if a trusted proxy sent them, because any
    client can write them.
    """

    def __init__(self, app: ASGIApp, *, trusted: Sequence[Network]) -> None:
        self._app, self._trusted = app, tuple(trusted)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with the client's address in place of a trusted proxy's."""
        client = scope.get("client")
        if scope["type"] == "http" and client and is_trusted(client[0], self._trusted):
            address = self._client_address(scope["headers"])
            if address is not None:
                scope["client"] = (str(address), 0)
        await self._app(scope, receive, send)

    def _client_address(self, headers: Iterable[tuple[bytes, bytes]]) -> Address | None:
        """The client's address as seen by the outermost trusted proxy.

        Returns None if the address is missing or ambiguous. A proxy writes one of the two headers
        (Forwarded and X-Forwarded-For) and passes the other one on unchanged. If they disagree, one
        of them is forged, and we cannot tell which.
        """
        values: dict[bytes, list[str]] = {b"x-forwarded-for": [], b"forwarded": []}
        for name, value in headers:
            if name in values:
                values[name].append(value.decode("latin-1"))
        x_forwarded_hops = [hop for value in values[b"x-forwarded-for"] for hop in value.split(",")]
        forwarded_hops = [hop for value in values[b"forwarded"] for hop in _FOR.findall(value)]
        addresses = {
            self._last_untrusted(hops) for hops in (x_forwarded_hops, forwarded_hops) if hops
        }
        return addresses.pop() if len(addresses) == 1 else None

    def _last_untrusted(self, hops: Sequence[str]) -> Address | None:
        """The last hop that is not a trusted proxy, or the first hop if all are trusted proxies.

        hops: the addresses that the request came from, in order: that of the client, then those of
            proxies. Each was written by the hop after it, so it is only as reliable as that hop;
            therefore they are read from the end.

        Returns None if a hop on the way has no readable address.
        """
        client_address: Address | None = None
        for hop in reversed(hops[-_MOST_HOPS:]):
            address = _hop_address(hop)
            if address is None:
                return None  # "unknown", or an obfuscated name
            client_address = address
            if not is_trusted(str(address), self._trusted):
                break
        return client_address


def is_trusted(text: str, networks: Sequence[Network]) -> bool:
    """Whether an address is in one of the networks."""
    address = _hop_address(text)
    return address is not None and any(address in network for network in networks)


def _hop_address(hop: str) -> Address | None:
    """The address of a hop, without quotes, brackets and port; None if it is not an address.

    IPv4-mapped IPv6 addresses become IPv4 addresses.
    """
    text = hop.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


class Guard:
    """ASGI middleware that checks every request, normalizes its path and identifies its caller."""

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
        self._allows_any_host = "*" in server.allowed_hosts
        self._allowed_hosts = _LOOPBACK | {
            normal_name(name) for name in (server.host, *server.allowed_hosts)
        }
        # An attacker can rebind only names, not addresses. So if other machines can reach the
        # server at all, the Host header may be any IP address.
        self._allows_any_address = not is_loopback(server.host)
        self._allowed_origins = frozenset(
            origin.rstrip("/").lower() for origin in server.cors_origins
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the request; pass it to the application or answer with the refusal."""
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
        """The error for a request that is refused; None if the request is accepted.

        The caller of an accepted request is put into the scope.
        """
        headers: dict[bytes, bytes] = {}
        header_list: Iterable[tuple[bytes, bytes]] = scope["headers"]
        for name, value in header_list:
            if name in _ONCE and name in headers:
                message = f"the header {name.decode()} was sent twice; send it once"
                return RequestRefused(message, code="repeated_header", field=name.decode())
            headers[name] = value
        if (refusal := self._host_or_origin_refusal(headers)) is not None:
            return refusal
        caller = caller_in(scope, headers, server_key=self._api_key, keys=self._keys)
        if caller is None and not self._dialects.is_open(path):
            return _key_refusal(headers)
        caller = caller or Caller(is_let_in=False)
        if caller.is_admin and not caller.has_key and not self._is_from_this_machine(headers):
            caller = replace(caller, is_admin=False)
        scope[CALLER] = caller
        scope[RECORD].key = caller.key_name
        return None

    def _host_or_origin_refusal(self, headers: dict[bytes, bytes]) -> RequestRefused | None:
        """The error for a Host or an Origin that is not allowed; None if both are.

        This keeps web pages of others from using the server through a visitor's browser.
        """
        host = headers.get(b"host", b"").decode("latin-1")
        is_from_container = (
            host_name(host) in _HOST_NAMES_IN_CONTAINERS and b"origin" not in headers
        )
        if not is_from_container and not self._is_allowed_host(host):
            message = (
                f"this server does not accept the host name {host[:100]!r}; to allow it, start the "
                "server with --allowed-hosts and the name (server.allowed_hosts)"
            )
            return RequestRefused(message, status=421, code="host_not_allowed")
        # Browsers send simple cross-origin POSTs without a preflight, so refusing preflights is not
        # enough.
        if (
            "*" not in self._allowed_origins
            and not self._is_program_or_allowed_page(headers)
            and not _is_local_page(headers)
        ):
            message = (
                f"web pages of {headers[b'origin'].decode('latin-1')[:100]!r} may not call this "
                "server; to allow them, start it with --cors and the origin (server.cors_origins)"
            )
            return RequestRefused(message, status=403, code="origin_not_allowed")
        return None

    def _is_allowed_host(self, header: str) -> bool:
        """Whether requests with this Host header are accepted."""
        # A page whose name is rebound to 127.0.0.1 passes the browser's same-origin check, but it
        # still sends its own name as the Host.
        name = host_name(header)
        if name is None:
            return self._allows_any_host and header == ""  # HTTP/1.0 has no Host
        return (
            self._allows_any_host
            or name in self._allowed_hosts
            or (self._allows_any_address and is_address(name))
        )

    def _is_program_or_allowed_page(self, headers: dict[bytes, bytes]) -> bool:
        """Whether a request comes from a program, a page of this server, or an allowed origin."""
        origin, host = (
            headers.get(name, b"").decode("latin-1").lower() for name in (b"origin", b"host")
        )
        origin = origin.rstrip("/")
        return (
            b"origin" not in headers
            or origin in self._allowed_origins
            or origin.partition("://")[2] == host
        )

    def _is_from_this_machine(self, headers: dict[bytes, bytes]) -> bool:
        """Whether a request over loopback comes from a program on this machine or from one of the
        server's own pages.

        Requests from containers (recognized by the host name that they use), apps and other pages
        are not trusted.
        """
        host = host_name(headers.get(b"host", b"").decode("latin-1"))
        return self._is_program_or_allowed_page(headers) and (
            host in self._allowed_hosts or host not in _HOST_NAMES_IN_CONTAINERS
        )


def _is_local_page(headers: dict[bytes, bytes]) -> bool:
    """Whether the Origin is that of a page or app on the client's machine (see LOCAL_ORIGIN)."""
    return LOCAL_ORIGIN.fullmatch(headers.get(b"origin", b"").decode("latin-1").lower()) is not None


def _key_refusal(headers: dict[bytes, bytes]) -> RequestRefused:
    """The error for a request without a valid API key."""
    keys = given_keys(headers)
    if len(set(keys.values())) > 1:
        names = " and ".join(name.decode() for name in keys)
        return RequestRefused(
            f"the headers {names} contain different API keys; send only one", code="repeated_header"
        )
    fault = "it is not this server's" if keys else "there is none"
    if not keys and b"authorization" in headers:  # often the key alone, or an unset variable
        fault = "the header authorization does not have the form Bearer KEY"
    message = (
        f"Incorrect API key provided: {fault}. Send the key as Authorization: Bearer KEY, "
        "x-api-key or api-key."
    )
    return RequestRefused(message, status=401, code="invalid_api_key")


def caller_in(
    scope: Scope, headers: Mapping[bytes, bytes], *, server_key: str, keys: KeyRing
) -> Caller | None:
    """The sender of a request; None if a key is required and the request has no valid one."""
    address = scope["client"][0] if scope.get("client") else ""
    if not server_key and not keys.is_needed:
        is_local = is_loopback(address) and not any(name in headers for name in _SIGNS_OF_PROXIES)
        return Caller(address=address, is_admin=is_local)
    secrets = set(given_keys(headers).values())
    if len(secrets) != 1:
        return None
    (secret,) = secrets
    if server_key and hmac.compare_digest(secret, server_key.encode()):
        return Caller(address=address, server_key=server_key, is_admin=not keys.names_an_admin)
    key = keys.find(secret)
    return None if key is None else Caller(address=address, key=key, is_admin=key.is_admin)
