"""The answer to one request: the events of its choices, merged, as an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack

from holdfast.errors import GenerationFailed, HoldfastError, InvalidRequest, QueueFull, TooLargeForMemory, WorkerUnavailable
from holdfast.intake.answer_observer import Observe
from holdfast.intake.prepare import Prepared
from holdfast.link.event_stream import EventStream, RequestEvent
from holdfast.messages.events import Rejected
from holdfast.messages.output import ChoiceFinished, OutputEvent
from holdfast.messages.requests import GenerationRequest
from holdfast.parsing.choice import ChoiceText

_LONG_ANSWER_TOKENS = 2048  # about 20 ms of reading: below, the hop to a thread costs more than it gives
_MOST_READY = 64  # events of several choices that are taken from the link before they are asked for


class GenerationStream:
    """Events of an accepted request: text deltas, and exactly one `ChoiceFinished` per choice. For one consumer.

    `aclose` cancels what still runs, and so does cancelling a pending `__anext__`. A choice that failed raises GenerationFailed
    and cancels the others. Use `async with contextlib.aclosing(stream)`.
    """

    def __init__(
        self,
        request: GenerationRequest,
        prepared: Prepared,
        *,
        sources: Sequence[EventStream],
        intake_seconds: float = 0.0,
        observe: Observe = lambda event: None,
    ) -> None:
        """sources: of the request's sequences, in their order."""
        self.request = request
        self.prompt_tokens = prepared.prompt_tokens
        self.intake_seconds = intake_seconds  # rendering and tokenization
        self.sampling = prepared.sequences[0].sampling
        self.put_back_tokens = prepared.put_back_tokens  # of earlier answers, as they were generated
        self.dropped_tokens = prepared.dropped_tokens  # of earlier answers, which the prompt does not show
        self.breakpoints = prepared.breakpoints  # the cache breakpoints of its client, in the prompt
        self.unenforced = prepared.unenforced  # keywords of schemas, by their places
        self._observe = observe
        self._choices = tuple(prepared.choice(index) for index in range(len(sources)))
        self._sources = tuple(sources)
        self._ready: deque[OutputEvent] = deque()
        self._pumps: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()  # for several choices: something is ready, or a pump has ended
        self._has_room = asyncio.Event()  # for several choices: few enough events are ready
        self._has_room.set()
        self._closed = False
        self._held = AsyncExitStack()

    def hold(self, resources: AsyncExitStack) -> None:
        """Keep what the answer needs until it has ended: the lease of its model."""
        self._held = resources

    def __aiter__(self) -> GenerationStream:
        return self

    async def __anext__(self) -> OutputEvent:
        while not self._ready:
            if self._closed:
                raise StopAsyncIteration
            whole = False
            try:
                await (self._next_of_one() if len(self._choices) == 1 else self._next_of_many())
                whole = True
            finally:
                if not whole:
                    await self.aclose()
        event = self._ready.popleft()
        if len(self._ready) < _MOST_READY:
            self._has_room.set()
        if isinstance(event, ChoiceFinished) and event.completion_tokens > _LONG_ANSWER_TOKENS:
            await asyncio.to_thread(self._observe, event)  # it reads the whole answer once more
        else:
            self._observe(event)
        return event

    async def accepted(self) -> None:
        """Wait until the worker has taken all choices. Raises what its refusal means; the caller closes the stream then."""
        for choice, source in zip(self._choices, self._sources, strict=True):
            event = await anext(source, None)
            if event is None:
                raise WorkerUnavailable("the worker ended before it took the request; please try again")
            if isinstance(event, Rejected):
                raise refusal(event)
            self._ready.extend(choice.feed(event))

    def pause(self) -> None:
        """Have nothing more drawn until `go_on`. What was drawn can still be read."""
        for source in self._sources:
            source.pause()

    def go_on(self) -> None:
        """Undo `pause`."""
        for source in self._sources:
            source.go_on()

    async def aclose(self) -> None:
        """Cancel what still runs and end the iteration. May be called twice."""
        self._closed = True
        self._ready.clear()
        for pump in self._pumps:
            pump.cancel()
        for source in self._sources:  # first of all, so that nothing that interrupts the rest can leave a sequence running
            await source.aclose()
        if self._pumps:
            await asyncio.gather(*self._pumps, return_exceptions=True)
            self._pumps.clear()
        await self._held.aclose()

    async def _next_of_one(self) -> None:
        """Straight from the link: no task and no queue between."""
        choice, source = self._choices[0], self._sources[0]
        self._ready.extend(choice.feed(await _next_event(source)))
        if choice.done:
            self._closed = True
            await source.aclose()
            await self._held.aclose()

    async def _next_of_many(self) -> None:
        if not self._pumps:
            pairs = zip(self._choices, self._sources, strict=True)
            self._pumps = [asyncio.create_task(self._pump(choice, source)) for choice, source in pairs]
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
            await self._has_room.wait()  # what nobody reads stays in the link, which stops the worker when it is too much
            if events := choice.feed(await _next_event(source)):
                self._ready.extend(events)
                self._changed.set()
                if len(self._ready) >= _MOST_READY:
                    self._has_room.clear()
        await source.aclose()


async def _next_event(source: EventStream) -> RequestEvent:
    event = await anext(source, None)
    if event is None:
        raise GenerationFailed("the worker's stream ended without a word")
    return event


def refusal(event: Rejected) -> HoldfastError:
    """The error that a worker's refusal means to the client."""
    match event.kind:
        case "queue_full":
            return QueueFull(queued=event.queued, limit=event.queue_limit, retry_after_seconds=event.retry_after_seconds)
        case "shutting_down":
            return WorkerUnavailable(event.message)
        case "too_large":
            return TooLargeForMemory(needed_bytes=event.needed_bytes, budget_bytes=event.budget_bytes)
        case "invalid":
            return InvalidRequest(event.message, field=event.field)
