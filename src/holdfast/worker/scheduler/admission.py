"""KV memory: the costs of a sequence, reservations, admission, and preemption."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.errors import TooLargeForMemory
from holdfast.wire.requests import RequestId
from holdfast.worker.scheduler.queue import Rank, ScheduledSequence, SequenceCosts


class KvLedger:
    """Accounts for the KV memory of a worker's running sequences. Memory that a dispatched step uses
    stays reserved until that step is over.
    """

    def __init__(
        self, costs: SequenceCosts, *, budget_bytes: int, expected_output_tokens: int
    ) -> None:
        """costs: those assumed for sequences that are not known yet."""
        self._costs = costs
        self._expected_output_tokens = expected_output_tokens
        self.budget_bytes = budget_bytes
        self.wanted_budget_bytes = budget_bytes
        self.leaving_bytes = 0
        self.held_bytes = 0  # of live states, in addition to the reservations
        self.parked_bytes = 0  # the part of held_bytes that can be freed
        self._running: set[ScheduledSequence] = set()
        self._leaving: deque[tuple[int, int]] = deque()  # (step, bytes), not sorted by step

    @property
    def running_bytes(self) -> int:
        """Bytes reserved for running sequences."""
        return sum([sequence.reserved_bytes for sequence in self._running])

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved for running sequences, and for ended ones in dispatched steps."""
        return self.running_bytes + self.leaving_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that may be reserved now."""
        return self.budget_bytes - self.running_bytes - self.leaving_bytes - self.held_bytes

    def capacity_for(self, tokens: int) -> int:
        """The capacity to reserve for `tokens` tokens."""
        step = self._costs.reserve_step_tokens
        return -(-tokens // step) * step

    def fits_alone(self, costs: SequenceCosts, *, final_tokens: int) -> bool:
        """Whether a request fits if it runs alone."""
        return costs.bytes_for(self.capacity_for(final_tokens)) <= self.budget_bytes

    def check_fits_alone(self, costs: SequenceCosts, *, final_tokens: int) -> None:
        """Raise TooLargeForMemory if a request would not fit even if it ran alone."""
        if not self.fits_alone(costs, final_tokens=final_tokens):
            needed = costs.bytes_for(self.capacity_for(final_tokens))
            raise TooLargeForMemory(needed_bytes=needed, budget_bytes=self.budget_bytes)

    def fit_budget(self, known: Iterable[ScheduledSequence]) -> None:
        """Apply the wanted budget, or a larger one if the largest accepted sequence would not fit
        alone.
        """
        if self.budget_bytes == self.wanted_budget_bytes:
            return
        needs = (each.costs.bytes_for(self.capacity_for(each.final_tokens)) for each in known)
        self.budget_bytes = max(self.wanted_budget_bytes, max(needs, default=0))

    def capacity_at_admission(self, sequence: ScheduledSequence) -> int:
        """The capacity for the known tokens and the expected answer."""
        ahead = min(sequence.max_tokens - sequence.drawn, self._expected_output_tokens)
        return self.capacity_for(sequence.prompt_tokens + sequence.drawn + ahead)

    def bytes_at_admission(self, sequence: ScheduledSequence) -> int:
        """The bytes to reserve for `capacity_at_admission`."""
        capacity = self.capacity_at_admission(sequence)
        return sequence.costs.bytes_for(capacity, held_tokens=sequence.held_tokens)

    def capacities_for_growth(self, sequence: ScheduledSequence) -> tuple[int, ...]:
        """The capacities to try, in this order, for a sequence that lacks room for its next token:
        the preferred one, then the smallest one.
        """
        tokens = min(sequence.position + self._expected_output_tokens, sequence.final_tokens)
        best = self.capacity_for(tokens)
        least = self.capacity_for(sequence.position + 1)
        return (best, least) if best > least else (least,)

    def may_enter(self, sequence: ScheduledSequence) -> bool:
        """Whether a sequence fits in addition to the running sequences and the next growth of each
        of them. Without room for that growth, the sequence would soon be preempted again.
        """
        return self._needed_to_enter(sequence, self._running) <= self.free_bytes

    def _needed_to_enter(
        self, sequence: ScheduledSequence, running: Iterable[ScheduledSequence]
    ) -> int:
        headroom = sum(
            other.costs.reserve_step_tokens * other.costs.kv_bytes_per_token
            for other in running
            if other.capacity_tokens < other.final_tokens and not other.is_fully_planned
        )
        return self.bytes_at_admission(sequence) + headroom

    def may_enter_soon(self, sequence: ScheduledSequence) -> bool:
        """Whether a sequence will fit once the dispatched steps are over."""
        free_bytes = self.free_bytes + self.leaving_bytes
        return self._needed_to_enter(sequence, self._running) <= free_bytes

    def may_enter_without(
        self, sequence: ScheduledSequence, gone: Collection[ScheduledSequence]
    ) -> bool:
        """Whether a sequence would fit if the running sequences in `gone` were preempted, the
        dispatched steps were over, and all parked states were freed.
        """
        return self._may_enter_between(sequence, self._running.difference(gone))

    def may_all_enter(self, sequences: Sequence[ScheduledSequence]) -> bool:
        """Whether all of these sequences would fit in addition to the running ones, once the
        dispatched steps are over and all parked states are freed.
        """
        *earlier, last = sequences
        return self._may_enter_between(last, (*self._running, *earlier))

    def _may_enter_between(
        self, sequence: ScheduledSequence, others: Collection[ScheduledSequence]
    ) -> bool:
        reserved = sum(
            each.reserved_bytes if each.is_running else self.bytes_at_admission(each)
            for each in others
        )
        free_bytes = self.budget_bytes - self.held_bytes + self.parked_bytes - reserved
        return self._needed_to_enter(sequence, others) <= free_bytes

    def missing_to_enter(self, sequence: ScheduledSequence) -> int:
        """The bytes of parked states to free so that a sequence fits; 0 if it fits anyway, or if
        freeing all parked states is not enough.
        """
        missing = self._needed_to_enter(sequence, self._running) - self.free_bytes
        return missing if 0 < missing <= self.parked_bytes else 0

    def enter(self, sequence: ScheduledSequence, *, step: int) -> None:
        """Reserve memory for a sequence and start it."""
        sequence.start(capacity_tokens=self.capacity_at_admission(sequence), step=step)
        self._running.add(sequence)

    def leave(self, sequence: ScheduledSequence, *, observed_steps: int) -> None:
        """Free the reservation of a sequence, immediately or when the last step that uses the
        sequence is over.
        """
        self._running.remove(sequence)
        freed = sequence.stop()
        if sequence.last_step > observed_steps and freed:
            self.leaving_bytes += freed
            self._leaving.append((sequence.last_step, freed))

    def step_is_over(self, step: int) -> None:
        """Free the memory of finished or preempted sequences that no step after `step` uses. step:
        the number of the step that is over.
        """
        if self._leaving:
            kept = [(until, held) for until, held in self._leaving if until > step]
            self._leaving = deque(kept)
            self.leaving_bytes = sum(held for _, held in kept)

    def check_invariants(self, running: Iterable[ScheduledSequence]) -> None:
        """Assert that memory is reserved for the running sequences, and that sums are right."""
        assert self._running == set(running), "memory is reserved for other sequences than these"
        assert all(sequence.is_running for sequence in self._running), "nothing is reserved for one"
        assert self.leaving_bytes == sum(held for _, held in self._leaving), (
            "bytes of leaving sequences are miscounted"
        )


@dataclass(slots=True)
class RoomMade:
    """The changes that let running sequences continue."""

    grown: list[RequestId] = field(default_factory=list)
    preempted: list[RequestId] = field(default_factory=list)
    # whether a sequence waits for memory that will be free soon; until then, none is admitted
    someone_waits: bool = False


def make_room(
    needy: list[ScheduledSequence],
    running: dict[RequestId, ScheduledSequence],
    ledger: KvLedger,
    *,
    ranks: Mapping[RequestId, Rank],
    preempt: Callable[[ScheduledSequence], None],
) -> RoomMade:
    """Grow each sequence that lacks room for its next token, the most urgent one first.

    The lowest rank is the most urgent. A sequence that does not fit waits if the dispatched
    steps will free enough memory. Otherwise the least urgent running sequence is preempted,
    unless it is the one that needs room: then it keeps its KV and stalls until another sequence
    ends. The most urgent sequence always finds room, because it fits alone (admission checked
    this), so some sequence always makes progress.

    needy: the sequences that lack room for their next token.
    running: all running sequences, oldest first; `preempt` must remove a sequence from it.
    """
    made = RoomMade()
    claimed_bytes = 0
    for sequence in sorted(needy, key=lambda each: ranks[each.request_id]):
        if sequence.request_id not in running:
            continue  # preempted in favor of a more urgent sequence
        least_bytes = extra_bytes(sequence, ledger.capacities_for_growth(sequence)[-1])
        while (spare_bytes := ledger.free_bytes - claimed_bytes) < least_bytes:
            victim = preemption_order(running, ranks)[0]
            if victim is sequence and len(running) == 1 and sequence.held_tokens:
                # The shared state may take more memory than the sequence's own tokens need, and no
                # other sequence can free memory: the sequence restarts.
                made.preempted.append(victim.request_id)
                preempt(victim)
                break
            if (
                victim is sequence
                or _bytes_free_soon(ledger, running) - claimed_bytes >= least_bytes
            ):
                claimed_bytes += least_bytes
                made.someone_waits = True
                break
            made.preempted.append(victim.request_id)
            preempt(victim)
        else:
            _grow(ledger, sequence, spare_bytes=spare_bytes)
            made.grown.append(sequence.request_id)
    return made


def preemption_order(
    running: Mapping[RequestId, ScheduledSequence], ranks: Mapping[RequestId, Rank]
) -> list[ScheduledSequence]:
    """The running sequences in the order of preemption: paused ones first, then the least urgent
    (highest rank) first.

    Within a priority class, the youngest sequence of the flow with the most sequences is the least
    urgent. Sequences that are about to end are omitted, because they free their memory anyway.
    """
    able = [sequence for sequence in running.values() if not sequence.is_fully_planned]
    able.sort(key=lambda each: (each.is_paused, ranks[each.request_id]), reverse=True)
    return able


def victims_for(
    waiting: ScheduledSequence,
    ledger: KvLedger,
    *,
    candidates: Iterable[ScheduledSequence],
    running: int,
    max_running: int,
) -> list[ScheduledSequence]:
    """The candidates to preempt so that a waiting sequence can start: as few as possible, in the
    given order. Empty if even all of them would not free enough. running: how many sequences run.
    """
    gone: list[ScheduledSequence] = []

    def has_room() -> bool:
        return running - len(gone) < max_running and ledger.may_enter_without(waiting, gone)

    for candidate in candidates:
        if has_room():
            return gone
        gone.append(candidate)
    return gone if gone and has_room() else []


def extra_bytes(sequence: ScheduledSequence, capacity_tokens: int) -> int:
    """The bytes to reserve for a larger capacity, in addition to those already reserved."""
    needed = sequence.costs.bytes_for(capacity_tokens, held_tokens=sequence.held_tokens)
    return needed - sequence.reserved_bytes


def _grow(ledger: KvLedger, sequence: ScheduledSequence, *, spare_bytes: int) -> None:
    for capacity in ledger.capacities_for_growth(sequence):
        if extra_bytes(sequence, capacity) <= spare_bytes:
            break
    sequence.capacity_tokens = capacity


def _bytes_free_soon(ledger: KvLedger, running: dict[RequestId, ScheduledSequence]) -> int:
    ending = sum(
        sequence.reserved_bytes for sequence in running.values() if sequence.is_fully_planned
    )
    return ledger.free_bytes + ledger.leaving_bytes + ending
