"""How many answers one API key, or one client address, may have running or waiting at once."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator

from holdfast.config import LimitsSettings
from holdfast.front.server.caller import Caller
from holdfast.front.server.problem import RequestRefused

_GAIN = 0.2
_LONGEST_RETRY_SECONDS = 60


class AnswersAtOnce:
    """Counts answers from their request to their end. Loop's thread only."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._seconds = 1.0  # that requests take, lately

    @contextlib.contextmanager
    def counted(self, caller: Caller, answers: int, *, limits: LimitsSettings) -> Iterator[None]:
        """Count so many answers of a caller in this block.

        Raises RequestRefused where it has too many already: 429.
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
        """Keys and addresses that have any."""
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
    """Whom a request is counted for: name, cap (0: none), and how it is told."""
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
