"""What the loop does about the cache: look up at arrival, open from what is there, commit what
sequences have computed.

Whatever fails here costs a request its shortcut, never its answer: that promise is kept in this
file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import CacheOutcome, CacheReport
from holdfast.wire.figures import CacheFigures
from holdfast.worker.engine.plan import KeepPolicy
from holdfast.worker.loop.commits import Commits
from holdfast.worker.loop.counters import Counters
from holdfast.worker.loop.failures import costing_no_answer
from holdfast.worker.loop.lookups import Lookups
from holdfast.worker.loop.parts import Cache, StepEngine
from holdfast.worker.loop.read_ahead import ReadAheadRuns
from holdfast.worker.loop.sequences import LiveSequence
from holdfast.worker.prefix.lookup import LiveChain
from holdfast.worker.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from holdfast.worker.engine.sequence import Kept, Prefix
    from holdfast.worker.kv.live import LiveState


class CacheSteps:
    """The loop's side of a cache. Only `opening` may raise: what it gives is the engine's to judge."""

    def __init__(
        self,
        cache: Cache,
        *,
        engine: StepEngine[Any],
        scheduler: Scheduler,
        counters: Counters,
        on_end: Callable[[LiveSequence], None],
        clock: Callable[[], float],
        read_ahead: ReadAheadRuns | None = None,
    ) -> None:
        """`on_end`: all of a sequence that ended is committed. read_ahead: where idle work says
        what it has read.
        """
        self._cache, self._counters, self._clock = cache, counters, clock
        self._read_ahead = read_ahead or ReadAheadRuns()
        self._lookups = Lookups(cache, scheduler, clock=clock)
        self._commits = Commits(cache, engine, on_progress=self._lookups.progress, on_end=on_end)
        self._scheduler = scheduler

    @property
    def is_waited_for(self) -> bool:
        """Whether a request waits for what `advance` does: the loop must not sleep then."""
        return self._lookups.is_waited_for

    @property
    def has_uncommitted(self) -> bool:
        """Whether something that was copied out is not committed yet."""
        return self._commits.has_work

    def is_computing_for(self, sequences: Container[LiveSequence]) -> bool:
        """Whether the step under way computes what was copied out of one of these."""
        return self._commits.is_computing_for(sequences)

    def boundaries(self, request: SequenceRequest) -> tuple[int, ...]:
        """Where spans of the request's prompt have to end."""
        return (
            self._cache.boundaries(len(request.prompt_token_ids), request.branch_points)
            if self.keeps(request)
            else ()
        )

    def look_up(self, sequence: LiveSequence) -> None:
        """Find what a waiting sequence can begin from; the scheduler is told when it is at hand."""
        if not self._serves(sequence.request) or sequence.is_cold:
            self._lookups.restart_cold(sequence)
            return
        self.flush()  # the next turn often comes right after the answer that it goes on from
        with costing_no_answer(
            "request %s is read from its beginning",
            sequence.request.request_id,
            otherwise=lambda error: self._lookups.restart_cold(sequence),
        ):
            self._lookups.begin(sequence)

    def advance(self) -> None:
        """Take what has come from the disk, look up again what has to be, and do housekeeping."""
        if self._lookups.has_to_repeat:
            self.flush()
        with costing_no_answer(
            "what was to be restored is read again",
            otherwise=lambda error: self._lookups.restart_all_cold(),
        ):
            self._lookups.advance()
            self._cache.tend()

    def opening(self, sequence: LiveSequence) -> tuple[Prefix | None, KeepPolicy | None]:
        """What to open a sequence from, and what to keep of it while it runs.

        May raise, as opening may.
        """
        request = sequence.request
        sequence.began_live = None
        if not sequence.is_cold:
            sequence.began_from = ()
        if not self._serves(request):
            self._report(
                sequence, CacheOutcome.SCORED if self._cache.keeps_anything else CacheOutcome.OFF
            )
            return None, None
        prefix, keep, lookup = None, None, sequence.lookup
        if lookup is None:
            sequence.cursor = self._cache.cursor(tenant=request.tenant)
            self._report(sequence, CacheOutcome.FAILED)
        else:
            began_at = self._clock()
            sequence.began_from, sequence.cursor = lookup.plan.keys, lookup.plan.cursor
            sequence.began_live = None if lookup.base is None else lookup.base.chain
            prefix = self._cache.prefix(lookup) if lookup.cached_tokens else None
            sequence.restore_seconds = lookup.fetch_seconds + self._clock() - began_at
        with costing_no_answer("what request %s reads is not kept", request.request_id):
            if self.keeps(request):
                keep = self._cache.policy(len(request.prompt_token_ids), request.branch_points)
        return prefix, keep

    def begin(self, sequence: LiveSequence, state: LiveState) -> None:
        """A sequence is open, on what `opening` gave."""
        request, lookup = sequence.request, sequence.lookup
        if sequence.cursor is not None and self._serves(request):
            live = LiveChain(
                request_id=request.request_id,
                tenant=request.tenant,
                session_id=request.session_id,
                chain=sequence.chain,
                prompt_tokens=len(request.prompt_token_ids),
                cursor=sequence.cursor,
            )
            sequence.live = self._cache.live.begin(lookup, live, state)
            self._scheduler.hold_apart(request.request_id, sequence.live.held_tokens)
        if lookup is None:
            return
        report = lookup.report(
            lookup_seconds=sequence.lookup_seconds,
            waited_seconds=sequence.waited_seconds,
            restore_seconds=sequence.restore_seconds,
        )
        if sequence.report is None and not request.is_idle_work:
            used = self._read_ahead.take(
                sequence.chain, tenant=request.tenant, cached_tokens=report.cached_tokens
            )
            report = msgspec.structs.replace(report, read_ahead_tokens=used)
        self._count(sequence, report)
        self._lookups.release(sequence)

    def could_not_begin(self, sequence: LiveSequence) -> None:
        """The engine could not open a sequence: a state that was to be moved to it is spoilt.

        One that it has leaves with it.
        """
        lookup = sequence.lookup
        if (
            sequence.live is None
            and lookup is not None
            and lookup.base is not None
            and lookup.base.use == "moved"
        ):
            with costing_no_answer("a parked state could not be given up"):
                self._cache.live.leave(lookup.base.chain)

    def make_room(self, *, live: Collection[LiveSequence]) -> None:
        """Have parked states give up what the next step needs, and tell the scheduler what they
        hold.
        """
        self._count_held()
        missing = self._scheduler.missing_bytes()
        if missing:
            with costing_no_answer("parked states could not be given up"):
                self._cache.live.reclaim(missing)
                self._count_held()
        if any(each.lookup is not None and each.lookup.has_lost_its_base for each in live):
            self._lookups.repeat_without((), live)

    def _count_held(self) -> None:
        for chain in self._cache.live.newly_frozen():
            self._scheduler.hold_apart(chain.request_id, chain.held_tokens)
        held = self._cache.live.held
        self._scheduler.hold(total_bytes=held.total_bytes, parked_bytes=held.parked_bytes)

    def _report(self, sequence: LiveSequence, outcome: CacheOutcome) -> None:
        waited_seconds = sequence.waited_seconds
        report = CacheReport(
            outcome=outcome,
            lookup_seconds=sequence.lookup_seconds,
            waited_for_another=waited_seconds > 0,
            waited_seconds=waited_seconds,
        )
        self._count(sequence, report)

    def _count(self, sequence: LiveSequence, report: CacheReport) -> None:
        # else it was preempted, and finds mostly what it has read itself
        if sequence.report is None:
            sequence.report = report
            if not sequence.request.is_idle_work:
                self._counters.count_report(report)

    def restart_cold(self, sequence: LiveSequence) -> None:
        """A waiting sequence begins from its first token, whatever is cached."""
        self._lookups.restart_cold(sequence)

    def reused_nothing(self, sequence: LiveSequence) -> None:
        """The sequence is read from its first token on after all."""
        self._lookups.release(sequence)
        if sequence.report is not None and sequence.report.cached_tokens and not sequence.generated:
            sequence.report = CacheReport(outcome=CacheOutcome.FAILED)

    def distrust(self, sequence: LiveSequence, *, live: Iterable[LiveSequence]) -> None:
        """What a sequence computed is not to be kept: forget what it handed over, and what it began
        from if that may be why.

        What is known to be sound stays until the sequence, read afresh, has come out right
        (`blame`): a model may give nonsense for one prompt, and others stand on the same chain.
        `live`: who of them was to begin from what is gone looks again.
        """
        with costing_no_answer(
            "what request %s has handed over could not be forgotten", sequence.request.request_id
        ):
            self._commits.discard((sequence,))
            gone = self._cache.forget(tuple(sequence.handed_over))
            if sequence.may_blame_live_state and sequence.began_live is not None:
                sequence.began_live.is_stale = True
            elif not sequence.is_cold:
                unsound = self._cache.forget_unsound(sequence.began_from)
                if unsound:
                    sequence.began_from = ()
                gone += unsound
            self._lookups.repeat_without(gone, [other for other in live if other is not sequence])

    def blame(self, sequence: LiveSequence, *, live: Iterable[LiveSequence]) -> None:
        """Read afresh, a sequence has come out right: forget what it began from the first time."""
        with costing_no_answer(
            "what request %s began from could not be forgotten", sequence.request.request_id
        ):
            began_from, sequence.began_from = sequence.began_from, ()
            if began_from:
                self._lookups.repeat_without(self._cache.forget(began_from), live)

    def repeat_without_forgotten(self, *, live: Collection[LiveSequence]) -> None:
        """A session was forgotten: who of `live` was to begin from what went with it looks again."""
        with costing_no_answer("what a session took with it could not be told"):
            wanted = {
                key for each in live if each.lookup is not None for key in each.lookup.plan.keys
            }
            self._lookups.repeat_without(self._cache.gone(wanted), live)

    def release(self, sequence: LiveSequence) -> None:
        """The sequence has begun, or never will."""
        self._lookups.release(sequence)

    def withdraw(self, sequence: LiveSequence) -> None:
        """The sequence reads no more: who waits for it is looked up again."""
        with costing_no_answer(
            "requests that waited for %s begin from their first token",
            sequence.request.request_id,
            otherwise=lambda error: self._lookups.restart_all_cold(),
        ):
            self._lookups.withdraw(sequence)

    def copy_rest(self, sequence: LiveSequence, *, for_good: bool) -> None:
        """Copy out the rest of an open sequence that is about to be closed, `for_good` unless it is
        only preempted.
        """
        with costing_no_answer(
            "what request %s has read could not be kept",
            sequence.request.request_id,
            otherwise=lambda error: self.give_up(sequence),
        ):
            if self.keeps(sequence.request):
                self._commits.copy_rest(sequence, for_good=for_good)
            else:
                self._commits.leave(sequence)

    def give_up(self, sequence: LiveSequence) -> None:
        """A sequence is about to be closed of which nothing is to be kept."""
        with costing_no_answer(
            "the state of request %s could not be given up", sequence.request.request_id
        ):
            self._commits.leave(sequence)

    def discard(self, sequences: Container[LiveSequence]) -> None:
        """Commit nothing more of what was copied out of these."""
        with costing_no_answer("what a step has read could not be given up"):
            self._commits.discard(sequences)

    def commit_step(
        self, take_kept: Callable[[], Sequence[Kept]], sequences: tuple[LiveSequence, ...]
    ) -> None:
        """A step was collected: commit what it has made of these sequences, and what was copied out
        before its dispatch.
        """
        with costing_no_answer("what a step has read could not be kept"):
            self._commits.commit_step(take_kept(), sequences)

    def flush(self) -> None:
        """Commit everything that was copied out; waits for the device."""
        with costing_no_answer("what a request has read could not be kept"):
            if self._commits.has_work:
                self._commits.flush()

    def figures(self) -> CacheFigures | None:
        """What is kept, and who waits; None for a cache that keeps nothing."""
        figures = self._cache.figures()
        if figures is None:
            return None
        return msgspec.structs.replace(
            figures, waiting=self._lookups.waiting, waits=self._lookups.waits
        )

    def offer_rest(self) -> None:
        """Have written down what was not, as the worker ends in order."""
        with costing_no_answer("what was read is not all written down"):
            self._cache.offer_rest()

    def close(self) -> None:
        """Write what is queued and let the cache go."""
        self._cache.close()

    def _serves(self, request: SequenceRequest) -> bool:
        """Whether it may begin from what is cached: a prompt of which everything is asked has to be
        read whole.
        """
        return self._cache.keeps_anything and request.reusable_tokens > 0

    def keeps(self, request: SequenceRequest) -> bool:
        """Whether what is read for it is there for later requests."""
        return self._serves(request) and request.is_kept
