"""Who waits: first come, first served, up to a bound, with an estimate of when to come again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from holdfast.scheduler.sequence import Sequence

_FIRST_GUESS_SECONDS = 2.0
_GAIN = 0.2
_SHORTEST_SECONDS, _LONGEST_SECONDS = 1.0, 60.0


class WaitingQueue:
    """Sequences in the order of their submission. A preempted one is older than all that wait, so its place is the head."""

    def __init__(self) -> None:
        self._waiting: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    @property
    def head(self) -> Sequence:
        """The next one to be admitted; nobody overtakes it."""
        return self._waiting[0]

    def join(self, sequence: Sequence) -> None:
        """Wait behind all others."""
        self._waiting.append(sequence)

    def rejoin(self, sequence: Sequence) -> None:
        """Wait before all others, after a preemption."""
        self._waiting.appendleft(sequence)

    def pop_head(self) -> Sequence:
        """Take the head out."""
        return self._waiting.popleft()

    def remove(self, sequence: Sequence) -> None:
        """Take one out wherever it stands."""
        self._waiting.remove(sequence)

    def check_invariants(self) -> None:
        """Assert that the order is that of submission."""
        orders = [sequence.order for sequence in self._waiting]
        assert orders == sorted(orders), "somebody overtook in the queue"


class PlaceEstimate:
    """How long it takes until a place in a full queue is free: the busy seconds between two ends, lately."""

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
        return min(max(self._seconds_per_end, self._busy_seconds, _SHORTEST_SECONDS), _LONGEST_SECONDS)
