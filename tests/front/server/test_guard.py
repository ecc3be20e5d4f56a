from __future__ import annotations

from typing import Any

import httpx
import pytest

from holdfast.config import ServerSettings
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
async def test_a_wrong_key_has_the_message_clients_look_for(
    headers: dict[str, str],
) -> None:
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
