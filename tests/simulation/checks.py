"""The named invariants of the simulated world.

Agents report the answers that they receive; messages on the links and the rounds of workers' loops
are observed; and when no agent waits any more, all resources are counted.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError
from holdfast.store.block import ReadFailed
from holdfast.worker.drafting.draft_model import DraftModelFailed
from tests.simulation.checks_answers import AnswerChecks
from tests.simulation.checks_limits import LimitChecks
from tests.simulation.checks_links import LinkChecks
from tests.simulation.checks_refusals import RefusalChecks
from tests.simulation.checks_store import StoreChecks
from tests.simulation.checks_workers import WorkerChecks
from tests.simulation.device import SimulatedFailure
from tests.simulation.excuses import Excuses
from tests.simulation.vision import TowerFailed
from tests.simulation.world import Killed

if TYPE_CHECKING:
    from tests.simulation.front import SimulatedFront
    from tests.simulation.simulation import Simulation

_CAUSES = OSError | SimulatedFailure | TowerFailed | ReadFailed | HoldfastError | Killed
MOST_FILES = 24  # open in one idle process


class Violation(Exception):
    """An invariant is violated."""

    def __init__(self, invariant: str, what: str, *, at: float) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant, self.what, self.at = invariant, what, at


class Checks:
    """Checks the invariants of one run."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.states: set[tuple[str, str]] = set()
        self._in_cache = ""  # the last event of `saw_in_cache`
        self.excuses = Excuses(self)
        self.answers = AnswerChecks(self)
        self.refusals = RefusalChecks(self)
        self.limits = LimitChecks(self)
        self.links = LinkChecks(self)
        self.workers = WorkerChecks(self)
        self.store = StoreChecks(self)
        running[:] = [self]

    def _violation(self, invariant: str, what: str) -> None:
        self.simulation.violation(invariant, what)

    def at_rest(self) -> None:
        """Called when no agent waits any more: nothing may be held."""
        front = self.simulation.front
        if front.app is not None:
            active = list(front.app.state.services.answers.active)
            if active:
                self._violation("nothing outlives its owner", f"{len(active)} requests are active")
            self._check_front_at_rest(front)
        self.links.check_rest()
        for worker in self.simulation.machine.workers.values():
            self.workers.check_rest(worker)
        self.store.check_unwanted()
        for process in self.world.processes:
            files = self.simulation.disk.open_files(process)
            if len(files) > (0 if process.is_dead else MOST_FILES):
                self._violation(
                    "nothing outlives its owner", f"{process.name} has these open: {files}"
                )
        if self.simulation.disk.misuses:
            self._violation(
                "nothing outlives its owner", f"closed files: {self.simulation.disk.misuses}"
            )
        self.store.check_blocks()
        self.store.check_durable()
        self.store.check_size()

    def _check_front_at_rest(self, front: SimulatedFront) -> None:
        """No answer is kept for a client that may reconnect, and all caches are consistent."""
        assert front.app is not None and front.residency is not None
        services = front.app.state.services
        resumable = services.answers.resumable
        left = {
            "answers": len(resumable) + len(resumable._by_head) + resumable.buffered_bytes,
            "running responses": len(resumable.named.keys() - set(resumable._unwritten)),
            "background tasks": len(resumable.tasks),
            "leases": sum(
                slot.leases.held + slot.leases.waiting for slot in front.residency._slots.values()
            ),
        }
        if any(left.values()):
            self._violation("nothing outlives its owner", f"at rest, the server has {left}")
        image_folder = services.gateway._images.folder
        if image_folder._holds:
            self._violation("nothing outlives its owner", "the server holds images")
        if not self.excuses.disk_has_failed():
            with self.simulation.disk.bypassed():
                image_folder.check_invariants()
        resumable.check_invariants()
        services.telemetry.misses.check_invariants()
        for slot in front.residency._slots.values():
            slot.check_invariants()
        for task in front.app.state.bundles._tasks.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                bundle = task.result()
                for memory in (bundle.token_memory, bundle.first_forms, bundle.known_answers):
                    memory.check_invariants()

    def at_end(self) -> None:
        """Called when the server has stopped."""
        self.store.check_blocks()

    def swallowed(self, error: BaseException) -> None:
        """An error is logged and not raised, which only simulated faults may cause."""
        if isinstance(error, Violation):
            return
        has_nan = any(kind == "a step computes NaN" for kind, _, _ in self.excuses.all)
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, _CAUSES):
                return
            if has_nan and isinstance(cause, DraftModelFailed):
                return
            cause = cause.__cause__ or cause.__context__
        lines = "".join(traceback.format_exception(error)[-3:])
        self._violation("nothing is swallowed", lines)

    def saw(self, front: SimulatedFront, event: str) -> None:
        residency = front.residency
        phases = "down"
        if residency is not None:
            phases = " ".join(slot.state.value for slot in residency._slots.values())
        self.states.add((phases, event))

    def saw_in_cache(self, event: str) -> None:
        """Something has happened in a cache or its store."""
        if event != self._in_cache:
            self.states.add((self._in_cache, event))
            self._in_cache = event


running: list[Checks] = []
