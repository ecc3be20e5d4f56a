"""The worker's loop: commands in, plans to the engine, events out, on the one thread that owns the device.

Pipelined by one step where that pays (on a GPU): step k+1 is dispatched before the results of step k are waited for, so that
Python works while the device computes. Results of sequences that ended or were cancelled meanwhile are dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.engine.plan import Span, SpanResult, StepPlan, StepResult
from holdfast.errors import InvalidRequest, QueueFull, WorkerUnavailable
from holdfast.messages.commands import (
    Command,
    SequenceControl,
    SequenceRequest,
    Shutdown,
    StatisticsRequest,
)
from holdfast.messages.events import FinishReason
from holdfast.messages.figures import WorkerStatistics
from holdfast.messages.requests import RequestId
from holdfast.messages.sessions import SessionAnswer, SessionCommand, SessionFailure
from holdfast.scheduler.decision import Decision, Drawn, StepOutcome
from holdfast.scheduler.scheduler import Scheduler
from holdfast.worker.cache_steps import CacheSteps
from holdfast.worker.flight import Flight, expected_together
from holdfast.worker.inbox import Inbox
from holdfast.worker.ledger import Ledger
from holdfast.worker.parts import Engine, Memory, Sessions
from holdfast.worker.pulse import Pulse
from holdfast.worker.retry import read_alone
from holdfast.worker.sequences import LiveSequence

FETCHING_SECONDS = 0.001  # between looks at what the disk has brought, when there is nothing else to do
IDLE_SECONDS = 5.0  # longest wait without work; a command ends it at once
STATISTICS_SECONDS = 0.25  # how often a working worker tells its figures unasked
FAILURES_OF_A_BROKEN_DEVICE = 3  # sequences in a row, each run alone, without one success between them

SHUTTING_DOWN = WorkerUnavailable("the server is shutting down")

logger = logging.getLogger("holdfast.worker")


@contextmanager
def _costing_no_answer(message: str, *names: str, otherwise: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Log whatever is raised, and do `otherwise`: what is not remembered is read again, and nobody's answer depends on it."""
    try:
        yield
    except Exception:
        logger.exception(message, *names)
        otherwise()


class DeviceBroken(Exception):
    """Nothing runs on the device any more; only a new process can help."""


class WorkerLoop:
    """Serves the inbox until Shutdown. Each accepted request gets exactly one Finished."""

    def __init__(
        self,
        *,
        engine: Engine,
        scheduler: Scheduler,
        inbox: Inbox,
        retry_chunk_tokens: int = 2048,
        memory: Memory | None = None,
        sessions: Sessions | None = None,
        on_rest: Callable[[], None] = lambda: None,
        pulse: Pulse | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`on_rest` is called once whenever there has been nothing to do for a while. `pulse`: where to show what is done."""
        self._pulse = pulse or Pulse()
        self._engine, self._scheduler, self._inbox, self._clock = engine, scheduler, inbox, clock
        self._retry_chunk_tokens, self._on_rest = retry_chunk_tokens, on_rest
        self._ledger = Ledger(clock=clock)
        self._remembering = CacheSteps(memory, engine=engine, scheduler=scheduler, sessions=sessions, clock=clock)
        self._flight: Flight | None = None
        self._collected_at = 0.0
        self._told_at = -IDLE_SECONDS
        self._told_busy = False
        self._failures_in_a_row = 0
        self._is_closing = False

    def run(self) -> None:
        """Work until Shutdown. Raises DeviceBroken when nothing can be computed any more; all requests are finished then too."""
        is_busy = is_resting = False
        try:
            self._tell_statistics(is_busy=False)
            self._inbox.send(self._ledger.take_outbox())
            while not self._is_closing:
                commands = self._receive(timeout_seconds=self._patience(is_busy=is_busy))
                if not commands and not is_busy and not is_resting:
                    self._on_rest()
                is_resting = not commands and not is_busy
                self._obey(commands)
                self._inbox.send(self._ledger.take_outbox())  # the front goes on while the step is laid out
                is_busy = self._advance()
                self._tell_statistics(is_busy=is_busy)
                self._inbox.send(self._ledger.take_outbox())
        except Exception as error:
            self._finish_all(FinishReason.FAILED, error=f"the worker has to be restarted: {error}")
            self._remembering.abandon()
            raise
        self._pulse.rest()  # how long the end may take is bounded by who has asked for it
        self._finish_all(FinishReason.CANCELLED, unhealthy=self._end_flight())
        self._remembering.close()

    def _receive(self, *, timeout_seconds: float) -> list[Command]:
        self._pulse.rest()
        commands = self._inbox.receive(timeout_seconds=timeout_seconds)
        self._pulse.work()
        return commands

    def _patience(self, *, is_busy: bool) -> float:
        """How long to wait for commands."""
        if is_busy:
            return 0.0
        if self._remembering.has_work:
            self._pulse.work()
            self._put_away_all()
        return FETCHING_SECONDS if self._remembering.is_fetching else IDLE_SECONDS

    def _look_up(self, sequence: LiveSequence) -> None:
        with _costing_no_answer(
            "request %s is read from its beginning",
            sequence.request.request_id,
            otherwise=lambda: self._remembering.begin_afresh(sequence),
        ):
            self._remembering.look_up(sequence)

    def _settle_recalls(self) -> None:
        with _costing_no_answer("what was to be restored is read again", otherwise=self._remembering.stop_fetching):
            self._remembering.settle()

    def _put_away_all(self) -> None:
        with _costing_no_answer("what a request has left behind could not be kept"):
            self._remembering.put_away_all()

    def _end_flight(self) -> tuple[LiveSequence, ...]:
        """Let the step under way end before its arrays are dropped; returns for whom it did not come out right."""
        flight, self._flight = self._flight, None
        if flight is None or flight.pending is None:
            return ()
        try:
            result = self._engine.collect(flight.pending)
        except Exception:  # nobody waits for it
            logger.exception("the last step failed")
            unhealthy = flight.sequences
        else:
            unhealthy = tuple(sequence for _, sequence, given in flight.wanted(result) if given.failure)
            self._take_kept(flight, result)
        self._remembering.discard_left(unhealthy)
        return unhealthy

    def _complete_flight(self) -> None:
        """Collect the step under way at once: what follows has to know how it came out."""
        if self._flight is not None:
            flight, self._flight = self._flight, None
            self._complete(flight)

    def _complete_what_is_left(self) -> None:
        """What a sequence has left behind is handed over when the step that computes it has come out right."""
        if self._flight is not None and self._remembering.has_left(self._flight.sequences):
            self._complete_flight()

    def statistics(self, *, in_answer: bool = False) -> WorkerStatistics:
        """Counters since the start and gauges of now."""
        load, memory = self._scheduler.statistics(), self._remembering.figures()
        return self._ledger.counters.statistics(load, memory, in_answer=in_answer)

    def check_invariants(self) -> None:
        """Raise AssertionError when the books disagree with themselves or with the scheduler's."""
        self._ledger.check_invariants()
        self._scheduler.check_invariants()

    def _obey(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, SequenceRequest):
                self._accept(command)
            elif isinstance(command, SequenceControl):
                {"cancel": self._cancel, "pause": self._pause, "resume": self._resume}[command.action](command.request_id)
            elif isinstance(command, Shutdown):
                self._is_closing = True
            elif isinstance(command, StatisticsRequest):
                self._ledger.tell(self.statistics(in_answer=True))
            else:
                self._carry_out(command)

    def _pause(self, request_id: RequestId) -> None:
        sequence = self._ledger.find(request_id)
        if sequence is None or self._scheduler.is_paused(request_id):
            return
        self._scheduler.pause(request_id)
        self._stop_reading(sequence)  # nobody is to wait for one that stands still
        if not sequence.is_open:
            self._remembering.begin_afresh(sequence)  # what it would begin from is not held for it meanwhile

    def _resume(self, request_id: RequestId) -> None:
        if not self._scheduler.is_paused(request_id):
            return
        self._scheduler.resume(request_id)
        sequence = self._ledger[request_id]
        if not sequence.is_open:
            self._look_up(sequence)

    def _cancel(self, request_id: RequestId) -> None:
        sequence = self._ledger.find(request_id)
        if sequence is not None and self._flight is not None and sequence in self._flight.sequences:
            self._complete_flight()
            sequence = self._ledger.find(request_id)
        if sequence is not None:
            self._drop(sequence, FinishReason.CANCELLED)

    def _carry_out(self, command: SessionCommand) -> None:
        self._complete_what_is_left()
        try:
            answer = self._remembering.carry_out(command)
        except Exception as error:  # as in _costing_no_answer
            logger.exception("a session command failed")
            answer = SessionAnswer(call_id=command.call_id, failure=SessionFailure.FAILED, message=str(error))
        if answer is not None:
            self._ledger.tell(answer)

    def _tend_sessions(self) -> None:
        with _costing_no_answer("sessions could not be tended"):
            for answer in self._remembering.tend_sessions():
                self._ledger.tell(answer)

    def _accept(self, request: SequenceRequest) -> None:
        ledger = self._ledger
        if self._is_closing:
            ledger.reject(request, SHUTTING_DOWN)
            return
        self._complete_what_is_left()
        try:
            self._submit(request)
        except (QueueFull, InvalidRequest) as refusal:
            ledger.reject(request, refusal)
        else:
            self._look_up(ledger.accept(request))

    def _submit(self, request: SequenceRequest) -> None:
        self._scheduler.submit(
            request.request_id,
            prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.max_tokens,
            boundaries=self._remembering.boundaries(request),
            scores_prompt=request.want_prompt_logprobs,
        )

    def _advance(self) -> bool:
        """Dispatch the next step, and collect the one before it: after that where it pays, else first. False when idle."""
        self._complete_what_is_left()
        self._settle_recalls()
        self._tend_sessions()
        previous = self._flight
        if not self._engine.runs_ahead:
            self._complete_flight()
            self._inbox.send(self._ledger.take_outbox())
        decision = self._scheduler.next_step()
        if decision.preempted:
            self._complete_flight()  # what it leaves behind is handed over when it is known how the step came out
        behind, self._flight = self._flight, None
        self._pulse.work(expected_together(decision.expected_seconds, behind))
        self._flight = self._begin(decision)
        if behind is not None:
            self._complete(behind)
        if self._flight is not None and self._flight.is_suspect:
            suspect, self._flight = self._flight, None
            self._complete(suspect)
            return True
        return previous is not None or self._flight is not None

    def _begin(self, decision: Decision) -> Flight | None:
        ledger = self._ledger
        for sequence in filter(None, map(ledger.find, decision.preempted)):
            self._close(sequence, for_good=False)
            if not self._scheduler.is_paused(sequence.request.request_id):  # it looks when it goes on
                self._look_up(sequence)
        for growth in decision.grown:
            grown = ledger.find(growth.request_id)
            if grown is not None and grown.is_open:
                self._grow(grown, growth.capacity_tokens)
        self._admit_all(decision)
        if not decision.plan.spans:
            return None
        spans = tuple(span for span in decision.plan.spans if span.request_id in ledger and ledger[span.request_id].is_open)
        flight = Flight(
            decided=decision.plan,
            plan=StepPlan(spans=spans),
            sequences=tuple(ledger[span.request_id] for span in spans),
            lives=tuple(ledger[span.request_id].lives for span in spans),
            started_at=self._clock(),
            expected_seconds=decision.expected_seconds,
        )
        if spans:
            try:
                flight.pending = self._engine.dispatch(flight.plan)
            except Exception:  # whatever a model or the device raises must not end the other requests
                logger.exception("a step of %d spans could not be dispatched; each is tried alone", len(spans))
                flight.is_suspect = True
        return flight

    def _complete(self, flight: Flight) -> None:
        self._pulse.work(flight.expected_seconds)
        result = StepResult(spans=()) if not flight.sequences else None
        if result is None and not flight.is_suspect:
            try:
                result = self._engine.collect(flight.pending)
                self._failures_in_a_row = 0
            except Exception:  # see _begin
                logger.exception("a step of %d spans failed; each is tried alone", len(flight.sequences))
                if self._flight is not None:
                    self._flight.is_suspect = True
        if result is None:
            self._engine.abandon_pending()
            self._remembering.discard_left(flight.sequences)
            result = StepResult(spans=tuple(map(self._retry_alone, flight.plan.spans, flight.sequences)))
        else:
            self._take_kept(flight, result)
        started_at, self._collected_at = max(flight.started_at, self._collected_at), self._clock()
        self._take(flight, result, seconds=self._collected_at - started_at)

    def _take(self, flight: Flight, result: StepResult, *, seconds: float) -> None:
        ledger = self._ledger
        ledger.counters.count_step(seconds)
        drawn: list[Drawn] = []
        ended: list[tuple[LiveSequence, FinishReason, str]] = []
        failed: list[tuple[LiveSequence, str]] = []
        for span, sequence, given in flight.wanted(result):
            ledger.count_prompt(sequence, start=span.start, tokens=span.tokens)
            if given.failure:
                failed.append((sequence, given.failure))
                if ledger.is_live(sequence) and not sequence.can_begin_anew:
                    ended.append((sequence, FinishReason.FAILED, given.failure))
                continue
            if not ledger.is_live(sequence):
                continue
            ledger.score(sequence, given.prompt_logprobs)
            if given.token_ids:
                end = sequence.ending(given.token_ids)
                ledger.generate(sequence, given.token_ids[: end.counted_tokens], given.logprobs[: end.counted_tokens])
                drawn.append(Drawn(request_id=span.request_id, tokens=end.counted_tokens))
                if sequence.reads_afresh and sequence.began_from:
                    self._blame(sequence)
                if end.reason is FinishReason.STOP:
                    ended.append((sequence, FinishReason.STOP, ""))
        ids = tuple(sequence.request.request_id for sequence, _, _ in ended)
        by_length = self._scheduler.observe(StepOutcome(plan=flight.decided, drawn=tuple(drawn), ended=ids, seconds=seconds))
        for sequence, failure in failed:
            self._give_up_state(sequence, failure)
        for sequence, reason, error in ended:
            self._finish(sequence, reason, error=error)
        for request_id in by_length:
            self._finish(ledger[request_id], FinishReason.LENGTH)

    def _take_kept(self, flight: Flight, result: StepResult) -> None:
        if not flight.sequences:
            return
        healthy = tuple(sequence for _, sequence, given in flight.wanted(result) if not given.failure)
        with _costing_no_answer("what a step has read could not be kept"):
            self._remembering.take(flight.pending, healthy)

    def _retry_alone(self, span: Span, sequence: LiveSequence) -> SpanResult:
        """Build a sequence anew and read it alone, up to the end of the span that failed: by its own fault or a neighbour's."""
        if not self._ledger.is_live(sequence) or not sequence.is_open:  # a preempted one is read anew later anyway
            return SpanResult(request_id=span.request_id)
        self._pulse.work()
        try:
            self._close(sequence, is_healthy=False)
            sequence.prompt_logprobs.clear()
            self._open_afresh(sequence)
            result = read_alone(self._engine, span, chunk_tokens=self._retry_chunk_tokens)
        except Exception as error:  # see _begin
            logger.exception("request %s fails alone too", span.request_id)
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= FAILURES_OF_A_BROKEN_DEVICE:
                raise DeviceBroken(f"{self._failures_in_a_row} requests in a row failed on the device: {error}") from error
            return SpanResult(request_id=span.request_id, failure=f"the model failed on this request: {error}")
        self._failures_in_a_row = 0
        return result

    def _admit_all(self, decision: Decision) -> None:
        unopened: list[tuple[LiveSequence, Exception]] = []
        for admission in decision.admitted:
            sequence = self._ledger[admission.request_id]
            sequence.admit(now=self._clock(), capacity_tokens=admission.capacity_tokens)
            try:
                self._open(sequence)
            except Exception as error:  # see _begin
                unopened.append((sequence, error))
        for sequence, failure in unopened:  # when the others have begun: nobody is between waiting and running
            if sequence.can_begin_anew:
                self._give_up_state(sequence, f"it cannot begin from what is remembered: {failure}")
                continue
            logger.error("request %s could not be opened", sequence.request.request_id, exc_info=failure)
            self._drop(sequence, FinishReason.FAILED, error=f"the request could not be started: {failure}")

    def _give_up_state(self, sequence: LiveSequence, reason: str) -> None:
        """Keep nothing of what a sequence has computed. If what it began from may be to blame, have it read again without."""
        request_id = sequence.request.request_id
        is_live = self._ledger.is_live(sequence)
        begins_anew = is_live and sequence.can_begin_anew
        if is_live:
            logger.warning(
                "request %s %s: %s", request_id, "is read again from its beginning" if begins_anew else "fails", reason
            )
        with _costing_no_answer("what request %s has handed over could not be forgotten", request_id):
            self._remembering.distrust(sequence, live=self._ledger.live())
        sequence.give_up_state()
        if begins_anew:
            self._close(sequence, is_healthy=False)
            self._remembering.begin_again(sequence)
            sequence.reads_afresh = True
            self._scheduler.restart(request_id)

    def _blame(self, sequence: LiveSequence) -> None:
        with _costing_no_answer("what request %s began from could not be forgotten", sequence.request.request_id):
            self._remembering.blame(sequence, live=self._ledger.live())

    def _leave(self, sequence: LiveSequence, *, for_good: bool) -> None:
        with _costing_no_answer("what request %s has read could not be kept", sequence.request.request_id):
            self._remembering.leave(sequence, for_good=for_good)

    def _stop_reading(self, sequence: LiveSequence) -> None:
        with _costing_no_answer(
            "requests that waited for %s begin afresh", sequence.request.request_id, otherwise=self._remembering.stop_fetching
        ):
            self._remembering.stop_reading(sequence)

    def _grow(self, sequence: LiveSequence, capacity_tokens: int) -> None:
        sequence.capacity_tokens = capacity_tokens
        try:
            self._engine.grow(sequence.request.request_id, capacity_tokens)
        except Exception as error:  # see _begin
            logger.exception("request %s could not be given more room", sequence.request.request_id)
            self._drop(sequence, FinishReason.FAILED, error=f"no more room for the request: {error}")

    def _open(self, sequence: LiveSequence) -> None:
        prefix, keep = self._remembering.opening(sequence)
        self._engine.open(
            sequence.request,
            generated=tuple(sequence.generated),
            capacity_tokens=sequence.capacity_tokens,
            prefix=prefix,
            keep=keep,
        )
        sequence.is_open = True

    def _open_afresh(self, sequence: LiveSequence) -> None:
        """From its first token, whatever is remembered: after a failure."""
        self._remembering.begin_again(sequence)
        sequence.began_from = ()
        generated = tuple(sequence.generated)
        self._engine.open(sequence.request, generated=generated, capacity_tokens=sequence.capacity_tokens)
        sequence.is_open = True

    def _close(self, sequence: LiveSequence, *, is_healthy: bool = True, for_good: bool = True) -> None:
        self._remembering.drop_recall(sequence)
        if sequence.is_open:
            sequence.is_open = False
            if is_healthy:
                self._leave(sequence, for_good=for_good)
            self._engine.close(sequence.request.request_id)
        self._stop_reading(sequence)

    def _drop(self, sequence: LiveSequence, reason: FinishReason, *, error: str = "") -> None:
        self._scheduler.cancel(sequence.request.request_id)
        self._finish(sequence, reason, error=error)

    def _finish(self, sequence: LiveSequence, reason: FinishReason, *, error: str = "") -> None:
        self._ledger.finish(sequence, reason, error=error)
        self._close(sequence, is_healthy=reason is not FinishReason.FAILED)

    def _finish_all(self, reason: FinishReason, *, error: str = "", unhealthy: tuple[LiveSequence, ...] = ()) -> None:
        for sequence in self._ledger.live():
            self._ledger.finish(sequence, reason, error=error)
            if reason is FinishReason.CANCELLED:
                self._close(sequence, is_healthy=sequence not in unhealthy)
        self._inbox.send(self._ledger.take_outbox())

    def _tell_statistics(self, *, is_busy: bool) -> None:
        """The front shows its figures without asking for them each time: often while requests run, now and then at rest."""
        now = self._clock()
        if is_busy != self._told_busy or now - self._told_at >= (STATISTICS_SECONDS if is_busy else IDLE_SECONDS):
            self._told_busy, self._told_at = is_busy, now
            self._ledger.tell(self.statistics())
