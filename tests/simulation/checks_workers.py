"""Invariants of workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.store.block import BlockKey
from holdfast.wire.events import WaitReason
from holdfast.worker.engine.plan import Draft
from holdfast.worker.loop.loop import IDLE_SECONDS, WorkerLoop
from tests.simulation.actions import BLOCK, Call
from tests.simulation.checks_links import DURABLE_SECONDS
from tests.simulation.checks_part import Part
from tests.simulation.excuses import HARMLESS_TO_STORE, LONGEST_SILENCE
from tests.simulation.vision import program_of
from tests.simulation.world import Process

if TYPE_CHECKING:
    from holdfast.worker.loop.sequences import LiveSequence
    from holdfast.worker.prefix.lookup import LiveChain
    from holdfast.worker.prefix.tiers import RamTier
    from tests.simulation.checks import Checks
    from tests.simulation.worker import SimulatedWorker

CHECKED_SHARE = 0.2  # of the loop's rounds


class WorkerChecks(Part):
    """Checks workers' loops, sessions and processes."""

    def __init__(self, checks: Checks) -> None:
        super().__init__(checks)
        self._uses = 0
        # of blocks in RAM: the number of the last use
        self._last_used: dict[RamTier, dict[BlockKey, int]] = defaultdict(dict)

    def at_round(self, loop: WorkerLoop, *, timeout_seconds: float) -> None:
        """A worker's loop is about to poll for commands."""
        worker = next(
            (each for each in self.simulation.machine.workers.values() if each.loop is loop), None
        )
        if worker is None:
            return
        statistics = loop._scheduler.statistics()
        waits = sorted(reason.value for reason in loop._ledger.wait_reasons().values())
        self.checks.states.add(
            (
                f"running {min(statistics.running, 3)} queued {min(statistics.queued, 3)}",
                f"waits {' '.join(dict.fromkeys(waits))}",
            )
        )
        if timeout_seconds >= IDLE_SECONDS:
            self._check_idle(loop)
        if self.world.random.random() < CHECKED_SHARE:
            loop.check_invariants()
            if worker.index is not None:
                worker.index.check_invariants()
            self._check_waits(loop)
            self._check_memory(loop)

    def _check_idle(self, loop: WorkerLoop) -> None:
        """The loop is about to sleep."""
        for request_id, reason in loop._ledger.wait_reasons().items():
            if reason is not WaitReason.READER:
                self._violation(
                    "the queue is never idle",
                    f"the loop sleeps, but {request_id} waits for {reason}",
                )

    def _check_waits(self, loop: WorkerLoop) -> None:
        """Every waiting request states a true reason."""
        cache = loop._cache_client
        for sequence in loop._ledger.live():
            scheduled = sequence.scheduled
            reason = scheduled.waits_for
            if reason is WaitReason.DISK and sequence.start.lookup is None:
                self._violation(
                    "true reasons", f"{sequence.id} waits for the disk without a lookup"
                )
            if reason is WaitReason.TWIN and sequence.id not in cache._in_flight._waiting:
                self._violation("true reasons", f"{sequence.id} waits for no other request")
        cache._in_flight.check_invariants()

    def _check_memory(self, loop: WorkerLoop) -> None:
        """Keys and values stay within the budget: parked states are freed first."""
        used = loop._scheduler._reservations
        nbytes = used.running_bytes + used.ending_bytes + used.live_state_bytes
        if used.parked_bytes and nbytes > used.budget_bytes:
            self._violation(
                "bytes",
                f"{nbytes} of {used.budget_bytes} bytes are in use, but {used.parked_bytes} of parked "
                "states are not freed",
            )

    def used(self, ram: RamTier, keys: Iterable[BlockKey]) -> None:
        """Blocks were put into RAM, or a request starts from them."""
        self._uses += 1
        self._last_used[ram].update(dict.fromkeys(keys, self._uses))

    def evicts(self, ram: RamTier, key: BlockKey) -> None:
        """A worker evicts a block from RAM."""
        used = self._last_used[ram]
        may_leave = [
            each for each in ram._last_used if each not in ram._holds and each not in ram._children
        ]
        if key not in may_leave:
            self._violation(
                "eviction order", f"{key.hex()} is held, or followed by others, but leaves RAM"
            )
        older = [each for each in may_leave if used[each] < used[key]]
        if older:
            self._violation(
                "eviction order", f"{key.hex()} leaves RAM, but {older[0].hex()} was used before it"
            )

    def reclaimed(self, before: Sequence[LiveChain], after: Sequence[LiveChain]) -> None:
        """A worker has dropped parked states to free memory: stale ones, then those that were used
        least recently; ones that waiting requests claim only if there are no others.
        """
        ranks = {
            chain: (not chain.is_stale, bool(chain.claims), chain.used)
            for chain in before
            if chain in after or chain.state is None
        }
        dropped = [rank for chain, rank in ranks.items() if chain not in after]
        kept = [rank for chain, rank in ranks.items() if chain in after]
        if dropped and kept and max(dropped) > min(kept):
            self._violation(
                "eviction order", f"a parked state {max(dropped)} goes before {min(kept)}"
            )

    def check_rest(self, worker: SimulatedWorker) -> None:
        """No agent waits any more: the worker holds nothing but its sessions."""
        self._check_rest(worker)
        self._check_sessions(worker)
        self._check_closed(worker)

    def _check_rest(self, worker: SimulatedWorker) -> None:
        if worker.loop is None or worker.engine is None:
            return
        statistics = worker.loop._scheduler.statistics()
        open_sequences = len(worker.engine._sequences)
        live = [sequence.id for sequence in worker.loop._ledger.live()]
        if statistics.running or statistics.queued or open_sequences or live:
            self._violation(
                "nothing outlives its owner",
                f"at rest {worker.name} has {statistics.running} running, {statistics.queued} "
                f"queued, {open_sequences} open sequences, and {live}",
            )
        images = worker.engine.images
        if images is not None and (images.is_busy or images._questions or images._processing):
            self._violation("nothing outlives its owner", f"{worker.name} still processes images")
        most = worker.settings.store.ram_bytes
        parked = 0 if worker.cache is None else worker.cache.live.held.parked_bytes
        if most is not None and parked > most:
            self._violation("bytes", f"{parked} of {most} bytes in parked states")
        index = worker.index
        if index is not None and not index.pins._held_sizes:
            nbytes = index.ram.resident_bytes
            if nbytes > index.ram.budget_bytes:
                self._violation("bytes", f"{nbytes} of {index.ram.budget_bytes} bytes in RAM")
        if index is not None and index.ram._holds and not index.pins._held_sizes:
            self._violation(
                "nothing outlives its owner", f"{len(index.ram._holds)} blocks are held"
            )

    def _check_closed(self, worker: SimulatedWorker) -> None:
        """Sessions that were closed are gone."""
        if worker.loop is None or worker.loop._sessions is None:
            return
        for (model, tenant, name), at in self.checks.links.closed.items():
            if model != worker.name or any(each.at >= at - 1.0 for each in self.checks.excuses.all):
                continue
            if worker.loop._sessions.is_open(name, tenant=tenant):
                self._violation("nothing outlives its owner", f"session {name} was closed")

    def _check_sessions(self, worker: SimulatedWorker) -> None:
        """Sessions that requests have named still exist."""
        options = self.simulation.options
        calls = [each for each in self.simulation.scenario.actions if isinstance(each, Call)]
        opens = [each for each in calls if each.method == "POST" and "sessions" in each.path]
        requests = [each.request for each in self.checks.links.asked.values()]
        named = {(each.session_id, each.tenant, each.adapter) for each in requests}
        are_kept = (
            all(kind in HARMLESS_TO_STORE for kind, _, _ in self.checks.excuses.all)
            and "failing" not in options
            and not any(each.method == "DELETE" for each in calls)
            and len(named) + len(opens) <= options["max_sessions"]
        )
        if not are_kept or worker.loop is None or worker.loop._sessions is None:
            return
        ends = self.simulation.machine.ended_at
        for (model, name, tenant), at in self.checks.links.sessions.items():
            lost_at = next((end for end in ends if end >= at), None)
            if model != worker.name or (
                lost_at is not None and (not options["has_store"] or lost_at < at + DURABLE_SECONDS)
            ):
                continue
            if not worker.loop._sessions.is_open(name, tenant=tenant):
                self._violation("sessions stay", f"{name} of {model} is gone")

    def expired(self, sessions: list[Any]) -> None:
        """Sessions expire. None gets that old here unless the clock jumps, and the server believes a
        jump only after an hour.
        """
        if sessions and self.world.now - self.checks.excuses.jumped_at < 3500.0:
            self._violation("nothing expires early", f"{len(sessions)} sessions are closed by age")

    def killed(self, process: Process) -> None:
        """The server may kill a serving worker only after a fault; a loading one can be stopped
        in no other way.
        """
        worker = self.simulation.machine.workers.get(process.pid)
        if (program := program_of(process)) is not None:
            worker = self.simulation.machine.workers.get(program.worker.pid)
            is_ending = worker is None or worker.loop is None or worker.loop._is_closing
            if program.is_working and not is_ending:
                self._violation("no needless kill", f"{process.name} is killed, but works")
            return
        is_loading = worker is None or worker.loop is None
        model = worker.name if worker is not None else ""
        if not is_loading and not self.checks.excuses.may_be_killed(model):
            self._violation(
                "no needless kill", f"{process.name} is killed, but nothing has gone wrong"
            )

    def suspended(self, process: Process, *, seconds: float) -> None:
        """A serving worker that was suspended for too long must have been replaced."""
        worker = self.simulation.machine.workers.get(process.pid)
        began = self.world.now - seconds
        front = self.simulation.front
        is_served = front.is_running and front.began_at < began
        has_slept = any(at >= began for at, _ in self.checks.excuses.sleeps)
        if worker and worker.loop and is_served and not has_slept and seconds > LONGEST_SILENCE:
            self._violation(
                "bounded time", f"{process.name} was suspended for {seconds:.0f} s and still lives"
            )

    def verified(self, sequence: LiveSequence, draft: Draft, *, accepted: int) -> None:
        """Count which part of a draft a step has accepted."""
        drafted = len(draft.token_ids)
        how_many = "all" if accepted == drafted else "some" if accepted else "none"
        place = sequence.known_tokens % BLOCK
        where = "over an edge" if place + drafted >= BLOCK else "within a block"
        whose = "model" if draft.is_by_model else "text"
        second = self.simulation.options["second_layer"]
        self.checks.states.add(
            (f"draft from the {whose} with {second}", f"{how_many} right {where}")
        )
        if sequence.request.grammar:
            self.checks.states.add(("draft under a grammar", f"{how_many} right"))
