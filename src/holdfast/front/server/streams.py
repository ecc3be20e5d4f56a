"""Wrappers around the worker's streams of output events: several prompts merged into one stream, and
a time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import msgspec

from holdfast.errors import QueueFull, TimeLimitExceeded
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.services import GenerateCall, OutputStream
from holdfast.wire.commands import PinnedPrefix
from holdfast.wire.output import OutputEvent
from holdfast.wire.requests import GenerationRequest

_MOST_READY = 64  # events of several prompts that are buffered


async def open_streams(
    generate: GenerateCall, requests: Sequence[GenerationRequest]
) -> OutputStream:
    """Submit all requests; once all are accepted, return their events as one stream, with the
    choices numbered consecutively.

    Raises the first refusal after cancelling the requests that were accepted. A request that could
    never fit into the queue raises RequestRefused.
    """
    try:
        return await (
            generate(requests[0]) if len(requests) == 1 else _open_many(generate, requests)
        )
    except QueueFull as full:
        answers = sum(request.choices for request in requests)
        if answers <= full.limit:
            raise
        field = "n" if len(requests) == 1 else "prompt"
        message = (
            f"`{field}`: {answers} answers in one request are more than may wait here "
            f"({full.limit}); ask for fewer at once"
        )
        raise RequestRefused(message, code="request_too_large_for_queue", field=field) from full


async def _open_many(generate: GenerateCall, requests: Sequence[GenerationRequest]) -> OutputStream:
    tasks = [asyncio.create_task(generate(request)) for request in requests]
    streams: list[OutputStream] = []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
        streams = [task.result() for task in tasks]
    finally:
        if not streams:
            await _abandon(tasks)
    return MergedStream(streams, requests[0].choices)


async def _abandon(tasks: Sequence[asyncio.Task[OutputStream]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled() and task.exception() is None:
            await task.result().aclose()


class MergedStream:
    """The events of several answers in order of arrival.

    Choice i of prompt p has the index p · choices + i.
    """

    def __init__(self, streams: Sequence[OutputStream], choices: int) -> None:
        self._streams = streams
        self.prompt_tokens = sum(stream.prompt_tokens for stream in streams)
        self.put_back_tokens = sum(stream.put_back_tokens for stream in streams)
        self.dropped_tokens = sum(stream.dropped_tokens for stream in streams)
        self.sampling = streams[0].sampling
        self.breakpoints: tuple[PinnedPrefix, ...] = ()  # only for requests with one prompt
        self.unenforced = tuple(
            dict.fromkeys(place for stream in streams for place in stream.unenforced)
        )
        self._events: asyncio.Queue[OutputEvent | asyncio.Task[None]] = asyncio.Queue()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._readers = [
            asyncio.create_task(self._read(stream, place * choices))
            for place, stream in enumerate(streams)
        ]
        self._unfinished = len(streams)
        for reader in self._readers:
            reader.add_done_callback(self._events.put_nowait)

    def __aiter__(self) -> MergedStream:
        """Itself: it can be read once."""
        return self

    async def __anext__(self) -> OutputEvent:
        """The next event of any of the answers; raises what one of them raises."""
        while self._unfinished:
            event = await self._events.get()
            if self._events.qsize() < _MOST_READY:
                self._has_room.set()
            if not isinstance(event, asyncio.Task):
                return event
            self._unfinished -= 1
            event.result()
        raise StopAsyncIteration

    def pause(self) -> None:
        """Stop generating until `go_on`."""
        for stream in self._streams:
            stream.pause()

    def go_on(self) -> None:
        """Undo `pause`."""
        for stream in self._streams:
            stream.go_on()

    def end_thoughts(self) -> bool:
        """End all thoughts. Returns whether the model allows that."""
        ended = [stream.end_thoughts() for stream in self._streams]
        return all(ended)

    async def aclose(self) -> None:
        """Cancel all answers that are still running."""
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for stream in self._streams:
            await stream.aclose()

    async def _read(self, stream: OutputStream, first_index: int) -> None:
        async for event in stream:
            await self._has_room.wait()
            self._events.put_nowait(msgspec.structs.replace(event, index=event.index + first_index))
            if self._events.qsize() >= _MOST_READY:
                self._has_room.clear()


class TimeLimit:
    """A deadline, this many seconds from now; 0: none. What was prefilled by then stays cached."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends_at = asyncio.get_running_loop().time() + seconds if seconds else None

    @contextlib.asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Cancel the block at the deadline and raise TimeLimitExceeded."""
        limit = asyncio.timeout_at(self._ends_at)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeLimitExceeded(seconds=self._seconds) from None

    def events(self, stream: OutputStream) -> AsyncIterator[OutputEvent]:
        """The events of a stream. Raises TimeLimitExceeded at the deadline."""
        return aiter(stream) if self._ends_at is None else self._limited(aiter(stream))

    async def _limited(self, events: AsyncIterator[OutputEvent]) -> AsyncIterator[OutputEvent]:
        while True:
            async with self.enforced():
                event = await anext(events, None)
            if event is None:
                return
            yield event
