"""The tasks of the processes that run worlds, and their results."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field

from tests.simulation.actions import Scenario

MOST_EVENTS = 500_000  # of one world
FORKS = sys.platform == "linux"  # a process runs many worlds, each in a fork
BEGAN = 1000.0  # the time at which a world begins


@dataclass(frozen=True)
class Failure:
    """A violated invariant. at: seconds of the world's clock."""

    invariant: str
    what: str
    at: float

    @property
    def seconds(self) -> float:
        """Seconds since the world began."""
        return self.at - BEGAN


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a world. seconds: of virtual time. states: the reached coverage."""

    failures: tuple[Failure, ...] = ()
    seconds: float = 0.0
    events: int = 0
    states: frozenset[tuple[str, str]] = frozenset()
    story: tuple[tuple[float, str], ...] = ()
    trace_hash: str = ""
    answers: int = 0
    counts: Counter[str] = field(default_factory=Counter)  # operations that a sweep can let fail


@dataclass(frozen=True, kw_only=True)
class Task:
    """A world to run. trace: a file for the trace of all events; "": none."""

    scenario: Scenario
    most_events: int = MOST_EVENTS
    trace: str = ""
