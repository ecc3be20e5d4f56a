"""The worker's loop: receives commands, runs plans on the engine, and sends events, on the thread
that owns the device.

The loop is pipelined by one step where that pays (on a GPU; `Engine.runs_ahead`): step k+1 is
dispatched before the loop waits for step k, so Python works while the device computes. Results of
sequences that end during the step are dropped.

To *collect* a step is to wait for its results and to process them; the step *under way* is
dispatched, but not collected. A sequence is *open* while the engine has state for it. *Idle work*
prefills a prompt that is expected later, while there is no request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import InvalidRequest, QueueFull, SessionFailure, WorkerUnavailable
from holdfast.wire.cache_map import CacheMap, CacheMapQuestion
from holdfast.wire.commands import (
    Command,
    LogChange,
    MemoryChange,
    MemoryPressure,
    ReadAheadRun,
    SchedulerLimits,
    SequenceControl,
    SequenceRequest,
    ThoughtLimit,
    WorkerControl,
)
from holdfast.wire.events import FinishReason, WaitReason, WorkerStatistics
from holdfast.wire.images import ImageCommand
from holdfast.wire.kv import CacheScope
from holdfast.wire.requests import RequestId
from holdfast.wire.sessions import SessionAnswer, SessionCommand
from holdfast.worker.engine.fingerprint import Fingerprints
from holdfast.worker.engine.kv_forms import ONLY_NATIVE, KVForms
from holdfast.worker.engine.plan import NO_DRAFT, Span, SpanResult, StepPlan
from holdfast.worker.kv.bits import AUTO_WHEN_SHORT, KVBits
from holdfast.worker.loop.cache_client import CacheClient
from holdfast.worker.loop.counters import Counters
from holdfast.worker.loop.device_steps import (
    DeviceFailed,
    DeviceSteps,
    DispatchedStep,
    device_call,
    log_failure,
)
from holdfast.worker.loop.drafts import Drafts
from holdfast.worker.loop.idle_work import IdleWork
from holdfast.worker.loop.inbox import Inbox, Pulse
from holdfast.worker.loop.lifetimes import Lifetimes
from holdfast.worker.loop.memory_budget import MemoryBudget
from holdfast.worker.loop.sequences import Ledger, LiveSequence, Times
from holdfast.worker.scheduler.draft_gain import NO_OFFERS, Offers
from holdfast.worker.scheduler.scheduler import Decision, Scheduler, StepOutcome
from holdfast.worker.scheduler.sequence import ScheduledSequence, SequenceCosts

if TYPE_CHECKING:  # these modules import MLX, which is not needed here at run time
    from holdfast.worker.drafting.draft_model import DraftModel
    from holdfast.worker.engine.engine import Engine
    from holdfast.worker.prefix.cache import PrefixCache
    from holdfast.worker.sessions.service import SessionService

POLL_SECONDS = 0.001  # between two checks for blocks from disk or images if there is no other work
IDLE_SECONDS = 5.0  # longest wait without work; a command ends the wait immediately
STATISTICS_SECONDS = 0.25  # between two statistics events of a busy worker

logger = logging.getLogger("holdfast.worker")

SHUTTING_DOWN = WorkerUnavailable("the server is shutting down")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What the loop must know about its model in addition to the engine.

    retry_chunk_tokens: the largest prompt chunk when a failed step is retried.
    fingerprints: which requests the model can serve, and with which cache. forms: the supported forms
    of keys and values. costs: the KV memory that a sequence takes in each; empty: the scheduler's
    default. speculates: whether steps verify drafts. draft_model: makes some of the drafts; None:
    there is none.
    """

    retry_chunk_tokens: int = 2048
    fingerprints: Fingerprints = Fingerprints()
    forms: KVForms = field(default_factory=lambda: ONLY_NATIVE)
    costs: Mapping[KVBits, SequenceCosts] = field(default_factory=dict)
    speculates: bool = False
    draft_model: DraftModel | None = None


DEFAULT_OPTIONS = ModelOptions()


class WorkerLoop:
    """Serves the inbox until it is told to shut down.

    Each accepted request gets exactly one Finished event, unless the device breaks.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        scheduler: Scheduler,
        inbox: Inbox,
        model: ModelOptions = DEFAULT_OPTIONS,
        cache: PrefixCache | None = None,
        sessions: SessionService | None = None,
        memory: MemoryBudget | None = None,
        on_rest: Callable[[], None] = lambda: None,
        on_wake: Callable[[], None] = lambda: None,
        pulse: Pulse | None = None,
        counters: Counters | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """on_rest: called once after a while without work. on_wake: called at the next request.
        pulse: reports what the thread does. counters: may contain counters of the engine.
        """
        self._pulse = pulse or Pulse()
        self._scheduler = scheduler
        self._inbox = inbox
        self._on_rest = on_rest
        self._on_wake = on_wake
        self._memory = memory
        self._sessions = sessions
        self._engine = engine
        self._steps = DeviceSteps(
            engine, retry_chunk_tokens=model.retry_chunk_tokens, limit_chunks=scheduler.limit_chunks
        )
        # without the draft model, whose memory is freed when `Drafts` drops it after a failure
        self._model = replace(model, draft_model=None)
        self._ledger = Ledger(clock=clock, counters=counters)
        self._drafts: Drafts | None = None
        if model.speculates:
            self._drafts = Drafts(
                engine,
                scheduler=scheduler,
                counters=self._ledger.counters,
                model=model.draft_model,
            )
        self._prefix_cache = cache
        self._cache_client = CacheClient(
            cache,
            engine=engine,
            scheduler=scheduler,
            ledger=self._ledger,
            on_end=self._record_session_use,
        )
        self._lifetimes = Lifetimes(engine, scheduler, self._ledger, self._cache_client)
        self._idle = IdleWork(scheduler, self._ledger, self._cache_client, self._lifetimes)
        self._step_under_way: DispatchedStep | None = None  # the step that is not collected yet
        self._collected_at = 0.0  # when the last step was collected
        self._statistics_sent_at = -IDLE_SECONDS  # when statistics were last emitted
        self._was_busy = False  # whether the worker was busy when they were
        self._has_rested = False  # whether `on_rest` was called since the last request
        self._is_closing = False
        self._waits_for_images = False  # whether a running sequence waits for an image's features

    def run(self) -> None:
        """Work until shutdown.

        Raises DeviceBroken when the device no longer works. Then open requests get no Finished
        event, because the front may continue them with another worker.
        """
        is_busy = False
        is_resting = False
        try:
            self._emit_statistics(is_busy=False)
            self._send()
            while not self._is_closing:
                commands = self._receive(is_busy=is_busy)
                was_resting = is_resting
                is_resting = not (commands or is_busy or self._waits_for_data)
                if is_resting and not was_resting:
                    self._on_rest()
                    self._has_rested = True
                self._handle(commands)
                self._answer_image_commands()
                if self._memory is not None:
                    self._memory.maintain(now=self._ledger.clock())
                    self._quantize_running(self._memory)
                self._send()  # the front continues while the step is laid out
                is_busy = self._advance()
                # otherwise, `_collect_before_planning` emits them, after the results of the step
                if self._step_under_way is None or self._engine.runs_ahead:
                    self._emit_statistics(is_busy=is_busy)
                self._send()
                is_busy = is_busy or self._flush_if_idle()
        except Exception:
            self._send()
            self._close_sessions(writes_records=False)
            self._cache_client.close(saves_all=False)
            raise
        finally:
            self._engine.close_images()
        self._shut_down()

    def _shut_down(self) -> None:
        """Cancel all requests, and save what is cached and the sessions."""
        self._pulse.rest()  # no heartbeat deadline: the front limits the duration of a shutdown
        self._lifetimes.cancel_all(unhealthy=self._collect_last_step())
        self._send()
        self._cache_client.flush()
        self._close_sessions(writes_records=True)
        self._cache_client.close(saves_all=True)

    def statistics(self, *, in_answer: bool = False) -> WorkerStatistics:
        """The worker's present statistics. in_answer: whether the front has asked for them."""
        return self._ledger.counters.statistics(
            self._scheduler.statistics(),
            self._cache_client.figures(),
            waits=self._ledger.wait_reasons(),
            in_answer=in_answer,
        )

    def check_invariants(self) -> None:
        self._ledger.check_invariants()
        self._scheduler.check_invariants()
        self._idle.check_invariants()

    # -- the link to the front

    @property
    def _waits_for_data(self) -> bool:
        """Whether a request waits for blocks or images that are being read."""
        return (
            self._cache_client.is_waited_for
            or self._engine.is_reading_images
            or self._waits_for_images
        )

    def _receive(self, *, is_busy: bool) -> list[Command]:
        """Take the commands that have arrived; without other work, wait for one. The wait is short if
        the loop must check for data that other threads read.
        """
        timeout_seconds = IDLE_SECONDS
        if is_busy:
            timeout_seconds = 0.0
        elif self._waits_for_data or (self._sessions is not None and self._sessions.is_busy):
            timeout_seconds = POLL_SECONDS
        self._pulse.rest()
        commands = self._inbox.receive(timeout_seconds=timeout_seconds)
        self._pulse.work()
        return commands

    def _send(self) -> None:
        self._inbox.send(self._ledger.take_outbox())

    def _emit_statistics(self, *, is_busy: bool) -> None:
        """Emit statistics if they are due: often while requests run, rarely without work."""
        now = self._ledger.clock()
        interval_seconds = STATISTICS_SECONDS if is_busy else IDLE_SECONDS
        if is_busy != self._was_busy or now - self._statistics_sent_at >= interval_seconds:
            self._was_busy = is_busy
            self._statistics_sent_at = now
            self._ledger.emit(self.statistics())

    # -- commands

    def _handle(self, commands: list[Command]) -> None:
        for command in map(self._with_cache_tenant, commands):
            match command:
                case SequenceRequest():
                    self._accept_request(command)
                case SequenceControl(action="cancel"):
                    self._cancel(command.request_id)
                case SequenceControl(action="pause"):
                    self._pause(command.request_id)
                case SequenceControl():  # action="resume"
                    self._resume(command.request_id)
                case ThoughtLimit():
                    self._limit_thoughts(command)
                case WorkerControl(action="shut_down"):
                    self._is_closing = True
                case WorkerControl():  # action="tell_statistics"
                    self._ledger.emit(self.statistics(in_answer=True))
                case SchedulerLimits():
                    self._set_limits(command)
                case MemoryChange():
                    if self._memory is not None:
                        self._ledger.emit(self._memory.set_share(command.state_bytes))
                case MemoryPressure():
                    if self._memory is not None:
                        self._memory.set_worker_pressure(command.pressure)
                case ReadAheadRun():
                    self._cache_client.note_read_ahead(command)
                case LogChange():
                    logging.getLogger().setLevel(command.level.upper())
                    logger.debug("the log level of this worker is now %s", command.level)
                case SessionCommand():
                    self._change_session(command)
                case ImageCommand():
                    self._ask_about_images(command)
                case CacheMapQuestion():
                    self._show_cache(command)

    def _with_cache_tenant(self, command: Command) -> Command:
        """The command, with the tenant under which its KV is cached."""
        if not isinstance(command, CacheScope):
            return command
        tenant = self._model.fingerprints.cache_tenant(command)
        return msgspec.structs.replace(command, tenant=tenant)

    def _accept_request(self, request: SequenceRequest) -> None:
        """Accept a new request, or reject it with the reason. Idle work gives way to it."""
        if reason := self._model.fingerprints.refusal(request):
            self._ledger.reject(request, InvalidRequest(reason))
            return
        if self._has_rested:
            self._on_wake()
            self._has_rested = False
        if self._is_closing:
            self._ledger.reject(request, SHUTTING_DOWN)
            return
        try:
            costs = self._choose_costs(
                request, is_short=self._memory is not None and self._memory.is_short
            )
        except InvalidRequest as refusal:
            self._ledger.reject(request, refusal)
            return
        if request.is_idle_work:
            self._idle.accept(self._new_sequence(request, costs))
            self._drop_idle_work_of_closed_session(request)
            return
        self._collect_idle_work()
        self._idle.give_way(request)
        self._collect_for_closed_sequences()
        sequence = self._new_sequence(request, costs)
        try:
            self._scheduler.submit(sequence.scheduled)
        except (QueueFull, InvalidRequest) as refusal:
            self._ledger.reject(request, refusal)
            return
        if self._sessions is not None and request.session_id:
            self._sessions.request_accepted(request.session_id, tenant=request.tenant)
        self._ledger.accept(sequence)
        self._cache_client.look_up(sequence)

    def _new_sequence(self, request: SequenceRequest, costs: SequenceCosts) -> LiveSequence:
        """The sequence of a new request. costs: the KV memory that it takes."""
        return LiveSequence(
            request=request,
            scheduled=ScheduledSequence(
                request_id=request.request_id,
                prompt_tokens=len(request.prompt_token_ids),
                max_tokens=request.max_tokens,
                generated_tokens=len(request.generated_token_ids),
                costs=costs,
                boundaries=self._cache_client.boundaries(request),
                indivisible=self._engine.indivisible(request),
                service=request.service,
                is_idle_work=request.is_idle_work,
                scores_prompt=request.want_prompt_logprobs,
            ),
            times=Times(self._ledger.clock()),
        )

    def _drop_idle_work_of_closed_session(self, request: SequenceRequest) -> None:
        """Drop a prompt to prefill ahead if its session was closed during the last answer."""
        if self._sessions is None or not request.session_id:
            return
        self._collect_for_closed_sequences()
        self._cache_client.flush()  # this opens the session of an answer that has just ended
        if not self._sessions.is_open(request.session_id, tenant=request.tenant):
            self._idle.forget_session(request.session_id, tenant=request.tenant)

    def _choose_costs(self, request: SequenceRequest, *, is_short: bool) -> SequenceCosts:
        """The memory of a new sequence in the form of keys and values that is best for it now.
        Raises InvalidRequest if the request names an unsupported form. is_short: whether to save
        memory.
        """

        def fits(form: KVBits) -> bool:
            costs = self._model.costs.get(form)
            return costs is None or self._scheduler.fits_alone(
                costs, prompt_tokens=len(request.prompt_token_ids), max_tokens=request.max_tokens
            )

        form = self._model.forms.choose(
            request,
            is_short=is_short,
            cached_tokens=partial(self._cache_client.cached_tokens, request),
            fits=fits,
        )
        return self._model.costs.get(form, self._scheduler.usual_costs)

    def _cancel(self, request_id: RequestId) -> None:
        """End a request, unless it has just ended."""
        sequence = self._find_between_steps(request_id)
        if sequence is not None:
            self._lifetimes.drop(sequence, FinishReason.CANCELLED)

    def _find_between_steps(self, request_id: RequestId) -> LiveSequence | None:
        """The live sequence with this id, which no step under way contains; None if it has ended. If
        the step under way contains the sequence, that step is collected first.
        """
        sequence = self._ledger.find(request_id)
        if (
            sequence is not None
            and self._step_under_way is not None
            and sequence in self._step_under_way.sequences
        ):
            self._collect_step_under_way()
            sequence = self._ledger.find(request_id)
        return sequence

    def _limit_thoughts(self, command: ThoughtLimit) -> None:
        """Change the reasoning budget of a request, which may already generate its answer."""
        sequence = self._find_between_steps(command.request_id)
        if sequence is None or sequence.request.is_idle_work:
            return
        sequence.request = msgspec.structs.replace(sequence.request, thinking_budget=command.budget)
        if sequence.is_open:
            self._engine.limit_thoughts(
                command.request_id, command.budget, generated=sequence.answer.token_ids
            )

    def _pause(self, request_id: RequestId) -> None:
        """Generate nothing for a request while its client does not read."""
        sequence = self._ledger.find(request_id)
        if sequence is None or sequence.request.is_idle_work or sequence.scheduled.is_paused:
            return
        self._scheduler.pause(request_id)
        # the cache releases the blocks found for it, and no other request waits for its prefill
        self._cache_client.withdraw(sequence)
        self._ledger.set_wait_reason(sequence, WaitReason.READER)

    def _resume(self, request_id: RequestId) -> None:
        """Continue a paused request. If it is not open, its cached prefix is looked up first."""
        sequence = self._ledger.find(request_id)
        if sequence is None or not sequence.scheduled.is_paused:
            return
        self._scheduler.resume(request_id)
        self._ledger.set_wait_reason(sequence, None)
        if not sequence.is_open:
            self._collect_for_closed_sequences()
            self._cache_client.look_up(sequence)

    def _set_limits(self, limits: SchedulerLimits) -> None:
        try:
            self._scheduler.set_limits(
                max_running=limits.max_running, step_tokens=limits.step_tokens
            )
        except InvalidRequest as error:  # unexpected: the front has checked the limits
            logger.error("the scheduler's limits are not changed: %s", error)

    # -- steps

    def _advance(self) -> bool:
        """Dispatch the next step and collect the one under way: in this order if the engine runs
        ahead, so that the device computes while results are processed; otherwise in reverse order
        (`_collect_before_planning`).

        Returns False if there was nothing to dispatch, collect or preempt.
        """
        was_under_way = self._step_under_way is not None
        self._collect_before_planning()
        self._pulse.work()
        # In this order: the cache allows the admission of requests whose blocks were read, or whose
        # prefix another request has prefilled; idle work begins only if there is no request; and parked
        # states (of ended sequences) are freed for the requests that may be admitted now.
        self._cache_client.advance()
        self._maintain_sessions()
        self._idle.begin()
        self._make_room()
        self._waits_for_images = False  # `_prepare_prefill` sets it again
        decision = self._scheduler.next_step(
            self._make_drafts(), prepare_prefill=self._prepare_prefill
        )
        if decision.preempted:
            self._collect_step_under_way()  # caches the state that it copied out of these sequences
        previous_step = self._step_under_way  # None if it was collected above
        self._step_under_way = None
        self._pulse.work(_expected_seconds_of_both(decision, previous_step))
        self._step_under_way = self._apply_decision(decision)
        # the device computes the next step while the results of the previous one are sent
        if previous_step is not None:
            self._collect_step(previous_step)
        # if a step failed, its sequences are tried alone before anything else is planned
        if self._step_under_way is not None and self._step_under_way.is_suspect:
            self._collect_step_under_way()
            return True
        if was_under_way or self._step_under_way is not None:
            return True
        if decision.preempted:
            return True  # parked states can be freed now for the requests that take their places
        self._idle.give_up_if_stuck()
        return False

    def _collect_before_planning(self) -> None:
        """Collect the step under way before the next one is planned, unless the engine runs ahead.

        During idle work, no step is dispatched ahead either: a new request waits for one step only.
        """
        if self._engine.runs_ahead and not self._is_idle_work_under_way:
            self._collect_for_closed_sequences()
            return
        was_under_way = self._step_under_way is not None
        self._collect_step_under_way()
        self._send()
        if was_under_way:
            self._emit_statistics(is_busy=True)

    def _make_room(self) -> None:
        """Free parked states for the next step. If waiting requests still do not fit, let them start
        quantized.
        """
        self._cache_client.make_room()
        if self._quantize_waiting():
            self._cache_client.make_room()

    def _apply_decision(self, decision: Decision) -> DispatchedStep | None:
        """Free the memory of preempted sequences, give it to others, and dispatch the step. Returns
        None if no span is planned.
        """
        for request_id in decision.preempted:
            self._lifetimes.preempt(request_id)
        for request_id in decision.grown:
            self._lifetimes.grow(request_id)
        self._lifetimes.admit(decision.admitted)
        step = self._step_to_dispatch(decision)
        if step is not None:
            self._steps.dispatch(step)
        return step

    def _make_drafts(self) -> Offers:
        """The drafts from which the scheduler may choose; none if the model does not speculate. That of a
        sequence in the step under way is for the step after the next one.
        """
        if self._drafts is None:
            return NO_OFFERS
        if self._memory is not None and self._memory.is_short:
            self._drafts.free_memory()
        under_way = () if self._step_under_way is None else self._step_under_way.sequences
        return self._drafts.offers(self._ledger.live(), under_way=under_way)

    def _quantize_running(self, memory: MemoryBudget) -> None:
        """If memory is critically short, quantize the longest running sequence whose form the
        server may choose (`auto`). Sequences that share tokens are quantized together if quantizing
        one of them would not save enough memory.
        """
        costs = self._model.costs.get(AUTO_WHEN_SHORT)
        if costs is None or not memory.is_critical or self._model.forms.refusal(AUTO_WHEN_SHORT):
            return
        candidates = [
            sequence.id
            for sequence in self._ledger.live()
            if sequence.is_open
            and not sequence.is_quantized
            and not sequence.stays_native
            and self._model.forms.is_automatic(sequence.request)
        ]
        conversions = self._engine.conversions(candidates)
        chosen_ids = next(
            (ids for ids, conversion in conversions if self._model.forms.is_worth_it(conversion)),
            (),
        )
        if not chosen_ids:
            return
        self._collect_step_under_way()
        for request_id in chosen_ids:
            sequence = self._ledger.find(request_id)
            if sequence is not None and sequence.is_open:
                self._pulse.work()
                self._lifetimes.quantize(sequence, costs)
                if sequence.stays_native:
                    break  # the tokens that it shares with the others would stay native, too
        memory.note_quantized(now=self._ledger.clock())

    def _quantize_waiting(self) -> bool:
        """Switch waiting requests to 8-bit KV, oldest first, until all fit into memory. Only requests
        that have not started and leave the form to the server are switched. Returns whether any was.
        """
        costs = self._model.costs.get(AUTO_WHEN_SHORT)
        if costs is None:
            return False

        def may_quantize(request_id: RequestId) -> bool:
            sequence = self._ledger[request_id]
            return not sequence.has_final_form and self._model.forms.is_automatic(sequence.request)

        has_changed = False
        while request_id := self._scheduler.next_to_quantize(costs, may_quantize=may_quantize):
            sequence = self._ledger[request_id]
            sequence.has_final_form = True
            chosen_costs = self._choose_costs(sequence.request, is_short=True)
            if chosen_costs.form != sequence.form:
                sequence.scheduled.costs = chosen_costs
                self._cache_client.look_up(sequence)
                has_changed = True
        return has_changed

    def _step_to_dispatch(self, decision: Decision) -> DispatchedStep | None:
        """The step to dispatch: the planned spans whose sequences are open; None: no spans."""
        if not decision.plan.spans:
            return None
        spans: list[Span] = []
        sequences: list[LiveSequence] = []
        for span in decision.plan.spans:
            sequence = self._ledger.find(span.request_id)
            if sequence is not None and sequence.is_open and self._provide_images(span, sequence):
                spans.append(span)
                sequences.append(sequence)
        return DispatchedStep(
            scheduled=decision.plan,
            plan=StepPlan(spans=tuple(spans)),
            sequences=tuple(sequences),
            attempts=tuple([sequence.attempts for sequence in sequences]),
            started_at=self._ledger.clock(),
            expected_seconds=decision.expected_seconds,
        )

    def _ask_about_images(self, command: ImageCommand) -> None:
        answer = self._engine.ask_about_images(command)
        if answer is not None:
            self._ledger.emit(answer)

    def _answer_image_commands(self) -> None:
        for answer in self._engine.poll_images():
            self._ledger.emit(answer)

    def _prepare_prefill(self, request_id: RequestId, start: int, tokens: int) -> bool:
        """Compute features of the images in the next tokens of a prompt. Returns whether these
        tokens can be prefilled. If not, the sequence waits, and the others continue.
        """
        sequence = self._ledger[request_id]
        if not sequence.request.images:
            return True
        may_prefill = False  # for a sequence that is not open yet: the next step asks again
        if sequence.is_open:
            self._pulse.work()
            may_prefill = True  # if this fails, so does the step, which then ends the sequence
            with log_failure("an image of request %s is not prepared", request_id):
                may_prefill = self._engine.advance_images(request_id, start, tokens)
            waits_for = None if may_prefill else WaitReason.IMAGES
            if sequence.scheduled.waits_for is not waits_for:
                self._ledger.set_wait_reason(sequence, waits_for)
        self._waits_for_images |= not may_prefill
        return may_prefill

    def _provide_images(self, span: Span, sequence: LiveSequence) -> bool:
        """Compute the features of a span's images that have none yet. If an image cannot be used, ends
        the sequence and returns False.
        """
        if not self._engine.lacks_images(span):
            return True
        self._pulse.work()
        try:
            with device_call():
                self._engine.provide_images(span)
        except DeviceFailed as failure:
            is_refused = isinstance(failure.__cause__, InvalidRequest)
            reason = FinishReason.REFUSED if is_refused else FinishReason.FAILED
            logger.warning("request %s ends: an image cannot be used: %s", sequence.id, failure)
            self._lifetimes.drop(sequence, reason, error=str(failure.__cause__))
            return False
        return True

    @property
    def _is_idle_work_under_way(self) -> bool:
        return self._step_under_way is not None and any(
            each.request.is_idle_work for each in self._step_under_way.sequences
        )

    def _collect_idle_work(self) -> None:
        """Collect the step under way if it is idle work."""
        if self._is_idle_work_under_way:
            self._collect_step_under_way()

    def _collect_for_closed_sequences(self) -> None:
        """Collect the step under way if a sequence in it has been closed while the rest of the
        sequence's state is still being computed.
        """
        if self._step_under_way is not None and self._cache_client.is_computing_for(
            self._step_under_way.sequences
        ):
            self._collect_step_under_way()

    def _collect_step_under_way(self) -> None:
        """Collect the step under way now, if there is one, because its outcome is needed."""
        if self._step_under_way is not None:
            step = self._step_under_way
            self._step_under_way = None
            self._collect_step(step)

    def _collect_step(self, step: DispatchedStep) -> None:
        """Wait for a step and process its results. If it failed, each span is tried alone."""
        self._pulse.work(step.expected_seconds)
        results = self._steps.collect(step, later=self._step_under_way)
        self._cache_client.end_step(step, results)
        if results is None:
            was_alone = len(step.sequences) == 1
            results = tuple(
                self._retry_alone(span, sequence, was_alone=was_alone)
                for span, sequence in zip(step.plan.spans, step.sequences, strict=True)
            )
        started_at = max(step.started_at, self._collected_at)
        self._collected_at = self._ledger.clock()
        self._process_results(step, results, seconds=self._collected_at - started_at)

    def _retry_alone(self, span: Span, sequence: LiveSequence, *, was_alone: bool) -> SpanResult:
        """Compute a sequence alone, from its first token to the end of the span that failed. was_alone:
        whether it was the only one in the step.
        """
        # a preempted sequence is not open; it is prefilled again later anyway
        if not self._ledger.is_live(sequence) or not sequence.is_open:
            return SpanResult(request_id=span.request_id)
        self._pulse.work()
        if self._lifetimes.wait_for_room(sequence) or (
            sequence.request.images
            and self._lifetimes.wait_for_images(sequence, end=span.start + span.tokens)
        ):
            return SpanResult(request_id=span.request_id)
        span = replace(span, tokens=span.certain_tokens, draft=NO_DRAFT)  # verifies nothing

        def reopen() -> None:
            self._pulse.work()  # each attempt may take as long as the first
            self._lifetimes.reopen_without_cache(sequence)

        return self._steps.retry_alone(span, reopen=reopen, was_alone=was_alone)

    def _process_results(
        self, step: DispatchedStep, results: tuple[SpanResult, ...], *, seconds: float
    ) -> None:
        """Emit a step's tokens, report it to the scheduler, and end sequences that are done."""
        ledger = self._ledger
        counters = ledger.counters
        prompt_tokens_before = counters.prompt_tokens
        generated_tokens_before = counters.generated_tokens
        generated: dict[RequestId, int] = {}
        repeated: dict[RequestId, int] = {}
        ended: list[tuple[LiveSequence, FinishReason, str]] = []
        failed: list[tuple[LiveSequence, str]] = []
        for span, sequence, result in step.current_results(results):
            ledger.count_prompt(sequence, start=span.start, tokens=span.tokens)
            is_live = ledger.is_live(sequence)
            if result.failure:
                failed.append((sequence, result.failure))
                # if cached state may be the cause, the sequence restarts without that state
                if is_live and not sequence.start.may_be_blamed:
                    ended.append((sequence, FinishReason.FAILED, result.failure))
            elif is_live and result.refusal:
                ended.append((sequence, FinishReason.REFUSED, result.refusal))
            elif is_live:
                if span.drafted and self._drafts is not None:
                    accepted = max(0, len(result.token_ids) - 1)
                    self._drafts.count(sequence, span.draft, accepted=accepted)
                ledger.score(sequence, result.prompt_logprobs)
                sequence.answer.embedding = result.embedding
                if result.token_ids:
                    ending = sequence.answer.ending(result.token_ids)
                    count = ending.counted_tokens
                    ledger.generate(sequence, result.token_ids[:count], result.logprobs[:count])
                    generated[span.request_id] = count
                    repeated[span.request_id] = result.repeated
                    if ending.reason is FinishReason.STOP:
                        ended.append((sequence, FinishReason.STOP, ""))
        counters.count_step(
            seconds,
            sequences=len(step.sequences),
            prompt_tokens=counters.prompt_tokens - prompt_tokens_before,
            generated_tokens=counters.generated_tokens - generated_tokens_before,
        )
        # before `record_step`: a restarted sequence has not ended, even if it generates no token
        for sequence, failure in failed:
            self._lifetimes.give_up_state(sequence, failure)
        ended_ids = tuple(sequence.id for sequence, _, _ in ended)
        by_length = self._scheduler.record_step(
            StepOutcome(
                plan=step.scheduled,
                generated_tokens=generated,
                ended=ended_ids,
                seconds=seconds,
                repeated=repeated,
            )
        )
        ended += [(ledger[request_id], FinishReason.LENGTH, "") for request_id in by_length]
        if ended:
            self._end_sequences(ended)

    def _end_sequences(self, ended: Sequence[tuple[LiveSequence, FinishReason, str]]) -> None:
        """End sequences that the scheduler has forgotten, each with its reason and error message."""
        for sequence, reason, error in ended:
            if self._drafts is not None:
                self._drafts.remember(sequence)
            self._ledger.finish(sequence, reason, error=error)
        self._send()  # before state is copied, so that no answer waits for that
        for sequence, reason, _ in ended:
            self._lifetimes.close(sequence, is_healthy=reason is not FinishReason.FAILED)

    def _flush_if_idle(self) -> bool:
        """Commit the state copied out of closed sequences, if any. Call it only when idle, because it
        waits for the device.

        Returns True if all of it was committed: the states of ended sequences are then parked, so they
        can be freed for a waiting request.
        """
        self._pulse.work()
        return self._cache_client.flush()

    def _collect_last_step(self) -> tuple[LiveSequence, ...]:
        """Collect the step that still runs on the device, without sending its tokens; returns the
        sequences that failed in it.
        """
        step = self._step_under_way
        self._step_under_way = None
        if step is None:
            return ()
        results = self._steps.collect_last(step)
        self._cache_client.end_step(step, results)
        return step.sequences if results is None else step.unhealthy(results)

    # -- sessions

    def _change_session(self, command: SessionCommand) -> None:
        """Carry out a command on sessions, once the results of all ended requests are cached, so that
        these belong to their sessions.
        """
        sessions = self._sessions
        if reason := self._model.fingerprints.refusal(command):
            self._refuse_session_command(command, SessionFailure.NOT_FOUND, reason)
            return
        if sessions is None:
            message = "this model has no prefix cache, so there are no sessions"
            self._refuse_session_command(command, SessionFailure.OFF, message)
            return
        if command.operation == "close":
            self._collect_idle_work()
            self._idle.forget_session(command.session_id, tenant=command.tenant)
        self._collect_for_closed_sequences()
        self._cache_client.flush()
        if command.operation == "close":
            self._detach_running(command, sessions)
        with log_failure(
            "a session command failed",
            otherwise=lambda error: self._refuse_session_command(
                command, SessionFailure.FAILED, str(error)
            ),
        ):
            answer = sessions.carry_out(command)
            if answer is not None:
                self._ledger.emit(answer)

    def _detach_running(self, command: SessionCommand, sessions: SessionService) -> None:
        """Detach the running requests of a session that is about to be closed.

        Their results so far are closed or forgotten with the session, even if they are its
        first requests. If it is forgotten, their later results are not cached.
        """
        for sequence in self._ledger.live():
            request = sequence.request
            if (request.session_id, request.tenant) == (command.session_id, command.tenant):
                sessions.add_running_request(
                    request.session_id,
                    root=self._cache_client.root_of(sequence),
                    chain=sequence.chain,
                )
                sequence.request = request.without_session(forget=command.forget)
                if command.forget and (sequence.is_open or sequence.scheduled.is_paused):
                    self._cache_client.withdraw(sequence)
                elif command.forget:
                    # it has not started: no request may wait for its prefill, as none is cached
                    self._cache_client.look_up(sequence)

    def _refuse_session_command(
        self, command: SessionCommand, failure: SessionFailure, message: str
    ) -> None:
        answer = SessionAnswer(call_id=command.call_id, failure=failure, message=message)
        self._ledger.emit(answer)

    def _show_cache(self, question: CacheMapQuestion) -> None:
        """Answer with a summary of what is cached; it is empty if there is no cache."""
        shown = CacheMap(call_id=question.call_id)
        if self._prefix_cache is not None:
            shown = msgspec.structs.replace(shown, is_complete=False)  # sent if `map` fails
            with log_failure("the prefix cache cannot be shown"):
                users = list if self._sessions is None else self._sessions.users
                shown = self._prefix_cache.map(question, users=users)
        self._ledger.emit(shown)

    def _maintain_sessions(self) -> None:
        """Continue exports and imports of sessions, close expired ones, and send answers."""
        if self._sessions is not None:
            with log_failure("the upkeep of sessions failed"):
                for answer in self._sessions.maintain():
                    self._ledger.emit(answer)

    def _record_session_use(self, sequence: LiveSequence) -> None:
        """Record in its session that a request has ended, once all its state is cached."""
        if self._sessions is None:
            return
        request = sequence.request
        if request.session_id:
            self._sessions.request_ended(
                request.session_id,
                root=self._cache_client.root_of(sequence),
                chain=sequence.chain,
                is_alternative=request.is_alternative,
            )

    def _close_sessions(self, *, writes_records: bool) -> None:
        if self._sessions is not None:
            self._sessions.close(writes_records=writes_records)


def _expected_seconds_of_both(
    decision: Decision, previous_step: DispatchedStep | None
) -> float | None:
    """Upper bound for the duration of a step and of the step before it, if that is still under way;
    None if unknown.
    """
    if previous_step is None or decision.expected_seconds is None:
        return decision.expected_seconds
    if previous_step.expected_seconds is None:
        return None
    return previous_step.expected_seconds + decision.expected_seconds
