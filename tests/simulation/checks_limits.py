"""Invariants of the limits on concurrent answers.

Clients see only when their own requests begin and end, so the checks use bounds: a request is refused
only if so many answers may have run, and never do more run than a limit allows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.simulation.actions import Turn
from tests.simulation.checks_part import Part
from tests.simulation.conversations import choices_of, runs_in_background

if TYPE_CHECKING:
    from tests.simulation.agents import Heard
    from tests.simulation.checks import Checks
    from tests.simulation.front import SimulatedFront

ENDING_SECONDS = 0.5  # within which the server counts an answer no more after its client has left
TRANSIT_SECONDS = 0.03  # longer than a message between server and client takes
LONGEST_RETRY_SECONDS = 60


@dataclass
class _Open:
    """A request, from the client's side. answering: when its first piece came."""

    turn: Turn
    front: SimulatedFront
    holders: frozenset[str]
    began: float
    answering: float = math.inf
    ended: float = math.inf
    counts: bool = True  # whether the server may have counted its answers

    @property
    def answers(self) -> int:
        return choices_of(self.turn)

    @property
    def is_certain(self) -> bool:
        """Whether the server certainly counts its answers while its client receives them."""
        return self.turn.reader != "slow" and not runs_in_background(self.turn)


class LimitChecks(Part):
    """Checks the limits on concurrent answers."""

    def __init__(self, checks: Checks) -> None:
        super().__init__(checks)
        self._requests: dict[str, _Open] = {}

    def began(self, request_id: str, turn: Turn, front: SimulatedFront) -> None:
        """An agent sends a request."""
        holders = frozenset(self.simulation.keys.holders(turn))
        self._requests[request_id] = _Open(turn, front, holders, self.world.now)

    def answering(self, request_id: str) -> None:
        """The first piece of an answer has come."""
        self._requests[request_id].answering = self.world.now

    def ended(self, request_id: str, heard: Heard | None) -> None:
        """The client has got its answer, or has left (None)."""
        request = self._requests[request_id]
        if heard is None and runs_in_background(request.turn):
            return  # it may still run
        request.ended = self.world.now
        request.counts = heard is None or heard.status not in (401, 429)
        if request.is_certain and request.counts and request.answering < request.ended:
            self._check_enforced(request_id, request)

    def _check_enforced(self, request_id: str, request: _Open) -> None:
        """When the answer began, no more answers were running than the limits allow."""
        limits = self.simulation.keys.limits(request.turn, since=request.began)
        for holder, (_, most) in limits.items():
            running = sum(
                each.answers
                for each in self._of(holder, request.front)
                if each.is_certain
                and each.answering <= request.answering - TRANSIT_SECONDS
                and each.ended >= request.answering + TRANSIT_SECONDS
            )
            if most and running + request.answers > most:
                self._violation(
                    "limits hold",
                    f"{request_id} ran with {running} answers more, but {holder} may have {most}",
                )

    def contradiction(self, request_id: str, heard: Heard) -> str:
        """What contradicts the refusal of a request because of a limit; "": nothing."""
        request = self._requests[request_id]
        limits = self.simulation.keys.limits(request.turn, since=request.began)
        named = [holder for holder in limits if f"{holder} " in f"{heard.message} "]
        named += [holder for holder in limits if f"{holder};" in heard.message]
        if not named:
            return "no limit is set"
        least = limits[named[0]][0]
        if heard.status != 429:
            return "" if request.answers > least else f"the limit is {least}"
        wait = re.search(r"try again in (\d+) s", heard.message)
        if wait is None or wait[1] != heard.retry_after:
            return f"retry-after is {heard.retry_after}"
        if not 1 <= int(wait[1]) <= LONGEST_RETRY_SECONDS:
            return "the wait is out of range"
        most = self._most(named[0], request)
        return "" if most > least else f"only {most} of {least} answers are running or waiting"

    def _most(self, holder: str, request: _Open) -> int:
        """How many answers of a holder may have run at once during a request, with its own."""
        slack = ENDING_SECONDS + self.checks.excuses.slept_since(request.began - ENDING_SECONDS)
        others = [each for each in self._of(holder, request.front) if each is not request]
        times = [each.began for each in others if each.began > request.began]
        return request.answers + max(
            sum(each.answers for each in others if each.began <= at <= each.ended + slack)
            for at in [request.began, *times]
        )

    def _of(self, holder: str, front: SimulatedFront) -> Iterable[_Open]:
        return (
            each
            for each in self._requests.values()
            if holder in each.holders and each.front is front and each.counts
        )
