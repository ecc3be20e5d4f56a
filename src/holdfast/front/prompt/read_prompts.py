"""Having prompts read of which nothing is continued: many at once, but not so many that others find
the queue full.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from holdfast.errors import (
    GenerationFailed,
    HoldfastError,
    InvalidRequest,
    QueueFull,
    TooLargeForMemory,
    WorkerUnavailable,
)
from holdfast.front.link.client import EngineClient
from holdfast.front.link.event_stream import RequestEvent
from holdfast.front.prompt.stream import refusal
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import (
    Finished,
    FinishReason,
    Rejected,
    Started,
    TokenLogprob,
    TokensGenerated,
)

AT_ONCE = 16  # prompts of one request that wait or are read: about what fills a step
_LONGEST_WAIT_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPrompt:
    """What came of a prompt that was read. logprobs: what was asked for, of its own tokens or of
    one that was drawn.
    """

    finished: Finished
    logprobs: tuple[TokenLogprob, ...] = ()


class PromptReader:
    """Takes the events of one sequence. Raises what its refusal or failure means to the client."""

    def __init__(self) -> None:
        self._logprobs: tuple[TokenLogprob, ...] = ()
        self.is_accepted = False

    def take(self, event: RequestEvent) -> ReadPrompt | None:
        """The next event; returns what the prompt came to with the last one."""
        self.is_accepted = self.is_accepted or not isinstance(event, Rejected)
        if isinstance(event, Rejected):
            raise refusal(event)
        if isinstance(event, Started | TokensGenerated):
            self._logprobs += event.logprobs
        if not isinstance(event, Finished):
            return None
        if failure := _failure(event):
            raise failure
        return ReadPrompt(finished=event, logprobs=self._logprobs)


def _failure(event: Finished) -> HoldfastError | None:
    match event.reason:
        case FinishReason.FAILED:
            message = event.error or "the request failed; the server's log has the details"
            return GenerationFailed(message, is_deadly=event.is_deadly)
        case FinishReason.REFUSED:
            return InvalidRequest(event.error)
        case FinishReason.CANCELLED:
            return WorkerUnavailable(
                "the server cancelled the request before it was done; please try again"
            )
        case _:
            return None


async def read_prompts(
    client: EngineClient, sequences: Sequence[SequenceRequest], *, field_of: Callable[[int], str]
) -> list[ReadPrompt]:
    """Read all, in any order; what came of each, in theirs.

    Whatever ends it early, what still runs is cancelled.

    field_of: the field of the request to name where the prompt in that place is more than memory
    can take.

    Raises the first refusal or failure. A queue that is full refuses only who has nothing in it
    yet; else a place is waited for.
    """
    reading = _Reading(client, sequences, field_of)
    lanes = [asyncio.create_task(reading.lane()) for _ in range(min(AT_ONCE, len(sequences)))]
    try:
        for lane in asyncio.as_completed(lanes):
            await lane
    finally:
        for task in lanes:
            task.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
    return [reading.found[place] for place in range(len(sequences))]


class _Reading:
    def __init__(
        self,
        client: EngineClient,
        sequences: Sequence[SequenceRequest],
        field_of: Callable[[int], str],
    ) -> None:
        self._client, self._field_of = client, field_of
        self._waiting = deque(enumerate(sequences))
        self._accepted = 0
        self.found: dict[int, ReadPrompt] = {}

    async def lane(self) -> None:
        """Read one prompt after the other."""
        while self._waiting:
            place, sequence = self._waiting.popleft()
            while place not in self.found:
                try:
                    self.found[place] = await self._read(sequence)
                except TooLargeForMemory as error:
                    error.field = self._field_of(place)
                    raise
                except QueueFull as full:
                    if not self._accepted:
                        raise
                    await asyncio.sleep(min(full.retry_after_seconds, _LONGEST_WAIT_SECONDS))

    async def _read(self, sequence: SequenceRequest) -> ReadPrompt:
        reader = PromptReader()
        async with aclosing(self._client.submit(sequence)) as events:
            async for event in events:
                found = reader.take(event)
                self._accepted += reader.is_accepted
                if found is not None:
                    return found
        raise GenerationFailed("the worker's stream ended without a word")
