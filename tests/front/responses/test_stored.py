"""Stored responses: read, followed, continued, cancelled and deleted, with real timing."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ResponsesUnavailable
from holdfast.front.records.responses import RecordKey, ResponseFile, ResponseStore
from holdfast.front.server.services import Answers
from tests.fakes.http_clients import RESPONSES, client_over, response_in
from tests.fakes.scripted_gateway import ScriptedGateway, answer, calling, scripted_services


async def created(client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post(RESPONSES, json={"input": "hello", **fields})
    assert response.status_code == 200, response.text
    return response.json()


def refusal(response: httpx.Response) -> tuple[int, Any, Any]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


async def test_a_retrieved_response_equals_the_returned_one() -> None:
    async with client_over(scripted_services(ScriptedGateway())) as client:
        got = await created(client, metadata={"a": "b"})
        assert (await client.get(f"{RESPONSES}/{got['id']}")).json() == got
        assert got["store"] is True


async def test_a_response_with_store_false_is_not_stored() -> None:
    async with client_over(scripted_services(ScriptedGateway())) as client:
        got = await created(client, store=False)
        assert refusal(await client.get(f"{RESPONSES}/{got['id']}")) == (
            404,
            "response_not_found",
            "response_id",
        )
        assert got["store"] is False


async def test_a_deleted_response_is_gone() -> None:
    async with client_over(scripted_services(ScriptedGateway())) as client:
        got = await created(client)
        deleted = await client.delete(f"{RESPONSES}/{got['id']}")
        assert deleted.json() == {"id": got["id"], "object": "response", "deleted": True}
        for response in (
            await client.get(f"{RESPONSES}/{got['id']}"),
            await client.delete(f"{RESPONSES}/{got['id']}"),
        ):
            assert refusal(response) == (404, "response_not_found", "response_id")
        refused = await client.post(
            RESPONSES, json={"input": "and?", "previous_response_id": got["id"]}
        )
        assert refusal(refused) == (404, "previous_response_not_found", "previous_response_id")


async def test_tenants_do_not_see_each_others_responses() -> None:
    async with client_over(scripted_services(ScriptedGateway())) as client:
        got = await created(client)
        item = (await client.get(f"{RESPONSES}/{got['id']}/input_items")).json()["data"][0]
        salted = await created(client, cache_salt="pepper")
        theirs = {"x-holdfast-tenant": "them"}
        path = f"{RESPONSES}/{got['id']}"
        for method, there in (
            ("GET", path),
            ("DELETE", path),
            ("POST", path + "/cancel"),
            ("GET", path + "/input_items"),
        ):
            assert (await client.request(method, there, headers=theirs)).status_code == 404
        for fields in (
            {"previous_response_id": got["id"]},
            {"input": [{"type": "item_reference", "id": item["id"]}]},
        ):
            refused = await client.post(RESPONSES, json={"input": "hi", **fields}, headers=theirs)
            assert refused.status_code == 404
        assert (await client.get(f"{RESPONSES}/{salted['id']}")).status_code == 404
        assert (
            await client.get(f"{RESPONSES}/{salted['id']}?cache_salt=pepper")
        ).status_code == 200


async def test_a_chain_has_all_inputs_and_outputs_without_instructions() -> None:
    gateway = ScriptedGateway(script=calling(("f", '{"x": 1}'), thought="hm", said="Hi"))
    async with client_over(scripted_services(gateway)) as client:
        tools = [{"type": "function", "name": "f"}]
        first = await created(
            client, tools=tools, instructions="be brief", reasoning={"summary": "auto"}
        )
        call = first["output"][-1]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
        gateway.script = answer("two")
        second = await created(
            client, input=[output], previous_response_id=first["id"], tools=tools
        )
        await created(client, input="thanks", previous_response_id=second["id"])
        assert second["previous_response_id"] == first["id"]
        assert "holdfast_thought" not in str(await response_in(client, first["id"], "completed"))
    said = [
        (message["role"], message.get("reasoning_content"), message["content"])
        for message in gateway.requests[-1].prompt.messages
    ]
    text = [{"type": "text", "text": "hello"}]
    assert said == [
        ("user", None, text),
        ("assistant", "hm", "Hi"),
        ("tool", None, "2"),
        ("assistant", None, "two"),
        ("user", None, "thanks"),
    ]
    assert gateway.requests[-1].prompt.messages[1]["tool_calls"][0]["id"] == call["call_id"]


async def test_stored_items_can_be_referenced() -> None:
    gateway = ScriptedGateway(script=calling(("f", "{}"), thought="hm"))
    async with client_over(scripted_services(gateway)) as client:
        first = await created(client, tools=[{"type": "function", "name": "f"}])
        references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        output = {
            "type": "function_call_output",
            "call_id": first["output"][1]["call_id"],
            "output": "2",
        }
        second = await created(
            client, input=[{"role": "user", "content": "hello"}, *references, output]
        )
        kept = (await client.get(f"{RESPONSES}/{second['id']}/input_items?order=asc")).json()[
            "data"
        ]
        refused = await client.post(
            RESPONSES, json={"input": [output, {"type": "item_reference", "id": "msg_x"}]}
        )
    assert [item["type"] for item in kept] == [
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
    ]
    assert kept[1:3] == first["output"]
    assert gateway.requests[-1].prompt.messages[1]["reasoning_content"] == "hm"
    assert refusal(refused) == (404, "item_not_found", "input.1.id")


async def test_clients_cannot_inject_the_fields_stored_with_an_item() -> None:
    gateway, item = ScriptedGateway(), {"role": "user", "content": "hello", "holdfast_thought": 5}
    async with client_over(scripted_services(gateway)) as client:
        first = await created(client, input=[item])
        await created(client, previous_response_id=first["id"])
        conversation = (await client.post("/v1/conversations", json={"items": [item]})).json()
        await created(client, conversation=conversation["id"])
    assert [request.prompt.messages[0]["role"] for request in gateway.requests] == ["user"] * 3  # type: ignore[union-attr]


async def test_a_reference_needs_no_type() -> None:
    gateway = ScriptedGateway()
    async with client_over(scripted_services(gateway)) as client:
        first = await created(client)
        await created(
            client, input=[{"id": first["output"][0]["id"]}, {"role": "user", "content": "and?"}]
        )
    assert gateway.requests[-1].prompt.messages[0]["content"] == "Hello"  # type: ignore[union-attr]


@pytest.mark.parametrize("reasoning", [{}, {"summary": "auto"}])
async def test_thoughts_can_be_retrieved_in_the_form_for_sending_back(
    reasoning: dict[str, str],
) -> None:
    gateway = ScriptedGateway(script=calling(thought="hm", said="Hi"))
    async with client_over(scripted_services(gateway)) as client:
        first = await created(client, reasoning=reasoning)
        path = f"{RESPONSES}/{first['id']}"
        found = (await client.get(path, params={"include[]": "reasoning.encrypted_content"})).json()
        assert "encrypted_content" not in (await client.get(path)).json()["output"][0]
        thought = {
            "type": "reasoning",
            "summary": [],
            "encrypted_content": found["output"][0]["encrypted_content"],
        }
        await created(
            client,
            input=[thought, found["output"][1], {"role": "user", "content": "and?"}],
            store=False,
        )
    assert gateway.requests[-1].prompt.messages[0]["reasoning_content"] == "hm"  # type: ignore[union-attr]


IDS = st.text(st.characters(exclude_characters="/", exclude_categories=["Cs"]), max_size=20)
VALUES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.sampled_from(["true", "asc", "desc", "20", "0", "-1", "1e9", "msg_1"]),
)
NAMES = st.sampled_from(
    ["limit", "order", "after", "stream", "starting_after", "include[]", "cache_salt", "before"]
)


@given(
    st.lists(
        st.tuples(st.sampled_from(["GET", "DELETE", "POST"]), IDS, st.dictionaries(NAMES, VALUES)),
        max_size=12,
    )
)
@settings(max_examples=20, deadline=None)
def test_arbitrary_ids_and_queries_cause_no_server_error(
    asked: list[tuple[str, str, dict[str, str]]],
) -> None:
    async def ask() -> None:
        async with client_over(scripted_services(ScriptedGateway())) as client:
            first = await created(client)
            kept = f"{RESPONSES}/{first['id']}/input_items"
            for method, name, query in asked:
                own, item = (
                    f"{RESPONSES}/{quote(name)}",
                    f"/v1/conversations/{quote(name)}/items/{quote(name)}",
                )
                for path in (own, kept, item):
                    response = await client.request(method, path, params=query)
                    assert response.status_code < 500, response.text

    asyncio.run(ask())


async def test_a_bad_item_is_named_by_its_position() -> None:
    async with client_over(scripted_services(ScriptedGateway())) as client:
        first = await created(client)
        refused = await client.post(
            RESPONSES, json={"input": [{"role": "user"}], "previous_response_id": first["id"]}
        )
    assert refusal(refused)[2] == "input.0.content"


async def test_an_unusable_file_fails_only_what_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.front.records.responses._BUSY_SECONDS", 0.0)
    gateway = ScriptedGateway()
    services = replace(
        scripted_services(gateway), answers=Answers(responses=ResponseStore(tmp_path))
    )
    async with client_over(services) as client:
        first = await created(client)
        await services.answers.responses.call(ResponseFile.totals)
        other = sqlite3.connect(tmp_path / "responses" / "responses-1.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        await created(client)
        in_need = (
            {"input": "and?", "previous_response_id": first["id"]},
            {"input": "later", "background": True},
        )
        refused = [await client.post(RESPONSES, json=fields) for fields in in_need]
        other.execute("ROLLBACK")
        other.close()
        await created(client, previous_response_id=first["id"])
    assert [refusal(response) for response in refused] == [(503, "responses_unavailable", None)] * 2
    assert all(log.has_ended for log in services.answers.resumable.named.values())


async def test_a_response_that_could_not_be_saved_is_still_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.front.records.responses._BUSY_SECONDS", 0.0)
    release = asyncio.Event()
    gateway = ScriptedGateway(script=[release, *answer("a")])
    services = replace(
        scripted_services(gateway), answers=Answers(responses=ResponseStore(tmp_path))
    )
    async with client_over(services) as client:
        got = await created(client, background=True)
        other = sqlite3.connect(tmp_path / "responses" / "responses-1.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        release.set()
        await response_in(client, got["id"], "completed")
        with pytest.raises(ResponsesUnavailable):
            # so saving the end was attempted before
            await services.answers.responses.call(ResponseFile.delete, RecordKey("", "resp_other"))
        assert (await response_in(client, got["id"], "completed"))["output"]
        assert (
            "response.completed" in (await client.get(f"{RESPONSES}/{got['id']}?stream=true")).text
        )
        other.close()


async def test_two_concurrent_requests_may_continue_one_response() -> None:
    release = asyncio.Event()
    gateway = ScriptedGateway()
    async with client_over(scripted_services(gateway)) as client:
        first = await created(client)
        gateway.script = [release, *answer("a")]
        both = [
            asyncio.create_task(created(client, input=text, previous_response_id=first["id"]))
            for text in ("1", "2")
        ]
        await gateway.until(lambda: len(gateway.requests) == 3)
        release.set()
        one, two = await asyncio.gather(*both)
        gateway.script = answer("b")
        await created(client, input="go on", previous_response_id=two["id"])
    assert one["id"] != two["id"]
    assert [message["content"] for message in gateway.requests[-1].prompt.messages][-3:] == [
        [{"type": "text", "text": "2"}],
        "a",
        "go on",
    ]
