from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from holdfast.front.link.event_stream import EventStream, RequestEvent
from holdfast.wire.commands import SequenceControl, ThoughtLimit
from holdfast.wire.events import (
    Accepted,
    CacheReport,
    Finished,
    FinishReason,
    PrefillFinished,
    PromptRead,
    Rejected,
    Timings,
    TokenLogprob,
    TokensGenerated,
)


def finished(request_id: str = "a") -> Finished:
    return Finished(
        request_id=request_id, reason=FinishReason.LENGTH, prompt_tokens=1, completion_tokens=2
    )


def tokens(request_id: str = "a") -> TokensGenerated:
    return TokensGenerated(request_id=request_id, token_ids=(4, 5))


class Front:
    """Streams that may have ten unread tokens, by id, and the commands they sent."""

    def __init__(self) -> None:
        self.streams: dict[str, EventStream] = {}
        self.asked: list[str] = []

    def open(self, request_id: str = "a") -> EventStream:
        stream = EventStream(
            request_id, control=self._control, unread_bytes=10 * 256, prompt_tokens=1
        )
        self.streams[request_id] = stream
        return stream

    def route(self, events: Sequence[RequestEvent]) -> None:
        for event in events:
            self.streams[event.request_id].push(event)

    def _control(self, command: SequenceControl | ThoughtLimit) -> None:
        assert isinstance(command, SequenceControl)
        self.asked.append(f"{command.action} {command.request_id}")


async def test_a_waiting_reader_is_woken() -> None:
    front = Front()
    stream = front.open()
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    front.route([tokens()])
    assert await reader == tokens()


async def test_a_refusal_is_the_only_event() -> None:
    front = Front()
    stream = front.open()
    refusal = Rejected(request_id="a", kind="invalid", message="no")
    front.route([refusal])
    assert [event async for event in stream] == [refusal]


async def test_closing_early_cancels_once_and_ends_the_iteration() -> None:
    front = Front()
    stream = front.open()
    front.route([Accepted(request_id="a"), tokens()])
    await stream.aclose()
    await stream.aclose()
    front.route([tokens(), finished()])  # events on their way are dropped
    assert [event async for event in stream] == []
    assert front.asked == ["cancel a"]


async def test_closing_after_the_end_cancels_nothing() -> None:
    front = Front()
    stream = front.open()
    front.route([Accepted(request_id="a"), finished()])
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


async def test_a_failure_follows_the_events_received_before_it() -> None:
    front = Front()
    begun, fresh = front.open("a"), front.open("b")
    front.route([Accepted(request_id="a"), tokens("a")])
    for stream in (begun, fresh):
        stream.fail("it died")
    *_, last = [event async for event in begun]
    assert isinstance(last, Finished)
    assert (last.reason, last.error, last.completion_tokens) == (FinishReason.FAILED, "it died", 2)
    assert [type(event) for event in [event async for event in fresh]] == [Accepted, Finished]


async def test_an_event_repeated_by_a_second_worker_arrives_once() -> None:
    front = Front()
    stream = front.open()
    began = PrefillFinished(
        request_id="a", cache_report=CacheReport(ram_tokens=3), timings=Timings(prefill_seconds=2.0)
    )
    front.route([Accepted(request_id="a"), began, tokens()])
    stream.resume()
    again = PrefillFinished(
        request_id="a", cache_report=CacheReport(disk_tokens=1), timings=Timings()
    )
    front.route([Accepted(request_id="a"), again, tokens(), finished()])
    events = [event async for event in stream]
    assert [type(event) for event in events] == [
        Accepted,
        PrefillFinished,
        TokensGenerated,
        TokensGenerated,
        Finished,
    ]
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.cache_report, end.timings.prefill_seconds, end.resumptions) == (
        began.cache_report,
        2.0,
        1,
    )


async def test_an_answer_begun_by_the_second_worker_has_its_report() -> None:
    front = Front()
    stream = front.open()
    front.route([Accepted(request_id="a")])
    stream.resume()
    front.route(
        [
            Accepted(request_id="a"),
            msgspec.structs.replace(finished(), cache_report=CacheReport(disk_tokens=1)),
        ]
    )
    *_, end = [event async for event in stream]
    assert isinstance(end, Finished)
    assert (end.cache_report.disk_tokens, end.resumptions) == (1, 1)


async def test_a_refusal_by_the_second_worker_fails_an_accepted_request() -> None:
    front = Front()
    stream = front.open()
    front.route([Accepted(request_id="a"), tokens()])
    stream.resume()
    front.route([Rejected(request_id="a", kind="too_large", message="no room")])
    *_, end = [event async for event in stream]
    assert isinstance(end, Finished)
    assert (end.reason, end.error, end.completion_tokens) == (FinishReason.FAILED, "no room", 2)


async def test_an_unread_stream_is_paused_and_resumed_when_half_read() -> None:
    front = Front()
    stream, other = front.open("a"), front.open("b")
    front.route([tokens("b"), *[tokens("a")] * 5])
    assert front.asked == []
    front.route([tokens("a")] * 3)  # events on their way when it was paused
    assert front.asked == ["pause a"]
    for _ in range(5):
        await anext(stream)
    assert front.asked == ["pause a"]
    await anext(stream)
    assert front.asked == ["pause a", "resume a"]
    await anext(other)
    assert front.asked == ["pause a", "resume a"]


async def test_resuming_a_stream_waits_until_enough_is_read() -> None:
    front = Front()
    stream = front.open()
    stream.pause()
    stream.pause()
    assert (front.asked, stream.is_paused) == (["pause a"], True)
    stream.unpause()
    assert (front.asked, stream.is_paused) == (["pause a", "resume a"], False)
    front.route([tokens()] * 8)
    stream.pause()
    for _ in range(8):
        await anext(stream)
    assert front.asked == ["pause a", "resume a", "pause a"]
    stream.unpause()
    assert front.asked == ["pause a", "resume a", "pause a", "resume a"]


async def test_a_finished_stream_is_not_paused() -> None:
    front = Front()
    stream = front.open()
    front.route([Rejected(request_id="a", kind="invalid", message="no")])
    stream.pause()
    assert front.asked == []


async def test_a_stream_read_promptly_is_never_paused() -> None:
    front = Front()
    stream = front.open()
    for _ in range(1000):
        front.route([tokens()])
        await anext(stream)
    assert front.asked == []


async def test_log_probabilities_count_as_unread_bytes() -> None:
    front = Front()
    front.open()
    scored = TokenLogprob(4, -1.0, tuple((token, -2.0) for token in range(20)))
    front.route([TokensGenerated(request_id="a", token_ids=(4,), logprobs=(scored,))] * 2)
    assert front.asked == ["pause a"]


async def test_closing_a_paused_stream_cancels_it_without_resuming() -> None:
    front = Front()
    stream = front.open()
    front.route([tokens()] * 8)
    await stream.aclose()
    assert front.asked == ["pause a", "cancel a"]


async def test_a_finished_stream_is_neither_paused_nor_resumed() -> None:
    front = Front()
    stream = front.open()
    front.route([*[tokens()] * 5, finished()])
    front.route([tokens()] * 50)
    _ = [event async for event in stream]
    assert front.asked == []


async def test_prefill_progress_is_reported_until_the_answer_begins() -> None:
    front = Front()
    stream = front.open()
    read = PromptRead(request_id="a", total_tokens=9, cached_tokens=0, read_tokens=4, seconds=1.0)
    started = PrefillFinished(request_id="a", cache_report=CacheReport(), timings=Timings())
    front.route([read, started, read, finished()])
    assert [type(event) async for event in stream] == [PromptRead, PrefillFinished, Finished]
