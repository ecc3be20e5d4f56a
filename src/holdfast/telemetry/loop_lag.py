"""How late the event loop comes round while requests are served: ticks that should come at equal
times.

What holds the loop (a long parse, a template, a library that keeps the interpreter's lock in
another thread) delays every other answer, and shows in no figure of one request. A machine that is
busy with other things makes ticks late too; then the loop's own work between two of them stays
small. At rest nothing ticks. Each tick wakes the process, which costs 0.1 ms on a virtual machine:
as often as every 2 ms they took more than all else that the front does for a request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Lag:
    """Of a while, in seconds."""

    late: float = 0.0  # by how much the latest tick came late
    busy: float = 0.0  # processor time that the loop's own thread took between two ticks, the most


class LoopLag:
    """The lag since somebody asked, to within `tick_seconds`. Loop's thread only."""

    def __init__(self, tick_seconds: float) -> None:
        self._lag, self._tick_seconds = Lag(), tick_seconds
        self._served = 0  # requests, now
        self._tick: asyncio.TimerHandle | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While a request is served."""
        self._served += 1
        if self._tick is None:
            self._set_tick(asyncio.get_running_loop())
        try:
            yield
        finally:
            self._served -= 1

    def take(self) -> Lag:
        """What there was; begins anew."""
        lag, self._lag = self._lag, Lag()
        return lag

    def _set_tick(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + self._tick_seconds
        self._tick = loop.call_at(due, self._on_tick, loop, due, time.thread_time())

    def _on_tick(self, loop: asyncio.AbstractEventLoop, due: float, used: float) -> None:
        self._lag.late = max(self._lag.late, loop.time() - due)
        self._lag.busy = max(self._lag.busy, time.thread_time() - used)
        if self._served:
            self._set_tick(loop)
        else:
            self._tick = None
