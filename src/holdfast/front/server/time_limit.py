"""Requests that may take only so long.

What was read for one that runs out of time stays for the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from holdfast.errors import TimeLimitExceeded
from holdfast.front.server.services import OutputStream
from holdfast.wire.output import OutputEvent

T = TypeVar("T")


class TimeLimit:
    """So many seconds from now on; 0: no bound."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends_at = asyncio.get_running_loop().time() + seconds if seconds else None

    async def stream(self, opening: Awaitable[OutputStream]) -> OutputStream:
        """The stream that is being opened, bounded.

        Raises TimeLimitExceeded, now or while it is read.
        """
        opened = await self.of(opening)
        return opened if self._ends_at is None else LimitedStream(opened, self)

    async def of(self, work: Awaitable[T]) -> T:
        """What some work gives within the time that is left; then it is cancelled.

        Raises TimeLimitExceeded.
        """
        if self._ends_at is None:
            return await work
        limit = asyncio.timeout_at(self._ends_at)
        try:
            async with limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeLimitExceeded(seconds=self._seconds) from None


class LimitedStream:
    """An answer's events until the time is over.

    Cut off within an event, the answer cancels what still runs by itself.
    """

    def __init__(self, stream: OutputStream, limit: TimeLimit) -> None:
        self._stream, self._limit, self._events = stream, limit, aiter(stream)
        self.prompt_tokens, self.put_back_tokens = stream.prompt_tokens, stream.put_back_tokens
        self.sampling = stream.sampling
        self.dropped_tokens, self.breakpoints = stream.dropped_tokens, stream.breakpoints
        self.unenforced = stream.unenforced

    def __aiter__(self) -> LimitedStream:
        """Itself: it can be read once."""
        return self

    async def __anext__(self) -> OutputEvent:
        """The next event. Raises TimeLimitExceeded."""
        return await self._limit.of(anext(self._events))

    def pause(self) -> None:
        """Stop generating until `go_on`. The time limit keeps running."""
        self._stream.pause()

    def go_on(self) -> None:
        """Undo `pause`."""
        self._stream.go_on()

    def end_thoughts(self) -> bool:
        """Have it think no more. Returns whether that can be done."""
        return self._stream.end_thoughts()

    async def aclose(self) -> None:
        """Cancel what still runs."""
        await self._stream.aclose()
