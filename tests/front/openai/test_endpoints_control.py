from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from holdfast.front.server.access import KeyRing, named_key, write_keys
from tests.fakes.http_clients import CHAT, MESSAGES, chat_body, client_of, message_body
from tests.fakes.scripted_gateway import ScriptedGateway, answer

CONTROL = f"{CHAT}/control"


def asked(answer_id: str, **fields: Any) -> dict[str, Any]:
    return {"id": answer_id, "action": "reasoning_end", **fields}


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat_body()), (MESSAGES, message_body())])
async def test_a_running_thought_is_ended_by_the_answers_id(
    path: str, body: dict[str, Any]
) -> None:
    goes_on = asyncio.Event()
    begun, *rest = answer("Hel", "lo")
    gateway = ScriptedGateway(script=[begun, goes_on, *rest])
    async with client_of(gateway) as client:
        answering = asyncio.create_task(client.post(path, json=body))
        await gateway.until(lambda: bool(gateway.requests))
        while not gateway.streams:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        response = await client.post(
            CONTROL, json=asked(gateway.request.request_id, model="demo/tiny")
        )
        assert (response.status_code, response.json()) == (200, {"success": True})
        assert gateway.streams[0].ended_thoughts == 1
        goes_on.set()
        assert (await answering).json()["id"] == gateway.request.request_id
        late = await client.post(CONTROL, json=asked(gateway.request.request_id))
    assert late.json() == {"success": False, "message": "no answer with this id is being generated"}


async def test_a_model_that_cannot_end_thoughts_says_so() -> None:
    goes_on = asyncio.Event()
    gateway = ScriptedGateway(script=[goes_on, *answer("Hel")])
    async with client_of(gateway) as client:
        answering = asyncio.create_task(client.post(CHAT, json=chat_body()))
        while not gateway.streams:
            await asyncio.sleep(0)
        gateway.streams[0].can_end_thoughts = False
        response = await client.post(CONTROL, json=asked(gateway.request.request_id))
        assert response.json() == {
            "success": False,
            "message": "this model has no token that ends a thought",
        }
        goes_on.set()
        await answering


@pytest.mark.parametrize(
    "body",
    [{"id": "chatcmpl-1"}, {"id": "chatcmpl-1", "action": "stop"}, {"action": "reasoning_end"}],
)
async def test_an_invalid_control_request_is_a_400(body: dict[str, Any]) -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(CONTROL, json=body)
    assert response.status_code == 400


async def test_only_the_requests_key_may_end_its_thought(tmp_path: Path) -> None:
    made = [
        named_key(name, name, is_admin=False, priority="interactive", max_requests=None)
        for name in ("alice", "bob")
    ]
    write_keys(tmp_path / "keys.json", made)
    goes_on = asyncio.Event()
    gateway = ScriptedGateway(script=[goes_on, *answer("Hel")])
    async with client_of(gateway, keys=KeyRing(str(tmp_path / "keys.json"))) as client:
        headers = {name: {"authorization": f"Bearer {name}"} for name in ("alice", "bob")}
        answering = asyncio.create_task(
            client.post(CHAT, json=chat_body(), headers=headers["alice"])
        )
        while not gateway.streams:
            await asyncio.sleep(0)
        asking = asked(gateway.request.request_id)
        assert (await client.post(CONTROL, json=asking, headers=headers["bob"])).json()[
            "success"
        ] is False
        assert (await client.post(CONTROL, json=asking, headers=headers["alice"])).json()[
            "success"
        ] is True
        goes_on.set()
        await answering
