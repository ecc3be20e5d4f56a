"""The worker's loop: commands in, plans to the engine, events out, on the one thread that owns the
device.

Pipelined by one step where that pays (on a GPU): step k+1 is dispatched before the results of step
k are waited for, so that Python works while the device computes. Results of sequences that ended or
were cancelled meanwhile are dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from holdfast.errors import InvalidRequest, QueueFull, SessionFailure, WorkerUnavailable
from holdfast.wire.commands import (
    SHUT_DOWN,
    Command,
    LogChange,
    MemoryChange,
    ReadAheadRun,
    SchedulerLimits,
    SequenceControl,
    SequenceRequest,
    ThoughtLimit,
    WorkerControl,
)
from holdfast.wire.events import FinishReason, WorkerStatistics
from holdfast.wire.requests import RequestId
from holdfast.wire.sessions import SessionAnswer, SessionCommand
from holdfast.worker.engine.plan import Span, SpanResult, StepPlan
from holdfast.worker.loop.cache_client import CacheClient
from holdfast.worker.loop.counters import Counters
from holdfast.worker.loop.device_steps import DeviceSteps, costing_no_answer
from holdfast.worker.loop.idle_work import IdleWork
from holdfast.worker.loop.inbox import Inbox, Pulse
from holdfast.worker.loop.lifetimes import Lifetimes
from holdfast.worker.loop.parts import (
    Cache,
    MemoryBudget,
    NoSessions,
    Step,
    StepEngine,
    WorkerSessions,
)
from holdfast.worker.loop.sequences import Flight, Ledger, LiveSequence, expected_together
from holdfast.worker.prefix.no_cache import NoCache
from holdfast.worker.scheduler.scheduler import Decision, Scheduler, StepOutcome

# between looks at what the disk has brought, when there is nothing else to do
FETCHING_SECONDS = 0.001
IDLE_SECONDS = 5.0  # longest wait without work; a command ends it at once
STATISTICS_SECONDS = 0.25  # how often a working worker emits its figures unasked

logger = logging.getLogger("holdfast.worker")

SHUTTING_DOWN = WorkerUnavailable("the server is shutting down")


class WorkerLoop:
    """Serves the inbox until `SHUT_DOWN`.

    Each accepted request gets exactly one Finished, unless the device breaks.
    """

    def __init__(
        self,
        *,
        engine: StepEngine[Step],
        scheduler: Scheduler,
        inbox: Inbox,
        retry_chunk_tokens: int = 2048,
        cache: Cache | None = None,
        sessions: WorkerSessions | None = None,
        on_rest: Callable[[], None] = lambda: None,
        on_wake: Callable[[], None] = lambda: None,
        memory: MemoryBudget | None = None,
        pulse: Pulse | None = None,
        counters: Counters | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`on_rest` is called once whenever there has been nothing to do for a while, `on_wake`
        before the first request after that. `pulse`: where to show what is done.

        counters: new ones, of which the engine may have a part to count in.
        """
        self._pulse = pulse or Pulse()
        self._scheduler, self._inbox, self._clock = scheduler, inbox, clock
        self._on_rest, self._on_wake = on_rest, on_wake
        self._memory = memory
        self._sessions = sessions or NoSessions()
        self._engine = engine
        self._steps = DeviceSteps(
            engine, retry_chunk_tokens=retry_chunk_tokens, limit_chunks=scheduler.limit_chunks
        )
        self._ledger = ledger = Ledger(clock=clock, counters=counters)
        self._cache = CacheClient(
            cache or NoCache(),
            engine=engine,
            scheduler=scheduler,
            counters=ledger.counters,
            on_end=self._record_use,
            clock=clock,
        )
        self._lifetimes = Lifetimes(
            engine=engine, scheduler=scheduler, ledger=ledger, cache=self._cache, clock=clock
        )
        self._idle = IdleWork(
            ledger=ledger,
            scheduler=scheduler,
            cache=self._cache,
            lifetimes=self._lifetimes,
        )
        self._flight: Flight | None = None
        self._collected_at = 0.0
        self._emitted_at = -IDLE_SECONDS
        self._emitted_busy = False
        self._is_closing = False
        self._has_rested = False

    def run(self) -> None:
        """Work until `SHUT_DOWN`. Raises DeviceBroken when nothing can be computed any more.

        Nothing more is said about the requests of then: who has the link may let another worker go
        on with them.
        """
        is_busy = is_resting = False
        try:
            self._emit_statistics(is_busy=False)
            self._send()
            while not self._is_closing:
                commands = self._receive(timeout_seconds=self._patience(is_busy=is_busy))
                if not commands and not is_busy and not is_resting:
                    self._on_rest()
                    self._has_rested = True
                if self._has_rested and any(
                    isinstance(command, SequenceRequest) for command in commands
                ):
                    self._on_wake()
                    self._has_rested = False
                is_resting = not commands and not is_busy
                self._obey(commands)
                if self._memory is not None:
                    self._memory.tend(now=self._clock())
                self._send()  # the front goes on while the step is laid out
                is_busy = self._advance()
                # else its results are there already, and go first
                if self._flight is None or self._engine.runs_ahead:
                    self._emit_statistics(is_busy=is_busy)
                self._send()
                is_busy = is_busy or self._flush_if_idle()
        except Exception:
            self._send()
            self._sessions.abandon()
            self._cache.close()
            raise
        self._pulse.rest()  # how long the end may take is bounded by who has asked for it
        self._lifetimes.cancel_all(unhealthy=self._end_flight())
        self._send()
        self._cache.flush()
        self._sessions.close()
        self._cache.offer_rest()
        self._cache.close()

    def statistics(self, *, in_answer: bool = False) -> WorkerStatistics:
        """Counters since the start and gauges of now."""
        return self._ledger.counters.statistics(
            self._scheduler.statistics(), self._cache.figures(), in_answer=in_answer
        )

    def check_invariants(self) -> None:
        """Raise AssertionError when the books disagree with themselves or with the scheduler's."""
        self._ledger.check_invariants()
        self._scheduler.check_invariants()
        self._idle.check_invariants()

    def _receive(self, *, timeout_seconds: float) -> list[Command]:
        self._pulse.rest()
        commands = self._inbox.receive(timeout_seconds=timeout_seconds)
        self._pulse.work()
        return commands

    def _send(self) -> None:
        self._inbox.send(self._ledger.take_outbox())

    def _flush_if_idle(self) -> bool:
        """With nothing else to do, commit what sequences have computed.

        True: states are parked now, there may be room.
        """
        if not self._cache.has_uncommitted:
            return False
        self._pulse.work()
        self._cache.flush()
        return not self._cache.has_uncommitted

    def _patience(self, *, is_busy: bool) -> float:
        """How long to wait for commands."""
        if is_busy:
            return 0.0
        return (
            FETCHING_SECONDS
            if self._cache.is_waited_for or self._sessions.is_busy
            else IDLE_SECONDS
        )

    def _emit_statistics(self, *, is_busy: bool) -> None:
        """The front shows its figures without asking for them each time: often while requests run,
        now and then at rest.
        """
        now = self._clock()
        if is_busy != self._emitted_busy or now - self._emitted_at >= (
            STATISTICS_SECONDS if is_busy else IDLE_SECONDS
        ):
            self._emitted_busy, self._emitted_at = is_busy, now
            self._ledger.emit(self.statistics())

    def _obey(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, SequenceRequest):
                self._accept(command)
            elif isinstance(command, SequenceControl):
                {"cancel": self._cancel, "pause": self._pause, "resume": self._resume}[
                    command.action
                ](command.request_id)
            elif isinstance(command, ThoughtLimit):
                self._limit_thoughts(command)
            elif command == SHUT_DOWN:
                self._is_closing = True
            elif isinstance(command, SchedulerLimits):
                self._set_limits(command)
            elif isinstance(command, LogChange):
                logging.getLogger().setLevel(command.level.upper())
                logger.debug("this worker's level of the log is %s", command.level)
            elif isinstance(command, MemoryChange):
                if self._memory is not None:
                    self._memory.share(command.state_bytes)
            elif isinstance(command, ReadAheadRun):
                self._cache.read_ahead.note(command)
            elif isinstance(command, WorkerControl):
                self._ledger.emit(self.statistics(in_answer=True))
            else:
                self._carry_out(command)

    def _set_limits(self, limits: SchedulerLimits) -> None:
        try:
            self._scheduler.set_limits(
                max_running=limits.max_running, step_tokens=limits.step_tokens
            )
        except InvalidRequest as error:  # the front has checked it: both have the same settings
            logger.error("the limits stay as they are: %s", error)

    def _accept(self, request: SequenceRequest) -> None:
        if self._is_closing:
            self._ledger.reject(request, SHUTTING_DOWN)
            return
        if request.is_idle_work:
            self._idle.accept(request)
            return
        if self._is_idle_work_under_way:
            self._complete_flight()
        self._idle.give_way(request)
        self._complete_what_is_to_be_committed()
        try:
            self._scheduler.submit(
                request.request_id,
                prompt_tokens=len(request.prompt_token_ids),
                max_tokens=request.max_tokens,
                drawn_tokens=len(request.generated_token_ids),
                boundaries=self._cache.boundaries(request),
                scores_prompt=request.want_prompt_logprobs,
                service=request.service,
                is_ready=False,  # until it is looked up
            )
        except (QueueFull, InvalidRequest) as refusal:
            self._ledger.reject(request, refusal)
        else:
            self._cache.look_up(self._ledger.accept(request))

    def _cancel(self, request_id: RequestId) -> None:
        sequence = self._at_rest(request_id)
        if sequence is not None:
            self._lifetimes.drop(sequence, FinishReason.CANCELLED)

    def _at_rest(self, request_id: RequestId) -> LiveSequence | None:
        """A live sequence of which no span is under way any more; None when it has ended by now."""
        sequence = self._ledger.find(request_id)
        if sequence is not None and self._flight is not None and sequence in self._flight.sequences:
            self._complete_flight()
            sequence = self._ledger.find(request_id)
        return sequence

    def _limit_thoughts(self, command: ThoughtLimit) -> None:
        sequence = self._at_rest(command.request_id)
        if sequence is None or sequence.request.is_idle_work:
            return
        sequence.request = msgspec.structs.replace(sequence.request, thinking_budget=command.budget)
        if sequence.is_open:
            self._engine.limit_thoughts(
                command.request_id, command.budget, generated=sequence.generated
            )

    def _pause(self, request_id: RequestId) -> None:
        sequence = self._ledger.find(request_id)
        if (
            sequence is None
            or self._scheduler.is_paused(request_id)
            or sequence.request.is_idle_work
        ):
            return
        self._scheduler.pause(request_id)
        self._cache.withdraw(sequence)  # nobody is to wait for one that stands still
        if not sequence.is_open:
            # what it would begin from is not held for it meanwhile
            self._cache.restart_cold(sequence)

    def _resume(self, request_id: RequestId) -> None:
        if not self._scheduler.is_paused(request_id):
            return
        self._scheduler.resume(request_id)
        sequence = self._ledger[request_id]
        if not sequence.is_open:
            self._complete_what_is_to_be_committed()
            self._cache.look_up(sequence)

    def _carry_out(self, command: SessionCommand) -> None:
        if command.operation == "close":
            if self._is_idle_work_under_way:
                self._complete_flight()
            self._idle.forget_session(command.session_id, tenant=command.tenant)
        self._complete_what_is_to_be_committed()
        self._cache.flush()

        def refuse(error: Exception) -> None:
            self._ledger.emit(
                SessionAnswer(
                    call_id=command.call_id, failure=SessionFailure.FAILED, message=str(error)
                )
            )

        with costing_no_answer("a session command failed", otherwise=refuse):
            answer = self._sessions.carry_out(command)
            if answer is not None:
                self._ledger.emit(answer)
        if command.forget:
            self._cache.repeat_without_forgotten(live=self._ledger.live())

    def _tend_sessions(self) -> None:
        with costing_no_answer("sessions could not be tended"):
            for answer in self._sessions.tend():
                self._ledger.emit(answer)

    def _record_use(self, sequence: LiveSequence) -> None:
        request = sequence.request
        if request.session_id:
            self._sessions.used(request.session_id, tenant=request.tenant, chain=sequence.chain)
        self._sessions.keep_prefixes(
            request.pins,
            tenant=request.tenant,
            chain=sequence.chain,
            began_from=sequence.began_from,
        )

    def _advance(self) -> bool:
        """Dispatch the next step, and collect the one before it: after that where it pays, else
        first. False when idle.
        """
        previous = self._flight
        # of which who comes waits for one step only
        if self._engine.runs_ahead and not self._is_idle_work_under_way:
            self._complete_what_is_to_be_committed()
        else:
            self._complete_flight()
            self._send()
            if previous is not None:
                self._emit_statistics(is_busy=True)
        self._cache.advance()
        self._tend_sessions()
        self._idle.begin()
        self._cache.make_room(live=self._ledger.live())
        decision = self._scheduler.next_step()
        if decision.preempted:
            # what was copied out of one is committed when it is known how the step came out
            self._complete_flight()
        behind, self._flight = self._flight, None
        self._pulse.work(expected_together(decision.expected_seconds, behind))
        self._flight = self._begin(decision)
        if self._flight is not None:
            self._steps.dispatch(self._flight)
        if behind is not None:
            self._complete(behind)
        if self._flight is not None and self._flight.is_suspect:
            self._complete_flight()
            return True
        if previous is None and self._flight is None:
            self._idle.give_up_if_stuck()
            return False
        return True

    @property
    def _is_idle_work_under_way(self) -> bool:
        return self._flight is not None and any(
            each.request.is_idle_work for each in self._flight.sequences
        )

    def _begin(self, decision: Decision) -> Flight | None:
        ledger = self._ledger
        for sequence in filter(None, map(ledger.find, decision.preempted)):
            self._lifetimes.preempt(sequence)
        for growth in decision.grown:
            self._lifetimes.grow(growth)
        self._lifetimes.admit(decision.admitted)
        if not decision.plan.spans:
            return None
        spans = tuple(
            span
            for span in decision.plan.spans
            if span.request_id in ledger and ledger[span.request_id].is_open
        )
        return Flight(
            decided=decision.plan,
            plan=StepPlan(spans=spans),
            sequences=tuple(ledger[span.request_id] for span in spans),
            lives=tuple(ledger[span.request_id].lives for span in spans),
            started_at=self._clock(),
            expected_seconds=decision.expected_seconds,
        )

    def _complete_flight(self) -> None:
        """Collect the step under way at once: what follows has to know how it came out."""
        if self._flight is not None:
            flight, self._flight = self._flight, None
            self._complete(flight)

    def _complete_what_is_to_be_committed(self) -> None:
        """What was copied out of a sequence is committed when the step that computes it has come
        out right.
        """
        if self._flight is not None and self._cache.is_computing_for(self._flight.sequences):
            self._complete_flight()

    def _complete(self, flight: Flight) -> None:
        self._pulse.work(flight.expected_seconds)
        results = self._steps.collect(flight, behind=self._flight)
        if results is None:
            self._cache.discard(flight.sequences)
            was_alone = len(flight.sequences) == 1
            results = tuple(
                self._retry_alone(span, sequence, was_alone=was_alone)
                for span, sequence in zip(flight.plan.spans, flight.sequences, strict=True)
            )
        elif flight.sequences:
            self._cache.commit_step(flight.take_kept, flight.healthy(results))
        started_at, self._collected_at = max(flight.started_at, self._collected_at), self._clock()
        self._observe(flight, results, seconds=self._collected_at - started_at)

    def _retry_alone(self, span: Span, sequence: LiveSequence, *, was_alone: bool) -> SpanResult:
        """Build a sequence anew and read it alone, up to the end of the span that failed: by its
        own fault or a neighbour's.
        """
        # a preempted one is read anew later anyway
        if not self._ledger.is_live(sequence) or not sequence.is_open:
            return SpanResult(request_id=span.request_id)
        self._pulse.work()
        if self._lifetimes.wait_for_room(sequence):
            return SpanResult(request_id=span.request_id)

        def reopen() -> None:
            self._pulse.work()  # each attempt may take as long as the first
            self._lifetimes.reopen_cold(sequence)

        return self._steps.retry_alone(span, reopen=reopen, was_alone=was_alone)

    def _observe(self, flight: Flight, results: tuple[SpanResult, ...], *, seconds: float) -> None:
        ledger = self._ledger
        ledger.counters.count_step(seconds)
        drawn: dict[RequestId, int] = {}
        ended: list[tuple[LiveSequence, FinishReason, str]] = []
        failed: list[tuple[LiveSequence, str]] = []
        for span, sequence, given in flight.wanted(results):
            ledger.count_prompt(sequence, start=span.start, tokens=span.tokens)
            if given.failure:
                failed.append((sequence, given.failure))
                if ledger.is_live(sequence) and not sequence.can_begin_anew:
                    ended.append((sequence, FinishReason.FAILED, given.failure))
                continue
            if not ledger.is_live(sequence):
                continue
            if given.refusal:
                ended.append((sequence, FinishReason.REFUSED, given.refusal))
                continue
            ledger.score(sequence, given.prompt_logprobs)
            sequence.embedding = given.embedding
            if given.token_ids:
                end = sequence.ending(given.token_ids)
                ledger.generate(
                    sequence,
                    given.token_ids[: end.counted_tokens],
                    given.logprobs[: end.counted_tokens],
                )
                drawn[span.request_id] = end.counted_tokens
                if sequence.is_cold and sequence.began_from:
                    self._cache.blame(sequence, live=ledger.live())
                if end.reason is FinishReason.STOP:
                    ended.append((sequence, FinishReason.STOP, ""))
        # first: who is read again has not ended, though it may have nothing to draw
        for sequence, failure in failed:
            self._lifetimes.give_up_state(sequence, failure)
        ids = tuple(sequence.request.request_id for sequence, _, _ in ended)
        by_length = self._scheduler.observe(
            StepOutcome(plan=flight.decided, drawn=drawn, ended=ids, seconds=seconds)
        )
        for sequence, reason, error in ended:
            self._lifetimes.finish(sequence, reason, error=error)
        for request_id in by_length:
            self._lifetimes.finish(ledger[request_id], FinishReason.LENGTH)

    def _end_flight(self) -> tuple[LiveSequence, ...]:
        """Collect the step under way; returns for whom it did not come out right."""
        flight, self._flight = self._flight, None
        if flight is None:
            return ()
        result = self._steps.collect_last(flight)
        unhealthy = flight.sequences if result is None else flight.unhealthy(result)
        if result is not None:
            self._cache.commit_step(flight.take_kept, flight.healthy(result))
        self._cache.discard(unhealthy)
        return unhealthy
