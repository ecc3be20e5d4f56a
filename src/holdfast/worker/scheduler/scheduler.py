"""Plans the next step from the waiting and running sequences.

Works on counts only: no tokens, no clock, no MLX.

The worker may ask for step k+1 before it reports the result of step k, so that the device never
waits. Tokens count once they are planned, and a sequence whose tokens are all planned gets no
more spans. A sequence that turns out to have ended in step k may have a span in step k+1; the token
of that span is ignored. Memory that a dispatched step uses stays reserved until the result of that
step is reported.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from holdfast.config import SchedulerSettings
from holdfast.errors import ConfigError, InvalidRequest, PromptTooLong, QueueFull
from holdfast.wire.commands import checked_limits
from holdfast.wire.events import WaitReason
from holdfast.wire.requests import RequestId, ServiceClass
from holdfast.worker.engine.plan import NO_DRAFT, Draft, Span, StepPlan
from holdfast.worker.scheduler.admission import (
    KvLedger,
    RoomMade,
    extra_bytes,
    make_room,
    preemption_order,
    victims_for,
)
from holdfast.worker.scheduler.chunking import NO_ROWS, ChunkSharing
from holdfast.worker.scheduler.cost_model import UNBOUNDED, ChunkBounds, CostModel, StepLoad
from holdfast.worker.scheduler.draft_gain import NO_OFFERS, DraftGain, Offers
from holdfast.worker.scheduler.queue import (
    FairShare,
    ScheduledSequence,
    SequenceCosts,
    by_order,
    check_sequences,
)

_FIRST_GUESS_SECONDS = 2.0
_GAIN = 0.2
_SHORTEST_SECONDS, _LONGEST_SECONDS = 1.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision on one step. The worker closes the preempted sequences, enlarges the grown ones,
    opens the admitted ones, and dispatches the plan, in this order.

    A step that is already dispatched may still generate a token for a sequence that is preempted
    here. The token counts, and is reported with `observe` before the sequence is admitted again.
    """

    admitted: tuple[RequestId, ...] = ()  # prefilled from their first token that is not cached
    preempted: tuple[RequestId, ...] = ()
    grown: tuple[RequestId, ...] = ()  # to their new capacity
    plan: StepPlan = StepPlan()
    # upper bound, including the time to enlarge buffers; None: not measured yet
    expected_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The result of one plan. Every plan with spans is reported exactly once, in order.

    seconds: time to the end of the step, from its dispatch or from the end of the previous step if
    that was later.
    """

    plan: StepPlan
    drawn: Mapping[RequestId, int]  # number of tokens that each sequence generated, if any
    ended: tuple[RequestId, ...]  # sequences ended by a stop token or a failure
    seconds: float
    # for sequences whose next span has to begin with tokens of this step: how many
    repeated: Mapping[RequestId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStatistics:
    """The state of the scheduler at one moment."""

    running: int
    queued: int
    reading: int  # running sequences that are being prefilled
    # for running sequences, including live states that they share, and for dispatched steps
    reserved_bytes: int
    budget_bytes: int
    preemptions: int  # since the start
    max_running: int
    step_tokens: int


@dataclass(slots=True)
class StepUnderWay:
    """A plan that was handed out and is not reported yet."""

    number: int
    plan: StepPlan
    load: StepLoad
    drawless: tuple[
        ScheduledSequence, ...
    ]  # sequences that end with this step, because they generate no token


class PlaceEstimate:
    """Estimates when a client that found the queue full should retry: after the time in which,
    recently, one sequence ended.
    """

    def __init__(self) -> None:
        self._seconds_per_end = _FIRST_GUESS_SECONDS
        self._busy_seconds = 0.0  # since the last end

    def observe(self, *, seconds: float, ends: int) -> None:
        """Learn from one step. ends: the number of sequences that ended with the step."""
        self._busy_seconds += seconds
        if ends:
            self._seconds_per_end += _GAIN * (self._busy_seconds / ends - self._seconds_per_end)
            self._busy_seconds = 0.0

    @property
    def seconds(self) -> float:
        """The estimate, from one second to one minute."""
        return min(
            max(self._seconds_per_end, self._busy_seconds, _SHORTEST_SECONDS), _LONGEST_SECONDS
        )


_NOTHING_TO_DO = Decision()
# request id, position, tokens: whether these tokens of the prompt can be prefilled now
MayPrefill: TypeAlias = Callable[[RequestId, int, int], bool]
# A chunk lengthens a step of decoding rows by at most this, so that streams still look fluent (with
# the step itself, less than 0.1 s); longer only where decoding would take more than a tenth of the
# step, which would slow prefill down.
_FLUENT_SECONDS = 0.08
_DECODE_STEPS_PER_CHUNK = 9
# for enlarging and restoring KV buffers; even a slow memory bus copies several times faster
_COPIED_BYTES_PER_SECOND = 1e9


class Scheduler:
    """Queue, admission, chunking and preemption of one worker. One thread only."""

    def __init__(
        self,
        settings: SchedulerSettings,
        costs: SequenceCosts,
        *,
        budget_bytes: int,
        context_tokens: int,
        mixes_chunks: bool,
        bounds: ChunkBounds = UNBOUNDED,
    ) -> None:
        """costs: those of a sequence with the usual `kv_bits`. mixes_chunks: whether prompt chunks
        share a forward pass with the decoding rows.

        Raises ConfigError if `settings.step_tokens` is not set: the worker must choose a value for
        its device first.
        """
        if settings.step_tokens is None or settings.step_tokens < 1:
            raise ConfigError(
                f"scheduler.step_tokens = {settings.step_tokens} must be at least 1 once the "
                "device is known"
            )
        self._settings = settings
        self._step_tokens = settings.step_tokens
        self._context_tokens = context_tokens
        self.usual_costs = costs
        self._ledger = KvLedger(
            costs, budget_bytes=budget_bytes, expected_output_tokens=settings.expected_output_tokens
        )
        self._costs = CostModel(
            mixes_chunks=mixes_chunks, min_chunk_tokens=settings.min_chunk_tokens, bounds=bounds
        )
        self._draft_gain = DraftGain()
        self._sharing = ChunkSharing(self._costs, min_chunk_tokens=settings.min_chunk_tokens)
        self._places = PlaceEstimate()
        self._fairness = FairShare(aging_seconds=settings.aging_seconds)
        self._known: dict[RequestId, ScheduledSequence] = {}  # waiting and running
        # oldest first; each says what it waits for
        self._queue: list[ScheduledSequence] = []
        self._running: dict[RequestId, ScheduledSequence] = {}  # oldest first
        self._reading: list[ScheduledSequence] = []  # running, being prefilled; oldest first
        self._decoding: list[ScheduledSequence] = []  # running, with tokens left to plan
        self._under_way: deque[StepUnderWay] = deque()
        self._submissions = 0
        self._issued_steps = 0
        self._observed_steps = 0
        self._preemptions = 0
        self.admits_one_at_a_time = False
        self._was_lowered = (
            False  # whether `max_running` was lowered: more may run until the next step
        )

    def submit(self, sequence: ScheduledSequence) -> None:
        """Put a request into the queue. Its answer ends at the end of the context, if not before.

        A request with tokens that an earlier worker generated is accepted even if the queue is full.

        Raises QueueFull, TooLargeForMemory and PromptTooLong, and InvalidRequest for an empty
        prompt or an id in use.
        """
        self._check(sequence)
        sequence.max_tokens = min(
            sequence.max_tokens, self._context_tokens - sequence.prompt_tokens
        )
        if sequence.drawn and sequence.drawn >= sequence.max_tokens:
            raise InvalidRequest(
                f"all {sequence.max_tokens} tokens of the answer are generated already",
                field="generated_token_ids",
            )
        self._ledger.check_fits_alone(sequence.costs, final_tokens=sequence.final_tokens)
        if not sequence.drawn:
            self._check_queue(sequence.service)
        sequence.submitted_after_step = self._issued_steps
        self._known[sequence.request_id] = sequence
        self._join_as_the_last(sequence)
        self._fairness.join(sequence)

    def _check(self, sequence: ScheduledSequence) -> None:
        if sequence.request_id in self._known:
            raise InvalidRequest(
                f"a request with the id {sequence.request_id!r} is being served already",
                field="request_id",
            )
        prompt_tokens = sequence.prompt_tokens
        if prompt_tokens < 1 or sequence.max_tokens < 0:
            raise InvalidRequest(
                f"cannot generate {sequence.max_tokens} tokens after a prompt of {prompt_tokens} "
                "tokens",
                field="prompt",
            )
        if prompt_tokens > self._context_tokens - min(sequence.max_tokens, 1):
            raise PromptTooLong(prompt_tokens=prompt_tokens, context_tokens=self._context_tokens)

    def fits_alone(self, costs: SequenceCosts, *, prompt_tokens: int, max_tokens: int) -> bool:
        """Whether a request with these costs would fit the budget if it ran alone."""
        final_tokens = min(prompt_tokens + max_tokens, self._context_tokens)
        return self._ledger.fits_alone(costs, final_tokens=final_tokens)

    def _check_queue(self, service: ServiceClass) -> None:
        # requests that arrive together may also use free running slots, which they get in the next
        # step
        limit = self._settings.max_queued + max(0, self._settings.max_running - len(self._running))
        if not self._fairness.may_wait(service.flow, self._queue, limit=limit):
            raise QueueFull(
                queued=len(self._queue), limit=limit, retry_after_seconds=self._places.seconds
            )

    def set_limits(self, *, max_running: int, step_tokens: int) -> None:
        """Change the limits from the next step on. Sequences beyond `max_running` wait again.

        Raises InvalidRequest, and changes nothing, if a limit is out of range.
        """
        self._settings = checked_limits(
            self._settings, max_running=max_running, step_tokens=step_tokens
        )
        self._step_tokens = step_tokens
        self._was_lowered = True

    def set_budget(self, nbytes: int) -> None:
        """Change the budget of live KV.

        The budget stays large enough for each accepted request to run alone. No sequence is
        preempted when it shrinks.
        """
        self._ledger.wanted_budget_bytes = nbytes
        self._ledger.fit_budget(self._known.values())

    @property
    def excess_bytes(self) -> int:
        """The reserved and held bytes that exceed the budget."""
        return max(0, -self._ledger.free_bytes)

    def limit_chunks(self, tokens: int) -> None:
        """Limit prompt chunks, because the device has failed on larger ones."""
        self._costs.limit_chunks(tokens)

    def hold(self, *, total_bytes: int, parked_bytes: int) -> int:
        """Record how much memory live states take in addition to reservations. Returns the number of
        bytes of parked states that must be freed for the next step.

        parked_bytes: the part of it that can be freed.
        """
        ledger = self._ledger
        ledger.held_bytes = total_bytes
        ledger.parked_bytes = parked_bytes
        if not parked_bytes:
            return 0
        growth = sum(
            extra_bytes(each, ledger.capacities_for_growth(each)[-1]) for each in self._needy()
        )
        missing = min(max(0, growth - ledger.free_bytes), parked_bytes)
        head = self._next_in_queue()
        if missing or head is None or len(self._running) >= self._settings.max_running:
            return missing
        return ledger.missing_to_enter(head)

    def has_room_apart(self, request_id: RequestId) -> bool:
        """Whether memory for all tokens of a running request, including held ones, can be
        reserved.
        """
        sequence = self._running.get(request_id)
        if sequence is None:
            return True
        costs = sequence.native_costs or sequence.costs
        needed = costs.bytes_for(sequence.capacity_tokens)
        return needed - sequence.reserved_bytes <= self._ledger.free_bytes

    def short_of_memory(
        self, costs: SequenceCosts, *, may_change: Callable[[RequestId], bool]
    ) -> RequestId | None:
        """If the waiting requests for which there are running slots do not all fit: the first one
        whose costs may change and that needs less with these costs, if it then fits together with
        those before it.

        Parked states count as free memory, because they are freed when a request needs them.
        """
        self._ledger.fit_budget(self._known.values())  # to the costs that were changed last
        head = self._next_in_queue()
        slots = self._settings.max_running - len(self._running)
        if head is None or slots <= 0 or (self.admits_one_at_a_time and self._unpaused):
            return None
        others = [each for each in self._queue if each.may_be_admitted and each is not head]
        waiting = (head, *others[: slots - 1])
        if self._ledger.may_all_enter(waiting):
            return None
        for place, sequence in enumerate(waiting):
            changed = replace(sequence, costs=costs, held_tokens=0)
            saves = self._ledger.bytes_at_admission(changed) < self._ledger.bytes_at_admission(
                sequence
            )
            if saves and may_change(sequence.request_id):
                fits = self._ledger.may_all_enter((*waiting[:place], changed))
                return sequence.request_id if fits else None
        return None

    def pause(self, request_id: RequestId) -> None:
        """Plan nothing for a request until it is resumed. The request keeps its memory until other
        requests need it.

        Unknown ids are ignored, because the request may have just ended.
        """
        sequence = self._known.get(request_id)
        if sequence is None:
            return
        sequence.waits_for = WaitReason.READER
        if sequence in self._reading:
            self._reading.remove(sequence)
        elif sequence in self._decoding:
            self._decoding.remove(sequence)

    def resume(self, request_id: RequestId) -> None:
        """Continue a paused request; if it was preempted since then, it joins the end of the
        queue.
        """
        sequence = self._known.get(request_id)
        if sequence is None or not sequence.is_paused:
            return
        sequence.waits_for = None
        if request_id not in self._running:
            self._queue.remove(sequence)
            self._join_as_the_last(sequence)
        elif sequence.position < sequence.known_tokens:
            reading = (*self._reading, sequence)
            self._reading = [each for each in self._running.values() if each in reading]
        elif not sequence.is_fully_planned:
            self._decoding.append(sequence)

    def waiting_for(self, *reasons: WaitReason) -> list[RequestId]:
        """The sequences in the queue that wait for one of these, oldest first."""
        # few wait for anything but memory; a member of an enum is slow to look up for each
        memory = WaitReason.MEMORY
        unready = [each for each in self._queue if each.waits_for is not memory]
        return [each.request_id for each in unready if each.waits_for in reasons]

    def restart(self, request_id: RequestId) -> None:
        """Prefill a request again from its first token. The request joins the end of the queue.

        Its answer so far is kept, but tokens that dispatched steps generate are ignored.
        """
        sequence = self._known[request_id]
        if request_id in self._running:
            self._leave(sequence)
            self._fairness.preempt(sequence)
        else:
            self._queue.remove(sequence)
        sequence.submitted_after_step = self._issued_steps
        sequence.start_after(0)
        if not sequence.is_paused:
            sequence.waits_for = None
        self._join_as_the_last(sequence)

    def cancel(self, request_id: RequestId) -> bool:
        """Forget a request. Returns False if it is unknown, for example because it has just
        ended.
        """
        sequence = self._known.get(request_id)
        if sequence is None:
            return False
        self._forget(sequence)
        self._places.observe(seconds=0.0, ends=1)
        return True

    def next_step(
        self, offers: Offers = NO_OFFERS, *, may_prefill: MayPrefill = lambda *_: True
    ) -> Decision:
        """Decide on one more step. An empty plan means that there is nothing to do before the next
        call of `observe` or `submit`.

        offers: drafts for decoding sequences; others are ignored. The plan contains the first tokens
        of those that the step verifies. If a step under way samples the sequence's last token, the
        offer is for the tokens after that one; if it is taken, the sequence is left out of this
        step, to verify its draft in the next one.

        may_prefill: returns whether the next tokens of a prompt, from a position on, can be
        prefilled now. If not, the prompt is left out of this step.
        """
        needy = self._needy()
        if not needy and not self._reading and not self._excess and self._next_in_queue() is None:
            if not self._decoding:
                return _NOTHING_TO_DO
            return self._decision(RoomMade(), (), offers, may_prefill)
        room = RoomMade()
        if needy:
            ranks = self._fairness.ranks(self._running)
            room = make_room(needy, self._running, self._ledger, ranks=ranks, preempt=self._preempt)
        admitted: tuple[RequestId, ...] = ()
        if not room.someone_waits and not room.preempted:
            room.preempted += self._shrink()
            if not (self.admits_one_at_a_time and self._unpaused):
                room.preempted += self._make_paused_give_way()
                room.preempted += self._make_many_give_way()
                admitted = self._admit()
        return self._decision(room, admitted, offers, may_prefill)

    def _decision(
        self,
        room: RoomMade,
        admitted: tuple[RequestId, ...],
        offers: Offers,
        may_prefill: MayPrefill,
    ) -> Decision:
        plan = self._plan(offers, may_prefill)
        if not plan.spans and not admitted and not room.preempted and not room.grown:
            return _NOTHING_TO_DO
        expected = self._costs.at_most(self._under_way[-1].load) if plan.spans else None
        if expected is not None:
            buffers = (self._known[each] for each in (*admitted, *room.grown))
            copied = sum(each.costs.bytes_for(each.capacity_tokens) for each in buffers)
            expected += copied / _COPIED_BYTES_PER_SECOND
        return Decision(
            admitted=admitted,
            preempted=tuple(room.preempted),
            # a sequence that has just grown may have been preempted
            grown=tuple(each for each in room.grown if each in self._running),
            plan=plan,
            expected_seconds=expected,
        )

    def observe(self, outcome: StepOutcome) -> tuple[RequestId, ...]:
        """Record the result of a step; returns the sequences that ended because they reached their
        maximum length.
        """
        if not outcome.plan.spans:
            return ()
        step = self._under_way.popleft()
        assert step.plan is outcome.plan or step.plan == outcome.plan, (
            "steps are reported out of order"
        )
        self._observed_steps = step.number
        finished: list[RequestId] = []
        for request_id, tokens in outcome.drawn.items():
            sequence = self._known.get(request_id)
            if sequence is None or sequence.submitted_after_step >= step.number:
                continue
            sequence.drawn += tokens
            if sequence.drawn >= sequence.max_tokens:
                finished.append(request_id)
        if step.load.drafted_rows:
            self._settle(step, outcome)
        ends = (
            self._end_all(step, outcome, finished)
            if outcome.ended or finished or step.drawless
            else ()
        )
        self._ledger.step_is_over(step.number)
        self._costs.learn(step.load, outcome.seconds)
        if not step.load.chunks:
            self._draft_gain.learn(
                step.load.rows, outcome.seconds, is_verifying=step.load.drafted_rows > 0
            )
        self._fairness.pass_time(outcome.seconds)
        self._sharing.pass_time(outcome.seconds)
        self._places.observe(seconds=outcome.seconds, ends=len(ends) + len(outcome.ended))
        return ends

    def _settle(self, step: StepUnderWay, outcome: StepOutcome) -> None:
        """Take back what was planned for rejected tokens."""
        for span in step.plan.spans:
            sequence = self._running.get(span.request_id)
            if sequence is not None and sequence.is_verifying and sequence.last_step == step.number:
                sequence.settle(
                    verified=span.tokens,
                    drawn=outcome.drawn.get(span.request_id, 0),
                    repeated=outcome.repeated.get(span.request_id, 0),
                )

    def statistics(self) -> SchedulerStatistics:
        """The current state, and counters since the start."""
        return SchedulerStatistics(
            running=sum(not each.is_idle_work for each in self._running.values()),
            queued=sum(not each.is_idle_work for each in self._queue),
            reading=sum(not each.is_idle_work for each in self._reading),
            reserved_bytes=self._ledger.reserved_bytes
            + self._ledger.held_bytes
            - self._ledger.parked_bytes,
            budget_bytes=self._ledger.budget_bytes,
            preemptions=self._preemptions,
            max_running=self._settings.max_running,
            step_tokens=self._step_tokens,
        )

    def check_invariants(self) -> None:
        """Assert that all lists and counts agree."""
        self._ledger.check_invariants(self._running.values())
        waiting = {sequence.request_id for sequence in self._queue}
        assert len(waiting) == len(self._queue), "a sequence waits twice"
        assert waiting | set(self._running) == set(self._known), (
            "a sequence is neither waiting nor running"
        )
        assert not waiting & set(self._running), "a sequence waits and runs"
        assert self._was_lowered or not self._excess, "too many run"
        assert len(self._known) == 1 or not any(
            each.is_idle_work for each in self._known.values()
        ), "idle work is not alone"
        assert self._fairness.flows == len({each.service.flow for each in self._known.values()}), (
            "flows are miscounted"
        )
        check_sequences(self._queue, self._running, reading=self._reading, decoding=self._decoding)

    def _next_in_queue(self) -> ScheduledSequence | None:
        """The sequence to admit next; with a single flow, this is the oldest."""
        return self._fairness.next(self._queue, self._running.values())

    def _admit(self) -> tuple[RequestId, ...]:
        admitted: list[RequestId] = []
        most = self._settings.max_running
        # paused sequences make no progress, so they must not keep others out
        if self.admits_one_at_a_time:
            most = min(most, len(self._running) - self._unpaused + 1)
        while len(self._running) < most and (sequence := self._next_in_queue()) is not None:
            draws_are_known = sequence.last_step <= self._observed_steps
            if not draws_are_known or not self._ledger.may_enter(sequence):
                break
            self._queue.remove(sequence)
            self._fairness.admit(sequence)
            self._ledger.enter(sequence, step=self._issued_steps)
            self._let_run(sequence)
            admitted.append(sequence.request_id)
        return tuple(admitted)

    @property
    def _unpaused(self) -> int:
        """The number of running sequences that are not paused."""
        return sum(not each.is_paused for each in self._running.values())

    def _let_run(self, sequence: ScheduledSequence) -> None:
        is_youngest = (
            not self._running or next(reversed(self._running.values())).order < sequence.order
        )
        self._running[sequence.request_id] = sequence
        self._reading.append(sequence)
        if not is_youngest:  # younger sequences passed it while it was not ready
            self._running = {
                each.request_id: each for each in sorted(self._running.values(), key=by_order)
            }
            self._reading.sort(key=by_order)

    def _make_paused_give_way(self) -> list[RequestId]:
        """Preempt paused sequences until the next sequence in the queue fits."""
        preempted: list[RequestId] = []
        while (waits := self._next_in_queue()) is not None:
            paused = [
                each
                for each in self._running.values()
                if each.is_paused and not each.is_fully_planned
            ]
            has_place = len(self._running) < self._settings.max_running
            if not paused or (has_place and self._ledger.may_enter_soon(waits)):
                break
            preempted.append(paused[-1].request_id)
            self._preempt(paused[-1])
        return preempted

    def _make_many_give_way(self) -> list[RequestId]:
        """Preempt sequences of flows that have many running sequences, if that makes room for the
        next sequence in the queue.
        """
        waits = self._next_in_queue()
        if waits is None or waits.last_step > self._observed_steps:
            return []
        victims = victims_for(
            waits,
            self._ledger,
            candidates=self._fairness.givers(waits, self._running),
            running=len(self._running),
            max_running=self._settings.max_running,
        )
        return self._preempt_all(victims)

    @property
    def _excess(self) -> int:
        """The number of running sequences that exceed `max_running`."""
        return max(0, len(self._running) - self._settings.max_running)

    def _shrink(self) -> list[RequestId]:
        """Preempt the sequences that exceed `max_running` since it was lowered."""
        excess = self._excess
        self._was_lowered = excess > 0
        if not excess:
            return []
        ranks = self._fairness.ranks(self._running)
        return self._preempt_all(preemption_order(self._running, ranks)[:excess])

    def _preempt_all(self, sequences: list[ScheduledSequence]) -> list[RequestId]:
        for sequence in sequences:
            self._preempt(sequence)
        return [sequence.request_id for sequence in sequences]

    def _preempt(self, sequence: ScheduledSequence) -> None:
        self._leave(sequence)
        self._fairness.preempt(sequence)
        bisect.insort(self._queue, sequence, key=by_order)
        self._preemptions += 1

    def _join_as_the_last(self, sequence: ScheduledSequence) -> None:
        self._submissions += 1
        sequence.order = self._submissions
        self._queue.append(sequence)

    def _forget(self, sequence: ScheduledSequence) -> None:
        del self._known[sequence.request_id]
        self._fairness.forget(sequence)
        if sequence.request_id in self._running:
            self._leave(sequence)
        else:
            self._queue.remove(sequence)
        self._ledger.fit_budget(self._known.values())

    def _leave(self, sequence: ScheduledSequence) -> None:
        del self._running[sequence.request_id]
        if not sequence.is_paused:
            if sequence.position < sequence.known_tokens:
                self._reading.remove(sequence)
            elif not sequence.is_fully_planned:
                self._decoding.remove(sequence)
        self._ledger.leave(sequence, observed_steps=self._observed_steps)

    def _end_all(
        self, step: StepUnderWay, outcome: StepOutcome, finished: list[RequestId]
    ) -> tuple[RequestId, ...]:
        """Forget the sequences that ended with a step. Returns those that ended by length, which
        the worker does not know yet.
        """
        finished += [
            each.request_id
            for each in step.drawless
            if self._known.get(each.request_id) is each and each.submitted_after_step < step.number
        ]
        for request_id in (*outcome.ended, *finished):
            sequence = self._known.get(request_id)
            if sequence is not None and sequence.submitted_after_step < step.number:
                self._forget(sequence)
        return tuple(request_id for request_id in finished if request_id not in outcome.ended)

    def _needy(self) -> list[ScheduledSequence]:
        """Decoding sequences without memory for their next token."""
        return [
            sequence for sequence in self._decoding if sequence.position >= sequence.capacity_tokens
        ]

    def _plan(self, offers: Offers, may_prefill: MayPrefill) -> StepPlan:
        number = self._issued_steps + 1
        spans = self._decode_spans(number, offers)
        rows = sum(span.tokens for span in spans)
        load = StepLoad(len(spans), drafted_rows=rows - len(spans))
        drawless: tuple[ScheduledSequence, ...] = ()
        reading = [
            each
            for each in (self._reading if rows < self._step_tokens else ())
            if may_prefill(each.request_id, each.position, self._step_tokens)
        ]
        if reading:
            load, drawless = self._add_chunks(spans, load, number, reading)
        if not spans:
            return _NOTHING_TO_DO.plan
        plan = StepPlan(spans=tuple(spans))
        self._issued_steps = number
        self._under_way.append(StepUnderWay(number, plan, load, drawless))
        return plan

    def _decode_spans(self, number: int, offers: Offers) -> list[Span]:
        spans: list[Span] = []
        has_last_draws = False
        decoding = self._decoding_this_step(number)
        drafts = self._drafts(decoding, offers) if offers else {}
        for sequence in decoding:
            position = sequence.position
            if position >= sequence.capacity_tokens or sequence.is_verifying:
                continue  # until there is memory, or until its last step is over
            draft = drafts.get(sequence.request_id, NO_DRAFT)
            extra = len(draft.chances)
            if extra and sequence.last_step > self._observed_steps:
                continue  # to verify its draft, it waits until its last token is known
            assert len(draft.token_ids) == extra, "the tokens of a draft in a plan are known"
            tokens = sequence.repeated + 1 + extra
            spans.append(
                Span(
                    request_id=sequence.request_id,
                    start=position,
                    tokens=tokens,
                    draws=True,
                    draft=draft,
                )
            )
            sequence.position = position + tokens
            sequence.last_step = number
            sequence.planned_draws += 1 + extra
            sequence.repeated = 0
            sequence.is_verifying = extra > 0
            if sequence.planned_draws >= sequence.max_tokens:
                has_last_draws = True
        if has_last_draws:
            self._decoding = [
                sequence for sequence in self._decoding if not sequence.is_fully_planned
            ]
        return spans

    def _drafts(self, decoding: list[ScheduledSequence], offers: Offers) -> dict[RequestId, Draft]:
        """The drafts that these sequences verify in a step."""
        if not self._costs.knows_decoding:
            return {}
        able: dict[RequestId, Draft] = {}
        for sequence in decoding:
            if sequence.request_id in offers and not sequence.is_verifying:
                draft = offers[sequence.request_id]
                able[sequence.request_id] = draft.cut(sequence.most_drafted)
        return self._draft_gain.choose(
            able, rows=len(decoding), most=self._most_drafted(len(decoding))
        )

    def _most_drafted(self, rows: int) -> int:
        """The largest number of drafted rows of a step with `rows` decoding sequences."""
        most = self._step_tokens - rows
        if self._reading:
            most -= min(self._settings.min_chunk_tokens, most)
        return most

    def passes_of_draft_model(
        self, offers: Offers, modelled: Offers, *, pass_seconds: float
    ) -> int:
        """How many tokens a draft model should draft before the next step; see `DraftGain.passes`."""
        rows = len(self._decoding)
        if not rows or not self._costs.knows_decoding:
            return 0
        return self._draft_gain.passes(
            offers, modelled, rows=rows, most=self._most_drafted(rows), pass_seconds=pass_seconds
        )

    def pays_to_prefill_draft(
        self, chances: Sequence[float], *, pass_seconds: float, seconds: float, generated: int
    ) -> bool:
        """As `DraftGain.pays_to_prefill`, with the sequences that decode now."""
        return self._draft_gain.pays_to_prefill(
            chances,
            rows=max(1, len(self._decoding)),
            pass_seconds=pass_seconds,
            seconds=seconds,
            generated=generated,
        )

    def _decoding_this_step(self, number: int) -> list[ScheduledSequence]:
        """The sequences that decode in this step: all, or, if they would leave no room for
        a chunk, some of them in turn.
        """
        limit = self._step_tokens
        if self._reading:
            # with one token per step, prefill and decode alternate
            limit -= min(self._settings.min_chunk_tokens, limit // 2) or number % 2
        if len(self._decoding) <= limit:
            return self._decoding
        stalled = self._needy()
        able = [
            sequence for sequence in self._decoding if sequence.position < sequence.capacity_tokens
        ]
        self._decoding = stalled + able[limit:] + able[:limit]
        return able[:limit]

    def _add_chunks(
        self,
        spans: list[Span],
        decoding: StepLoad,
        number: int,
        reading: list[ScheduledSequence],
    ) -> tuple[StepLoad, tuple[ScheduledSequence, ...]]:
        """Add chunks of these prompts to the spans of decoding sequences. decoding: the load of
        these spans.
        """
        rows = decoding.decode_rows
        seconds = self._stall_seconds(rows) if rows else math.inf
        chunk_tokens = 0
        scored_tokens = 0
        position_sum = 0.0
        drawless: list[ScheduledSequence] = []
        by_flow = (
            Counter(self._known[span.request_id].service.flow for span in spans)
            if self._fairness.flows > 1
            else NO_ROWS
        )
        room = self._step_tokens - decoding.rows
        if reading[0].is_idle_work:
            room = min(room, self._idle_work_tokens(reading[0].position))
        chunks = self._sharing.share(
            reading, tokens=room, seconds=seconds, step=number, rows=by_flow
        )
        for sequence, tokens in chunks:
            start = sequence.position
            sequence.position = start + tokens
            sequence.last_step = number
            draws = False
            if sequence.position == sequence.known_tokens:
                self._reading.remove(sequence)
                draws = sequence.planned_draws < sequence.max_tokens
                sequence.planned_draws += draws
                if not draws:
                    drawless.append(sequence)
                elif not sequence.is_fully_planned:
                    self._decoding.append(sequence)
            spans.append(
                Span(request_id=sequence.request_id, start=start, tokens=tokens, draws=draws)
            )
            chunk_tokens += tokens
            scored_tokens += tokens if sequence.scores_prompt else 0
            position_sum += tokens * (start + tokens / 2)
        load = replace(
            decoding,
            chunks=len(chunks),
            chunk_tokens=chunk_tokens,
            position_sum=position_sum,
            scored_tokens=scored_tokens,
        )
        return load, tuple(drawless)

    def _stall_seconds(self, rows: int) -> float:
        """By how much chunks may lengthen a step with this many decoding rows."""
        worth_it = _DECODE_STEPS_PER_CHUNK * self._costs.decode_seconds(rows)
        return min(self._settings.stall_seconds, max(_FLUENT_SECONDS, worth_it))

    def _idle_work_tokens(self, position: int) -> int:
        """The chunk size of idle work, so that a new request waits no longer for it than for an
        ordinary chunk.
        """
        return max(
            self._settings.min_chunk_tokens,
            self._costs.tokens_within(self._settings.stall_seconds, position),
        )
