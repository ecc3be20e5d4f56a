"""Which sequences fit into the KV memory: reservations, admission, and preemption.

Live states are KV in the engine's buffers. Their tokens that sequences share, and those of parked
states (of ended sequences), are in no reservation; parked states can be freed at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.errors import TooLargeForMemory
from holdfast.wire.requests import RequestId
from holdfast.worker.scheduler.queue import Rank
from holdfast.worker.scheduler.sequence import ScheduledSequence, SequenceCosts


class KvReservations:
    """Accounts for the KV memory of a worker's running sequences. Memory that a dispatched step uses
    stays reserved until that step is over.
    """

    def __init__(
        self, costs: SequenceCosts, *, budget_bytes: int, expected_output_tokens: int
    ) -> None:
        """costs: those of a sequence in the usual form. expected_output_tokens: memory for an answer
        of this length is reserved at first, and added whenever an answer outgrows its memory.
        """
        self._costs = costs
        self._expected_output_tokens = expected_output_tokens
        self.budget_bytes = budget_bytes
        self.wanted_budget_bytes = budget_bytes  # may be too small for an accepted sequence
        self.ending_bytes = 0  # of sequences that no longer run, but are in dispatched steps
        self.live_state_bytes = (
            0  # of live states that no reservation covers (`Scheduler.record_live_states`)
        )
        self.parked_bytes = 0  # the part of live_state_bytes that can be freed
        self._running: set[ScheduledSequence] = set()
        self._ending: deque[tuple[int, int]] = deque()  # (last step, bytes), not sorted by step

    @property
    def running_bytes(self) -> int:
        return sum([sequence.reserved_bytes for sequence in self._running])

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved for running sequences, and for ended ones in dispatched steps."""
        return self.running_bytes + self.ending_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that may be reserved now."""
        return self.budget_bytes - self.running_bytes - self.ending_bytes - self.live_state_bytes

    def capacity_for(self, tokens: int) -> int:
        """The capacity, in tokens, to reserve for this many tokens."""
        reserve_step_tokens = self._costs.reserve_step_tokens
        return -(-tokens // reserve_step_tokens) * reserve_step_tokens  # rounded up

    def fits_alone(self, costs: SequenceCosts, *, final_tokens: int) -> bool:
        return costs.bytes_for(self.capacity_for(final_tokens)) <= self.budget_bytes

    def check_fits_alone(self, costs: SequenceCosts, *, final_tokens: int) -> None:
        """Raise TooLargeForMemory if a request would not fit even if it ran alone."""
        if not self.fits_alone(costs, final_tokens=final_tokens):
            needed_bytes = costs.bytes_for(self.capacity_for(final_tokens))
            raise TooLargeForMemory(needed_bytes=needed_bytes, budget_bytes=self.budget_bytes)

    def fit_budget(self, sequences: Iterable[ScheduledSequence]) -> None:
        """Apply the wanted budget, or a larger one in which every accepted sequence fits alone."""
        if self.budget_bytes == self.wanted_budget_bytes:
            return
        needed_bytes = (
            each.costs.bytes_for(self.capacity_for(each.final_tokens)) for each in sequences
        )
        self.budget_bytes = max(self.wanted_budget_bytes, max(needed_bytes, default=0))

    def capacity_at_admission(self, sequence: ScheduledSequence) -> int:
        """The capacity for the known tokens and the expected answer."""
        expected_tokens = min(
            sequence.max_tokens - sequence.generated_tokens, self._expected_output_tokens
        )
        return self.capacity_for(
            sequence.prompt_tokens + sequence.generated_tokens + expected_tokens
        )

    def bytes_at_admission(self, sequence: ScheduledSequence) -> int:
        """The bytes to reserve when a sequence starts to run."""
        capacity = self.capacity_at_admission(sequence)
        return sequence.costs.bytes_for(capacity, held_tokens=sequence.held_tokens)

    def capacities_for_growth(self, sequence: ScheduledSequence) -> tuple[int, ...]:
        """The capacities to try, in this order, for a sequence that lacks room for its next token:
        the preferred one, then the smallest one.
        """
        tokens = min(sequence.position + self._expected_output_tokens, sequence.final_tokens)
        preferred = self.capacity_for(tokens)
        smallest = self.capacity_for(sequence.position + 1)
        return (preferred, smallest) if preferred > smallest else (smallest,)

    def fits(self, sequence: ScheduledSequence) -> bool:
        """Whether a sequence fits in addition to the running sequences and the next growth of each
        of them. Without room for that growth, the sequence would soon be preempted again.
        """
        return self._needed_bytes(sequence, self._running) <= self.free_bytes

    def _needed_bytes(
        self, sequence: ScheduledSequence, running: Iterable[ScheduledSequence]
    ) -> int:
        """The bytes that must be free for a sequence to start beside the `running` ones: its own,
        and one more `reserve_step_tokens` for each running one that will grow.
        """
        headroom_bytes = sum(
            other.costs.reserve_step_tokens * other.costs.kv_bytes_per_token
            for other in running
            if other.capacity_tokens < other.final_tokens and not other.is_fully_planned
        )
        return self.bytes_at_admission(sequence) + headroom_bytes

    def fits_after_steps(self, sequence: ScheduledSequence) -> bool:
        """Whether a sequence will fit once the dispatched steps are over."""
        free_bytes = self.free_bytes + self.ending_bytes
        return self._needed_bytes(sequence, self._running) <= free_bytes

    def fits_without(
        self, sequence: ScheduledSequence, preempted: Collection[ScheduledSequence]
    ) -> bool:
        """Whether a sequence would fit if the running sequences in `preempted` were preempted, the
        dispatched steps were over, and all parked states were freed.
        """
        return self._fits_beside(sequence, self._running.difference(preempted))

    def all_fit(self, sequences: Sequence[ScheduledSequence]) -> bool:
        """Whether all of these sequences would fit in addition to the running ones, once the
        dispatched steps are over and all parked states are freed.
        """
        *earlier, last = sequences
        return self._fits_beside(last, (*self._running, *earlier))

    def _fits_beside(
        self, sequence: ScheduledSequence, others: Collection[ScheduledSequence]
    ) -> bool:
        """Whether a sequence would fit if exactly `others` ran, some of which may still wait, and no
        dispatched step or parked state took memory.
        """
        reserved_bytes = sum(
            each.reserved_bytes if each.is_running else self.bytes_at_admission(each)
            for each in others
        )
        free_bytes = self.budget_bytes - self.live_state_bytes + self.parked_bytes - reserved_bytes
        return self._needed_bytes(sequence, others) <= free_bytes

    def parked_bytes_to_free(self, sequence: ScheduledSequence) -> int:
        """How many bytes of parked states must be freed so that a sequence fits; 0 if it fits
        anyway, or if freeing all parked states is not enough.
        """
        missing_bytes = self._needed_bytes(sequence, self._running) - self.free_bytes
        return missing_bytes if 0 < missing_bytes <= self.parked_bytes else 0

    def reserve(self, sequence: ScheduledSequence, *, step: int) -> None:
        """Reserve memory for a sequence and start it."""
        sequence.start(capacity_tokens=self.capacity_at_admission(sequence), step=step)
        self._running.add(sequence)

    def release(self, sequence: ScheduledSequence, *, recorded_steps: int) -> None:
        """Stop a sequence and free its reservation: now, or after the last step that uses it if that
        is later than step `recorded_steps`, the latest one that is over.
        """
        self._running.remove(sequence)
        freed_bytes = sequence.stop()
        if sequence.last_step > recorded_steps and freed_bytes:
            self.ending_bytes += freed_bytes
            self._ending.append((sequence.last_step, freed_bytes))

    def release_after(self, step: int) -> None:
        """Free the memory of finished or preempted sequences whose last step is over.

        step: the number of the latest step that is over.
        """
        if self._ending:
            remaining = [
                (last_step, nbytes) for last_step, nbytes in self._ending if last_step > step
            ]
            self._ending = deque(remaining)
            self.ending_bytes = sum(nbytes for _, nbytes in remaining)

    def check_invariants(self, running: Iterable[ScheduledSequence]) -> None:
        """Assert that memory is reserved for the running sequences, and that sums are right."""
        assert self._running == set(running), "memory is reserved for other sequences than these"
        assert all(sequence.is_running for sequence in self._running), "nothing is reserved for one"
        assert self.ending_bytes == sum(nbytes for _, nbytes in self._ending), (
            "bytes of ending sequences are miscounted"
        )


@dataclass(slots=True)
class RoomMade:
    """What `make_room` did so that running sequences can continue."""

    grown: list[RequestId] = field(default_factory=list)
    preempted: list[RequestId] = field(default_factory=list)
    # whether a sequence waits for memory that will be free soon; until then, none is admitted
    waits_for_memory: bool = False


def make_room(
    lacking: list[ScheduledSequence],
    running: dict[RequestId, ScheduledSequence],
    reservations: KvReservations,
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

    lacking: the sequences that lack room for their next token.
    running: all running sequences, oldest first; `preempt` must remove a sequence from it.
    """
    made = RoomMade()
    claimed_bytes = 0  # of the memory that is free now or soon, for more urgent sequences that wait
    for sequence in sorted(lacking, key=lambda each: ranks[each.request_id]):
        if sequence.request_id not in running:
            continue  # preempted in favor of a more urgent sequence
        least_bytes = extra_bytes(sequence, reservations.capacities_for_growth(sequence)[-1])
        while (spare_bytes := reservations.free_bytes - claimed_bytes) < least_bytes:
            victim = preemption_order(running, ranks)[0]
            if victim is sequence and len(running) == 1 and sequence.held_tokens:
                # The shared state may take more memory than the sequence's own tokens need, and no
                # other sequence can free memory: the sequence restarts.
                made.preempted.append(victim.request_id)
                preempt(victim)
                break
            if (
                victim is sequence
                or _bytes_free_soon(reservations, running) - claimed_bytes >= least_bytes
            ):
                claimed_bytes += least_bytes
                made.waits_for_memory = True
                break
            made.preempted.append(victim.request_id)
            preempt(victim)
        else:
            _grow(reservations, sequence, spare_bytes=spare_bytes)
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
    preemptible = [sequence for sequence in running.values() if not sequence.is_fully_planned]
    preemptible.sort(key=lambda each: (each.is_paused, ranks[each.request_id]), reverse=True)
    return preemptible


def victims_for(
    waiting: ScheduledSequence,
    reservations: KvReservations,
    *,
    candidates: Iterable[ScheduledSequence],
    running: int,
    max_running: int,
) -> list[ScheduledSequence]:
    """The candidates to preempt so that a waiting sequence can start: as few as possible, in the
    given order. Empty if even all of them would not free enough. running: how many sequences run.
    """
    preempted: list[ScheduledSequence] = []

    def has_room() -> bool:
        return running - len(preempted) < max_running and reservations.fits_without(
            waiting, preempted
        )

    for candidate in candidates:
        if has_room():
            return preempted
        preempted.append(candidate)
    return preempted if preempted and has_room() else []


def extra_bytes(sequence: ScheduledSequence, capacity_tokens: int) -> int:
    """The bytes to reserve for a larger capacity, in addition to those already reserved."""
    needed_bytes = sequence.costs.bytes_for(capacity_tokens, held_tokens=sequence.held_tokens)
    return needed_bytes - sequence.reserved_bytes


def _grow(reservations: KvReservations, sequence: ScheduledSequence, *, spare_bytes: int) -> None:
    """Enlarge a sequence to the preferred capacity if that fits, otherwise to the smallest one."""
    for capacity in reservations.capacities_for_growth(sequence):
        if extra_bytes(sequence, capacity) <= spare_bytes:
            break
    sequence.capacity_tokens = capacity


def _bytes_free_soon(
    reservations: KvReservations, running: dict[RequestId, ScheduledSequence]
) -> int:
    """The bytes that will be free when the dispatched steps are over, without preemption."""
    ending_bytes = sum(
        sequence.reserved_bytes for sequence in running.values() if sequence.is_fully_planned
    )
    return reservations.free_bytes + reservations.ending_bytes + ending_bytes
