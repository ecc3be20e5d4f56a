from __future__ import annotations

import asyncio

import pytest

from holdfast.errors import WorkerUnavailable
from holdfast.link.event_stream import EventRouter, EventStream
from holdfast.messages.commands import ControlAction
from holdfast.messages.events import (
    Accepted,
    Event,
    Finished,
    FinishReason,
    Rejected,
    TokenLogprob,
    TokensGenerated,
)


def finished(request_id: str = "a") -> Finished:
    return Finished(request_id=request_id, reason=FinishReason.LENGTH, prompt_tokens=1, completion_tokens=2)


def tokens(request_id: str = "a") -> TokensGenerated:
    return TokensGenerated(request_id=request_id, token_ids=(4, 5))


class Front:
    """A router of streams with room for ten plain tokens, and what the streams asked for."""

    def __init__(self) -> None:
        self.router = EventRouter()
        self.asked: list[str] = []

    def open(self, request_id: str = "a") -> EventStream:
        return self.router.open(request_id, prompt_tokens=1, control=self._steer, unread_bytes=10 * 256)

    def _steer(self, request_id: str, action: ControlAction) -> None:
        if action != "cancel" or self.router.detach(request_id):
            self.asked.append(f"{action} {request_id}")


async def test_each_event_goes_to_its_own_stream_in_order() -> None:
    front = Front()
    first, second = front.open("a"), front.open("b")
    events: list[Event] = [
        Accepted(request_id="b"),
        Accepted(request_id="a"),
        tokens("a"),
        finished("b"),
        tokens("a"),
        finished("a"),
    ]
    front.router.route(events)
    assert [event async for event in first] == [events[1], events[2], events[4], events[5]]
    assert [event async for event in second] == [events[0], events[3]]
    assert len(front.router) == 0


async def test_a_waiting_reader_is_woken() -> None:
    front = Front()
    stream = front.open()
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    front.router.route([tokens()])
    assert await reader == tokens()


async def test_a_refusal_is_the_only_event() -> None:
    front = Front()
    stream = front.open()
    refusal = Rejected(request_id="a", kind="invalid", message="no")
    front.router.route([refusal])
    assert [event async for event in stream] == [refusal]


async def test_closing_early_cancels_once_and_ends_the_iteration() -> None:
    front = Front()
    stream = front.open()
    front.router.route([Accepted(request_id="a"), tokens()])
    await stream.aclose()
    await stream.aclose()
    front.router.route([tokens(), finished()])  # what was under way is dropped
    assert [event async for event in stream] == []
    assert front.asked == ["cancel a"]


async def test_closing_after_the_end_cancels_nothing() -> None:
    front = Front()
    stream = front.open()
    front.router.route([Accepted(request_id="a"), finished()])
    _ = [event async for event in stream]
    await stream.aclose()
    assert front.asked == []


async def test_a_cancelled_reader_cancels_the_request() -> None:
    front = Front()
    stream = front.open()
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert front.asked == ["cancel a"]


async def test_the_workers_death_ends_each_stream_with_what_it_had_and_one_failure() -> None:
    front = Front()
    begun, fresh = front.open("a"), front.open("b")
    front.router.route([Accepted(request_id="a"), tokens("a")])
    front.router.fail_all("it died")
    *_, last = [event async for event in begun]
    assert isinstance(last, Finished)
    assert (last.reason, last.error, last.completion_tokens) == (FinishReason.FAILED, "it died", 2)
    assert [type(event) for event in [event async for event in fresh]] == [Accepted, Finished]
    with pytest.raises(WorkerUnavailable, match="it died"):
        front.open("c")


async def test_an_id_in_use_cannot_be_opened_twice() -> None:
    front = Front()
    front.open()
    with pytest.raises(ValueError, match="in use"):
        front.open()


async def test_a_stream_that_nobody_reads_is_paused_once_and_resumed_when_half_of_it_is_read() -> None:
    front = Front()
    stream, other = front.open("a"), front.open("b")
    front.router.route([tokens("b"), *[tokens("a")] * 5])
    assert front.asked == []
    front.router.route([tokens("a")] * 3)  # what was under way when it was told
    assert front.asked == ["pause a"]
    for _ in range(5):
        await anext(stream)
    assert front.asked == ["pause a"]
    await anext(stream)
    assert front.asked == ["pause a", "resume a"]
    await anext(other)
    assert front.asked == ["pause a", "resume a"]


async def test_a_stream_that_is_read_as_it_comes_is_never_paused() -> None:
    front = Front()
    stream = front.open()
    for _ in range(1000):
        front.router.route([tokens()])
        await anext(stream)
    assert front.asked == []


async def test_rivals_of_tokens_count() -> None:
    front = Front()
    front.open()
    scored = TokenLogprob(4, -1.0, tuple((token, -2.0) for token in range(20)))
    front.router.route([TokensGenerated(request_id="a", token_ids=(4,), logprobs=(scored,))] * 2)
    assert front.asked == ["pause a"]


async def test_a_paused_stream_that_is_closed_is_cancelled_and_never_resumed() -> None:
    front = Front()
    stream = front.open()
    front.router.route([tokens()] * 8)
    await stream.aclose()
    assert front.asked == ["pause a", "cancel a"]


async def test_a_stream_that_has_ended_is_neither_paused_nor_resumed() -> None:
    front = Front()
    stream = front.open()
    front.router.route([*[tokens()] * 5, finished()])
    front.router.route([tokens()] * 50)
    _ = [event async for event in stream]
    assert front.asked == []
