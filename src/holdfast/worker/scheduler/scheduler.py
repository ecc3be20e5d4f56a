"""Plans the next step from the waiting and running sequences.

Works on counts only: no tokens, no clock, no MLX.

The worker may ask for step k+1 before it reports the result of step k, so that the device never
waits. Tokens count once they are planned, and a sequence whose tokens are all planned gets no
more spans. A sequence that turns out to have ended in step k may have a span in step k+1; the token
of that span is ignored. Memory that a dispatched step uses stays reserved until the result of that
step is reported.

The KV of a sequence is its *live state*. Other sequences may share it; it is *parked* when its
request has ended, and freed when memory is needed. *Idle work* prefills a prompt that is expected
later, while there is no request.
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
    KvReservations,
    RoomMade,
    extra_bytes,
    make_room,
    preemption_order,
    victims_for,
)
from holdfast.worker.scheduler.chunking import NO_ROWS, ChunkSharing
from holdfast.worker.scheduler.cost_model import UNBOUNDED, ChunkBounds, CostModel, StepLoad
from holdfast.worker.scheduler.draft_gain import NO_OFFERS, DraftGain, Offers
from holdfast.worker.scheduler.queue import FairShare, RetryEstimate
from holdfast.worker.scheduler.sequence import (
    ScheduledSequence,
    SequenceCosts,
    by_order,
    check_sequences,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do for one step. The worker closes the preempted sequences, enlarges the buffers of
    the grown ones, opens the admitted ones, and dispatches the plan, in this order.

    A step that is already dispatched may still generate a token for a sequence that is preempted
    here. The token counts, and `record_step` learns of it before the sequence is admitted again.
    """

    admitted: tuple[RequestId, ...] = ()  # prefilled from their first token that is not cached
    preempted: tuple[RequestId, ...] = ()
    grown: tuple[RequestId, ...] = ()  # whose buffers must be enlarged to `capacity_tokens`
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
    generated_tokens: Mapping[RequestId, int]  # by sequence; those that generated none are omitted
    ended: tuple[RequestId, ...]  # sequences ended by a stop token or a failure
    seconds: float
    # for sequences whose next span must compute tokens of this step again: how many
    repeated: Mapping[RequestId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStatistics:
    """The state of the scheduler at one moment."""

    running: int
    queued: int
    prefilling: int  # running sequences that are being prefilled
    # for running sequences, including live states that they share, and for dispatched steps; not
    # for parked states, which are freed as soon as a request needs their memory
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
    prefill_only: tuple[ScheduledSequence, ...]  # generate no token, and end with this step


_NOTHING_TO_DO = Decision()
# request id, position, tokens: prepares these tokens of the prompt; whether they can be prefilled now
PreparePrefill: TypeAlias = Callable[[RequestId, int, int], bool]
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
        """costs: those of a sequence in the usual form. mixes_chunks: whether prompt chunks
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
        self._reservations = KvReservations(
            costs, budget_bytes=budget_bytes, expected_output_tokens=settings.expected_output_tokens
        )
        self._cost_model = CostModel(
            mixes_chunks=mixes_chunks, min_chunk_tokens=settings.min_chunk_tokens, bounds=bounds
        )
        self._draft_gain = DraftGain()
        self._chunk_sharing = ChunkSharing(
            self._cost_model,
            min_chunk_tokens=settings.min_chunk_tokens,
            stall_seconds=settings.stall_seconds,
        )
        self._retry_estimate = RetryEstimate()
        self._fairness = FairShare(aging_seconds=settings.aging_seconds)
        self._sequences: dict[RequestId, ScheduledSequence] = {}  # waiting and running
        self._queue: list[ScheduledSequence] = []  # waiting (see `waits_for`), oldest first
        self._running: dict[RequestId, ScheduledSequence] = {}  # oldest first
        self._prefilling: list[ScheduledSequence] = []  # running, being prefilled; oldest first
        self._decoding: list[ScheduledSequence] = []  # running, with tokens left to plan
        self._under_way: deque[StepUnderWay] = deque()  # plans that are not reported yet
        self._submissions = 0  # counted, to order requests by arrival
        self._issued_steps = 0  # number of the last plan
        self._recorded_steps = 0  # number of the last reported plan
        self._preemptions = 0
        self.admits_one_at_a_time = False  # because memory is critically short
        # whether `max_running` may have been lowered, so that too many run until the next step
        self._may_exceed_max_running = False

    def submit(self, sequence: ScheduledSequence) -> None:
        """Put a request into the queue. Its answer ends at the end of the context, if not before.

        A request with tokens that an earlier worker generated is accepted even if the queue is full.

        Raises QueueFull, TooLargeForMemory and PromptTooLong, and InvalidRequest for an empty
        prompt or an id in use.
        """
        self._check_request(sequence)
        sequence.max_tokens = min(
            sequence.max_tokens, self._context_tokens - sequence.prompt_tokens
        )
        if sequence.generated_tokens and sequence.generated_tokens >= sequence.max_tokens:
            raise InvalidRequest(
                f"all {sequence.max_tokens} tokens of the answer are already generated",
                field="generated_token_ids",
            )
        self._reservations.check_fits_alone(sequence.costs, final_tokens=sequence.final_tokens)
        if not sequence.generated_tokens:
            self._check_queue(sequence.service)
        sequence.submitted_after_step = self._issued_steps
        self._sequences[sequence.request_id] = sequence
        self._enqueue_last(sequence)
        self._fairness.add_sequence(sequence)

    def _check_request(self, sequence: ScheduledSequence) -> None:
        """Raise InvalidRequest for a request that cannot be served."""
        if sequence.request_id in self._sequences:
            raise InvalidRequest(
                f"a request with the id {sequence.request_id!r} is already being served",
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
        return self._reservations.fits_alone(costs, final_tokens=final_tokens)

    def _check_queue(self, service: ServiceClass) -> None:
        """Raise QueueFull if the queue has no room for one more request of this flow."""
        # free running slots count, too, because requests in the queue get them in the next step
        limit = self._settings.max_queued + max(0, self._settings.max_running - len(self._running))
        if not self._fairness.may_wait(service.flow, self._queue, limit=limit):
            raise QueueFull(
                queued=len(self._queue),
                limit=limit,
                retry_after_seconds=self._retry_estimate.seconds,
            )

    def set_limits(self, *, max_running: int, step_tokens: int) -> None:
        """Change the limits from the next step on. Sequences beyond `max_running` wait again.

        Raises InvalidRequest, and changes nothing, if a limit is out of range.
        """
        self._settings = checked_limits(
            self._settings, max_running=max_running, step_tokens=step_tokens
        )
        self._step_tokens = step_tokens
        self._may_exceed_max_running = True

    def set_budget(self, nbytes: int) -> None:
        """Change the budget of live KV.

        The budget stays large enough for each accepted request to run alone. No sequence is
        preempted when it shrinks.
        """
        self._reservations.wanted_budget_bytes = nbytes
        self._reservations.fit_budget(self._sequences.values())

    @property
    def excess_bytes(self) -> int:
        """The reserved and held bytes that exceed the budget."""
        return max(0, -self._reservations.free_bytes)

    def limit_chunks(self, tokens: int) -> None:
        """Limit prompt chunks, because the device has failed on larger ones."""
        self._cost_model.limit_chunks(tokens)

    def record_live_states(self, *, total_bytes: int, parked_bytes: int) -> int:
        """Record the memory of live states that no reservation covers: states that sequences share,
        and parked ones. Returns how many bytes of parked states must be freed for the next step.

        parked_bytes: the part of `total_bytes` that can be freed.
        """
        reservations = self._reservations
        reservations.live_state_bytes = total_bytes
        reservations.parked_bytes = parked_bytes
        if not parked_bytes:
            return 0
        growth_bytes = sum(
            extra_bytes(each, reservations.capacities_for_growth(each)[-1])
            for each in self._lacking_capacity()
        )
        missing_bytes = min(max(0, growth_bytes - reservations.free_bytes), parked_bytes)
        next_sequence = self._next_in_queue()
        has_slot = len(self._running) < self._settings.max_running
        if missing_bytes or next_sequence is None or not has_slot:
            return missing_bytes
        return reservations.parked_bytes_to_free(next_sequence)

    def has_room_for_copy(self, request_id: RequestId) -> bool:
        """Whether a running request could have its own copy of all its tokens, including those that
        it shares with other sequences. If it is quantized, the copy is not.
        """
        sequence = self._running.get(request_id)
        if sequence is None:
            return True
        costs = sequence.native_costs or sequence.costs
        needed_bytes = costs.bytes_for(sequence.capacity_tokens)
        return needed_bytes - sequence.reserved_bytes <= self._reservations.free_bytes

    def next_to_quantize(
        self, costs: SequenceCosts, *, may_quantize: Callable[[RequestId], bool]
    ) -> RequestId | None:
        """If the waiting requests for which there are running slots do not all fit: the first one
        that may be quantized and then needs less memory, if it then fits together with those before
        it.

        costs: those of a quantized sequence. may_quantize: whether a request leaves this to the
        server. Parked states count as free memory, because they are freed when a request needs them.
        """
        # the caller may have changed the costs of a sequence since the last call
        self._reservations.fit_budget(self._sequences.values())
        next_sequence = self._next_in_queue()
        free_slots = self._settings.max_running - len(self._running)
        if (
            next_sequence is None
            or free_slots <= 0
            or (self.admits_one_at_a_time and self._unpaused_running)
        ):
            return None
        others = [
            each for each in self._queue if each.may_be_admitted and each is not next_sequence
        ]
        next_sequences = (next_sequence, *others[: free_slots - 1])
        if self._reservations.all_fit(next_sequences):
            return None
        for index, sequence in enumerate(next_sequences):
            quantized = replace(sequence, costs=costs, held_tokens=0)
            saves_memory = self._reservations.bytes_at_admission(
                quantized
            ) < self._reservations.bytes_at_admission(sequence)
            if saves_memory and may_quantize(sequence.request_id):
                fits = self._reservations.all_fit((*next_sequences[:index], quantized))
                return sequence.request_id if fits else None
        return None

    def pause(self, request_id: RequestId) -> None:
        """Plan nothing for a request until it is resumed. The request keeps its memory until other
        requests need it.

        Unknown ids are ignored, because the request may have just ended.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        sequence.waits_for = WaitReason.READER
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        elif sequence in self._decoding:
            self._decoding.remove(sequence)

    def resume(self, request_id: RequestId) -> None:
        """Continue a paused request; if it was preempted, it joins the end of the queue."""
        sequence = self._sequences.get(request_id)
        if sequence is None or not sequence.is_paused:
            return
        sequence.waits_for = None
        if request_id not in self._running:
            self._queue.remove(sequence)
            self._enqueue_last(sequence)
        elif sequence.position < sequence.known_tokens:
            prefilling = (*self._prefilling, sequence)  # not in the order of age
            self._prefilling = [each for each in self._running.values() if each in prefilling]
        elif not sequence.is_fully_planned:
            self._decoding.append(sequence)

    def waiting_for(self, *reasons: WaitReason) -> list[RequestId]:
        """The sequences in the queue that wait for one of these, oldest first."""
        # Called often, and most sequences wait for memory: so leave these out first, and look the
        # member of the enum up only once, which is slow.
        memory = WaitReason.MEMORY
        others = [each for each in self._queue if each.waits_for is not memory]
        return [each.request_id for each in others if each.waits_for in reasons]

    def restart(self, request_id: RequestId) -> None:
        """Prefill a request again from its first token. The request joins the end of the queue.

        Its answer so far is kept, but tokens that dispatched steps generate are ignored.
        """
        sequence = self._sequences[request_id]
        if request_id in self._running:
            self._stop_running(sequence)
            self._fairness.preempt(sequence)
        else:
            self._queue.remove(sequence)
        sequence.submitted_after_step = self._issued_steps
        sequence.start_after(0)
        if not sequence.is_paused:
            sequence.waits_for = None
        self._enqueue_last(sequence)

    def cancel(self, request_id: RequestId) -> bool:
        """Forget a request. Returns False if it is unknown: it may have just ended."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._forget(sequence)
        self._retry_estimate.learn(seconds=0.0, ends=1)
        return True

    def next_step(
        self, offers: Offers = NO_OFFERS, *, prepare_prefill: PreparePrefill = lambda *_: True
    ) -> Decision:
        """Decide on one more step. An empty plan means that there is nothing to do before the next
        call of `record_step` or `submit`.

        offers: drafts for decoding sequences; others are ignored. The plan contains the first tokens
        of those that the step verifies. If a step under way samples the sequence's last token, the
        offer is for the tokens after that one; if it is taken, the sequence is left out of this
        step, to verify its draft in the next one.

        prepare_prefill: returns whether the next tokens of a prompt, from a position on, can be
        prefilled now. If not, the prompt is left out of this step.
        """
        lacking = self._lacking_capacity()
        if (
            not lacking
            and not self._prefilling
            and not self._excess_running
            and self._next_in_queue() is None
        ):
            if not self._decoding:
                return _NOTHING_TO_DO
            return self._decision(RoomMade(), (), offers, prepare_prefill)
        room = RoomMade()
        if lacking:
            ranks = self._fairness.ranks(self._running)
            room = make_room(
                lacking, self._running, self._reservations, ranks=ranks, preempt=self._preempt
            )
        admitted: tuple[RequestId, ...] = ()
        if not room.waits_for_memory and not room.preempted:
            room.preempted += self._preempt_excess()
            if not (self.admits_one_at_a_time and self._unpaused_running):
                room.preempted += self._preempt_paused()
                room.preempted += self._preempt_for_fairness()
                admitted = self._admit()
        return self._decision(room, admitted, offers, prepare_prefill)

    def _decision(
        self,
        room: RoomMade,
        admitted: tuple[RequestId, ...],
        offers: Offers,
        prepare_prefill: PreparePrefill,
    ) -> Decision:
        """Plan the step after room was made, and estimate its duration, including the copies of
        buffers that grow.
        """
        plan = self._plan_step(offers, prepare_prefill)
        if not plan.spans and not admitted and not room.preempted and not room.grown:
            return _NOTHING_TO_DO
        expected_seconds = (
            self._cost_model.at_most(self._under_way[-1].load) if plan.spans else None
        )
        if expected_seconds is not None:
            enlarged = (self._sequences[each] for each in (*admitted, *room.grown))
            copied_bytes = sum(each.costs.bytes_for(each.capacity_tokens) for each in enlarged)
            expected_seconds += copied_bytes / _COPIED_BYTES_PER_SECOND
        return Decision(
            admitted=admitted,
            preempted=tuple(room.preempted),
            # a sequence that has just grown may have been preempted
            grown=tuple(each for each in room.grown if each in self._running),
            plan=plan,
            expected_seconds=expected_seconds,
        )

    def record_step(self, outcome: StepOutcome) -> tuple[RequestId, ...]:
        """Record the result of a step; returns the sequences that ended with it because they reached
        their maximum length. The caller has already ended those in `outcome.ended`.
        """
        if not outcome.plan.spans:
            return ()
        step = self._under_way.popleft()
        assert step.plan is outcome.plan or step.plan == outcome.plan, (
            "steps are reported out of order"
        )
        self._recorded_steps = step.number
        at_max_tokens: list[RequestId] = []
        for request_id, tokens in outcome.generated_tokens.items():
            sequence = self._sequences.get(request_id)
            # the id may belong to a later request, or the sequence may have restarted since
            if sequence is None or sequence.submitted_after_step >= step.number:
                continue
            sequence.generated_tokens += tokens
            if sequence.generated_tokens >= sequence.max_tokens:
                at_max_tokens.append(request_id)
        if step.load.drafted_rows:
            self._settle_drafts(step, outcome)
        by_length: tuple[RequestId, ...] = ()
        if outcome.ended or at_max_tokens or step.prefill_only:
            by_length = self._forget_ended(step, outcome, at_max_tokens)
        self._reservations.release_after(step.number)
        self._cost_model.learn(step.load, outcome.seconds)
        if not step.load.chunks:
            self._draft_gain.learn(
                step.load.rows, outcome.seconds, is_verifying=step.load.drafted_rows > 0
            )
        self._fairness.pass_time(outcome.seconds)
        self._chunk_sharing.pass_time(outcome.seconds)
        self._retry_estimate.learn(
            seconds=outcome.seconds, ends=len(by_length) + len(outcome.ended)
        )
        return by_length

    def _settle_drafts(self, step: StepUnderWay, outcome: StepOutcome) -> None:
        """Correct the positions of sequences whose drafts the step has verified: it was planned as if
        all drafted tokens were accepted.
        """
        for span in step.plan.spans:
            sequence = self._running.get(span.request_id)
            if sequence is not None and sequence.is_verifying and sequence.last_step == step.number:
                sequence.settle_draft(
                    span_tokens=span.tokens,
                    generated_tokens=outcome.generated_tokens.get(span.request_id, 0),
                    repeated=outcome.repeated.get(span.request_id, 0),
                )

    def statistics(self) -> SchedulerStatistics:
        # no reservation covers the live states that running sequences share, so these are added;
        # parked states are not in use by any sequence, so they do not count
        reserved_bytes = (
            self._reservations.reserved_bytes
            + self._reservations.live_state_bytes
            - self._reservations.parked_bytes
        )
        return SchedulerStatistics(
            running=sum(not each.is_idle_work for each in self._running.values()),
            queued=sum(not each.is_idle_work for each in self._queue),
            prefilling=sum(not each.is_idle_work for each in self._prefilling),
            reserved_bytes=reserved_bytes,
            budget_bytes=self._reservations.budget_bytes,
            preemptions=self._preemptions,
            max_running=self._settings.max_running,
            step_tokens=self._step_tokens,
        )

    def check_invariants(self) -> None:
        self._reservations.check_invariants(self._running.values())
        waiting = {sequence.request_id for sequence in self._queue}
        assert len(waiting) == len(self._queue), "a sequence waits twice"
        assert waiting | set(self._running) == set(self._sequences), (
            "a sequence is neither waiting nor running"
        )
        assert not waiting & set(self._running), "a sequence waits and runs"
        assert self._may_exceed_max_running or not self._excess_running, "too many run"
        assert len(self._sequences) == 1 or not any(
            each.is_idle_work for each in self._sequences.values()
        ), "idle work is not alone"
        assert self._fairness.flows == len(
            {each.service.flow for each in self._sequences.values()}
        ), "flows are miscounted"
        check_sequences(
            self._queue, self._running, prefilling=self._prefilling, decoding=self._decoding
        )

    def _next_in_queue(self) -> ScheduledSequence | None:
        """The sequence to admit next; with a single flow, this is the oldest."""
        return self._fairness.next(self._queue, self._running.values())

    def _admit(self) -> tuple[RequestId, ...]:
        """Start sequences from the queue while there are running slots and memory. A sequence with
        tokens in a dispatched step is not started before these are known.
        """
        admitted: list[RequestId] = []
        max_running = self._settings.max_running
        if self.admits_one_at_a_time:  # paused sequences make no progress, so they do not count
            max_running = min(max_running, len(self._running) - self._unpaused_running + 1)
        while len(self._running) < max_running and (sequence := self._next_in_queue()) is not None:
            tokens_are_known = sequence.last_step <= self._recorded_steps
            if not tokens_are_known or not self._reservations.fits(sequence):
                break
            self._queue.remove(sequence)
            self._fairness.admit(sequence)
            self._reservations.reserve(sequence, step=self._issued_steps)
            self._start_running(sequence)
            admitted.append(sequence.request_id)
        return tuple(admitted)

    @property
    def _unpaused_running(self) -> int:
        """The number of running sequences that are not paused."""
        return sum(not each.is_paused for each in self._running.values())

    def _start_running(self, sequence: ScheduledSequence) -> None:
        is_youngest = (
            not self._running or next(reversed(self._running.values())).order < sequence.order
        )
        self._running[sequence.request_id] = sequence
        self._prefilling.append(sequence)
        if not is_youngest:  # younger sequences were admitted while this one was not ready
            self._running = {
                each.request_id: each for each in sorted(self._running.values(), key=by_order)
            }
            self._prefilling.sort(key=by_order)

    def _preempt_paused(self) -> list[RequestId]:
        """Preempt paused sequences until the next sequence in the queue fits."""
        preempted: list[RequestId] = []
        while (next_sequence := self._next_in_queue()) is not None:
            paused = [
                each
                for each in self._running.values()
                if each.is_paused and not each.is_fully_planned
            ]
            has_slot = len(self._running) < self._settings.max_running
            if not paused or (has_slot and self._reservations.fits_after_steps(next_sequence)):
                break
            preempted.append(paused[-1].request_id)
            self._preempt(paused[-1])
        return preempted

    def _preempt_for_fairness(self) -> list[RequestId]:
        """Preempt sequences of flows with more than their share of the running sequences, if that
        makes room for the next sequence in the queue.
        """
        next_sequence = self._next_in_queue()
        if next_sequence is None or next_sequence.last_step > self._recorded_steps:
            return []
        victims = victims_for(
            next_sequence,
            self._reservations,
            candidates=self._fairness.preemptible(next_sequence, self._running),
            running=len(self._running),
            max_running=self._settings.max_running,
        )
        return self._preempt_all(victims)

    @property
    def _excess_running(self) -> int:
        """The number of running sequences above `max_running`."""
        return max(0, len(self._running) - self._settings.max_running)

    def _preempt_excess(self) -> list[RequestId]:
        """Preempt the sequences that exceed `max_running` since it was lowered."""
        excess = self._excess_running
        self._may_exceed_max_running = excess > 0  # some are about to end and are not preempted
        if not excess:
            return []
        ranks = self._fairness.ranks(self._running)
        return self._preempt_all(preemption_order(self._running, ranks)[:excess])

    def _preempt_all(self, sequences: list[ScheduledSequence]) -> list[RequestId]:
        for sequence in sequences:
            self._preempt(sequence)
        return [sequence.request_id for sequence in sequences]

    def _preempt(self, sequence: ScheduledSequence) -> None:
        """Stop a running sequence, which waits again at the place of its age in the queue."""
        self._stop_running(sequence)
        self._fairness.preempt(sequence)
        bisect.insort(self._queue, sequence, key=by_order)
        self._preemptions += 1

    def _enqueue_last(self, sequence: ScheduledSequence) -> None:
        self._submissions += 1
        sequence.order = self._submissions
        self._queue.append(sequence)

    def _forget(self, sequence: ScheduledSequence) -> None:
        """Remove a sequence that has ended, from the queue or from the running sequences."""
        del self._sequences[sequence.request_id]
        self._fairness.forget(sequence)
        if sequence.request_id in self._running:
            self._stop_running(sequence)
        else:
            self._queue.remove(sequence)
        self._reservations.fit_budget(self._sequences.values())

    def _stop_running(self, sequence: ScheduledSequence) -> None:
        """Take a sequence out of the running ones, and free its memory as soon as possible."""
        del self._running[sequence.request_id]
        if not sequence.is_paused:
            if sequence.position < sequence.known_tokens:
                self._prefilling.remove(sequence)
            elif not sequence.is_fully_planned:
                self._decoding.remove(sequence)
        self._reservations.release(sequence, recorded_steps=self._recorded_steps)

    def _forget_ended(
        self, step: StepUnderWay, outcome: StepOutcome, at_max_tokens: list[RequestId]
    ) -> tuple[RequestId, ...]:
        """Forget the sequences that ended with a step. Returns those that ended by length, which
        the worker does not know yet: those with `max_tokens` tokens, and those that need none.
        """
        by_length = at_max_tokens + [
            each.request_id
            for each in step.prefill_only
            if self._sequences.get(each.request_id) is each
            and each.submitted_after_step < step.number
        ]
        for request_id in (*outcome.ended, *by_length):
            sequence = self._sequences.get(request_id)
            if sequence is not None and sequence.submitted_after_step < step.number:
                self._forget(sequence)
        return tuple(request_id for request_id in by_length if request_id not in outcome.ended)

    def _lacking_capacity(self) -> list[ScheduledSequence]:
        """Decoding sequences without memory for their next token."""
        return [
            sequence for sequence in self._decoding if sequence.position >= sequence.capacity_tokens
        ]

    def _plan_step(self, offers: Offers, prepare_prefill: PreparePrefill) -> StepPlan:
        """Plan decoding first, then prompt chunks in the rows that are left (`step_tokens`)."""
        step_number = self._issued_steps + 1
        spans = self._decode_spans(step_number, offers)
        rows = sum(span.tokens for span in spans)
        load = StepLoad(len(spans), drafted_rows=rows - len(spans))
        prefill_only: tuple[ScheduledSequence, ...] = ()
        prefilling = [
            each
            for each in (self._prefilling if rows < self._step_tokens else ())
            if prepare_prefill(each.request_id, each.position, self._step_tokens)
        ]
        if prefilling:
            load, prefill_only = self._add_chunks(spans, load, step_number, prefilling)
        if not spans:
            return _NOTHING_TO_DO.plan
        plan = StepPlan(spans=tuple(spans))
        self._issued_steps = step_number
        self._under_way.append(StepUnderWay(step_number, plan, load, prefill_only))
        return plan

    def _decode_spans(self, step_number: int, offers: Offers) -> list[Span]:
        """Plan the spans of the decoding sequences. Each sequence advances as if all its drafted
        tokens were accepted; `_settle_drafts` corrects that when the result is known.
        """
        spans: list[Span] = []
        plans_last_token = False
        decoding = self._decoding_this_step(step_number)
        drafts = self._drafts_to_verify(decoding, offers) if offers else {}
        for sequence in decoding:
            position = sequence.position
            if position >= sequence.capacity_tokens or sequence.is_verifying:
                continue  # until there is memory, or until its last step is over
            draft = drafts.get(sequence.request_id, NO_DRAFT)
            drafted_tokens = len(draft.chances)
            if drafted_tokens and sequence.last_step > self._recorded_steps:
                continue  # to verify its draft, it waits until its last token is known
            assert len(draft.token_ids) == drafted_tokens, (
                "the tokens of a draft in a plan are known"
            )
            tokens = sequence.repeated + 1 + drafted_tokens
            spans.append(
                Span(
                    request_id=sequence.request_id,
                    start=position,
                    tokens=tokens,
                    samples=True,
                    draft=draft,
                )
            )
            sequence.position = position + tokens
            sequence.last_step = step_number
            sequence.planned_answer_tokens += 1 + drafted_tokens
            sequence.repeated = 0
            sequence.is_verifying = drafted_tokens > 0
            if sequence.planned_answer_tokens >= sequence.max_tokens:
                plans_last_token = True
        if plans_last_token:
            self._decoding = [
                sequence for sequence in self._decoding if not sequence.is_fully_planned
            ]
        return spans

    def _drafts_to_verify(
        self, decoding: list[ScheduledSequence], offers: Offers
    ) -> dict[RequestId, Draft]:
        """Choose the drafts that the step verifies, none until a decode step was measured."""
        if not self._cost_model.knows_decoding:
            return {}
        possible: dict[RequestId, Draft] = {}
        for sequence in decoding:
            if sequence.request_id in offers and not sequence.is_verifying:
                draft = offers[sequence.request_id]
                possible[sequence.request_id] = draft.cut(sequence.most_drafted)
        return self._draft_gain.choose(
            possible, rows=len(decoding), most=self._most_drafted_rows(len(decoding))
        )

    def _most_drafted_rows(self, rows: int) -> int:
        """The largest number of drafted rows of a step with `rows` decoding sequences: they leave
        room for the smallest chunk, if there are prompts.
        """
        free_rows = self._step_tokens - rows
        if self._prefilling:
            free_rows -= min(self._settings.min_chunk_tokens, free_rows)
        return free_rows

    def passes_of_draft_model(
        self, offers: Offers, model_drafts: Offers, *, pass_seconds: float
    ) -> int:
        """How many tokens, one per forward pass, a draft model should draft for each sequence in
        `model_drafts` before the next step.

        offers: drafts that cost nothing. model_drafts: those that are expected of the draft model.
        pass_seconds: the duration of a pass.
        """
        rows = len(self._decoding)
        if not rows or not self._cost_model.knows_decoding:
            return 0
        return self._draft_gain.passes(
            offers,
            model_drafts,
            rows=rows,
            most=self._most_drafted_rows(rows),
            pass_seconds=pass_seconds,
        )

    def approve_draft_prefill(
        self, chances: Sequence[float], *, pass_seconds: float, seconds: float, generated: int
    ) -> bool:
        """Decide whether a draft model prefills a sequence, which takes `seconds`.

        chances: for each token of its drafts, the chance that it and those before it are right.
        pass_seconds: how long it takes to draft a token. generated: tokens of the answer so far.
        """
        return self._draft_gain.approve_prefill(
            chances,
            rows=max(1, len(self._decoding)),
            pass_seconds=pass_seconds,
            seconds=seconds,
            generated=generated,
        )

    def _decoding_this_step(self, step_number: int) -> list[ScheduledSequence]:
        """The sequences that decode in this step: all, or, if they would leave no room for
        a chunk, some of them in turn.
        """
        limit = self._step_tokens
        if self._prefilling:
            # with one token per step, prefill and decode alternate
            limit -= min(self._settings.min_chunk_tokens, limit // 2) or step_number % 2
        if len(self._decoding) <= limit:
            return self._decoding
        stalled = self._lacking_capacity()
        ready = [
            sequence for sequence in self._decoding if sequence.position < sequence.capacity_tokens
        ]
        self._decoding = stalled + ready[limit:] + ready[:limit]
        return ready[:limit]

    def _add_chunks(
        self,
        spans: list[Span],
        decoding: StepLoad,
        step_number: int,
        prefilling: list[ScheduledSequence],
    ) -> tuple[StepLoad, tuple[ScheduledSequence, ...]]:
        """Add chunks of the prompts in `prefilling` to the spans of the decoding sequences.

        decoding: the load of those spans. Returns the load of the whole step, and the sequences that
        end with it because they generate no token.
        """
        rows = decoding.decode_rows
        chunk_seconds = self._chunk_sharing.stall_seconds(rows) if rows else math.inf
        scored_tokens = 0
        position_sum = 0.0
        prefill_only: list[ScheduledSequence] = []
        rows_by_flow = (
            Counter(self._sequences[span.request_id].service.flow for span in spans)
            if self._fairness.flows > 1
            else NO_ROWS
        )
        free_tokens = self._step_tokens - decoding.rows
        if prefilling[0].is_idle_work:
            free_tokens = min(
                free_tokens, self._chunk_sharing.idle_work_tokens(prefilling[0].position)
            )
        chunks = self._chunk_sharing.share(
            prefilling,
            tokens=free_tokens,
            seconds=chunk_seconds,
            step=step_number,
            rows=rows_by_flow,
        )
        for sequence, tokens in chunks:
            start = sequence.position
            sequence.position = start + tokens
            sequence.last_step = step_number
            samples = False
            if sequence.position == sequence.known_tokens:
                self._prefilling.remove(sequence)
                samples = sequence.planned_answer_tokens < sequence.max_tokens
                sequence.planned_answer_tokens += samples
                if not samples:
                    prefill_only.append(sequence)
                elif not sequence.is_fully_planned:
                    self._decoding.append(sequence)
            spans.append(
                Span(request_id=sequence.request_id, start=start, tokens=tokens, samples=samples)
            )
            scored_tokens += tokens if sequence.scores_prompt else 0
            position_sum += tokens * (start + tokens / 2)
        load = replace(
            decoding,
            chunks=len(chunks),
            chunk_tokens=sum(tokens for _, tokens in chunks),
            position_sum=position_sum,
            scored_tokens=scored_tokens,
        )
        return load, tuple(prefill_only)
