from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from holdfast.config import ServerSettings
from holdfast.front.application import DIALECTS
from holdfast.front.server.access import KeyRing, named_key, write_keys
from holdfast.front.server.dialect import Dialect, operation
from holdfast.front.server.services import Services
from tests.fakes.http_clients import CHAT, chat_body, client_of, events_of
from tests.fakes.scripted_gateway import ScriptedGateway
from tests.fakes.scripted_gateway import answer as answer_script


@operation("POST", "/admin/ping", needs_admin=True)
async def ping(request: Request, services: Services) -> Response:
    return PlainTextResponse("pong")


ADMIN = Dialect(name="test", error=DIALECTS[0].error, operations=(ping,), prefixes=("/admin",))


def ring_of(folder: Path, *, admin: str = "") -> KeyRing:
    write_keys(
        folder / "keys.json",
        tuple(
            named_key(
                name,
                f"{name}-key",
                is_admin=name == admin,
                priority="interactive",
                max_requests=None,
            )
            for name in ("alice", "bob", "root")
        ),
    )
    return KeyRing(str(folder / "keys.json"))


async def answer(
    *,
    key: str = "",
    keys: KeyRing | None = None,
    server_key: str = "",
    address: str = "127.0.0.1",
    header: str = "",
) -> int:
    sent = {"x-api-key": key} if key else {}
    if header:
        sent[header] = "127.0.0.1"
    server = ServerSettings(api_key=server_key)
    dialects = (*DIALECTS, ADMIN)
    async with client_of(
        ScriptedGateway(), keys=keys, server=server, address=address, dialects=dialects
    ) as client:
        return (await client.post("/admin/ping", headers=sent)).status_code


async def test_without_a_key_only_the_local_machine_may_administer() -> None:
    assert await answer() == 200
    assert await answer(address="::1") == 200
    assert await answer(address="192.168.1.7") == 403


@pytest.mark.parametrize(
    "header",
    ["x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "forwarded", "x-real-ip", "via"],
)
async def test_a_proxied_request_is_not_local(header: str) -> None:
    assert await answer(header=header) == 403


async def test_a_container_cannot_administer() -> None:
    async with client_of(ScriptedGateway(), dialects=(*DIALECTS, ADMIN)) as client:
        from_container = await client.post(
            "/admin/ping", headers={"host": "host.docker.internal:8321"}
        )
        from_here = await client.post("/admin/ping", headers={"host": "localhost:8321"})
    assert (from_container.status_code, from_here.status_code) == (403, 200)


@pytest.mark.parametrize(
    ("origins", "origin", "key", "expected"),
    [
        (("*",), "https://evil.example", "", 403),
        (("*",), "null", "", 403),
        (("*",), "http://127.0.0.1:8321", "", 200),
        (("https://ui.example", "*"), "https://ui.example", "", 200),
        (("*",), "https://evil.example", "single", 200),  # the page knows the key
        ((), "https://evil.example", "single", 403),
        ((), "http://localhost:3000", "", 403),
        (("http://localhost:3000",), "http://localhost:3000", "", 200),
        ((), "app://obsidian.md", "", 403),
    ],
)
async def test_a_foreign_web_page_cannot_administer(
    origins: tuple[str, ...], origin: str, key: str, expected: int
) -> None:
    server = ServerSettings(cors_origins=origins, api_key=key)
    async with client_of(ScriptedGateway(), server=server, dialects=(*DIALECTS, ADMIN)) as client:
        answered = await client.post(
            "/admin/ping", headers={"origin": origin, "x-api-key": key or "none"}
        )
    assert answered.status_code == expected


async def test_with_keys_only_an_admin_key_may_administer(tmp_path: Path) -> None:
    keys = ring_of(tmp_path, admin="root")
    assert await answer(keys=keys) == 401
    assert await answer(keys=keys, key="alice-key") == 403
    assert await answer(keys=keys, key="root-key") == 200
    assert await answer(keys=keys, key="root-key", address="192.168.1.7") == 200


async def test_the_single_key_is_admin_until_a_named_one_is(tmp_path: Path) -> None:
    assert await answer(server_key="single", key="single") == 200
    assert await answer(server_key="single") == 401
    assert await answer(server_key="single", key="single", keys=ring_of(tmp_path)) == 200
    assert (
        await answer(server_key="single", key="single", keys=ring_of(tmp_path, admin="root")) == 403
    )


async def tenant(folder: Path, key: str, *, server_key: str = "", name: str = "") -> str:
    gateway = ScriptedGateway()
    headers = {"authorization": f"Bearer {key}", "x-holdfast-tenant": name}
    async with client_of(
        gateway, keys=KeyRing(str(folder / "keys.json")), server=ServerSettings(api_key=server_key)
    ) as client:
        response = await client.post(CHAT, json=chat_body(), headers=headers)
    assert response.status_code == 200
    return gateway.requests[-1].tenant


async def test_the_tenant_is_the_keys_name_and_survives_rotation(tmp_path: Path) -> None:
    ring_of(tmp_path)
    before = await tenant(tmp_path, "alice-key")
    assert before != await tenant(tmp_path, "bob-key")
    assert before != await tenant(tmp_path, "alice-key", name="team")
    write_keys(
        tmp_path / "keys.json",
        (named_key("alice", "fresh", is_admin=False, priority="interactive", max_requests=None),),
    )
    assert await tenant(tmp_path, "fresh") == before


async def test_a_revoked_key_still_finishes_its_stream(tmp_path: Path) -> None:
    keys, gate = ring_of(tmp_path), asyncio.Event()
    first, *rest = answer_script("Hel", "lo")
    gateway = ScriptedGateway(script=[first, gate, *rest])
    headers = {"authorization": "Bearer alice-key"}
    async with client_of(gateway, keys=keys) as client:
        running = asyncio.create_task(
            client.post(CHAT, json=chat_body(stream=True), headers=headers)
        )
        await gateway.until(lambda: bool(gateway.requests))
        write_keys(tmp_path / "keys.json", ())
        keys.reload()
        assert (await client.post(CHAT, json=chat_body(), headers=headers)).status_code == 401
        gate.set()
        stream = events_of((await running).text)
    assert (
        "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in stream[:-1]) == "Hello"
    )
    assert stream[-1] == "[DONE]"


async def test_named_keys_do_not_change_the_single_keys_tenant(tmp_path: Path) -> None:
    ring_of(tmp_path)
    gateway = ScriptedGateway()
    async with client_of(gateway, server=ServerSettings(api_key="single")) as client:
        await client.post(CHAT, json=chat_body(), headers={"x-api-key": "single"})
    assert await tenant(tmp_path, "single", server_key="single") == gateway.requests[0].tenant
    assert (
        gateway.requests[0].tenant == "3d7039cabda18e688d943f8144ba1909"
    )  # as before keys had names: existing stores use it


async def test_a_key_of_the_file_is_accepted_in_any_key_header(tmp_path: Path) -> None:
    async with client_of(ScriptedGateway(), keys=ring_of(tmp_path)) as client:
        for header, value, expected in (
            ("authorization", "Bearer alice-key", 200),
            ("x-api-key", "alice-key", 200),
            ("api-key", "bob-key", 200),
            ("x-api-key", "alice-ke", 401),
            ("x-api-key", "alice", 401),
            ("accept", "*/*", 401),
        ):
            response = await client.post(CHAT, json=chat_body(), headers={header: value})
            assert response.status_code == expected, (header, value)
        both = await client.post(
            CHAT, json=chat_body(), headers={"x-api-key": "alice-key", "api-key": "bob-key"}
        )
        assert both.status_code == 400
