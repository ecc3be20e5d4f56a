"""The answer to one request: the events of its choices, merged, as an asynchronous iterator."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import TypeAlias

import msgspec

from holdfast.errors import (
    GenerationFailed,
    HoldfastError,
    InvalidRequest,
    QueueFull,
    TooLargeForMemory,
    WorkerUnavailable,
)
from holdfast.front.answers.choice import ChoiceText
from holdfast.front.answers.repetition import RepetitionGuard
from holdfast.front.link.event_stream import EventStream, RequestEvent
from holdfast.front.prompt.prepare import Prepared
from holdfast.wire.events import Rejected
from holdfast.wire.output import (
    ChoiceFinished,
    OutputEvent,
    TextDelta,
    ThoughtEnder,
)
from holdfast.wire.requests import GenerationRequest

_log = logging.getLogger(__name__)
# about 20 ms of tokenization; for shorter answers the hop to a thread costs more than it saves
_LONG_ANSWER_TOKENS = 2048
_MAX_READY = 64  # events of several choices that are taken from the link in advance

Observe: TypeAlias = Callable[[OutputEvent], None]
"""Sees every event of an answer."""


class GenerationStream:
    """The events of an accepted request: deltas, and one `ChoiceFinished` per choice.

    `aclose` cancels what still runs, and so does cancelling a pending `__anext__`. A failed choice
    raises GenerationFailed and cancels the others. For one consumer, who should use `async with
    contextlib.aclosing(stream)`.
    """

    def __init__(
        self,
        request: GenerationRequest,
        prepared: Prepared,
        *,
        sources: Sequence[EventStream],
        observe: Observe = lambda event: None,
        repeated_thought_tokens: int = 0,
    ) -> None:
        """sources: the events of each sequence. repeated_thought_tokens: see `RepetitionGuard`."""
        self.request = request
        self.prompt_tokens = prepared.prompt_tokens
        self.sampling = prepared.sequences[0].sampling
        self.put_back_tokens = prepared.put_back_tokens
        self.dropped_tokens = prepared.dropped_tokens
        self.breakpoints = prepared.breakpoints
        self.unenforced = prepared.unenforced
        self._observe = observe
        self._choices = tuple(prepared.choice(index) for index in range(len(sources)))
        self._sources = tuple(sources)
        self._thought_end = prepared.thought_end
        self._guards = tuple(RepetitionGuard(repeated_thought_tokens) for _ in sources)
        self._thought_ended_by: dict[int, ThoughtEnder] = {}  # by choice
        self._ready: deque[OutputEvent] = deque()
        self._pumps: list[asyncio.Task[None]] = []
        # for several choices: an event is ready or a pump has ended; few enough events are ready
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._closed = False
        self._held = AsyncExitStack()

    def hold(self, resources: AsyncExitStack) -> None:
        """Keep resources, such as the lease of the model, until the answer has ended."""
        self._held = resources

    def __aiter__(self) -> GenerationStream:
        return self

    async def __anext__(self) -> OutputEvent:
        while not self._ready:
            if self._closed:
                raise StopAsyncIteration
            is_complete = False
            try:
                await (self._next_of_one() if len(self._choices) == 1 else self._next_of_many())
                is_complete = True
            finally:
                if not is_complete:
                    await self.aclose()
        event = self._ready.popleft()
        if len(self._ready) < _MAX_READY:
            self._has_room.set()
        if isinstance(event, ChoiceFinished) and event.completion_tokens > _LONG_ANSWER_TOKENS:
            await asyncio.to_thread(self._observe, event)  # may tokenize the whole answer
        else:
            self._observe(event)
        return event

    async def accepted(self) -> None:
        """Wait until the worker has accepted all choices.

        Raises the error for its refusal; then the caller closes the stream.
        """
        for choice, source in zip(self._choices, self._sources, strict=True):
            event = await anext(source, None)
            if event is None:
                raise WorkerUnavailable(
                    "the worker ended before it took the request; please try again"
                )
            if isinstance(event, Rejected):
                raise refusal(event)
            self._ready.extend(choice.feed(event))

    def pause(self) -> None:
        """Pause generation until `go_on`. What was generated can still be read."""
        for source in self._sources:
            source.pause()

    def go_on(self) -> None:
        """Undo `pause`."""
        for source in self._sources:
            source.go_on()

    def end_thoughts(self) -> bool:
        """End the thoughts of all choices. Returns False if the model has no marker for that."""
        for index in range(len(self._sources)):
            self._end_thought(index, by="request")
        return self._thought_end is not None

    async def aclose(self) -> None:
        """Cancel what still runs and end the iteration. May be called twice."""
        self._closed = True
        self._ready.clear()
        for pump in self._pumps:
            pump.cancel()
        # before anything that may be interrupted and leave a sequence running
        for source in self._sources:
            await source.aclose()
        if self._pumps:
            await asyncio.gather(*self._pumps, return_exceptions=True)
            self._pumps.clear()
        await self._held.aclose()

    async def _next_of_one(self) -> None:
        """Read directly from the link, without a task or queue."""
        choice, source = self._choices[0], self._sources[0]
        self._ready.extend(self._watched(choice.feed(await _next_event(source))))
        if choice.done:
            self._closed = True
            await source.aclose()
            await self._held.aclose()

    async def _next_of_many(self) -> None:
        if not self._pumps:
            pairs = zip(self._choices, self._sources, strict=True)
            self._pumps = [
                asyncio.create_task(self._pump(choice, source)) for choice, source in pairs
            ]
            for pump in self._pumps:
                pump.add_done_callback(lambda _: self._changed.set())
        self._changed.clear()
        ended = [pump for pump in self._pumps if pump.done()]
        for pump in ended:
            pump.result()  # raises what the pump raised
        if len(ended) == len(self._pumps):
            self._closed = True
            await self._held.aclose()
        else:
            await self._changed.wait()

    async def _pump(self, choice: ChoiceText, source: EventStream) -> None:
        while not choice.done:
            # what is not read stays in the link, which exerts backpressure
            await self._has_room.wait()
            if events := choice.feed(await _next_event(source)):
                self._ready.extend(self._watched(events))
                self._changed.set()
                if len(self._ready) >= _MAX_READY:
                    self._has_room.clear()
        await source.aclose()

    def _watched(self, events: Iterable[OutputEvent]) -> Iterator[OutputEvent]:
        """Pass the events on, end thoughts that repeat themselves, and report what ended them."""
        for event in events:
            if (
                isinstance(event, TextDelta)
                and event.kind == "reasoning"
                and self._guards[event.index].take(event.token_ids)
            ):
                self._end_thought(event.index, by="repetition")
            if isinstance(event, ChoiceFinished) and event.index in self._thought_ended_by:
                yield msgspec.structs.replace(
                    event, thought_ended_by=self._thought_ended_by[event.index]
                )
            else:
                yield event

    def _end_thought(self, index: int, *, by: ThoughtEnder) -> None:
        if (
            self._thought_end is None
            or index in self._thought_ended_by
            or self._choices[index].done
        ):
            return
        self._thought_ended_by[index] = by
        self._sources[index].limit_thoughts(self._thought_end)
        if by == "repetition":
            _log.info("the thought of %s repeated itself and was ended", self.request.request_id)


async def _next_event(source: EventStream) -> RequestEvent:
    event = await anext(source, None)
    if event is None:
        raise GenerationFailed("the worker's stream ended without a word")
    return event


def refusal(event: Rejected) -> HoldfastError:
    """The client's error for a worker's refusal."""
    match event.kind:
        case "queue_full":
            return QueueFull(
                queued=event.queued,
                limit=event.queue_limit,
                retry_after_seconds=event.retry_after_seconds,
            )
        case "shutting_down":
            return WorkerUnavailable(event.message)
        case "too_large":
            return TooLargeForMemory(
                needed_bytes=event.needed_bytes, budget_bytes=event.budget_bytes
            )
        case "invalid":
            return InvalidRequest(event.message, field=event.field)
