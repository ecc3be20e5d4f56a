"""Who uses a model, and who waits to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from holdfast.errors import HoldfastError, QueueFull
from holdfast.front.fleet.waiting_room import RETRY_AFTER_SECONDS


class Leases:
    """The requests that use one model, and the line of those that wait for it to have a place.

    Loop's thread only.
    """

    def __init__(
        self, *, places: int, numbers: Iterator[int], on_change: Callable[[], None]
    ) -> None:
        """places: most sequences that may wait. numbers: of all arrivals at all models. on_change:
        of what is held or waits.
        """
        self.held = 0
        self.is_open = False  # whoever comes gets one at once
        self._places, self._numbers, self._on_change = places, numbers, on_change
        # number of the arrival, and its sequences
        self._line: dict[asyncio.Future[None], tuple[int, int]] = {}

    @property
    def waiting_since(self) -> int | None:
        """The number of the first that waits; None when nobody does."""
        return min((number for number, _ in self._line.values()), default=None)

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._line)

    async def take(self, *, sequences: int, seconds: float) -> None:
        """Take a lease, as soon as leases are given. Each is to be given back.

        Raises TimeoutError, QueueFull when too many wait, and what `turn_away` is given; may be
        cancelled.
        """
        if self.is_open:
            self.held += 1
            return
        waiting = sum(count for _, count in self._line.values())
        if waiting + sequences > self._places:
            raise QueueFull(
                queued=waiting, limit=self._places, retry_after_seconds=RETRY_AFTER_SECONDS
            )
        called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line[called] = (next(self._numbers), sequences)
        self._on_change()
        try:
            async with asyncio.timeout(seconds):
                await called
        except BaseException:
            if self._line.pop(called, None) is not None:
                self._on_change()
            elif not called.cancelled() and called.exception() is None:
                self.give_back()  # it was given in the very moment in which nobody waited any more
            raise

    def give_back(self) -> None:
        """Somebody needs the model no longer."""
        self.held -= 1
        assert self.held >= 0, "a lease was given back twice"
        self._on_change()

    def open(self) -> None:
        """The model has a place: all who wait have a lease from this moment on, and who comes gets
        one at once.
        """
        self.is_open = True
        line, self._line = self._line, {}
        for called in line:
            if not called.done():
                self.held += 1
                called.set_result(None)

    def close(self) -> None:
        """From now on who comes has to wait."""
        self.is_open = False

    def turn_away(self, error: HoldfastError) -> None:
        """All who wait get this error."""
        line, self._line = self._line, {}
        for called in line:
            if not called.done():
                called.set_exception(error)
