"""How late the event loop comes round while requests are served: ticks that should come every few milliseconds.

What holds the loop (a long parse, a template, a library that keeps the interpreter's lock in another thread) delays every other
answer, and shows in no figure of one request. At rest nothing ticks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

TICK_SECONDS = 0.002


class LoopLag:
    """The latest tick since somebody asked. Loop's thread only, but for `take`."""

    def __init__(self) -> None:
        self._longest = 0.0
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

    def take(self) -> float:
        """Seconds by which the latest tick came late; begins anew."""
        longest, self._longest = self._longest, 0.0
        return longest

    def _set_tick(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + TICK_SECONDS
        self._tick = loop.call_at(due, self._on_tick, loop, due)

    def _on_tick(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._longest = max(self._longest, loop.time() - due)
        if self._served:
            self._set_tick(loop)
        else:
            self._tick = None
