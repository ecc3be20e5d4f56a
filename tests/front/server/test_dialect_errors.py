from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from holdfast.errors import GenerationFailed
from holdfast.front.openai.endpoints import OPENAI
from holdfast.front.server.dialect import operation
from holdfast.front.server.services import Services
from holdfast.wire.events import FinishReason
from tests.fakes.http_clients import CHAT, Exchange, chat_body, client_of, events_of
from tests.fakes.scripted_gateway import ScriptedGateway, answer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_text_has_its_status(stream: bool) -> None:
    async with client_of(ScriptedGateway(script=[GenerationFailed("the worker died")])) as client:
        response = await client.post(CHAT, json=chat_body(stream=stream))
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the worker died"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_deadly", [False, True])
async def test_clients_are_told_not_to_retry_deadly_requests(is_deadly: bool, stream: bool) -> None:
    failure = GenerationFailed("the worker died", is_deadly=is_deadly)
    async with client_of(ScriptedGateway(script=[failure])) as client:
        response = await client.post(CHAT, json=chat_body(stream=stream))
    assert response.json()["error"]["code"] == "generation_failed"
    assert response.headers.get("x-should-retry") == ("false" if is_deadly else None)


async def test_a_failure_within_a_stream_is_an_error_without_done() -> None:
    gateway = ScriptedGateway()
    exchange = Exchange(gateway)
    gateway.script = [*answer("Hel")[:1], exchange.first_body, GenerationFailed("the worker died")]
    await exchange.run(CHAT, chat_body(stream=True))
    assert exchange.status == 200
    events = events_of(exchange.text)
    assert [event["choices"][0]["delta"] for event in events[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
    ]
    assert events[-1]["error"]["message"] == "the worker died"
    assert exchange.messages[-1]["more_body"] is False


@pytest.mark.parametrize(
    ("reason", "status"), [(FinishReason.CANCELLED, 503), (FinishReason.FAILED, 500)]
)
async def test_an_abnormal_end_is_never_a_normal_answer(reason: FinishReason, status: int) -> None:
    async with client_of(ScriptedGateway(script=answer("Hel", reason=reason))) as client:
        response = await client.post(CHAT, json=chat_body())
    assert response.status_code == status


async def test_an_error_after_the_beginning_starts_no_second_answer() -> None:
    @operation("POST", "/late")
    async def broken(request: Request, services: Services) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"a"
            raise RuntimeError("late")

        return StreamingResponse(pieces())

    late = replace(OPENAI, operations=(broken,))
    exchange = Exchange(ScriptedGateway(), dialects=[late])
    # passes on to the server, which logs it and closes the connection
    with pytest.raises(RuntimeError):
        await exchange.run("/late", {})
    assert [message["type"] for message in exchange.messages] == [
        "http.response.start",
        "http.response.body",
    ]
    assert exchange.text == "a"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("GET", CHAT, 405), ("DELETE", "/health", 405)],
)
async def test_the_frameworks_own_errors_have_the_same_form(
    method: str, path: str, status: int
) -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.request(method, path)
    assert response.status_code == status
    assert set(json.loads(response.text)["error"]) == {"message", "type", "param", "code", "advice"}
