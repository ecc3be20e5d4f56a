from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from holdfast.errors import GenerationFailed
from holdfast.front.openai.answer import CompletionAnswer
from holdfast.front.server import answers as server_answers
from holdfast.front.server.answers import EventWriter
from tests.fakes.http_clients import CHAT, Exchange, chat_body
from tests.fakes.scripted_gateway import ScriptedGateway, answer

FORM = CompletionAnswer(answer_id="a", model="m", version="1", shows_logprobs=False)


class Socket:
    """Records writes, and lets the producer wait for a number of writes."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self._waiting: list[tuple[int, asyncio.Event]] = []

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        for count, event in self._waiting:
            if len(self.bodies) >= count:
                event.set()

    async def writes(self, count: int) -> None:
        event = asyncio.Event()
        self._waiting.append((count, event))
        await event.wait()

    @property
    def bodies(self) -> list[bytes]:
        return [
            message["body"] for message in self.messages if message["type"] == "http.response.body"
        ]


async def write(opening: bytes, produce: Callable[[Socket], AsyncIterator[bytes]]) -> Socket:
    out = Socket()

    async def events() -> AsyncIterator[bytes]:
        yield opening
        async for event in produce(out):
            yield event

    await EventWriter(out.send, FORM, events()).run()
    assert out.messages[0]["type"] == "http.response.start"
    assert [message["more_body"] for message in out.messages[1:]] == [True] * (
        len(out.messages) - 2
    ) + [False]
    return out


async def test_ready_events_are_written_together_with_the_opening() -> None:
    async def produce(_: Socket) -> AsyncIterator[bytes]:
        for event in (b"a", b"b", b"c"):
            yield event

    assert (await write(b"o", produce)).bodies == [b"oabc"]


async def test_an_event_is_written_without_waiting_for_the_next() -> None:
    async def produce(out: Socket) -> AsyncIterator[bytes]:
        yield b"a"
        await out.writes(1)
        yield b"b"
        await out.writes(2)

    assert (await write(b"", produce)).bodies == [b"a", b"b", b""]


async def test_comments_are_sent_during_a_long_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_answers, "HEADER_GRACE_SECONDS", 0.01)
    monkeypatch.setattr(server_answers, "KEEP_ALIVE_SECONDS", 0.01)

    async def produce(out: Socket) -> AsyncIterator[bytes]:
        await out.writes(3)
        yield b"a"

    bodies = (await write(b"o", produce)).bodies
    assert bodies[:3] == [b"o", FORM.keep_alive(), FORM.keep_alive()]
    assert b"a" in b"".join(bodies[3:])


async def test_a_late_opening_is_written_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_answers, "HEADER_GRACE_SECONDS", 0.01)
    out = Socket()

    async def events() -> AsyncIterator[bytes]:
        await out.writes(1)
        yield b"o"
        await out.writes(2)

    await EventWriter(out.send, FORM, events()).run()
    assert out.bodies == [FORM.keep_alive(), b"o", b""]


async def test_a_failure_before_the_first_write_is_raised() -> None:
    async def fail() -> AsyncIterator[bytes]:
        yield b"o"
        raise GenerationFailed("early")

    out = Socket()
    with pytest.raises(GenerationFailed):
        await EventWriter(out.send, FORM, fail()).run()
    assert out.messages == []


async def test_a_cancelled_writer_closes_its_event_source() -> None:
    has_ended = asyncio.Event()

    async def wait() -> AsyncIterator[bytes]:
        yield b"o"
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()

    running = asyncio.create_task(EventWriter(Socket().send, FORM, wait()).run())
    for _ in range(3):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert has_ended.is_set()


async def test_deltas_written_together_are_separate_events() -> None:
    exchange = Exchange(ScriptedGateway(script=answer("a", "b", "c")))
    await exchange.run(CHAT, chat_body(stream=True))
    assert len(exchange.writes) == 1
    assert exchange.text.count("data: ") == 1 + 3 + 1 + 1
    assert exchange.text.endswith("data: [DONE]\n\n")


async def test_an_unread_response_pauses_its_event_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_answers, "MOST_READY_BYTES", 100)
    reads = asyncio.Event()
    made = written = 0

    async def send(message: Any) -> None:
        nonlocal written
        if message["type"] == "http.response.body":
            await reads.wait()
            written += len(message["body"])

    async def events() -> AsyncIterator[bytes]:
        nonlocal made
        yield b"o"
        for _ in range(1000):
            yield b"0123456789"
            made += 10
            await asyncio.sleep(0)

    writing = asyncio.create_task(EventWriter(send, FORM, events()).run())
    for _ in range(2000):
        await asyncio.sleep(0)
    assert made <= 200
    reads.set()
    await writing
    assert written == 10_001
