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
