from __future__ import annotations

import ipaddress
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config import ServerSettings
from holdfast.errors import ConfigError
from holdfast.front.server.guard import (
    ForwardedAddresses,
    host_name,
    is_loopback,
    is_wildcard,
    normal_name,
    trusted_networks,
)
from holdfast.front.server.http_server import ConnectionCounter
from tests.fakes.http_clients import CHAT, chat_body, client_of
from tests.fakes.scripted_gateway import MODEL, ScriptedDirectory, ScriptedGateway, model_status


async def status(headers: dict[str, Any], **settings: Any) -> int:
    gateway = ScriptedGateway()
    async with client_of(gateway, server=ServerSettings(**settings)) as client:
        response = await client.post(CHAT, json=chat_body(), headers=headers)
    assert (response.status_code == 200) == bool(gateway.requests)
    if response.status_code != 200:
        assert response.json()["error"]["message"]
    return response.status_code


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8321", "127.0.0.1:9", "[::1]:8321", "LOCALHOST:1", "localhost."],
)
async def test_loopback_names_are_always_accepted(host: str) -> None:
    assert await status({"host": host}) == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8321",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "10.0.0.7",
        "",
        "localhost:80@evil.com",
    ],
)
async def test_other_hosts_are_misdirected(host: str) -> None:
    assert await status({"host": host}) == 421


@pytest.mark.parametrize(
    ("settings", "host", "expected"),
    [
        ({"host": "box.local"}, "box.local:8321", 200),
        ({"allowed_hosts": ("mac.local",)}, "mac.local", 200),
        ({"allowed_hosts": ("mac.local",)}, "evil.example", 421),
        ({"allowed_hosts": ("*",)}, "evil.example", 200),
        ({"host": "0.0.0.0"}, "192.168.1.5:8321", 200),
        ({"host": "::"}, "[fe80::1]:8321", 200),
        ({"host": "0.0.0.0"}, "evil.example", 421),
        ({"host": "box.local"}, "192.168.1.5:8321", 200),
        ({"host": "127.0.0.1"}, "192.168.1.5:8321", 421),
        ({"host": "0.0.0.0"}, "192.168.1.5:80@evil.example", 421),
        ({"allowed_hosts": ("*",)}, "localhost:80@evil.example", 421),
        ({"allowed_hosts": ("Mac.local.",)}, "mac.LOCAL", 200),
    ],
)
async def test_more_hosts_can_be_configured(
    settings: dict[str, Any], host: str, expected: int
) -> None:
    assert await status({"host": host}, **settings) == expected


@pytest.mark.parametrize(
    ("authorization", "expected"),
    [
        ("Bearer sesame", 200),
        ("bearer sesame", 200),
        ("Bearer  sesame ", 200),
        ("", 401),
        ("Bearer", 401),
        ("Bearer wrong", 401),
        ("Bearer sesame2", 401),
        ("Basic sesame", 401),
        ("sesame", 401),
        ("Bearer sésame", 401),
    ],
)
async def test_only_the_key_grants_access(authorization: str, expected: int) -> None:
    assert (
        await status({"authorization": authorization.encode("latin-1")}, api_key="sesame")
        == expected
    )


@pytest.mark.parametrize("name", ["x-api-key", "api-key", "X-Api-Key"])
async def test_the_key_is_accepted_in_other_vendors_headers(name: str) -> None:
    assert await status({name: "sesame"}, api_key="sesame") == 200
    assert await status({name: "wrong"}, api_key="sesame") == 401
    assert (
        await status({name: "sesame", "authorization": "Basic of-a-proxy"}, api_key="sesame") == 200
    )


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}])
async def test_a_wrong_key_has_the_message_clients_look_for(headers: dict[str, str]) -> None:
    async with client_of(ScriptedGateway(), server=ServerSettings(api_key="sesame")) as client:
        response = await client.post(CHAT, json=chat_body(), headers=headers)
    error = response.json()["error"]
    assert (response.status_code, response.headers["www-authenticate"], error["code"]) == (
        401,
        "Bearer",
        "invalid_api_key",
    )
    assert response.headers["x-should-retry"] == "false"  # else Claude Code tries for three minutes
    assert error["message"].startswith("Incorrect API key provided")
    assert "wrong" not in error["message"]


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (None, "there is none"),
        ("Bearer wrong", "it is not this server's"),
        ("sesame", "the header authorization does not have the form Bearer KEY"),
        ("Bearer ", "the header authorization does not have the form Bearer KEY"),
        ("Basic sesame", "the header authorization does not have the form Bearer KEY"),
    ],
)
async def test_a_wrong_key_is_described(header: str | None, said: str) -> None:
    headers = {} if header is None else {"authorization": header}
    async with client_of(ScriptedGateway(), server=ServerSettings(api_key="sesame")) as client:
        response = await client.post(CHAT, json=chat_body(), headers=headers)
    assert f"Incorrect API key provided: {said}. Send" in response.json()["error"]["message"]


ONCE = [
    "host",
    "x-holdfast-tenant",
    "x-session-id",
    "authorization",
    "x-api-key",
    "api-key",
    "origin",
    "transfer-encoding",
]


@pytest.mark.parametrize("name", ONCE)
async def test_duplicated_security_headers_are_ignored(name: str) -> None:
    gateway = ScriptedGateway()
    async with client_of(gateway) as client:
        response = await client.post(
            CHAT,
            json=chat_body(),
            headers=[("host", "localhost")] * (name != "host") + [(name, "a"), (name, "a")],
        )
    assert (response.status_code, gateway.requests) == (400, [])
    assert (response.json()["error"]["code"], response.json()["error"]["param"]) == (
        "repeated_header",
        name,
    )


async def test_contradictory_keys_are_refused_where_one_is_needed() -> None:
    both = {"authorization": "Bearer sesame", "x-api-key": "other"}
    assert await status(both, api_key="sesame") == 400
    assert await status({**both, "x-api-key": "sesame"}, api_key="sesame") == 200
    assert await status(both) == 200


async def test_without_a_configured_key_any_key_is_accepted() -> None:
    assert await status({"authorization": "Bearer whatever"}) == 200


@pytest.mark.parametrize("key", [None, "wrong"])
@pytest.mark.parametrize(("state", "status"), [("ready", 200), ("loading", 503)])
async def test_without_the_key_health_shows_only_the_status(
    state: Any, status: int, key: str | None
) -> None:
    directory = ScriptedDirectory(models=(model_status(state=state, is_awaited=True),))
    settings = ServerSettings(api_key="sesame")
    async with client_of(ScriptedGateway(), server=settings, directory=directory) as client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        closed = await client.get("/health", headers=headers)
        opened = await client.get("/health", headers={"authorization": "Bearer sesame"})
    shown = "ok" if status == 200 else "loading"
    assert (closed.status_code, closed.json()) == (status, {"status": shown})
    assert (opened.status_code, opened.json()["models"][0]["id"]) == (status, MODEL)


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json", "/nope"])
async def test_everything_except_health_needs_the_key(path: str) -> None:
    async with client_of(ScriptedGateway(), server=ServerSettings(api_key="sesame")) as client:
        closed = await client.get(path)
        health = await client.get("/health")
    assert (closed.status_code, health.status_code) == (401, 200)
    assert closed.headers["www-authenticate"] == "Bearer"
    assert closed.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("origin", "settings", "expected"),
    [
        ("https://evil.example", {}, 403),
        ("null", {}, 403),
        ("http://localhost.evil.example", {}, 403),
        ("http://127.0.0.1.nip.io:3000", {}, 403),
        ("http://localhost:3000@evil.example", {}, 403),
        ("http://192.168.1.5:3000", {}, 403),
        ("https://obsidian.md", {}, 403),
        ("https://evil.example?app://obsidian.md", {}, 403),
        ("chrome-extension://abcdefgh", {}, 403),
        ("http://localhost:8321", {}, 200),
        ("http://app.example", {"cors_origins": ("http://app.example",)}, 200),
        ("https://evil.example", {"cors_origins": ("*",)}, 200),
    ],
)
async def test_foreign_web_pages_cannot_use_the_server(
    origin: str, settings: dict[str, Any], expected: int
) -> None:
    assert await status({"host": "localhost:8321", "origin": origin}, **settings) == expected


LOCAL_ORIGINS = [
    "http://localhost:3000",
    "https://localhost",
    "http://127.0.0.1:5173",
    "http://[::1]:8080",
    "http://0.0.0.0:3000",
    "app://obsidian.md",
    "capacitor://localhost",
    "tauri://localhost",
    "vscode-webview://1o2p3q4r",
    "vscode-file://vscode-app",
    "file://",
]


async def preflight_and_answer(
    origin: str, **settings: Any
) -> tuple[httpx.Response, httpx.Response]:
    """The preflight response for a browser at this origin, and the response to the request."""
    asked = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    async with client_of(ScriptedGateway(), server=ServerSettings(**settings)) as client:
        preflight = await client.options(CHAT, headers=asked)
        return preflight, await client.post(CHAT, json=chat_body(), headers={"origin": origin})


@pytest.mark.parametrize("origin", LOCAL_ORIGINS)
async def test_local_pages_and_apps_may_call(origin: str) -> None:
    preflight, answer = await preflight_and_answer(origin)
    assert (preflight.status_code, answer.status_code) == (200, 200)
    assert (
        preflight.headers["access-control-allow-origin"]
        == answer.headers["access-control-allow-origin"]
        == origin
    )


async def test_a_local_page_needs_the_key_if_configured() -> None:
    _, answer = await preflight_and_answer("http://localhost:3000", api_key="sesame")
    assert answer.status_code == 401


@pytest.mark.parametrize("origin", ["http://app.example", "null"])
async def test_cors_allows_only_configured_origins(origin: str) -> None:
    preflight, answer = await preflight_and_answer(origin)
    assert preflight.status_code >= 400
    assert "access-control-allow-origin" not in {**preflight.headers, **answer.headers}
    preflight, answer = await preflight_and_answer(origin, cors_origins=(origin,))
    assert preflight.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize(
    "host", ["host.docker.internal:8321", "host.containers.internal", "HOST.docker.internal."]
)
async def test_containers_may_use_their_name_for_the_host(host: str) -> None:
    assert await status({"host": host}) == 200


@pytest.mark.parametrize(
    "origin", ["http://host.docker.internal:8321", "http://localhost:3000", "https://evil.example"]
)
async def test_a_web_page_cannot_use_the_containers_hostname(origin: str) -> None:
    assert await status({"host": "host.docker.internal:8321", "origin": origin}) == 421


@pytest.mark.parametrize(
    "host", ["docker.internal", "evil.docker.internal", "host.docker.internal.evil.example"]
)
async def test_names_similar_to_containers_hosts_are_misdirected(host: str) -> None:
    assert await status({"host": host}) == 421


async def test_every_response_has_a_request_id() -> None:
    async with client_of(ScriptedGateway()) as client:
        own = await client.get("/health")
        kept = await client.post(CHAT, json=chat_body(), headers={"x-request-id": "abc-1.2:3"})
        replaced = await client.get("/nope", headers={"x-request-id": "a b"})
        refused = await client.get("/health", headers={"host": "evil.example"})
    assert own.headers["x-request-id"].startswith("req_")
    assert kept.headers["x-request-id"] == "abc-1.2:3"
    assert replaced.headers["x-request-id"].startswith("req_")
    assert refused.headers["x-request-id"].startswith("req_")


ports = st.integers(0, 65535).map(lambda port: f":{port}") | st.just("")
labels = st.from_regex(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,20}[A-Za-z0-9_])?", fullmatch=True)
names = st.lists(labels, min_size=1, max_size=4).map(".".join)


@given(name=names, dot=st.sampled_from(["", "."]), port=ports)
def test_host_names_ignore_case_port_and_trailing_dot(name: str, dot: str, port: str) -> None:
    assert host_name(f"{name}{dot}{port}") == normal_name(name)


@given(address=st.ip_addresses(), port=ports)
def test_addresses_are_normalized(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: str
) -> None:
    written = f"[{address.exploded.upper()}]" if address.version == 6 else str(address)
    assert host_name(f"{written}{port}") == str(address)


@given(text=st.text(max_size=40) | st.text(alphabet="localhost.127[]:@%/\\ 089f", max_size=24))
def test_a_parsed_host_is_exactly_a_name_and_a_port(text: str) -> None:
    name = host_name(text)
    if name is not None:
        bracketed = f"[{name}]" if ":" in name else name
        rest = text[text.index("]") + 1 :] if ":" in name else text.lower()[len(name) :]
        assert rest.lstrip(".").lstrip(":").isdecimal() or rest in ("", ".")
        assert host_name(bracketed) == name


@given(
    good=st.sampled_from(["localhost", "127.0.0.1", "[::1]"]),
    port=ports,
    bad=st.sampled_from(
        [
            "@evil.com",
            ":80@evil.com",
            " ",
            "\t",
            "/",
            "?",
            "#",
            "\\",
            ",evil.com",
            ":",
            ":x",
            ":-1",
            "%00",
            "\n",
        ]
    ),
    in_front=st.booleans(),
)
def test_a_malformed_host_is_not_trimmed(good: str, port: str, bad: str, in_front: bool) -> None:
    assert host_name(bad + good + port if in_front else good + port + bad) is None


LONG_NAME = ".".join(["a" * 60] * 5)
BAD_NAMES = [
    "",
    ".",
    "..",
    "a..b",
    "a" * 64,
    LONG_NAME,
    "ⅼocalhost",
    "user@localhost",
    "user:pw@localhost",
]
BAD_PORTS = [
    "localhost:80@evil.com",
    "localhost:",
    "localhost:99999",
    "localhost:8o",
    "localhost:８０",
    "localhost.:80.",
]
BAD_BRACKETS = [
    "::1",
    "[::1",
    "::1]",
    "[::1]x",
    "[[::1]]",
    "[fe80::1%eth0]",
    "[1.2.3.4]",
    "[localhost]",
]


@pytest.mark.parametrize("header", [*BAD_NAMES, *BAD_PORTS, *BAD_BRACKETS])
def test_a_malformed_header_is_rejected(header: str) -> None:
    assert host_name(header) is None


@pytest.mark.parametrize(
    ("host", "wildcard", "loopback"),
    [("", True, False), ("0.0.0.0", True, False), ("::", True, False)],
)
def test_wildcards_are_recognized(host: str, wildcard: bool, loopback: bool) -> None:
    assert (is_wildcard(host), is_loopback(host)) == (wildcard, loopback)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", "::1", "[::1]"])
def test_loopback_is_recognized(host: str) -> None:
    assert is_loopback(host)
    assert not is_wildcard(host)


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
    addresses = ConnectionCounter(0, trusted=trusted_networks(["10.0.0.0/8"]))
    assert addresses.has_room(PROXY)
    assert not addresses.has_room("203.0.113.9")
