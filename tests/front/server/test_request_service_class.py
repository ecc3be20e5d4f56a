"""The flow and priority that a worker gets from key, headers and body."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.front.server.access import KeyRing, named_key, write_keys
from holdfast.wire.requests import ServiceClass
from tests.fakes.http_clients import CHAT, chat_body, client_of
from tests.fakes.scripted_gateway import ScriptedGateway


async def service(
    folder: Path, *, key: str = "", body: dict[str, Any] | None = None, **headers: str
) -> ServiceClass:
    gateway = ScriptedGateway()
    keys = None
    if key:
        made = [
            named_key("fast", "fast", is_admin=False, priority="interactive", max_requests=None)
        ]
        made.append(named_key("slow", "slow", is_admin=False, priority="batch", max_requests=None))
        write_keys(folder / "keys.json", made)
        keys, headers["x_api_key"] = KeyRing(str(folder / "keys.json")), key
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with client_of(gateway, keys=keys) as client:
        response = await client.post(CHAT, json=chat_body(**(body or {})), headers=sent)
    assert response.status_code == 200, response.text
    return gateway.requests[0].service


@pytest.mark.parametrize(
    ("key", "body", "header", "expected"),
    [
        ("", {}, "", "interactive"),
        ("", {"service_tier": "flex"}, "", "batch"),
        ("", {"service_tier": "priority"}, "", "interactive"),
        ("", {"priority": 3}, "", "batch"),
        ("", {"priority": -3}, "", "interactive"),
        ("", {}, "batch", "batch"),
        ("fast", {}, "", "interactive"),
        ("slow", {}, "", "batch"),
        # requests cannot exceed their key's priority
        ("slow", {"service_tier": "priority"}, "interactive", "batch"),
        ("fast", {"service_tier": "flex"}, "interactive", "batch"),
    ],
)
async def test_key_header_and_body_may_each_lower_the_priority(
    tmp_path: Path, key: str, body: dict[str, Any], header: str, expected: str
) -> None:
    headers = {"x_holdfast_priority": header} if header else {}
    assert (await service(tmp_path, key=key, body=body, **headers)).priority == expected


async def test_a_flow_belongs_to_the_key_whatever_salt_or_header(tmp_path: Path) -> None:
    plain = (await service(tmp_path, key="fast")).flow
    assert (
        plain
        == (
            await service(tmp_path, key="fast", body={"cache_salt": "x"}, x_holdfast_tenant="other")
        ).flow
    )
    assert plain != (await service(tmp_path, key="slow")).flow
    keyless = (await service(tmp_path)).flow
    assert keyless == (await service(tmp_path, body={"cache_salt": "x"})).flow
    assert keyless != (await service(tmp_path, x_holdfast_tenant="team")).flow


async def test_an_unknown_priority_is_refused() -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(
            CHAT, json=chat_body(), headers={"x-holdfast-priority": "urgent"}
        )
    assert response.status_code == 400
    assert "interactive or batch" in response.text
