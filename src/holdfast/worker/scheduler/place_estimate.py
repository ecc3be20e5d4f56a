"""When a client that found the queue full shall come again."""

from __future__ import annotations

_FIRST_GUESS_SECONDS = 2.0
_GAIN = 0.2
_SHORTEST_SECONDS, _LONGEST_SECONDS = 1.0, 60.0


class PlaceEstimate:
    """How long it takes until a place in a full queue is free: the busy seconds between two ends,
    lately.
    """

    def __init__(self) -> None:
        self._seconds_per_end = _FIRST_GUESS_SECONDS
        self._busy_seconds = 0.0  # since the last end

    def observe(self, *, seconds: float, ends: int) -> None:
        """Learn from one step and the sequences that ended with it."""
        self._busy_seconds += seconds
        if ends:
            self._seconds_per_end += _GAIN * (self._busy_seconds / ends - self._seconds_per_end)
            self._busy_seconds = 0.0

    @property
    def seconds(self) -> float:
        """The estimate, never shorter than a second, never longer than a minute."""
        return min(
            max(self._seconds_per_end, self._busy_seconds, _SHORTEST_SECONDS), _LONGEST_SECONDS
        )
