"""The streams of answers: opened, merged, limited in time, and cancelled if the client disconnects.

Here a stream yields the events of an answer. An answer to several prompts has one stream for each,
which are merged into one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeAlias

import msgspec
from starlette.types import Receive

from holdfast.errors import QueueFull, TimeLimitExceeded
from holdfast.front.gateway import GenerationStream
from holdfast.front.output import OutputEvent, TruncatedPart
from holdfast.front.request import GenerationRequest, MarkedPrefix
from holdfast.front.server.problem import RequestRefused
from holdfast.machine.clocks import awake_clock, awake_timeout

OutputStream: TypeAlias = "GenerationStream | MergedStream"
"""The answer to one accepted request: text deltas, and one `ChoiceFinished` per choice."""
SubmitCall: TypeAlias = Callable[[GenerationRequest], Coroutine[Any, Any, GenerationStream]]


async def open_streams(submit: SubmitCall, requests: Sequence[GenerationRequest]) -> OutputStream:
    """Submit all requests; once all are accepted, return their events as one stream, with the
    choices numbered consecutively.

    Raises the first refusal after cancelling the requests that were accepted. A request that could
    never fit into the queue raises RequestRefused.
    """
    try:
        if len(requests) == 1:
            return await submit(requests[0])
        return await _open_many(submit, requests)
    except QueueFull as full:
        answers = sum(request.choices for request in requests)
        if answers <= full.limit:
            raise
        field = "n" if len(requests) == 1 else "prompt"
        message = (
            f"`{field}`: {answers} answers in one request are more than the queue can hold "
            f"({full.limit}); ask for fewer at once"
        )
        raise RequestRefused(message, code="request_too_large_for_queue", field=field) from full


async def _open_many(submit: SubmitCall, requests: Sequence[GenerationRequest]) -> OutputStream:
    """Submit several requests and merge their answers. If one is refused, all are cancelled."""
    tasks = [asyncio.create_task(submit(request)) for request in requests]
    streams: list[GenerationStream] = []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
        streams = [task.result() for task in tasks]
    finally:
        if not streams:
            await _cancel_submits(tasks)
    return MergedStream(streams, requests[0].choices)


async def _cancel_submits(tasks: Sequence[asyncio.Task[GenerationStream]]) -> None:
    """Cancel the tasks that submit requests, and close the streams of accepted requests."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled() and task.exception() is None:
            await task.result().aclose()


class MergedStream:
    """The events of several answers in order of arrival.

    At most one event of each answer is read before the consumer asks for it, so that the answers
    apply backpressure.

    Choice i of prompt p has the index p · choices + i.

    The other attributes are those of a GenerationStream, added up or joined over all prompts.
    """

    def __init__(self, streams: Sequence[GenerationStream], choices: int) -> None:
        """streams: one for each prompt. choices: the number of answers to each prompt."""
        self._streams = streams
        self.prompt_tokens = sum(stream.prompt_tokens for stream in streams)
        # tokens of earlier answers that the prompts contain exactly as generated, and
        # those that the chat template left out
        self.put_back_tokens = sum(stream.put_back_tokens for stream in streams)
        self.dropped_tokens = sum(stream.dropped_tokens for stream in streams)
        self.sampling = streams[0].sampling
        self.breakpoints: tuple[MarkedPrefix, ...] = ()  # set only for requests with one prompt
        # what did not fit the context; None: nothing was left out
        left_out = [stream.left_out for stream in streams if stream.left_out is not None]
        self.left_out = (
            TruncatedPart(tokens=sum(each.tokens for each in left_out)) if left_out else None
        )
        # paths of schema keywords that no grammar enforces
        self.unenforced = tuple(
            dict.fromkeys(path for stream in streams for path in stream.unenforced)
        )
        # events of all answers; the task that has read an answer marks the answer's end
        self._events: asyncio.Queue[OutputEvent | asyncio.Task[None]] = asyncio.Queue()
        self._has_room = asyncio.Event()  # set while nothing waits to be read
        self._has_room.set()
        self._readers = [
            asyncio.create_task(self._read(stream, prompt_index * choices))
            for prompt_index, stream in enumerate(streams)
        ]
        self._unfinished = len(streams)  # answers that have not ended
        for reader in self._readers:
            reader.add_done_callback(self._events.put_nowait)

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that needed no prefill, over the prompts for which that is known yet; None
        if it is known for none.
        """
        counts = [each.cached_tokens for each in self._streams if each.cached_tokens is not None]
        return sum(counts) if counts else None

    def __aiter__(self) -> MergedStream:
        """Return the stream itself, which can be iterated only once."""
        return self

    async def __anext__(self) -> OutputEvent:
        """The next event of any of the answers; raises what one of them raises."""
        while self._unfinished:
            event = await self._events.get()
            if self._events.empty():
                self._has_room.set()
            if not isinstance(event, asyncio.Task):
                return event
            self._unfinished -= 1
            event.result()
        raise StopAsyncIteration

    def pause(self) -> None:
        """Stop generating until `unpause`."""
        for stream in self._streams:
            stream.pause()

    def unpause(self) -> None:
        """Undo `pause`."""
        for stream in self._streams:
            stream.unpause()

    def end_thoughts(self) -> bool:
        """End the reasoning of all answers. Returns whether the model supports that."""
        were_supported = [stream.end_thoughts() for stream in self._streams]
        return all(were_supported)

    async def aclose(self) -> None:
        """Cancel all answers that are still running."""
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for stream in self._streams:
            await stream.aclose()

    async def _read(self, stream: GenerationStream, first_index: int) -> None:
        """Pass on the events of one answer, whose first choice gets the index `first_index`."""
        async for event in stream:
            await self._has_room.wait()
            self._events.put_nowait(msgspec.structs.replace(event, index=event.index + first_index))
            self._has_room.clear()


class TimeLimit:
    """A deadline that lies `seconds` after its creation; 0 means no deadline.

    Time in which the machine sleeps does not count.
    Tokens that were prefilled before the deadline stay cached.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends_at = awake_clock().time() + seconds if seconds else None

    @contextlib.asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Context manager: cancels the block at the deadline, and raises TimeLimitExceeded."""
        limit: asyncio.Timeout | None = None
        try:
            async with awake_timeout(self._seconds_left()) as limit:
                yield
        except TimeoutError:
            if limit is None or not limit.expired():
                raise
            raise TimeLimitExceeded(seconds=self._seconds) from None

    def _seconds_left(self) -> float | None:
        return None if self._ends_at is None else max(0.0, self._ends_at - awake_clock().time())

    def events(self, stream: OutputStream) -> AsyncIterator[OutputEvent]:
        """Pass on the events of a stream. Raises TimeLimitExceeded at the deadline."""
        return aiter(stream) if self._ends_at is None else self._limited(aiter(stream))

    async def _limited(self, events: AsyncIterator[OutputEvent]) -> AsyncIterator[OutputEvent]:
        """Pass on events until they end or the deadline comes, even while none arrives."""
        while True:
            async with self.enforced():
                event = await anext(events, None)
            if event is None:
                return
            yield event


async def run_unless_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`, but cancel it if the client disconnects first.

    Returns whether the work ended. If the work fails, raises its error.
    """
    return await run_unless(disconnected(receive), work)


async def run_unless(
    cancelling: Coroutine[Any, Any, None], work: Coroutine[Any, Any, None]
) -> bool:
    """Run `work`, but cancel it if `cancelling` ends first.

    Returns whether the work ended. If the work fails, raises its error.
    """
    work_task = asyncio.create_task(work)
    cancelling_task = asyncio.create_task(cancelling)
    try:
        await asyncio.wait((work_task, cancelling_task), return_when=asyncio.FIRST_COMPLETED)
        if work_task.done():
            work_task.result()
            return True
        return False
    finally:
        for task in (work_task, cancelling_task):
            task.cancel()
        await asyncio.wait((work_task, cancelling_task))


async def disconnected(receive: Receive) -> None:
    """Wait until the connection is closed. Ignores the rest of a body that was not read."""
    while (await receive())["type"] != "http.disconnect":
        pass
