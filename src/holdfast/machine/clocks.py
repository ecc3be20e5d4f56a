"""A clock for deadlines.

Deadlines count only the time in which this process runs. While a laptop sleeps, a virtual machine
is paused or a process is stopped, other clocks advance; on macOS even the event loop's. On waking
up, all deadlines would have passed, although no client had a chance to meet them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from weakref import WeakKeyDictionary

from holdfast.machine.retention_clock import duration_text

TICK_SECONDS = 1.0
# at most this much of the time between two ticks counts; a busy process may tick late
MOST_TICK_SECONDS = 5.0
LEAST_SLEEP_SECONDS = 60.0  # shorter sleeps are not logged

logger = logging.getLogger("holdfast")


def _time_with_sleep() -> float:
    """Seconds since the machine started, including sleep."""
    # CLOCK_MONOTONIC stops during sleep on Linux. On macOS only time.monotonic() does.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class AwakeClock:
    """Counts the seconds in which this process runs, on one event loop."""

    def __init__(self, *, clock: Callable[[], float] = _time_with_sleep) -> None:
        """Start ticking on the running event loop. clock: returns seconds, including sleep."""
        self._clock = clock
        self._ticked_at = clock()
        self._awake_seconds = 0.0
        asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def time(self) -> float:
        """Seconds since an arbitrary moment, excluding time in which the process did not run."""
        return self._awake_seconds + min(self._clock() - self._ticked_at, MOST_TICK_SECONDS)

    def _tick(self) -> None:
        """Add the time since the last tick, at most MOST_TICK_SECONDS of it: more was sleep."""
        asleep_seconds = self._clock() - self._ticked_at - TICK_SECONDS
        self._awake_seconds = self.time()
        self._ticked_at = self._clock()
        if asleep_seconds >= LEAST_SLEEP_SECONDS:
            logger.warning("the machine slept %s", duration_text(asleep_seconds))
        asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> AwakeTimer:
        """Call `callback` after the process has run for this many seconds."""
        return AwakeTimer(self, seconds, callback)


class AwakeTimer:
    """A call that `AwakeClock.call_later` has scheduled."""

    def __init__(self, clock: AwakeClock, seconds: float, callback: Callable[[], None]) -> None:
        self._clock = clock
        self._callback = callback
        self._due_at = clock.time() + seconds  # on the awake clock
        self._handle = asyncio.get_running_loop().call_later(seconds, self._call_if_due)

    def cancel(self) -> None:
        """Cancel the call."""
        self._handle.cancel()

    def _call_if_due(self) -> None:
        """Call the callback, or set the loop's timer again if the awake clock has not come so far."""
        seconds_left = self._due_at - self._clock.time()
        if seconds_left > 0.001:  # the process did not run the whole time
            self._handle = asyncio.get_running_loop().call_later(seconds_left, self._call_if_due)
        else:
            self._callback()


_clocks: WeakKeyDictionary[asyncio.AbstractEventLoop, AwakeClock] = WeakKeyDictionary()


def awake_clock() -> AwakeClock:
    """The clock of the running event loop."""
    loop = asyncio.get_running_loop()
    clock = _clocks.get(loop)
    if clock is None:
        clock = _clocks[loop] = AwakeClock()
    return clock


@contextlib.asynccontextmanager
async def awake_timeout(seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Like `asyncio.timeout`, but counts only the time in which this process runs."""
    if seconds is None or seconds <= 0:
        async with asyncio.timeout(seconds) as limit:
            yield limit
        return
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        timer = awake_clock().call_later(seconds, lambda: limit.reschedule(loop.time()))
        try:
            yield limit
        finally:
            timer.cancel()
