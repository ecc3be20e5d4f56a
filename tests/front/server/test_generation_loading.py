"""Requests during a load: what the client receives while waiting, and how it ends."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from holdfast.config import ServerSettings
from holdfast.errors import QueueFull, WorkerUnavailable
from holdfast.front.server import answers as server_answers
from tests.fakes.http_clients import CHAT, Exchange, chat_body, events_of
from tests.fakes.scripted_gateway import (
    MODEL,
    ScriptedDirectory,
    ScriptedGateway,
    ScriptedSessions,
    model_status,
)

LOADING = ScriptedDirectory(models=(model_status(state="loading"),))


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_answers, "HEADER_GRACE_SECONDS", 0.01)
    monkeypatch.setattr(server_answers, "KEEP_ALIVE_SECONDS", 0.01)


EMPTY = '"delta":{},"logprobs":null,"finish_reason":null}'


async def signs_of_life(exchange: Exchange, count: int) -> None:
    await exchange.until(lambda: exchange.text.count(EMPTY) >= count)


@pytest.mark.parametrize("state", ["unloaded", "loading", "stopping", "failed"])
async def test_a_stream_is_kept_alive_until_its_model_is_ready(state: str) -> None:
    gateway = ScriptedGateway(accept_when=asyncio.Event())
    exchange = Exchange(gateway, directory=ScriptedDirectory(models=(model_status(state=state),)))
    running = asyncio.create_task(exchange.run(CHAT, chat_body(stream=True)))
    await signs_of_life(exchange, 3)
    assert exchange.status == 200
    assert gateway.accept_when is not None
    gateway.accept_when.set()
    await running
    assert events_of(exchange.text)[-1] == "[DONE]"
    texts = [
        event["choices"][0]["delta"].get("content", "") for event in events_of(exchange.text)[:-1]
    ]
    assert "".join(texts) == "Hello"


async def test_a_stream_fails_if_its_model_loads_too_slowly() -> None:
    gateway = ScriptedGateway(accept_when=asyncio.Event())
    exchange = Exchange(gateway, directory=LOADING)
    running = asyncio.create_task(exchange.run(CHAT, chat_body(stream=True)))
    await signs_of_life(exchange, 1)
    gateway.refusal_at_last = WorkerUnavailable("still loading after 60 s")
    assert gateway.accept_when is not None
    gateway.accept_when.set()
    await running
    assert events_of(exchange.text)[-1]["error"]["code"] == "model_unavailable"
    assert exchange.messages[-1]["more_body"] is False


@pytest.mark.parametrize("stream", [True, False])
async def test_an_immediate_refusal_during_loading_keeps_its_status(*, stream: bool) -> None:
    gateway = ScriptedGateway(refusal=QueueFull(queued=9, limit=9, retry_after_seconds=5))
    exchange = Exchange(gateway, directory=LOADING)
    await exchange.run(CHAT, chat_body(stream=stream))
    assert exchange.status == 503


async def test_a_ready_models_stream_sends_nothing_before_acceptance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker in a long step refuses with a full queue after more than half a second, still with
    its status.
    """
    monkeypatch.setattr(server_answers, "HEADER_GRACE_SECONDS", 0.0)
    gateway = ScriptedGateway(accept_when=asyncio.Event())
    exchange = Exchange(gateway)
    running = asyncio.create_task(exchange.run(CHAT, chat_body(stream=True)))
    for _ in range(100):
        await asyncio.sleep(0)
    assert exchange.messages == []
    gateway.refusal_at_last = QueueFull(queued=9, limit=9, retry_after_seconds=5)
    assert gateway.accept_when is not None
    gateway.accept_when.set()
    await running
    assert exchange.status == 503


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_the_model_loads_ends_the_wait(*, stream: bool) -> None:
    gateway = ScriptedGateway(accept_when=asyncio.Event())
    exchange = Exchange(gateway, directory=LOADING)
    running = asyncio.create_task(exchange.run(CHAT, chat_body(stream=stream)))
    while not gateway.requests:
        await asyncio.sleep(0)
    exchange.gone.set()
    await running
    assert gateway.dropped == [gateway.request.request_id]


async def test_waiting_for_the_model_is_reported() -> None:
    gateway = ScriptedGateway(accept_when=asyncio.Event())
    exchange = Exchange(gateway, directory=LOADING)
    running = asyncio.create_task(
        exchange.run(CHAT, chat_body(stream=True, holdfast={"explain": True}))
    )
    await signs_of_life(exchange, 3)
    assert gateway.accept_when is not None
    gateway.accept_when.set()
    await running
    (explained,) = [
        event["holdfast"] for event in events_of(exchange.text)[:-1] if "holdfast" in event
    ]
    assert explained["seconds"]["accept"] >= 0.03  # a header and three comments, 10 ms apart


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_session_command_waits_for_the_model_unless_its_client_leaves(leaves: bool) -> None:
    is_loaded = asyncio.Event()
    sessions = ScriptedSessions(answers_when=is_loaded)
    exchange = Exchange(ScriptedGateway(), directory=LOADING, sessions=sessions)
    nothing: dict[str, Any] = {}
    running = asyncio.create_task(exchange.run("/v1/sessions", nothing, method="GET"))
    while not sessions.asked:
        await asyncio.sleep(0)
    if leaves:
        exchange.gone.set()
        await running
        assert exchange.text == ""
    else:
        is_loaded.set()
        await running
        assert exchange.status == 200


async def test_a_retry_gets_the_events_that_were_sent_while_the_model_was_loaded() -> None:
    gateway = ScriptedGateway(accept_when=asyncio.Event())
    server = ServerSettings(port=0)
    first = Exchange(gateway, directory=LOADING, server=server)
    body = {"model": MODEL, "input": "hello", "stream": True}
    key = {"idempotency-key": "k"}
    running = asyncio.create_task(first.run("/v1/responses", body, headers=key))
    await first.until(lambda: first.text.count("event: response.in_progress") >= 2)
    assert gateway.accept_when is not None
    gateway.accept_when.set()
    await running
    again = Exchange(gateway)
    again.app = first.app
    await again.run("/v1/responses", body, headers=key)
    assert len(gateway.requests) == 1
    told = re.findall("event: response.(.*)", again.text)
    assert told.count("created") == 1
    assert list(dict.fromkeys(told))[:3] == ["created", "in_progress", "output_item.added"]
