"""Background responses, resumed streams, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from holdfast.config import LimitsSettings, ResponsesSettings
from holdfast.errors import GenerationFailed, PromptTooLong, QueueFull
from holdfast.front.application import create_application
from holdfast.front.output import TextDelta
from holdfast.front.records.responses import ResponseStore
from holdfast.front.server.services import Answers
from tests.fakes.http_clients import RESPONSES, Exchange, client_over, response_in, served
from tests.fakes.scripted_gateway import (
    ScriptedDirectory,
    ScriptedGateway,
    answer,
    model_status,
    scripted_services,
)

TERMINAL = {"response.completed", "response.incomplete", "response.failed"}


def parts(*texts: str, then: asyncio.Event | None = None, rest: str = "") -> Any:
    """A script that pauses after the texts until released."""
    whole = answer(*texts, rest)
    return [*whole[: len(texts)], *([then] if then else []), *whole[len(texts) :]]


def events(text: str) -> list[Any]:
    return [json.loads(frame.partition("data: ")[2]) for frame in text.split("\n\n") if frame]


async def begun(client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post(RESPONSES, json={"input": "hello", "background": True, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_background_response_is_returned_before_it_is_generated() -> None:
    release = asyncio.Event()
    async with client_over(
        scripted_services(ScriptedGateway(script=parts("a", then=release, rest="b")))
    ) as client:
        got = await begun(client)
        assert (got["status"], got["background"], got["output"]) == ("queued", True, [])
        assert (await response_in(client, got["id"], "in_progress"))["output"] == []
        release.set()
        done = await response_in(client, got["id"], "completed")
    assert done["output"][0]["content"][0]["text"] == "ab"


async def test_its_events_begin_as_queued_and_can_be_resumed_anywhere() -> None:
    async with client_over(
        scripted_services(ScriptedGateway(script=answer("a", "b", "c")))
    ) as client:
        text = (
            await client.post(RESPONSES, json={"input": "hi", "background": True, "stream": True})
        ).text
        streamed = events(text)
        assert [event["type"] for event in streamed[:3]] == [
            "response.created",
            "response.queued",
            "response.in_progress",
        ]
        assert [event["response"]["status"] for event in streamed[:3]] == [
            "queued",
            "queued",
            "in_progress",
        ]
        assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))
        path = f"{RESPONSES}/{streamed[0]['response']['id']}?stream=true"
        assert (await client.get(path)).text == text
        for number in range(len(streamed)):
            again = events((await client.get(f"{path}&starting_after={number}")).text)
            assert again == streamed[number + 1 :]


async def test_two_clients_resume_a_running_stream() -> None:
    release = asyncio.Event()
    gateway = ScriptedGateway(script=parts("a", "b", then=release, rest="c"))
    async with served(gateway) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        got = await begun(client)
        path = f"{RESPONSES}/{got['id']}"

        async def follow(after: int) -> list[Any]:
            async with client.stream("GET", f"{path}?stream=true&starting_after={after}") as stream:
                text = ""
                async for piece in stream.aiter_text():
                    text += piece
                    if '"delta":"b"' in text:
                        release.set()
            return events(text)

        one, two = await asyncio.gather(follow(0), follow(4))
    assert one[0]["sequence_number"] == 1
    assert two[0]["sequence_number"] == 5
    assert one[4:] == two
    assert one[-1]["type"] == "response.completed"


async def test_followers_are_kept_alive_without_counted_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.front.server.answers.HEADER_GRACE_SECONDS", 0.002)
    monkeypatch.setattr("holdfast.front.server.answers.KEEP_ALIVE_SECONDS", 0.002)
    release = asyncio.Event()
    async with (
        served(ScriptedGateway(script=parts("a", then=release, rest="b"))) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        path = f"{RESPONSES}/{(await begun(client))['id']}?stream=true"
        async with client.stream("GET", path) as stream:
            text = ""
            async for piece in stream.aiter_text():
                text += piece
                if text.count(": keep-alive\n\n") == 2:
                    release.set()
        told = events(text.replace(": keep-alive\n\n", ""))
        assert told == events((await client.get(path)).text)


async def test_leaving_a_background_stream_does_not_cancel_it() -> None:
    release = asyncio.Event()
    services = scripted_services(ScriptedGateway(script=parts("a", then=release, rest="b")))
    app = create_application(services)
    exchange = Exchange(ScriptedGateway())
    exchange.app = app
    leaving = asyncio.create_task(
        exchange.run(RESPONSES, {"input": "hi", "background": True, "stream": True})
    )
    await exchange.until(lambda: "delta" in exchange.text)
    exchange.gone.set()
    await leaving
    response_id = events(exchange.text.partition("\n\n")[0])[0]["response"]["id"]
    release.set()
    async with client_over(services) as client:
        assert (await response_in(client, response_id, "completed"))["output"][0]["content"][0][
            "text"
        ] == "ab"


async def test_leaving_any_other_stream_cancels_and_keeps_it() -> None:
    gateway = ScriptedGateway(script=parts("a", then=asyncio.Event()))
    services = scripted_services(gateway)
    exchange = Exchange(gateway)
    exchange.app = create_application(services)
    leaving = asyncio.create_task(exchange.run(RESPONSES, {"input": "hi", "stream": True}))
    await exchange.until(lambda: '"delta":"a"' in exchange.text)
    exchange.gone.set()
    await leaving
    assert gateway.closed
    async with client_over(services) as client:
        response_id = events(exchange.text.partition("\n\n")[0])[0]["response"]["id"]
        kept = (await client.get(f"{RESPONSES}/{response_id}")).json()
        assert (kept["status"], kept["output"][0]["status"]) == ("cancelled", "incomplete")
        assert kept["output"][0]["content"][0]["text"] == "a"
        again = events((await client.get(f"{RESPONSES}/{response_id}?stream=true")).text)
    assert again[-1]["response"]["status"] == "cancelled"


async def test_cancelling_ends_work_and_streams_and_is_idempotent() -> None:
    gateway = ScriptedGateway(script=parts("a", then=asyncio.Event()))
    services = scripted_services(gateway)
    async with client_over(services) as client:
        got = await begun(client)
        path = f"{RESPONSES}/{got['id']}"
        await response_in(client, got["id"], "in_progress")
        following = asyncio.create_task(client.get(f"{path}?stream=true"))
        await asyncio.sleep(0.001)
        cancelled = (await client.post(f"{path}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        assert events((await following).text)[-1]["response"]["status"] == "cancelled"
        await gateway.until(lambda: bool(gateway.closed))
        assert (await client.post(f"{path}/cancel")).json() == cancelled
        assert (await client.get(path)).json() == cancelled
        assert not services.answers.resumable.named


async def test_only_background_responses_can_be_cancelled() -> None:
    async with client_over(scripted_services(ScriptedGateway())) as client:
        got = (await client.post(RESPONSES, json={"input": "hello"})).json()
        refused = await client.post(f"{RESPONSES}/{got['id']}/cancel")
        done = await begun(client)
        await response_in(client, done["id"], "completed")
        assert (await client.post(f"{RESPONSES}/{done['id']}/cancel")).json()[
            "status"
        ] == "completed"
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_id")


async def test_a_running_response_that_is_deleted_stays_deleted() -> None:
    gateway = ScriptedGateway(script=parts("a", then=asyncio.Event()))
    services = scripted_services(gateway)
    async with client_over(services) as client:
        got = await begun(client)
        assert (await client.delete(f"{RESPONSES}/{got['id']}")).status_code == 200
        await gateway.until(lambda: bool(gateway.closed))
        assert (await client.get(f"{RESPONSES}/{got['id']}")).status_code == 404
        assert not services.answers.resumable.named


async def test_a_running_response_cannot_be_continued() -> None:
    async with client_over(
        scripted_services(ScriptedGateway(script=parts("a", then=asyncio.Event())))
    ) as client:
        got = await begun(client)
        refused = await client.post(
            RESPONSES, json={"input": "and?", "previous_response_id": got["id"]}
        )
    assert (refused.status_code, refused.json()["error"]["code"]) == (
        400,
        "previous_response_in_progress",
    )


async def test_a_refused_response_is_not_stored() -> None:
    for refusal, status in (
        (PromptTooLong(prompt_tokens=9, context_tokens=8), 400),
        (QueueFull(queued=1, limit=1, retry_after_seconds=1), 503),
    ):
        services = scripted_services(ScriptedGateway(refusal=refusal))
        async with client_over(services) as client:
            for fields in (
                {},
                {"stream": True},
                {"background": True},
                {"background": True, "stream": True},
            ):
                response = await client.post(RESPONSES, json={"input": "hello", **fields})
                assert response.status_code == status, fields
            assert await services.answers.responses.call(lambda file: file.totals()) == (0, 0)
            assert not services.answers.resumable.named


async def test_a_failed_response_is_stored_as_failed() -> None:
    script = [TextDelta(index=0, text="a", token_ids=(1,)), GenerationFailed("the device broke")]
    async with client_over(scripted_services(ScriptedGateway(script=script))) as client:
        got = await begun(client)
        failed = await response_in(client, got["id"], "failed")
        streamed = events((await client.get(f"{RESPONSES}/{got['id']}?stream=true")).text)
    assert failed["error"]["message"] == "the device broke"
    assert streamed[-1]["type"] == "response.failed"


async def test_a_response_waits_for_its_model_and_fails_with_it() -> None:
    accepted = asyncio.Event()
    gateway = ScriptedGateway(accept_when=accepted)
    services = scripted_services(
        gateway, directory=ScriptedDirectory(models=(model_status(state="loading"),))
    )
    async with client_over(services) as client:
        got = await begun(client)
        assert (await client.get(f"{RESPONSES}/{got['id']}")).json()["status"] == "queued"
        accepted.set()
        await response_in(client, got["id"], "completed")
        accepted.clear()
        gateway.refusal_at_last = PromptTooLong(prompt_tokens=9, context_tokens=8)
        got = await begun(client)
        accepted.set()
        assert (await response_in(client, got["id"], "failed"))["error"][
            "code"
        ] == "context_length_exceeded"


async def test_the_number_of_background_responses_is_limited() -> None:
    store = ResponseStore(limits=ResponsesSettings(max_background=1))
    services = replace(
        scripted_services(ScriptedGateway(script=parts("a", then=asyncio.Event()))),
        answers=Answers(responses=store),
    )
    async with client_over(services) as client:
        await begun(client)
        refused = await client.post(RESPONSES, json={"input": "hello", "background": True})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["type"]) == (
        429,
        "background",
        "rate_limit_error",
    )
    assert int(refused.headers["retry-after"]) >= 1


async def test_a_background_response_beyond_a_limit_is_refused_even_if_its_model_must_be_loaded() -> (
    None
):
    services = scripted_services(
        ScriptedGateway(accept_when=asyncio.Event()),
        directory=ScriptedDirectory(models=(model_status(state="loading"),)),
        limits=LimitsSettings(max_requests_per_address=1),
    )
    async with client_over(services) as client:
        await begun(client)
        for fields in ({}, {"stream": True}):
            refused = await client.post(
                RESPONSES, json={"input": "hello", "background": True, **fields}
            )
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                429,
                "rate_limit_exceeded",
            )
        assert len(services.answers.resumable.named) == 1


async def test_background_responses_are_failed_when_the_server_stops() -> None:
    services = scripted_services(ScriptedGateway(script=parts("a", then=asyncio.Event())))
    app = create_application(services)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8321"
    ) as client:
        got = await begun(client)
        await response_in(client, got["id"], "in_progress")
        await services.answers.resumable.close()
        failed = (await client.get(f"{RESPONSES}/{got['id']}")).json()
    await services.answers.responses.close()
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_is_overloaded")


async def test_a_whole_answer_has_its_events_too() -> None:
    async with client_over(scripted_services(ScriptedGateway(script=answer("a", "b")))) as client:
        got = (await client.post(RESPONSES, json={"input": "hello"})).json()
        streamed = events((await client.get(f"{RESPONSES}/{got['id']}?stream=true")).text)
    assert [
        event["delta"] for event in streamed if event["type"] == "response.output_text.delta"
    ] == ["a", "b"]
    assert streamed[-1]["response"] == got
    assert {event["type"] for event in streamed} & TERMINAL == {"response.completed"}
