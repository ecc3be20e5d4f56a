from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast.front.server.guard import ForwardedAddresses, trusted_networks
from holdfast.front.server.http_server import Addresses

PROXY = "10.0.0.1"
Headers = list[tuple[bytes, bytes]]


async def seen(headers: Headers, *, peer: str = PROXY) -> str:
    found: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(scope["client"][0])

    middleware = ForwardedAddresses(app, trusted=trusted_networks(["10.0.0.0/8", "fd00::/8"]))
    await middleware({"type": "http", "client": (peer, 1), "headers": headers}, None, None)  # type: ignore[arg-type]
    return found[0]


def xff(text: str) -> Headers:
    return [(b"x-forwarded-for", text.encode())]


def forwarded(text: str) -> Headers:
    return [(b"forwarded", text.encode())]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], PROXY),
        (xff("203.0.113.9"), "203.0.113.9"),
        # anybody may have written the part before it
        (xff("1.2.3.4, 203.0.113.9"), "203.0.113.9"),
        (xff("203.0.113.9, 10.2.2.2"), "203.0.113.9"),
        (xff("1.2.3.4") + xff("203.0.113.9"), "203.0.113.9"),
        (xff("203.0.113.9:4711"), "203.0.113.9"),
        (xff("::ffff:203.0.113.9"), "203.0.113.9"),
        (xff("10.3.3.3"), "10.3.3.3"),
        (xff("unknown"), PROXY),
        (xff("203.0.113.9, nonsense"), PROXY),
        (forwarded("for=203.0.113.9;proto=https"), "203.0.113.9"),
        (forwarded('For="[2001:db8::17]:4711"'), "2001:db8::17"),
        (forwarded("for=1.2.3.4, for=203.0.113.9;by=10.0.0.1"), "203.0.113.9"),
        (forwarded("for=_hidden"), PROXY),
        (xff("203.0.113.9") + forwarded("for=203.0.113.9"), "203.0.113.9"),
        # one of the two is the client's own
        (xff("203.0.113.9") + forwarded("for=127.0.0.1"), PROXY),
    ],
)
async def test_a_trusted_proxy_determines_the_client_address(
    headers: Headers, expected: str
) -> None:
    assert await seen(headers) == expected


@pytest.mark.parametrize("peer", ["203.0.113.9", "127.0.0.1", "testclient"])
async def test_forwarded_addresses_from_others_are_ignored(peer: str) -> None:
    assert await seen(xff("1.2.3.4") + forwarded("for=1.2.3.4"), peer=peer) == peer


@given(
    claimed=st.text(max_size=60),
    real=st.ip_addresses(v=4).filter(lambda address: not str(address).startswith("10.")),
)
async def test_a_client_cannot_forge_the_address_its_proxy_saw(claimed: str, real: object) -> None:
    raw = claimed.encode("utf-8", "replace") + b", " + str(real).encode()
    assert await seen([(b"x-forwarded-for", raw)]) == str(real)


@pytest.mark.parametrize("text", ["nginx", "10.0.0.0/33", "", "1.2.3"])
def test_an_invalid_proxy_address_prevents_the_start(text: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.trusted_proxies"):
        trusted_networks([text])


def test_a_trusted_proxy_may_have_more_connections_than_a_client() -> None:
    addresses = Addresses(0, trusted=trusted_networks(["10.0.0.0/8"]))
    assert addresses.has_room(PROXY)
    assert not addresses.has_room("203.0.113.9")
