"""Names and addresses of hosts: the Host header, and the client's address behind a trusted proxy.

The Host header is read strictly: anything but a name or an address with an optional port is refused.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.errors import ConfigError

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

# RFC 7239, section 4
_FOR = re.compile(r'(?:^|[;,])\s*for\s*=\s*("[^"]*"|[^;,\s]*)', re.IGNORECASE)
_MOST_HOPS = 32

_LONGEST_NAME = 253
_PORT = r"(?::([0-9]{1,5}))?"
_NAMED = re.compile(rf"((?:[A-Za-z0-9_-]{{1,63}}\.)*[A-Za-z0-9_-]{{1,63}})\.?{_PORT}")
_BRACKETED = re.compile(rf"\[([0-9A-Fa-f:.]{{2,45}})\]{_PORT}")
_LAST_PORT = 65535


def host_name(header: str) -> str | None:
    """The name or address in a Host header, as `normal_name` writes it; None if it is malformed.

    Nothing is cut off to make it fit: a lenient parser could read either host from
    `localhost:80@evil.com`.
    """
    found = _NAMED.fullmatch(header) or _BRACKETED.fullmatch(header)
    if found is None or int(found[2] or 0) > _LAST_PORT or len(found[1]) > _LONGEST_NAME:
        return None
    if header.startswith("[") and not (":" in found[1] and is_address(found[1])):
        return None
    return normal_name(found[1])


def normal_name(name: str) -> str:
    """A name in the form used for comparison: lower case, no brackets, no final dot, addresses
    in short form.
    """
    name = name.strip("[]").rstrip(".").lower()
    return str(ipaddress.ip_address(name)) if is_address(name) else name


def is_address(name: str) -> bool:
    """Whether it is an IP address, without brackets and without a zone."""
    return _address(name) is not None


def is_wildcard(name: str) -> bool:
    """Whether listening on it means listening on all addresses."""
    address = _address(name.strip("[]"))
    return name == "" or (address is not None and address.is_unspecified)


def is_loopback(name: str) -> bool:
    """Whether only this machine can reach what listens on it."""
    address = _address(normal_name(name))
    return normal_name(name) == "localhost" or (address is not None and address.is_loopback)


def _address(name: str) -> Address | None:
    try:
        return None if "%" in name else ipaddress.ip_address(name)
    except ValueError:
        return None


def trusted_networks(given: Iterable[str]) -> tuple[Network, ...]:
    """The networks that `server.trusted_proxies` names.

    Raises ConfigError for what is no address and no network.
    """
    networks: list[Network] = []
    for text in given:
        try:
            networks.append(ipaddress.ip_network(text.strip(), strict=False))
        except ValueError:
            raise ConfigError(
                f"server.trusted_proxies: {text!r} is neither an address nor a network such as "
                "10.0.0.0/8"
            ) from None
    return tuple(networks)


class ForwardedAddresses:
    """ASGI middleware that replaces a trusted proxy's address with the one it forwarded for.

    Headers from anyone else are ignored: any client can send them.
    """

    def __init__(self, app: ASGIApp, *, trusted: Sequence[Network]) -> None:
        self._app, self._trusted = app, tuple(trusted)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        if scope["type"] == "http" and scope.get("client") and self._is_trusted(scope["client"][0]):
            found = self._origin(scope["headers"])
            if found is not None:
                scope["client"] = (str(found), 0)
        await self._app(scope, receive, send)

    def _origin(self, headers: Iterable[tuple[bytes, bytes]]) -> Address | None:
        """The last address before the trusted ones; None if it is missing or ambiguous.

        A proxy writes one of the two headers and passes the other through as its client sent it.
        When they disagree, one of them is forged, and we cannot tell which.
        """
        values: dict[bytes, list[str]] = {b"x-forwarded-for": [], b"forwarded": []}
        for name, value in headers:
            if name in values:
                values[name].append(value.decode("latin-1"))
        old = [hop for value in values[b"x-forwarded-for"] for hop in value.split(",")]
        new = [hop for value in values[b"forwarded"] for hop in _FOR.findall(value)]
        told = {self._first_untrusted(hops) for hops in (old, new) if hops}
        return told.pop() if len(told) == 1 else None

    def _first_untrusted(self, hops: Sequence[str]) -> Address | None:
        """Read from the end: each hop was written by the next one, and is trusted only if that
        one is.
        """
        found: Address | None = None
        for hop in reversed(hops[-_MOST_HOPS:]):
            address = _hop_address(hop)
            if address is None:
                return None  # "unknown", or an obfuscated name
            found = address
            if not self._is_trusted(str(address)):
                break
        return found

    def _is_trusted(self, text: str) -> bool:
        return is_trusted(text, self._trusted)


def is_trusted(text: str, networks: Sequence[Network]) -> bool:
    """Whether an address is in one of the networks."""
    address = _hop_address(text)
    return address is not None and any(address in network for network in networks)


def _hop_address(hop: str) -> Address | None:
    """The address of a hop, without quotes, brackets and port; IPv4-mapped IPv6 becomes IPv4."""
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
