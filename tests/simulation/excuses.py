"""The faults of a run, and the failures that they excuse."""

from __future__ import annotations

import errno
import math
from typing import TYPE_CHECKING, NamedTuple

from holdfast.front.fleet.supervised_worker import LONGEST_BACKOFF_SECONDS
from tests.simulation.actions import Trouble
from tests.simulation.checks_part import Part
from tests.simulation.vision import ImageFault
from tests.simulation.world import Process

if TYPE_CHECKING:
    from tests.simulation.checks import Checks

LONGEST_SILENCE = 120.0  # of a serving worker, after which it is killed
EXCUSE_OF_WRITES_SECONDS = 10.0  # within which the end of a response is written
# Requests that begin within this many seconds after a fault may fail, as may those that run when it
# happens. Disk errors never make a request fail.
RECOVERY_SECONDS = {
    "a step raises an error": 0.0,  # each request is then retried alone
    "a step computes NaN": 0.0,
    "the planned step": 0.0,  # of a sweep, like the next three
    "the planned allocation": 0.0,
    "the planned message": 30.0,
    "the planned spawn": 30.0,
    "a step is slow": 30.0,
    "a step hangs": 90.0,  # until its worker is killed and replaced
    "a step kills its process": 90.0,  # with the backoff after several deaths
    "a step computes a conversation that kills its process": 90.0,
    "worker dies": 90.0,
    "workers keep dying": 90.0,
    "no process starts": 90.0,
    "worker is suspended": 30.0,
    "a load raises an error": 90.0,
    "a load kills its process": 90.0,
    "a load hangs": 700.0,  # it is killed after ten minutes without progress
    "server dies": 30.0,
    "server restarts": 20.0,
    "power cut": 30.0,
    "weights change": 30.0,
    "machine sleeps": 30.0,
    "model is unloaded": 20.0,
}
# after which the server kills a serving worker that is silent, or whose step lasts so long: the
# default of `residency.hang_seconds`, less a heartbeat
SHORTEST_SILENCE = 6.0
# For this many seconds after a fault, the server may kill a serving worker.
KILL_SECONDS = {
    "a step is slow": 30.0,
    "a step hangs": LONGEST_SILENCE,
    "worker is suspended": LONGEST_SILENCE,
    "the planned message": LONGEST_SILENCE,
    "server dies": 90.0,
    "server restarts": 90.0,
    "power cut": 90.0,
    "weights change": 90.0,
}
_SILENCES = {"a step is slow", "a step hangs", "worker is suspended"}
# faults that do not affect stored data
HARMLESS_TO_STORE = {
    "worker dies", "worker dies after writes", "workers keep dying", "no process starts",
    "worker is suspended", "worker hangs", "a step hangs", "step kills", "a step kills its process",
    "a conversation kills", "a step computes a conversation that kills its process",
    "step is slow", "a step is slow", "load fails", "a load raises an error",
    "a load kills its process", "a load hangs",
    "server dies", "server restarts", "power cut", "power cut after syncs", "machine sleeps",
    "clock jumps", "model is unloaded",
    "image process dies", "the image process dies", "image process hangs", "the image process hangs",
    "the image process computes without end", "image process is slow", "the image process is slow",
    "image process does not start", "the image process does not start", "no image process starts",
    "vision tower fails", "the image process is not to blame, but the vision tower fails",
}  # fmt: skip
# faults after which a stored block may be missing or damaged
OF_DISK = {"disk error", "disk is full", "file is damaged", "file vanishes", "power cut"}


class _Excuse(NamedTuple):
    """A fault. model: whose requests it affects; "": all."""

    kind: str
    at: float
    model: str


class Excuses(Part):
    """Records the faults of a run."""

    def __init__(self, checks: Checks) -> None:
        super().__init__(checks)
        self.all: list[_Excuse] = []
        self.sleeps: list[tuple[float, float]] = []  # when the machine slept, and for how long
        self.jumped_at = -math.inf  # when the wall clock jumped ahead

    def add(self, kind: str, *, model: str = "") -> None:
        """Record a fault. model: whose requests may fail; "": all."""
        self.all.append(_Excuse(kind, self.world.now, model))
        self.checks.saw(self.simulation.front, kind)

    def slept(self, seconds: float) -> None:
        """The machine has slept."""
        self.sleeps.append((self.world.now - seconds, seconds))

    def any_since(self, at: float) -> bool:
        """Whether anything has gone wrong since then."""
        return any(each.at >= at for each in self.all)

    def slept_since(self, at: float) -> float:
        """The seconds slept since then, which no time limit of the server counts."""
        return sum(seconds for began, seconds in self.sleeps if began >= at)

    def fault(self, process: Process, what: str) -> None:
        """Record a failed step or load of a worker."""
        worker = self.simulation.machine.workers.get(process.pid)
        self.add(what, model=worker.name if worker is not None else "")

    def has_excuse(self, model: str, began: float) -> bool:
        """Whether a fault may make a model's requests fail that began at this time and still run."""
        return any(
            began
            <= each.at + RECOVERY_SECONDS.get(each.kind, -math.inf) + self.slept_since(each.at)
            and each.model in ("", model)
            for each in self.all
        )

    def may_be_killed(self, model: str) -> bool:
        """Whether something has gone wrong for which the server may kill a worker that serves."""
        now = self.world.now
        return any(
            each.at + (SHORTEST_SILENCE if each.kind in _SILENCES else 0.0) <= now
            and now <= each.at + KILL_SECONDS.get(each.kind, -math.inf) + self.slept_since(each.at)
            and each.model in ("", model)
            for each in self.all
        )

    @property
    def recovered_at(self) -> float:
        """The time by which the server must have recovered from all faults."""
        return max(
            (each.at + RECOVERY_SECONDS.get(each.kind, 0.0) for each in self.all), default=0.0
        )

    def image_faults(self, model: str, *kinds: ImageFault, since: float) -> int:
        """How many faults of these kinds have happened to images of a model."""
        names = {f"the image process {kind.value}" for kind in kinds}
        return sum(
            each.kind in names and each.model == model and each.at >= since for each in self.all
        )

    def disk_has_failed(self) -> bool:
        """Whether the disk has failed or has lost unsynced data."""
        return any(kind in OF_DISK for kind, _, _ in self.all)

    def disk_was_full(self, began: float) -> bool:
        """Whether a request that began then may fail because the disk has no space, or had none
        when the server tried last.
        """
        is_planned = any(
            isinstance(each, Trouble) and each.error == errno.ENOSPC and each.kind == "disk error"
            for each in self.simulation.scenario.actions
        )
        return is_planned or began <= self.simulation.disk.full_until + LONGEST_BACKOFF_SECONDS

    def failed_steps(self, model: str, *, since: float) -> bool:
        """Whether steps of a model have failed that make a request fail: two, or one with a NaN."""
        kinds = [each.kind for each in self.all if each.at >= since and each.model == model]
        return "a step computes NaN" in kinds or kinds.count("a step raises an error") >= 2

    def server_died_near(self, at: float) -> bool:
        """Whether the server died at about this time."""
        return any(
            abs(each.at - at) < EXCUSE_OF_WRITES_SECONDS
            and each.kind in ("server dies", "weights change")
            for each in self.all
        )
