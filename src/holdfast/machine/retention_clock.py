"""A clock for deleting by age.

Ages are differences of wall-clock times. A wall clock may be wrong, and data deleted for
this reason is lost. So a clock that jumps far ahead is trusted only after an hour.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

MOST_AHEAD_SECONDS = 86400.0
RECHECK_SECONDS = 3600.0

logger = logging.getLogger("holdfast")


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
        self, *, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic
    ) -> None:
        """wall: returns seconds since the epoch. steady: returns seconds that only ever advance."""
        self._wall = wall
        self._steady = steady
        self._has_records = False  # whether `start_from` was called
        self._trusted_time: float | None = None  # the last wall-clock time that was trusted
        self._trusted_at = 0.0  # when that was, on the steady clock
        self._suspected_at: float | None = (
            None  # steady time since which the wall clock is too far ahead
        )
        self._was_trusted = False  # whether this process has trusted the wall clock before

    def start_from(self, newest: float) -> None:
        """Compare the clock with an earlier process. Only the first call counts.

        newest: the time of its newest record, in seconds since the epoch.
        """
        if not self._has_records:
            self._has_records = True
            self._trusted_time = newest
            self._trusted_at = self._steady()

    def start_from_stamps(self, stamps: Iterable[float]) -> None:
        """Like `start_from`, for times of the wall clock, which may have been wrong. Does nothing
        if none of them is an hour old; then, all are recent.
        """
        an_hour_ago = self._wall() - RECHECK_SECONDS
        newest = max((stamp for stamp in stamps if stamp <= an_hour_ago), default=None)
        if newest is not None:
            self.start_from(newest)

    def __call__(self) -> float:
        """Seconds since the epoch, according to the trusted time."""
        wall = self._wall()
        steady = self._steady()
        expected = wall
        if self._trusted_time is not None:
            expected = self._trusted_time + max(0.0, steady - self._trusted_at)
        if wall - expected > MOST_AHEAD_SECONDS:
            if self._suspected_at is None:
                self._suspected_at = steady
                logger.log(
                    logging.WARNING if self._was_trusted else logging.INFO,
                    "the clock is %s ahead of the newest record; nothing is deleted by age until the "
                    "clock is checked again in an hour",
                    duration_text(wall - expected),
                )
            if steady - self._suspected_at < RECHECK_SECONDS:
                return expected
        self._suspected_at = None
        self._was_trusted = True
        self._trusted_time = wall
        self._trusted_at = steady
        return wall


def duration_text(seconds: float) -> str:
    """The duration in words, rounded."""
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = round(seconds / 3600)
    return f"{hours} h" if hours < 48 else f"{round(seconds / 86400)} days"
