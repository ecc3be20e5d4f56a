"""KV bytes against the budget: what a sequence needs, what is reserved, who may come in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from holdfast.errors import TooLargeForMemory
from holdfast.worker.scheduler.decision import SequenceCosts
from holdfast.worker.scheduler.sequence import ScheduledSequence


class KvLedger:
    """Counts reserved bytes.

    Bytes of a sequence that a step under way still touches stay reserved until that step is over.
    """

    def __init__(
        self, costs: SequenceCosts, *, budget_bytes: int, expected_output_tokens: int
    ) -> None:
        self._costs = costs
        self._expected_output_tokens = expected_output_tokens
        self.budget_bytes = budget_bytes
        self.wanted_budget_bytes = budget_bytes
        # reserved when the budget shrank: nothing is taken away, nothing is added
        self._tolerated_bytes = budget_bytes
        self.running_bytes = 0
        self.leaving_bytes = 0
        self.held_bytes = 0  # of live states that no sequence here has reserved
        self.parked_bytes = 0  # of these, what becomes free when it is asked for
        self._leaving: deque[tuple[int, int]] = deque()  # (step, bytes), not sorted by step

    @property
    def reserved_bytes(self) -> int:
        """Bytes that nobody else may have now."""
        return self.running_bytes + self.leaving_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that may be reserved now."""
        return self.budget_bytes - self.running_bytes - self.leaving_bytes - self.held_bytes

    def capacity_for(self, tokens: int) -> int:
        """The capacity to reserve so that `tokens` tokens fit."""
        step = self._costs.reserve_step_tokens
        return -(-tokens // step) * step

    def bytes_for(self, capacity_tokens: int, *, held_tokens: int = 0) -> int:
        """Bytes of one sequence of that capacity, without those of tokens that are held elsewhere."""
        own_tokens = max(0, capacity_tokens - held_tokens)
        return own_tokens * self._costs.kv_bytes_per_token + self._costs.fixed_bytes_per_sequence

    def check_fits_alone(self, *, final_tokens: int) -> None:
        """Raise TooLargeForMemory for what could not even run alone."""
        needed = self.bytes_for(self.capacity_for(final_tokens))
        if needed > self.budget_bytes:
            raise TooLargeForMemory(needed_bytes=needed, budget_bytes=self.budget_bytes)

    def fit_budget(self, known: Iterable[ScheduledSequence]) -> None:
        """Bring the budget to what is wanted, as far as each sequence that was accepted still fits
        alone.
        """
        if self.budget_bytes == self.wanted_budget_bytes:
            return
        needs = (self.bytes_for(self.capacity_for(each.final_tokens)) for each in known)
        self.budget_bytes = max(self.wanted_budget_bytes, max(needs, default=0))
        self._tolerated_bytes = max(self.budget_bytes, self.reserved_bytes)

    def capacity_at_admission(self, sequence: ScheduledSequence) -> int:
        """Capacity for what is known and the answer that is expected."""
        ahead = min(sequence.max_tokens - sequence.drawn, self._expected_output_tokens)
        return self.capacity_for(sequence.prompt_tokens + sequence.drawn + ahead)

    def capacities_for_growth(self, sequence: ScheduledSequence) -> tuple[int, ...]:
        """Larger capacities for a sequence that has no room for its next token, the most welcome
        first, the least one last.
        """
        wanted = min(sequence.position + self._expected_output_tokens, sequence.final_tokens)
        least = self.capacity_for(sequence.position + 1)
        return (self.capacity_for(wanted), least) if self.capacity_for(wanted) > least else (least,)

    def may_enter(self, sequence: ScheduledSequence, running: Iterable[ScheduledSequence]) -> bool:
        """Whether it fits beside those that run and the next growth of each of them, lest it be
        preempted at once.
        """
        return self._needed_to_enter(sequence, running) <= self.free_bytes

    def _needed_to_enter(
        self, sequence: ScheduledSequence, running: Iterable[ScheduledSequence]
    ) -> int:
        growing = sum(
            1
            for other in running
            if other.capacity_tokens < other.final_tokens and not other.is_fully_planned
        )
        headroom = growing * self._costs.reserve_step_tokens * self._costs.kv_bytes_per_token
        return (
            self.bytes_for(self.capacity_at_admission(sequence), held_tokens=sequence.held_tokens)
            + headroom
        )

    def may_enter_soon(
        self, sequence: ScheduledSequence, running: Iterable[ScheduledSequence]
    ) -> bool:
        """Whether it will, when the steps under way are over."""
        return (
            self._needed_to_enter(sequence, running)
            <= self.budget_bytes - self.running_bytes - self.held_bytes
        )

    def may_enter_without(
        self,
        sequence: ScheduledSequence,
        running: Iterable[ScheduledSequence],
        *,
        gone: Iterable[ScheduledSequence],
    ) -> bool:
        """Whether it will beside those that are left of all that run now, when parked states have
        given up what they hold.
        """
        reserved = self.running_bytes - sum(each.reserved_bytes for each in gone)
        return (
            self._needed_to_enter(sequence, running)
            <= self.budget_bytes - reserved - self.held_bytes + self.parked_bytes
        )

    def missing_to_enter(
        self, sequence: ScheduledSequence, running: Iterable[ScheduledSequence]
    ) -> int:
        """Bytes that parked states have to give up before it may enter; 0 when that is not enough,
        or none have to.
        """
        missing = self._needed_to_enter(sequence, running) - self.free_bytes
        return missing if 0 < missing <= self.parked_bytes else 0

    def hold_apart(self, sequence: ScheduledSequence, held_tokens: int) -> None:
        """The first tokens of a running sequence are counted elsewhere from now on."""
        sequence.held_tokens = held_tokens
        self.grow(sequence, sequence.capacity_tokens)

    def enter(self, sequence: ScheduledSequence, *, step: int) -> None:
        """Reserve for a sequence and let it run."""
        capacity = self.capacity_at_admission(sequence)
        needed = self.bytes_for(capacity, held_tokens=sequence.held_tokens)
        self.running_bytes += needed
        sequence.start(capacity_tokens=capacity, reserved_bytes=needed, step=step)

    def grow(self, sequence: ScheduledSequence, capacity_tokens: int) -> None:
        """Reserve more for a running sequence."""
        needed = self.bytes_for(capacity_tokens, held_tokens=sequence.held_tokens)
        self.running_bytes += needed - sequence.reserved_bytes
        sequence.capacity_tokens, sequence.reserved_bytes = capacity_tokens, needed

    def leave(self, sequence: ScheduledSequence, *, observed_steps: int) -> None:
        """Give back what a sequence has reserved, at once or when the last step that touches it is
        over.
        """
        freed = sequence.stop()
        self.running_bytes -= freed
        if sequence.last_step > observed_steps and freed:
            self.leaving_bytes += freed
            self._leaving.append((sequence.last_step, freed))

    def step_is_over(self, step: int) -> None:
        """Give back what was held for steps up to this one."""
        if self._leaving:
            kept = [(until, held) for until, held in self._leaving if until > step]
            self._leaving = deque(kept)
            self.leaving_bytes = sum(held for _, held in kept)

    def check_invariants(self, running: Iterable[ScheduledSequence]) -> None:
        """Assert that the sums agree with the sequences and stay within the budget."""
        assert self.running_bytes == sum(sequence.reserved_bytes for sequence in running), (
            "reserved bytes are miscounted"
        )
        assert self.leaving_bytes == sum(held for _, held in self._leaving), (
            "bytes of leaving sequences are miscounted"
        )
        assert self.reserved_bytes <= self._tolerated_bytes, "more is reserved than there is"
