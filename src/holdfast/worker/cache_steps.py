"""What the loop does about memory: look up at arrival, open from what is there, hand over what sequences leave behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.engine.plan import KeepPolicy
from holdfast.messages.commands import SequenceRequest
from holdfast.messages.events import CacheOutcome, CacheReport
from holdfast.messages.figures import CacheFigures
from holdfast.messages.requests import RequestId
from holdfast.messages.sessions import SessionAnswer, SessionCommand, SessionFailure
from holdfast.prefix.in_flight import InFlightPrefills
from holdfast.scheduler.scheduler import Scheduler
from holdfast.store.block import BlockKey
from holdfast.worker.counters import CacheCounters
from holdfast.worker.parts import Engine, Memory, Sessions
from holdfast.worker.sequences import LiveSequence

LEAST_SHARED_TOKENS = 64  # fewer are read faster than waited for


@dataclass(frozen=True, slots=True)
class _Left:
    """What a sequence has left behind."""

    sequence: LiveSequence
    kept: Any
    for_good: bool


class CacheSteps:
    """The loop's side of a memory. Without one, every method does nothing."""

    def __init__(
        self,
        memory: Memory | None,
        *,
        engine: Engine,
        scheduler: Scheduler,
        sessions: Sessions | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._memory, self._engine, self._scheduler, self._clock = memory, engine, scheduler, clock
        self._sessions = sessions
        self._counters = CacheCounters()
        self._readings = InFlightPrefills()
        self._behind: dict[RequestId, LiveSequence] = {}  # wait until another one has read what they share
        self._fetching: list[LiveSequence] = []
        self._freed: list[LiveSequence] = []  # no longer wait for another one, and have to look again
        self._left: list[_Left] = []  # what was copied out and is being computed
        self._ready: list[_Left] = []

    @property
    def is_fetching(self) -> bool:
        """Whether a request waits for the disk, or a session is on its way out or in: the loop must not sleep then."""
        return bool(self._fetching) or (self._sessions is not None and self._sessions.is_busy)

    @property
    def has_work(self) -> bool:
        """Whether something that was left behind is not put away yet."""
        return bool(self._left or self._ready)

    def boundaries(self, request: SequenceRequest) -> tuple[int, ...]:
        """Where spans of the request's prompt have to end."""
        return (
            self._memory.boundaries(len(request.prompt_token_ids), request.branch_points)
            if self._memory and _takes_part(request)
            else ()
        )

    def look_up(self, sequence: LiveSequence) -> None:
        """Find what a waiting sequence can begin from, and tell the scheduler.

        It waits when that is on its way from disk, or when another sequence is reading what both begin with.
        """
        if self._memory is None or not _takes_part(sequence.request) or sequence.reads_afresh:
            return
        if self.has_work:
            self.put_away_all()  # the next turn often comes right after the answer that it goes on from
        began_at = self._clock()
        _stop_waiting(sequence, now=began_at)
        sequence.recall = self._memory.recall(sequence.chain, tenant=sequence.request.tenant)
        sequence.lookup_seconds += self._clock() - began_at
        if self._waits_for_another(sequence):
            return
        self._announce(sequence)
        if self._memory.is_settled(sequence.recall):
            self._begin_at(sequence)
        else:
            self._scheduler.wait_for_memory(sequence.request.request_id)
            self._fetching.append(sequence)

    def _waits_for_another(self, sequence: LiveSequence) -> bool:
        request, cached = sequence.request, sequence.recall.cached_tokens
        ahead = self._readings.ahead_of(sequence.chain, cached, tenant=request.tenant, limit=len(sequence.chain) - 1)
        if ahead is None or ahead.tokens - cached < LEAST_SHARED_TOKENS:
            return False
        sequence.recall.release()
        sequence.recall = None
        sequence.waits_since = self._clock()
        self._readings.wait(request.request_id, ahead)
        self._behind[request.request_id] = sequence
        self._scheduler.wait_for_memory(request.request_id)
        return True

    def _announce(self, sequence: LiveSequence) -> None:
        assert self._memory is not None
        request = sequence.request
        boundaries = self.boundaries(request) or None
        self._readings.announce(
            request.request_id,
            sequence.chain,
            tenant=request.tenant,
            have=sequence.recall.cached_tokens,
            boundaries=boundaries,
        )

    def settle(self) -> None:
        """See what has come from the disk, and do housekeeping."""
        if self._memory is None:
            return
        self._look_again(())
        for sequence in self._fetching[:]:
            if sequence.recall is not None and self._memory.is_settled(sequence.recall):
                self._fetching.remove(sequence)
                self._begin_at(sequence)
        self._memory.tend()

    def opening(self, sequence: LiveSequence) -> tuple[Any, KeepPolicy | None]:
        """What to open a sequence from, and what to keep of it while it runs."""
        if self._memory is None or not _takes_part(sequence.request):
            outcome = CacheOutcome.OFF if self._memory is None else CacheOutcome.SCORED
            self._book(sequence, CacheReport(outcome=outcome))
            return None, None
        prefix, report = None, CacheReport(outcome=CacheOutcome.FAILED)
        if not sequence.reads_afresh:
            sequence.began_from = ()
        if sequence.recall is not None:
            began_at = self._clock()
            sequence.began_from = sequence.recall.keys
            prefix = self._memory.prefix(sequence.recall)
            report = sequence.recall.report()
            report = msgspec.structs.replace(report, restore_seconds=report.restore_seconds + self._clock() - began_at)
            self.drop_recall(sequence)
        self._book(sequence, report)
        return prefix, self._memory.policy(len(sequence.request.prompt_token_ids), sequence.request.branch_points)

    def begin_again(self, sequence: LiveSequence) -> None:
        """The sequence is read from its first token on: nothing was reused after all."""
        self.drop_recall(sequence)
        if sequence.memory is not None and sequence.memory.cached_tokens and not sequence.generated:
            sequence.memory = CacheReport(outcome=CacheOutcome.FAILED)

    def distrust(self, sequence: LiveSequence, *, live: Iterable[LiveSequence]) -> None:
        """What a sequence computed is not to be kept: forget what it handed over, and what it began from if that may be why.

        What is known to be sound stays until the sequence, read afresh, has come out right (`blame`): a model may give nonsense
        for one prompt, and others stand on the same chain. `live`: who of them was to begin from what is gone looks again.
        """
        self.discard_left((sequence,))
        if self._memory is None:
            return
        gone = self._memory.forget(tuple(sequence.handed_over))
        if not sequence.reads_afresh:
            unsound = self._memory.forget_unsound(sequence.began_from)
            if unsound:
                sequence.began_from = ()
            gone += unsound
        self._look_elsewhere(gone, [other for other in live if other is not sequence])

    def blame(self, sequence: LiveSequence, *, live: Iterable[LiveSequence]) -> None:
        """Read afresh, a sequence has come out right: forget what it began from the first time."""
        began_from, sequence.began_from = sequence.began_from, ()
        if self._memory is not None and began_from:
            self._look_elsewhere(self._memory.forget(began_from), live)

    def _look_elsewhere(self, gone: tuple[BlockKey, ...], live: Iterable[LiveSequence]) -> None:
        lost = set(gone)
        # Who has just been admitted begins from what it holds, as those do that have begun: it finds out by itself.
        waiting = [other for other in live if self._scheduler.is_waiting(other.request.request_id)]
        for other in waiting:
            if other.recall is not None and not lost.isdisjoint(other.recall.keys):
                self._scheduler.wait_for_memory(other.request.request_id)
                self.drop_recall(other)
                self._freed.append(other)
                self._freed += [self._behind.pop(request_id) for request_id in self._readings.withdraw(other.request.request_id)]
        self._look_again(())

    def figures(self) -> CacheFigures | None:
        """What is kept and what it was good for; None without a memory."""
        if self._memory is None:
            return None
        readings = self._readings.statistics()
        figures = msgspec.structs.replace(self._memory.figures(), waiting=readings.waiting, waits=readings.waits)
        return self._counters.written_into(figures)

    def _book(self, sequence: LiveSequence, report: CacheReport) -> None:
        if sequence.memory is None:  # else it was preempted, and finds mostly what it has read itself
            sequence.memory = msgspec.structs.replace(
                report,
                waited_for_another=sequence.waited_seconds > 0,
                waited_seconds=sequence.waited_seconds,
                lookup_seconds=sequence.lookup_seconds,
            )
            self._counters.count(sequence.memory)

    def begin_afresh(self, sequence: LiveSequence) -> None:
        """Let a waiting sequence begin from its first token."""
        _stop_waiting(sequence, now=self._clock())
        self.drop_recall(sequence)
        self._scheduler.set_cached(sequence.request.request_id, 0)

    def stop_fetching(self) -> None:
        """Let all that wait, for the disk or for another one, begin from their first token."""
        waiting = (*self._fetching, *self._behind.values(), *self._freed)
        self._behind.clear()
        self._freed.clear()
        for sequence in waiting:
            self._readings.withdraw(sequence.request.request_id)
            self.begin_afresh(sequence)

    def stop_reading(self, sequence: LiveSequence) -> None:
        """The sequence has ended or is preempted: who waits for it looks again."""
        self._behind.pop(sequence.request.request_id, None)
        if sequence in self._freed:
            self._freed.remove(sequence)
        self._look_again(self._readings.withdraw(sequence.request.request_id))

    def drop_recall(self, sequence: LiveSequence) -> None:
        """The sequence has begun, or never will."""
        if sequence.recall is not None:
            sequence.recall.release()
            sequence.recall = None
            if sequence in self._fetching:
                self._fetching.remove(sequence)

    def leave(self, sequence: LiveSequence, *, for_good: bool) -> None:
        """Copy out the rest of an open sequence that is about to be closed, `for_good` unless it is only preempted."""
        if self._memory is not None and _takes_part(sequence.request):
            rest = self._engine.keep_rest(sequence.request.request_id)
            if rest is not None:
                self._left.append(_Left(sequence, rest, for_good))
            elif for_good:
                self._note_use(sequence)

    def discard_left(self, sequences: Container[LiveSequence]) -> None:
        """Keep nothing of what these have left behind."""
        self._left = [left for left in self._left if left.sequence not in sequences]
        self._ready = [left for left in self._ready if left.sequence not in sequences]

    def has_left(self, sequences: Container[LiveSequence]) -> bool:
        """Whether one of these has left behind what is still being computed."""
        return any(left.sequence in sequences for left in self._left)

    def take(self, pending: Any, sequences: tuple[LiveSequence, ...]) -> None:
        """A step was collected: put away what it has made of these sequences, and what was left behind before its dispatch."""
        if self._memory is None:
            return
        by_id = {sequence.request.request_id: sequence for sequence in sequences}
        for kept in self._engine.take_kept(pending):
            if kept.request_id in by_id:
                self._put_away(by_id[kept.request_id], kept)
        self.put_away_ready()
        self._ready, self._left = self._left, []

    def put_away_all(self) -> None:
        """Put away everything that was left behind; waits for the device."""
        self.put_away_ready()
        self._ready, self._left = self._left, []
        self.put_away_ready()

    def put_away_ready(self) -> None:
        """Put away what a collected step has surely computed. What one request raises leaves the others for the next time."""
        while self._ready:
            left = self._ready.pop(0)
            self._put_away(left.sequence, left.kept)
            if left.for_good:
                self._note_use(left.sequence)

    def carry_out(self, command: SessionCommand) -> SessionAnswer | None:
        """The answer to a session command; None when it comes later."""
        if self._sessions is None:
            message = "this worker keeps nothing of what it reads, so there are no sessions"
            return SessionAnswer(call_id=command.call_id, failure=SessionFailure.OFF, message=message)
        self.put_away_all()
        return self._sessions.carry_out(command)

    def tend_sessions(self) -> list[SessionAnswer]:
        """Housekeeping of sessions; answers that are due."""
        return [] if self._sessions is None else self._sessions.tend()

    def _note_use(self, sequence: LiveSequence) -> None:
        request = sequence.request
        if self._sessions is not None and request.session_id:
            self._sessions.used(request.session_id, tenant=request.tenant, chain=sequence.chain)

    def close(self) -> None:
        """Write what is queued and let the memory go."""
        if self._memory is not None:
            self.put_away_all()
            if self._sessions is not None:
                self._sessions.close()
            self._memory.close()

    def abandon(self) -> None:
        """End all threads: the device is broken, and nothing more can be put away."""
        if self._memory is not None:
            if self._sessions is not None:
                self._sessions.abandon()
            self._memory.close()

    def _begin_at(self, sequence: LiveSequence) -> None:
        self._scheduler.set_cached(sequence.request.request_id, sequence.recall.cached_tokens)

    def _put_away(self, sequence: LiveSequence, kept: Any) -> None:
        assert self._memory is not None
        sequence.handed_over += self._memory.keep(sequence.chain, kept, tenant=sequence.request.tenant)
        if kept.runs:
            self._look_again(self._readings.progress(sequence.request.request_id, kept.runs[-1].start + kept.runs[-1].tokens))

    def _look_again(self, freed: tuple[RequestId, ...]) -> None:
        self._freed += [self._behind.pop(request_id) for request_id in freed]
        while self._freed:
            sequence = self._freed.pop(0)
            try:
                self.look_up(sequence)
            except BaseException:
                self.begin_afresh(sequence)  # the others look again the next time
                raise


def _stop_waiting(sequence: LiveSequence, *, now: float) -> None:
    if sequence.waits_since is not None:
        sequence.waited_seconds += now - sequence.waits_since
        sequence.waits_since = None


def _takes_part(request: SequenceRequest) -> bool:
    """A prompt that is to be scored has to be read whole."""
    return not request.want_prompt_logprobs
