"""What goes to the processes that run worlds, and what comes back."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field

from tests.simulation.actions import Scenario

MOST_EVENTS = 500_000  # of one world
FORKS = sys.platform == "linux"  # whether a process runs many worlds, each in a fork
BEGAN = 1000.0  # what the clock of a world shows when it begins


@dataclass(frozen=True)
class Failure:
    """An invariant that was violated. at: seconds of the world's clock."""

    invariant: str
    what: str
    at: float

    @property
    def seconds(self) -> float:
        """When, since the world began."""
        return self.at - BEGAN


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a world. seconds: that passed in it."""

    failures: tuple[Failure, ...] = ()
    seconds: float = 0.0
    events: int = 0
    states: frozenset[tuple[str, str]] = frozenset()
    story: tuple[tuple[float, str], ...] = ()
    trace_hash: str = ""
    answers: int = 0
    counts: Counter[str] = field(default_factory=Counter)  # of what a sweep lets fail


@dataclass(frozen=True, kw_only=True)
class Task:
    """A world to run. trace: a file for everything that happens in it; "": none."""

    scenario: Scenario
    most_events: int = MOST_EVENTS
    trace: str = ""
