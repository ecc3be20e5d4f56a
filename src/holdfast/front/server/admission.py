"""Which new requests are admitted: a cap on the answers of one API key or client address, and no
new work while the server drains.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator

from holdfast.config import LimitsSettings
from holdfast.errors import ServerStopping
from holdfast.front.server.caller import Caller
from holdfast.front.server.problem import RequestRefused

_LONGEST_RETRY_SECONDS = 60  # clients give up rather than wait longer
_GAIN = 0.2  # of the moving average of how long a request takes
_READS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})  # DELETE ends things, as `/cancel` does
_RESTART_SECONDS = 2.0  # until this server, restarted, or another one listens


class AnswersAtOnce:
    """Counts the running and waiting answers of each caller. Event loop's thread only."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._seconds = 1.0  # moving average of how long a request takes

    @contextlib.contextmanager
    def counted(self, caller: Caller, answers: int, *, limits: LimitsSettings) -> Iterator[None]:
        """Count this many answers of a caller while the block runs.

        Raises RequestRefused (429) when the caller has too many already.
        """
        caps = [(holder, cap, whose) for holder, cap, whose in _caps(caller, limits) if cap]
        for holder, cap, whose in caps:
            self._refuse_above(cap, holder, whose=whose, answers=answers)
        holders = [holder for holder, _, _ in caps]
        began = self._clock()
        for holder in holders:
            self._counts[holder] += answers
        try:
            yield
        finally:
            self._seconds += _GAIN * (self._clock() - began - self._seconds)
            for holder in holders:
                self._counts[holder] -= answers
                if not self._counts[holder]:
                    del self._counts[holder]

    @property
    def holders(self) -> int:
        """The number of keys and addresses with running or waiting answers."""
        return len(self._counts)

    def _refuse_above(self, cap: int, holder: str, *, whose: str, answers: int) -> None:
        running = self._counts[holder]
        if answers > cap:
            message = (
                f"{answers} answers in one request are more than {whose} may have at once ({cap}); "
                "ask for fewer"
            )
            raise RequestRefused(message, code="request_too_large_for_cap")
        if running + answers > cap:
            retry = min(max(1, math.ceil(self._seconds / running)), _LONGEST_RETRY_SECONDS)
            message = (
                f"{whose} has {running} answers running or waiting, of at most {cap} at once; "
                f"please try again in {retry} s"
            )
            raise RequestRefused(
                message, status=429, code="rate_limit_exceeded", retry_after_seconds=retry
            )


def _caps(caller: Caller, limits: LimitsSettings) -> Iterator[tuple[str, int, str]]:
    """Each holder a request counts against: its name, its cap (0: none), its name in messages."""
    if caller.key is not None:
        own = caller.key.max_requests
        yield (
            f"key {caller.key.name}",
            limits.max_requests_per_key if own is None else own,
            f"the key {caller.key.name}",
        )
    elif caller.server_key:
        yield "the server's key", limits.max_requests_per_key, "this API key"
    if caller.address:
        yield (
            f"address {caller.address}",
            limits.max_requests_per_address,
            f"the address {caller.address}",
        )


class Drain:
    """A server that is stopping: it starts nothing new, and running answers get a time limit.

    Event loop's thread only.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_at: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether the server is draining."""
        return self._ends_at is not None

    @property
    def seconds_left(self) -> float:
        """How long running answers may continue; 0 before the drain begins."""
        return 0.0 if self._ends_at is None else max(0.0, self._ends_at - self._clock())

    def begin(self, limit_seconds: float) -> None:
        """Refuse new work from now on; running answers get `limit_seconds` to finish."""
        self._ends_at = self._clock() + limit_seconds

    def refusal(self, method: str, path: str) -> ServerStopping | None:
        """The refusal of a request that would start new work; None for any other.

        Reading state and ending things still works.
        """
        if not self.is_on or method in _READS or path.endswith("/cancel"):
            return None
        return ServerStopping(
            retry_after_seconds=min(self.seconds_left + _RESTART_SECONDS, _LONGEST_RETRY_SECONDS)
        )
