from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from holdfast.errors import GenerationFailed, PromptTooLong, QueueFull
from holdfast.front.output import OutputEvent, TextDelta
from holdfast.front.request import GenerationRequest
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.services import open_streams
from tests.fakes.scripted_gateway import (
    MODEL,
    PROMPT_TOKENS,
    ScriptedGateway,
    ScriptedStream,
    answer,
)


def requests(count: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(request_id=f"r{place}", model=MODEL, prompt=str(place))
        for place in range(count)
    ]


async def collect(gateway: ScriptedGateway, count: int) -> list[OutputEvent]:
    stream = await open_streams(gateway.generate, requests(count))
    try:
        assert stream.prompt_tokens == count * PROMPT_TOKENS
        return [event async for event in stream]
    finally:
        await stream.aclose()


async def test_the_events_of_all_prompts_are_numbered_consecutively() -> None:
    events = await collect(ScriptedGateway(script=lambda request: answer(request.request_id)), 3)
    assert {(event.index, event.text) for event in events if isinstance(event, TextDelta)} == {
        (0, "r0"),
        (1, "r1"),
        (2, "r2"),
    }
    assert len(events) == 6


async def test_a_slow_prompt_does_not_delay_the_others() -> None:
    gate = asyncio.Event()

    def script(request: GenerationRequest) -> Any:
        return [gate, *answer("slow")] if request.request_id == "r0" else answer("fast")

    stream = await open_streams(ScriptedGateway(script=script).generate, requests(2))
    events = aiter(stream)
    assert (await anext(events)).index == 1
    assert (await anext(events)).index == 1
    gate.set()
    assert [event.index async for event in events] == [0, 0]
    await stream.aclose()


async def test_at_most_two_events_of_each_prompt_are_read_ahead() -> None:
    read = []

    class CountedStream(ScriptedStream):
        async def __anext__(self) -> OutputEvent:
            read.append(self)
            return await super().__anext__()

    async def generate(request: GenerationRequest) -> ScriptedStream:
        return CountedStream(answer(*"abcdefghij"), lambda: None)

    stream = await open_streams(generate, requests(2))
    first = await anext(aiter(stream))
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(read) <= 1 + 2 * 2
    assert len([first, *[event async for event in stream]]) == 2 * 11
    await stream.aclose()


async def test_one_failing_prompt_fails_the_whole() -> None:
    def script(request: GenerationRequest) -> Any:
        return [GenerationFailed("bad luck")] if request.request_id == "r1" else answer("x")

    with pytest.raises(GenerationFailed):
        await collect(ScriptedGateway(script=script), 3)


class PickyGateway(ScriptedGateway):
    """Refuses one of the prompts, accepts the others, and then accepts no more."""

    async def generate(self, request: GenerationRequest) -> ScriptedStream:
        if request.request_id == "r1":
            raise PromptTooLong(prompt_tokens=9, context_tokens=8, field="prompt.1")
        if request.request_id == "r2":
            await asyncio.Event().wait()
        return await super().generate(request)


async def test_one_refused_prompt_cancels_accepted_and_waiting_ones() -> None:
    gateway = PickyGateway()
    with pytest.raises(PromptTooLong) as refusal:
        await open_streams(gateway.generate, requests(3))
    assert refusal.value.field == "prompt.1"
    assert gateway.closed == ["r0"]


class CrowdedGateway(ScriptedGateway):
    """Its queue of ten is full."""

    async def generate(self, request: GenerationRequest) -> ScriptedStream:
        raise QueueFull(queued=10, limit=10, retry_after_seconds=1.0)


@pytest.mark.parametrize(
    ("prompts", "choices", "field"), [(11, 1, "prompt"), (4, 3, "prompt"), (1, 11, "n")]
)
async def test_a_request_that_can_never_fit_says_so(prompts: int, choices: int, field: str) -> None:
    wanted = [msgspec.structs.replace(request, choices=choices) for request in requests(prompts)]
    with pytest.raises(RequestRefused, match=rf"{prompts * choices} answers .* \(10\)") as refusal:
        await open_streams(CrowdedGateway().generate, wanted)
    assert (refusal.value.status, refusal.value.field) == (400, field)


@pytest.mark.parametrize("prompts", [1, 10])
async def test_a_request_that_may_fit_later_is_told_to_retry(prompts: int) -> None:
    with pytest.raises(QueueFull):
        await open_streams(CrowdedGateway().generate, requests(prompts))
