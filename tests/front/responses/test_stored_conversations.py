from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.fakes.http_clients import client_of
from tests.fakes.scripted_gateway import ScriptedGateway, answer

CONVERSATIONS, RESPONSES = "/v1/conversations", "/v1/responses"


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text, **more}


def texts(page: Any) -> list[str]:
    return [item["content"][0]["text"] for item in page["data"]]


@pytest.fixture
def gateway() -> ScriptedGateway:
    return ScriptedGateway(script=answer("Hi"))


@pytest.fixture
async def client(gateway: ScriptedGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(gateway) as client:
        yield client


async def opened(client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post(CONVERSATIONS, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_conversation_is_opened_read_changed_and_deleted(client: httpx.AsyncClient) -> None:
    got = await opened(client, metadata={"a": "b"})
    path = f"{CONVERSATIONS}/{got['id']}"
    assert (got["object"], got["metadata"]) == ("conversation", {"a": "b"})
    assert (await client.get(path)).json() == got
    assert (await client.post(path, json={"metadata": {"c": "d"}})).json() == {
        **got,
        "metadata": {"c": "d"},
    }
    assert (await client.get(path)).json()["metadata"] == {"c": "d"}
    assert (await client.delete(path)).json() == {
        "id": got["id"],
        "object": "conversation.deleted",
        "deleted": True,
    }
    for method, end in (
        ("GET", ""),
        ("DELETE", ""),
        ("GET", "/items"),
        ("GET", "/items/msg_1"),
        ("DELETE", "/items/msg_1"),
    ):
        refused = await client.request(method, path + end)
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            404,
            "conversation_not_found",
        )


async def test_a_conversation_can_be_opened_without_a_body(client: httpx.AsyncClient) -> None:
    assert (await client.post(CONVERSATIONS)).json()["metadata"] == {}


async def test_items_are_added_listed_read_and_deleted(client: httpx.AsyncClient) -> None:
    path = f"{CONVERSATIONS}/{(await opened(client, items=[said('one')]))['id']}/items"
    added = (await client.post(path, json={"items": [said("two"), said("three")]})).json()
    assert texts(added) == ["two", "three"]
    assert (added["first_id"], added["last_id"]) == (added["data"][0]["id"], added["data"][1]["id"])
    page = (await client.get(path, params={"order": "asc", "limit": 2})).json()
    assert (texts(page), page["has_more"]) == (["one", "two"], True)
    rest = (await client.get(path, params={"order": "asc", "after": page["last_id"]})).json()
    assert (texts(rest), rest["has_more"]) == (["three"], False)
    assert texts((await client.get(path)).json()) == ["three", "two", "one"]
    item = f"{path}/{added['first_id']}"
    assert (await client.get(item)).json() == added["data"][0]
    assert (await client.delete(item)).json()["object"] == "conversation"
    refused = await client.get(item)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "item_not_found")


async def test_a_response_continues_and_extends_a_conversation(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    got = await opened(client, items=[said("one")])
    for conversation in (got["id"], {"id": got["id"]}):
        response = await client.post(
            RESPONSES, json={"input": "more", "conversation": conversation}
        )
        assert response.json()["conversation"] == {"id": got["id"]}
    items = (await client.get(f"{CONVERSATIONS}/{got['id']}/items", params={"order": "asc"})).json()
    assert texts(items) == ["one", "more", "Hi", "more", "Hi"]
    roles = [message["role"] for message in gateway.requests[-1].prompt.messages]  # type: ignore[union-attr]
    assert roles == ["user", "user", "assistant", "user"]
    refused = await client.post(
        RESPONSES, json={"input": "and?", "previous_response_id": response.json()["id"]}
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")


async def test_a_response_that_is_not_stored_still_extends_its_conversation(
    client: httpx.AsyncClient,
) -> None:
    got = await opened(client)
    response = (
        await client.post(
            RESPONSES, json={"input": "hello", "conversation": got["id"], "store": False}
        )
    ).json()
    assert texts((await client.get(f"{CONVERSATIONS}/{got['id']}/items")).json()) == ["Hi", "hello"]
    assert (await client.get(f"{RESPONSES}/{response['id']}")).status_code == 404


async def test_concurrent_responses_each_add_their_items_together(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    release = asyncio.Event()
    gateway.script = lambda request: [
        release,
        *answer(request.prompt.messages[-1]["content"].upper()),
    ]
    got = await opened(client)
    asked = [
        client.post(RESPONSES, json={"input": text, "conversation": got["id"]})
        for text in ("a", "b")
    ]
    both = [asyncio.create_task(each) for each in asked]
    await gateway.until(lambda: len(gateway.requests) == 2)
    release.set()
    await asyncio.gather(*both)
    items = texts(
        (await client.get(f"{CONVERSATIONS}/{got['id']}/items", params={"order": "asc"})).json()
    )
    assert items in (["a", "A", "b", "B"], ["b", "B", "a", "A"])


async def test_deleting_the_conversation_does_not_affect_a_running_response(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    release = asyncio.Event()
    gateway.script = [release, *answer("Hi")]
    got = await opened(client)
    asking = asyncio.create_task(
        client.post(RESPONSES, json={"input": "hello", "conversation": got["id"]})
    )
    await gateway.until(lambda: len(gateway.requests) == 1)
    await client.delete(f"{CONVERSATIONS}/{got['id']}")
    release.set()
    response = (await asking).json()
    assert response["status"] == "completed"
    assert (await client.get(f"{RESPONSES}/{response['id']}")).json() == response


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [said("x")] * 21}, "items"),
        ({"items": [{"type": "message", "role": "user"}]}, "items.0.content"),
        ({"items": [{"type": "odd"}]}, "items.0.type"),
        ({"items": [{"type": "item_reference", "id": "msg_1"}]}, "items.0.id"),
        ({"items": "x"}, "items"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {f"{number}": "" for number in range(17)}}, "metadata"),
    ],
)
async def test_an_invalid_conversation_is_refused_by_field(
    client: httpx.AsyncClient, body: Any, param: str
) -> None:
    refused = await client.post(CONVERSATIONS, json=body)
    assert refused.status_code in (400, 404)
    assert refused.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("end", "body", "param"),
    [("", {}, "metadata"), ("/items", {}, "items"), ("/items", {"items": []}, "items")],
)
async def test_an_empty_change_is_refused(
    client: httpx.AsyncClient, end: str, body: Any, param: str
) -> None:
    got = await opened(client)
    refused = await client.post(f"{CONVERSATIONS}/{got['id']}{end}", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"conversation": "conv_x"}, 404, "conversation"),
        ({"conversation": {"id": ""}}, 400, "conversation.id"),
        ({"conversation": {}}, 400, "conversation.id"),
        ({"conversation": 1}, 400, "conversation"),
        ({"conversation": "conv_x", "previous_response_id": "resp_x"}, 400, "previous_response_id"),
        ({"background": True, "store": False}, 400, "background"),
        ({"previous_response_id": "resp_x"}, 404, "previous_response_id"),
        ({"previous_response_id": ""}, 400, "previous_response_id"),
        ({"previous_response_id": 7}, 400, "previous_response_id"),
    ],
)
async def test_an_impossible_continuation_is_refused_by_field(
    client: httpx.AsyncClient, gateway: ScriptedGateway, fields: Any, status: int, param: str
) -> None:
    refused = await client.post(RESPONSES, json={"input": "hello", **fields})
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)
    assert not gateway.requests


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=99999999999999999999999999", "limit"),
        ("limit=-1", "limit"),
        ("limit=ten", "limit"),
        ("limit=", "limit"),
        ("order=up", "order"),
        ("after=msg_x", "after"),
    ],
)
async def test_an_invalid_page_is_refused_by_field(
    client: httpx.AsyncClient, query: str, param: str
) -> None:
    response = (await client.post(RESPONSES, json={"input": "hello"})).json()
    conversation = await opened(client)
    for path in (
        f"{RESPONSES}/{response['id']}/input_items",
        f"{CONVERSATIONS}/{conversation['id']}/items",
    ):
        refused = await client.get(f"{path}?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=perhaps", "stream"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=x", "starting_after"),
        ("stream=true&starting_after=99999999999999999999", "starting_after"),
    ],
)
async def test_an_invalid_stream_position_is_refused(
    client: httpx.AsyncClient, query: str, param: str
) -> None:
    response = (await client.post(RESPONSES, json={"input": "hello"})).json()
    refused = await client.get(f"{RESPONSES}/{response['id']}?{query}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_websockets_are_refused_as_unsupported(client: httpx.AsyncClient) -> None:
    upgrade = await client.get(RESPONSES, headers={"connection": "upgrade", "upgrade": "websocket"})
    assert (upgrade.status_code, upgrade.headers["allow"]) == (405, "POST")
