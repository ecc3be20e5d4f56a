from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from holdfast.errors import (
    GenerationFailed,
    InvalidRequest,
    QueueFull,
    TooLargeForMemory,
    WorkerUnavailable,
)
from holdfast.front.prompt import embed_and_rank as module
from holdfast.front.prompt.embed_and_rank import MAX_CONCURRENT, READ_ONLY, ReadPrompt, read_prompts
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import Accepted, Event, Finished, FinishReason, Rejected
from holdfast.wire.requests import TokenIds
from tests.fakes.scripted_client import ScriptedClient, refuses


def requests(count: int) -> list[SequenceRequest]:
    return [
        SequenceRequest(
            request_id=f"r/{place}",
            prompt_token_ids=TokenIds.of((place,)),
            max_tokens=0,
            sampling=READ_ONLY,
            pooling="mean",
        )
        for place in range(count)
    ]


async def read_all(
    client: ScriptedClient, sequences: Sequence[SequenceRequest]
) -> list[ReadPrompt]:
    return await read_prompts(client, sequences, field_of=lambda place: f"input.{place}")


def read(
    request: SequenceRequest, *, reason: FinishReason = FinishReason.LENGTH, error: str = ""
) -> Sequence[Event]:
    request_id = request.request_id
    end = Finished(
        request_id=request_id,
        reason=reason,
        prompt_tokens=1,
        completion_tokens=0,
        error=error,
        embedding=bytes(request.prompt_token_ids),
    )
    return [Accepted(request_id=request_id), end]


@dataclass
class FullNowAndThen:
    """Refuses every third submission, after the first."""

    asked: int = 0
    refused: list[str] = field(default_factory=list)

    def __call__(self, request: SequenceRequest) -> Sequence[Event]:
        self.asked += 1
        if self.asked % 3 == 0:
            self.refused.append(request.request_id)
            return [
                Rejected(
                    request_id=request.request_id,
                    kind="queue_full",
                    message="full",
                    retry_after_seconds=1,
                )
            ]
        return read(request)


async def test_prompts_are_prefilled_in_order_with_limited_concurrency() -> None:
    client = ScriptedClient(read)
    client.may_go_on.clear()
    reading = asyncio.create_task(read_all(client, requests(50)))
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(client.submitted) == MAX_CONCURRENT
    client.may_go_on.set()
    found = await reading
    assert [each.finished.embedding for each in found] == [bytes([place]) for place in range(50)]
    assert client.cancelled == []


async def test_prompts_wait_for_the_queue_if_another_has_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MAX_WAIT_SECONDS", 0.0)
    script = FullNowAndThen()
    found = await read_all(ScriptedClient(script), requests(20))
    assert len(found) == 20
    assert script.refused


async def test_without_a_place_in_the_queue_they_are_refused() -> None:
    with pytest.raises(QueueFull):
        await read_all(ScriptedClient(refuses("queue_full")), requests(3))


async def test_a_prompt_too_large_for_memory_is_named() -> None:
    def script(request: SequenceRequest) -> Sequence[Event]:
        return refuses("too_large")(request) if request.request_id == "r/2" else read(request)

    with pytest.raises(TooLargeForMemory) as refused:
        await read_all(ScriptedClient(script), requests(4))
    assert refused.value.field == "input.2"


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (FinishReason.FAILED, GenerationFailed),
        (FinishReason.REFUSED, InvalidRequest),
        (FinishReason.CANCELLED, WorkerUnavailable),
    ],
)
async def test_one_failure_ends_all_and_leaves_nothing_behind(
    reason: FinishReason, error: type[Exception]
) -> None:
    def script(request: SequenceRequest) -> Sequence[Event]:
        if request.request_id == "r/2":
            return read(request, reason=reason, error="it went wrong")
        return (
            [Accepted(request_id=request.request_id)]
            if request.request_id == "r/1"
            else read(request)
        )

    client = ScriptedClient(script)
    with pytest.raises(error):
        await read_all(client, requests(5))
    assert client.cancelled == ["r/1"]


async def test_a_prompt_that_kills_workers_is_marked_deadly() -> None:
    def script(request: SequenceRequest) -> Sequence[Event]:
        accepted, *_, end = read(request, reason=FinishReason.FAILED, error="the worker died")
        assert isinstance(end, Finished)
        return [accepted, msgspec.structs.replace(end, is_deadly=True)]

    with pytest.raises(GenerationFailed) as failed:
        await read_all(ScriptedClient(script), requests(1))
    assert failed.value.is_deadly


async def test_a_cancelled_batch_cancels_its_sequences() -> None:
    client = ScriptedClient(lambda request: [Accepted(request_id=request.request_id)])
    reading = asyncio.create_task(read_all(client, requests(3)))
    for _ in range(5):
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert sorted(client.cancelled) == ["r/0", "r/1", "r/2"]


async def test_an_empty_batch_gives_nothing() -> None:
    assert await read_all(ScriptedClient(read), []) == []
