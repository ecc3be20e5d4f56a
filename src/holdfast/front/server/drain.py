"""A server on its way to the end: it takes nothing new, and what runs comes to its own end within a
limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.errors import ServerStopping

_READS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})  # DELETE ends things, as `/cancel` does
_LONGEST_RETRY_SECONDS = 60.0  # clients give up rather than wait for longer
_START_SECONDS = 2.0  # until another server, or this one started again, listens


class Drain:
    """Whether the server is stopping, and how long what runs may go on. Loop's thread only."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_at: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether it has begun."""
        return self._ends_at is not None

    @property
    def seconds_left(self) -> float:
        """How long running answers may still go on; 0 before it begins."""
        return 0.0 if self._ends_at is None else max(0.0, self._ends_at - self._clock())

    def begin(self, limit_seconds: float) -> None:
        """From now on nothing new is taken."""
        self._ends_at = self._clock() + limit_seconds

    def refusal(self, method: str, path: str) -> ServerStopping | None:
        """Why a request is not taken: it would begin something.

        Looking at things and ending them goes on.
        """
        if not self.is_on or method in _READS or path.endswith("/cancel"):
            return None
        return ServerStopping(
            retry_after_seconds=min(self.seconds_left + _START_SECONDS, _LONGEST_RETRY_SECONDS)
        )
