"""A *lease* entitles a request to use a model. While requests hold leases, the model stays loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from holdfast.errors import HoldfastError, QueueFull
from holdfast.machine.clocks import awake_timeout

RETRY_AFTER_SECONDS = 5.0  # for a full queue, since nobody knows how long the load takes


class Leases:
    """Counts the requests that use one model, and queues those that wait for a place for it.

    Only use it on the event loop's thread.
    """

    def __init__(
        self,
        *,
        max_waiting_sequences: int,
        arrival_numbers: Iterator[int],
        on_change: Callable[[], None],
    ) -> None:
        """The arguments are those of `ModelSlot`."""
        self.held = 0  # leases that requests hold now
        self.is_open = False  # whether new requests get a lease immediately
        self._max_waiting_sequences = max_waiting_sequences
        self._arrival_numbers = arrival_numbers
        self._on_change = on_change
        # each waiting request's arrival number and number of sequences
        self._queue: dict[asyncio.Future[None], tuple[int, int]] = {}

    @property
    def waiting_since(self) -> int | None:
        """The arrival number of the first waiting request; None if none waits."""
        return min((number for number, _ in self._queue.values()), default=None)

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._queue)

    async def acquire(self, *, sequences: int, seconds: float) -> None:
        """Acquire a lease; wait if necessary. The caller must `release` it.

        Raises TimeoutError, QueueFull, or the error passed to `refuse_waiting`.
        """
        if self.is_open:
            self.held += 1
            return
        waiting_sequences = sum(count for _, count in self._queue.values())
        self.check_queue_room(waiting_sequences, sequences)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue[granted] = (next(self._arrival_numbers), sequences)
        self._on_change()
        try:
            async with awake_timeout(seconds):
                await granted
        except BaseException:
            if self._queue.pop(granted, None) is not None:
                self._on_change()
            elif not granted.cancelled() and granted.exception() is None:
                self.release()  # the lease was granted at the very moment at which the wait ended
            raise

    def check_queue_room(self, waiting_sequences: int, sequences: int) -> None:
        """Raise QueueFull if `sequences` more may not wait besides the `waiting_sequences`."""
        if waiting_sequences + sequences > self._max_waiting_sequences:
            raise QueueFull(
                queued=waiting_sequences,
                limit=self._max_waiting_sequences,
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )

    def release(self) -> None:
        """End a lease."""
        self.held -= 1
        assert self.held >= 0, "a lease was given back twice"
        self._on_change()

    def open(self) -> None:
        """Grant leases to all waiting requests, and to new ones immediately."""
        self.is_open = True
        queue, self._queue = self._queue, {}
        for granted in queue:
            if not granted.done():
                self.held += 1
                granted.set_result(None)

    def close(self) -> None:
        """Make new requests wait from now on."""
        self.is_open = False

    def refuse_waiting(self, error: HoldfastError) -> None:
        """Fail all waiting requests with this error."""
        queue, self._queue = self._queue, {}
        for granted in queue:
            if not granted.done():
                granted.set_exception(error)
