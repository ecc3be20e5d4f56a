"""Where a request really comes from, if a proxy that is trusted to say so stands between."""

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
    """ASGI middleware that puts the address a trusted proxy has forwarded for in the place of the
    proxy's own.

    Others' words are not listened to: anybody can send these headers.
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
        """The last address before the trusted ones; None where it is not told, or not in one way.

        A proxy writes one of the two headers and hands the other on as its client sent it. So where
        both are there and do not agree, one of them is a lie, and which cannot be told.
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
        """From the end: each hop was written by the one behind it, and is believed as long as that
        one is.
        """
        found: Address | None = None
        for hop in reversed(hops[-_MOST_HOPS:]):
            address = _address(hop)
            if address is None:
                return None  # unknown, or a name that somebody has made up
            found = address
            if not self._is_trusted(str(address)):
                break
        return found

    def _is_trusted(self, text: str) -> bool:
        return is_trusted(text, self._trusted)


def is_trusted(text: str, networks: Sequence[Network]) -> bool:
    """Whether an address is in one of the networks."""
    address = _address(text)
    return address is not None and any(address in network for network in networks)


def _address(hop: str) -> Address | None:
    """The address of a hop, without quotes, brackets and port; IPv4 in IPv6's clothes is IPv4."""
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
