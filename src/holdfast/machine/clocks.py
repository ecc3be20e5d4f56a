"""Clocks for deadlines and for deleting by age.

Deadlines count only the time in which this process runs. While a laptop sleeps, a virtual machine
is paused or a process is stopped, other clocks advance; on macOS even the event loop's. On waking
up, all deadlines would have passed, although no client had a chance to meet them.

Ages are differences of wall-clock times. A wall clock may be wrong, and data deleted for
this reason is lost. So a clock that jumps far ahead is trusted only after an hour.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from weakref import WeakKeyDictionary

TICK_SECONDS = 1.0
# at most this much of the time between two ticks counts; a busy process may tick late
MOST_TICK_SECONDS = 5.0
LEAST_SLEEP_SECONDS = 60.0  # shorter sleeps are not logged
MOST_AHEAD_SECONDS = 86400.0
RECHECK_SECONDS = 3600.0

logger = logging.getLogger("holdfast")


def _time_with_sleep() -> float:
    """Seconds since the machine started, including sleep."""
    # CLOCK_MONOTONIC stops during sleep on Linux. On macOS only time.monotonic() does.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class AwakeClock:
    """Counts the seconds in which this process runs, on one event loop."""

    def __init__(self, *, clock: Callable[[], float] = _time_with_sleep) -> None:
        """Starts ticking on the running event loop."""
        self._clock = clock
        self._ticked_at = clock()
        self._awake_seconds = 0.0
        asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def time(self) -> float:
        """Seconds since an arbitrary moment, excluding time in which the process did not run."""
        return self._awake_seconds + min(self._clock() - self._ticked_at, MOST_TICK_SECONDS)

    def _tick(self) -> None:
        asleep = self._clock() - self._ticked_at - TICK_SECONDS
        self._awake_seconds = self.time()
        self._ticked_at = self._clock()
        if asleep >= LEAST_SLEEP_SECONDS:
            logger.warning("the machine slept %s", _duration_text(asleep))
        asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def call_later(self, seconds: float, act: Callable[[], None]) -> AwakeTimer:
        """Call `act` after the process has run for this many seconds."""
        return AwakeTimer(self, seconds, act)


class AwakeTimer:
    """A call that `AwakeClock.call_later` has scheduled."""

    def __init__(self, clock: AwakeClock, seconds: float, act: Callable[[], None]) -> None:
        self._clock = clock
        self._act = act
        self._due = clock.time() + seconds
        self._handle = asyncio.get_running_loop().call_later(seconds, self._look)

    def cancel(self) -> None:
        """Cancel the call."""
        self._handle.cancel()

    def _look(self) -> None:
        left = self._due - self._clock.time()
        if left > 0.001:  # the process did not run the whole time
            self._handle = asyncio.get_running_loop().call_later(left, self._look)
        else:
            self._act()


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


class RetentionClock:
    """The wall clock, for deleting by age.

    A clock that is more than a day ahead of its last reading, or of the newest record, is trusted
    only if it still is an hour later. Until then, time continues from the last trusted reading, so
    that nothing suddenly becomes old.

    Uses are stamped with the wall clock itself. Most clocks that are ahead of the newest record are
    right, because the server was off, and data used in that hour must not be old after it. So a
    stamp says that the clock is right only an hour later: until then, the clock may have been wrong
    when the stamp was made, by an earlier process.
    """

    def __init__(
        self,
        *,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._steady = steady
        self._has_records = False
        self._believed: float | None = None
        self._believed_at = 0.0  # on the steady clock
        self._suspected_at: float | None = None
        self._was_right = False  # whether this process has believed it before

    def start_from(self, newest: float) -> None:
        """newest: the time of the newest record of an earlier process. Only the first call counts."""
        if not self._has_records:
            self._has_records = True
            self._believed = newest
            self._believed_at = self._steady()

    def start_from_stamps(self, stamps: Iterable[float]) -> None:
        """Like `start_from`, for times of the wall clock, which may have been wrong. Does nothing
        if none of them is an hour old; then, all are recent.
        """
        before = self._wall() - RECHECK_SECONDS
        newest = max((stamp for stamp in stamps if stamp <= before), default=None)
        if newest is not None:
            self.start_from(newest)

    def __call__(self) -> float:
        """Seconds since the epoch, according to the trusted time."""
        wall = self._wall()
        steady = self._steady()
        expected = wall
        if self._believed is not None:
            expected = self._believed + max(0.0, steady - self._believed_at)
        if wall - expected > MOST_AHEAD_SECONDS:
            if self._suspected_at is None:
                self._suspected_at = steady
                logger.log(
                    logging.WARNING if self._was_right else logging.INFO,
                    "the clock is %s ahead of the newest record; nothing is deleted by age until the "
                    "clock is checked again in an hour",
                    _duration_text(wall - expected),
                )
            if steady - self._suspected_at < RECHECK_SECONDS:
                return expected
        self._suspected_at = None
        self._was_right = True
        self._believed = wall
        self._believed_at = steady
        return wall


def _duration_text(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = round(seconds / 3600)
    return f"{hours} h" if hours < 48 else f"{round(seconds / 86400)} days"
