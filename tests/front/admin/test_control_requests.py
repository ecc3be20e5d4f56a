from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.config import ServerSettings
from holdfast.front.output import PromptProgress
from holdfast.front.server.access import KeyRing, named_key, write_keys
from holdfast.wire.events import WaitReason
from tests.fakes.http_clients import (
    CHAT,
    MESSAGES,
    chat_body,
    client_of,
    events_of,
    message_body,
    named_events_of,
    served,
)
from tests.fakes.scripted_gateway import (
    MODEL,
    ScriptedDirectory,
    ScriptedGateway,
    answer,
    model_status,
)

REQUESTS = "/admin/requests"


def endless(*texts: str) -> ScriptedGateway:
    """Write this many deltas, then wait for ever."""
    return ScriptedGateway(script=[*answer(*texts)[: len(texts)], asyncio.Event()])


async def listed(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    return list((await client.get(REQUESTS)).json()["requests"])


async def test_a_running_request_is_listed_and_can_be_cancelled() -> None:
    gateway = endless("Hel", "lo")
    async with served(gateway) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        headers = {"x-request-id": "mine", "x-session-id": "agent-1"}
        async with client.stream(
            "POST", CHAT, json=chat_body(stream=True), headers=headers
        ) as stream:
            lines = stream.aiter_lines()
            while '"lo"' not in await anext(lines):
                continue
            (shown,) = await listed(client)
            assert shown.pop("age_seconds") > 0
            assert shown.pop("answer_id").startswith("chatcmpl-")
            del shown["tokens_per_second"]  # it depends on the machine
            assert shown == {
                "id": "mine",
                "model": MODEL,
                "state": "writing",
                "waits_for": None,
                "path": CHAT,
                "key": "",
                "client": "127.0.0.1",
                "session_id": "agent-1",
                "prompt_tokens": 7,
                "prefilled_tokens": 0,
                "cached_tokens": 0,
                "answer_tokens": 2,
            }
            assert (await client.delete(f"{REQUESTS}/mine")).json() == {
                "id": "mine",
                "cancelled": True,
            }
            rest = "\n".join([line async for line in lines])
        *_, error = [event for event in events_of(rest.strip()) if event != "[DONE]"]
        assert (error["error"]["code"], error["error"]["message"]) == (
            "request_cancelled",
            "the server's administrator has cancelled this request",
        )
        assert await listed(client) == []
        assert gateway.closed == [gateway.request.request_id]


async def test_health_and_the_list_say_what_a_request_waits_for() -> None:
    gateway = endless("Hel")
    directory = ScriptedDirectory(models=(model_status(waits={}),))
    async with (
        served(gateway, directory=directory) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as client,
    ):
        body = chat_body(stream=True)
        headers = {"x-request-id": "mine"}
        async with client.stream("POST", CHAT, json=body, headers=headers) as stream:
            lines = stream.aiter_lines()
            while '"Hel"' not in await anext(lines):
                continue
            sequence = f"{gateway.request.request_id}/0"
            directory.models = (
                model_status(waits={sequence: WaitReason.READER, "b/0": WaitReason.DISK}),
            )
            (shown,) = await listed(client)
            (model,) = (await client.get("/health")).json()["models"]
    assert shown["waits_for"] == "reader"
    assert [(each["id"], each["waits_for"]) for each in model["waiting"]] == [("mine", "reader")]


async def test_the_cached_part_of_a_prompt_is_listed_once_known() -> None:
    gateway = endless("Hel")
    async with (
        served(gateway) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as client,
        client.stream("POST", CHAT, json=chat_body(stream=True)) as stream,
    ):
        lines = stream.aiter_lines()
        while '"Hel"' not in await anext(lines):
            continue
        gateway.streams[0].cached_tokens = 5
        (shown,) = await listed(client)
    assert (shown["cached_tokens"], shown["prompt_tokens"]) == (5, 7)


async def test_a_cancelled_whole_answer_gets_its_protocols_error() -> None:
    async with (
        served(endless("Hel")) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as client,
    ):
        asked = [
            asyncio.create_task(
                client.post(MESSAGES, json=message_body(), headers={"x-request-id": "same"})
            )
            for _ in range(2)
        ]
        while len(found := await listed(client)) < 2:
            continue
        assert [each["id"] for each in found] == ["same", "same.2"]
        for each in found:
            assert (await client.delete(f"{REQUESTS}/{each['id']}")).status_code == 200
        for answered in await asyncio.gather(*asked):
            assert answered.status_code == 403
            assert answered.json()["type"] == "error"
            assert "cancelled" in answered.json()["error"]["message"]


async def test_a_cancelled_messages_stream_ends_with_an_error_event() -> None:
    async with (
        served(endless("Hel")) as url,
        httpx.AsyncClient(base_url=url, trust_env=False) as client,
    ):
        asked = asyncio.create_task(client.post(MESSAGES, json=message_body(stream=True)))
        while not (found := [each for each in await listed(client) if each["state"] == "writing"]):
            continue
        await client.delete(f"{REQUESTS}/{found[0]['id']}")
        name, event = named_events_of((await asked).text)[-1]
        assert (name, "cancelled" in event["error"]["message"]) == ("error", True)


async def test_waiting_requests_and_embeddings_have_different_states() -> None:
    gateway = ScriptedGateway(accept_when=asyncio.Event())
    async with served(gateway) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        asked = [
            asyncio.create_task(client.post(CHAT, json=chat_body())),
            asyncio.create_task(client.post("/v1/embeddings", json={"model": MODEL, "input": "x"})),
        ]
        while len(found := await listed(client)) < 2:
            continue
        assert {each["path"]: each["state"] for each in found} == {
            CHAT: "waiting",
            "/v1/embeddings": "reading",
        }
        for each in found:
            await client.delete(f"{REQUESTS}/{each['id']}")
        assert {answered.status_code for answered in await asyncio.gather(*asked)} == {403}


@pytest.mark.parametrize(
    ("method", "path"), [("GET", REQUESTS), ("DELETE", f"{REQUESTS}/x"), ("GET", "/admin/store")]
)
async def test_only_administrators_are_allowed(method: str, path: str) -> None:
    keyed = ServerSettings(api_key="k")
    async with client_of(ScriptedGateway(), server=keyed) as client:
        assert (await client.request(method, path)).status_code == 401
        allowed = await client.request(method, path, headers={"authorization": "Bearer k"})
        assert allowed.status_code in (200, 404)
    async with client_of(ScriptedGateway()) as client:
        refused = await client.request(method, path, headers={"x-forwarded-for": "192.0.2.1"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_only")


async def test_an_unknown_request_cannot_be_cancelled() -> None:
    async with client_of(ScriptedGateway()) as client:
        refused = await client.delete(f"{REQUESTS}/none")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "request_not_found")


async def test_the_prefill_progress_of_a_long_prompt_is_listed() -> None:
    progress = PromptProgress(index=0, total_tokens=7, cached_tokens=0, read_tokens=3, seconds=0.5)
    gateway = ScriptedGateway(script=[progress, asyncio.Event()])
    async with served(gateway) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        body = chat_body(stream=True, return_progress=True)
        async with client.stream("POST", CHAT, json=body) as stream:
            lines = stream.aiter_lines()
            while "prompt_progress" not in await anext(lines):
                continue
            (shown,) = await listed(client)
            assert (shown["state"], shown["prefilled_tokens"], shown["prompt_tokens"]) == (
                "reading",
                3,
                7,
            )


async def test_an_ordinary_key_sees_its_own_requests_only(tmp_path: Path) -> None:
    named = [
        named_key(name, name, is_admin=name == "root", priority="interactive", max_requests=None)
        for name in ("alice", "bob", "root")
    ]
    write_keys(tmp_path / "keys.json", named)
    keys = KeyRing(str(tmp_path / "keys.json"))
    async with client_of(endless("Hel", "lo"), keys=keys) as client:

        async def seen_by(name: str) -> list[str]:
            answered = await client.get(REQUESTS, headers={"x-api-key": name})
            return sorted(each["key"] for each in answered.json()["requests"] if each["model"])

        asking = [
            asyncio.create_task(client.post(CHAT, json=chat_body(), headers={"x-api-key": name}))
            for name in ("alice", "bob")
        ]
        while len(await seen_by("root")) < 2:
            await asyncio.sleep(0)
        assert await seen_by("alice") == ["alice"]
        assert await seen_by("root") == ["alice", "bob"]
        (request,) = (await client.get(REQUESTS, headers={"x-api-key": "bob"})).json()["requests"]
        refused = await client.delete(f"{REQUESTS}/{request['id']}", headers={"x-api-key": "alice"})
        for task in asking:
            task.cancel()
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_only")
