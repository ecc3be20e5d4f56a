"""A clock that tests can move."""

from __future__ import annotations

import time

from holdfast.store.io_thread import Clocks


class MovedClock:
    """The real time, moved forward."""

    def __init__(self) -> None:
        self.moved_seconds = 0.0

    def clocks(self) -> Clocks:
        return Clocks(
            wall=lambda: time.time() + self.moved_seconds,
            steady=lambda: time.monotonic() + self.moved_seconds,
        )


class ManualClock:
    """A clock that is moved by hand."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
