"""Requests that have come while their model is loaded, and wait until it serves."""

from __future__ import annotations

import asyncio

from holdfast.errors import HoldfastError, QueueFull

RETRY_AFTER_SECONDS = 5.0  # when nobody more may wait: how long loading takes is not known


class WaitingRoom:
    """So many sequences may wait as the worker's queue takes at rest. Loop's thread only."""

    def __init__(self, *, places: int) -> None:
        self._places = places
        # how many sequences each is going to be
        self._waiting: dict[asyncio.Future[None], int] = {}

    @property
    def taken(self) -> int:
        """Sequences that wait."""
        return sum(self._waiting.values())

    async def wait(self, *, sequences: int, seconds: float) -> None:
        """Wait until `admit_all`.

        Raises TimeoutError, QueueFull, and what `turn_away` is given; may be cancelled.
        """
        if self.taken + sequences > self._places:
            raise QueueFull(
                queued=self.taken, limit=self._places, retry_after_seconds=RETRY_AFTER_SECONDS
            )
        called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[called] = sequences
        try:
            async with asyncio.timeout(seconds):
                await called
        finally:
            self._waiting.pop(called, None)

    def admit_all(self) -> None:
        """The model serves."""
        for called in self._waiting:
            if not called.done():
                called.set_result(None)

    def turn_away(self, error: HoldfastError) -> None:
        """The model never will: each of them gets this error."""
        for called in self._waiting:
            if not called.done():
                called.set_exception(error)
