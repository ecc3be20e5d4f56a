"""The loop's use of the prefix cache: look up on arrival, start from what is cached, commit.

Whatever raises here costs a request its shortcut, never its answer: `_guarded` logs it and, where
something must be done instead, does that.

A sequence waits in the scheduler's queue, not ready, while its blocks are read from disk, or while
another sequence prefills the prefix that both have. What a step was told to keep is committed with
it. The rest of a sequence is copied out when it is closed, computed with the next step, and
committed when that has succeeded.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias

import msgspec

from holdfast.store.block import BlockKey
from holdfast.wire.commands import ReadAheadRun, SequenceRequest
from holdfast.wire.events import CacheFigures, CacheOutcome, CacheReport
from holdfast.wire.requests import TOKEN_BYTES, RequestId, common_tokens
from holdfast.worker.engine.plan import KeepPolicy
from holdfast.worker.loop.counters import Counters
from holdfast.worker.loop.device_steps import costing_no_answer
from holdfast.worker.loop.parts import Cache, StepEngine
from holdfast.worker.loop.sequences import LiveSequence
from holdfast.worker.prefix.in_flight import InFlightPrefills
from holdfast.worker.prefix.lookup import LiveChain
from holdfast.worker.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from holdfast.worker.engine.sequence import Kept, Prefix
    from holdfast.worker.kv.live import LiveState

LEAST_SHARED_TOKENS = 64  # fewer are prefilled faster than waited for
_MOST_REMEMBERED = 32

P = ParamSpec("P")
_Action: TypeAlias = "Callable[Concatenate[CacheClient, P], None]"


def _guarded(
    message: str, *, otherwise: Callable[..., None] | None = None
) -> Callable[[_Action[P]], _Action[P]]:
    """Log what a method raises, and call `otherwise` with its arguments.

    message: a `%s` stands for the request, if the first argument is a sequence.
    """

    def decorate(method: _Action[P]) -> _Action[P]:
        @functools.wraps(method)
        def guarded(client: CacheClient, /, *args: P.args, **more: P.kwargs) -> None:
            first = args[0] if args else None
            names = [first.request.request_id] if isinstance(first, LiveSequence) else []

            def fall_back(error: Exception) -> None:
                if otherwise is not None:
                    otherwise(client, *args, **more)

            with costing_no_answer(message, *names, otherwise=fall_back):
                method(client, *args, **more)

        return guarded

    return decorate


@dataclass(frozen=True, slots=True)
class _Rest:
    """What was copied out of a sequence that was closed; `for_good` unless only preempted."""

    sequence: LiveSequence
    kept: Kept
    for_good: bool


class CacheClient:
    """Which sequences wait for the cache, and what is on its way into it. Device thread only.

    Only `opening` and `begin` may raise; the caller treats that as a failure to open the sequence.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        engine: StepEngine[Any],
        scheduler: Scheduler,
        counters: Counters,
        on_end: Callable[[LiveSequence], None],
        clock: Callable[[], float],
    ) -> None:
        """on_end: called when everything of an ended sequence is committed."""
        self._cache = cache
        self._engine = engine
        self._scheduler = scheduler
        self._counters = counters
        self._on_end = on_end
        self._clock = clock
        self.read_ahead = ReadAheadRuns()
        self._in_flight = InFlightPrefills()
        self._behind: dict[RequestId, LiveSequence] = {}  # wait for another one's prefill
        self._fetching: list[LiveSequence] = []  # wait for the disk
        self._to_repeat: list[LiveSequence] = []  # to be looked up again
        self._computing: list[_Rest] = []  # copied out since the last step was dispatched
        self._computed: list[_Rest] = []

    @property
    def is_waited_for(self) -> bool:
        """Whether a request waits for `advance`: then the loop must not sleep."""
        return bool(self._fetching or self._to_repeat)

    @property
    def has_uncommitted(self) -> bool:
        """Whether something that was copied out is not committed yet."""
        return bool(self._computing or self._computed)

    def is_computing_for(self, sequences: Container[LiveSequence]) -> bool:
        """Whether the step under way computes the rest of one of these."""
        return any(rest.sequence in sequences for rest in self._computing)

    def keeps(self, request: SequenceRequest) -> bool:
        """Whether later requests may start from what is computed for this one."""
        return self._serves(request) and request.is_kept

    def _serves(self, request: SequenceRequest) -> bool:
        """Whether a request may start from the cache: not if all of its prompt is scored."""
        return self._cache.keeps_anything and request.reusable_tokens > 0

    def boundaries(self, request: SequenceRequest) -> tuple[int, ...]:
        """Where spans of the request's prompt must end."""
        if not self.keeps(request):
            return ()
        return self._cache.boundaries(len(request.prompt_token_ids), request.branch_points)

    # -- look up

    @_guarded(
        "request %s is prefilled from its first token",
        otherwise=lambda client, sequence: client.restart_cold(sequence),
    )
    def look_up(self, sequence: LiveSequence) -> None:
        """Find what a waiting sequence can start from; tells the scheduler once it is there."""
        request = sequence.request
        if not self._serves(request) or sequence.is_cold:
            self.restart_cold(sequence)
            return
        self.flush()  # the next turn often comes right after the answer that it continues
        began_at = self._clock()
        sequence.stop_waiting(now=began_at)
        chain = bytes(sequence.chain)
        reusable = _reusable(sequence, chain)
        sequence.lookup = lookup = self._cache.lookup(
            reusable,
            tenant=request.tenant,
            in_blocks_only=sequence.avoids_live,
            may_move=request.is_kept,
        )
        sequence.lookup_seconds += self._clock() - began_at
        if self._waits_for_another(sequence, reusable, cached_tokens=lookup.cached_tokens):
            return
        if request.is_kept:
            self._in_flight.announce(
                request.request_id,
                chain,
                tenant=request.tenant,
                have=lookup.cached_tokens,
                boundaries=self.boundaries(request) or None,
            )
        if not self._is_fetched(sequence):
            self._scheduler.hold_back(request.request_id)
            self._fetching.append(sequence)

    def _waits_for_another(
        self, sequence: LiveSequence, chain: bytes, *, cached_tokens: int
    ) -> bool:
        request = sequence.request
        limit = len(chain) // TOKEN_BYTES - 1
        ahead = self._in_flight.ahead_of(chain, cached_tokens, tenant=request.tenant, limit=limit)
        if ahead is None or ahead.tokens - cached_tokens < LEAST_SHARED_TOKENS:
            return False
        self.release(sequence)
        sequence.waits_since = self._clock()
        self._in_flight.wait(request.request_id, ahead)
        self._behind[request.request_id] = sequence
        self._scheduler.hold_back(request.request_id)
        return True

    def _is_fetched(self, sequence: LiveSequence) -> bool:
        """Whether everything that a sequence starts from is in memory; then it is ready."""
        lookup = sequence.lookup
        assert lookup is not None
        is_fetched = self._cache.advance(lookup)
        if is_fetched:
            self._scheduler.begin_behind(
                sequence.request.request_id, lookup.cached_tokens, held_tokens=lookup.held_tokens
            )
        return is_fetched

    @_guarded(
        "what was to be restored is prefilled instead",
        otherwise=lambda client: client.restart_all_cold(),
    )
    def advance(self) -> None:
        """Take what has come from disk, repeat lookups, and do the cache's housekeeping."""
        while self._to_repeat:
            self.look_up(self._to_repeat.pop(0))
        for sequence in tuple(self._fetching):
            if self._is_fetched(sequence):
                self._fetching.remove(sequence)
        self._cache.tend()

    def restart_cold(self, sequence: LiveSequence) -> None:
        """Let a waiting sequence start from its first token."""
        sequence.stop_waiting(now=self._clock())
        self.release(sequence)
        self._scheduler.begin_behind(sequence.request.request_id, 0)

    def restart_all_cold(self) -> None:
        """Let every waiting sequence start from its first token."""
        waiting = (*self._fetching, *self._behind.values(), *self._to_repeat)
        self._behind.clear()
        self._to_repeat.clear()
        for sequence in waiting:
            self._in_flight.withdraw(sequence.request.request_id)
            self.restart_cold(sequence)

    @_guarded(
        "requests that waited for %s start from their first token",
        otherwise=lambda client, sequence: client.restart_all_cold(),
    )
    def withdraw(self, sequence: LiveSequence) -> None:
        """The sequence ended, is preempted or paused; those that waited for it look up again."""
        self._behind.pop(sequence.request.request_id, None)
        if sequence in self._to_repeat:
            self._to_repeat.remove(sequence)
        self._free(self._in_flight.withdraw(sequence.request.request_id))

    def release(self, sequence: LiveSequence) -> None:
        """Let go of what a sequence was to start from: it has started, or never will."""
        if sequence.lookup is not None:
            sequence.lookup.release()
            sequence.lookup = None
            if sequence in self._fetching:
                self._fetching.remove(sequence)

    def _free(self, request_ids: Iterable[RequestId]) -> None:
        self._to_repeat += [self._behind.pop(request_id) for request_id in request_ids]

    def _repeat_without(self, gone: Iterable[BlockKey], live: Iterable[LiveSequence]) -> None:
        """Blocks or live states are gone: sequences that were to start from them look up again.

        One that was just admitted starts from what it holds, like a running one; if that is bad, it
        will find out.
        """
        lost = set(gone)
        for other in live:
            request_id = other.request.request_id
            lookup = other.lookup
            if lookup is None or not self._scheduler.is_waiting(request_id):
                continue
            if lookup.has_lost_its_base or not lost.isdisjoint(lookup.plan.keys):
                self._scheduler.hold_back(request_id)
                self.release(other)
                self._to_repeat.append(other)
                self._free(self._in_flight.withdraw(request_id))

    # -- open

    def opening(self, sequence: LiveSequence) -> tuple[Prefix | None, KeepPolicy | None]:
        """What to open a sequence from, and what to copy out of it while it runs. May raise."""
        request = sequence.request
        lookup = sequence.lookup
        sequence.began_live = None
        if not sequence.is_cold:
            sequence.began_from = ()
        if not self._serves(request):
            is_on = self._cache.keeps_anything
            self._report(sequence, CacheOutcome.SCORED if is_on else CacheOutcome.OFF)
            return None, None
        prefix = None
        keep = None
        if lookup is None:
            sequence.cursor = self._cache.cursor(tenant=request.tenant)
            self._report(sequence, CacheOutcome.FAILED)
        else:
            began_at = self._clock()
            sequence.began_from = lookup.plan.keys
            sequence.cursor = lookup.plan.cursor
            sequence.began_live = None if lookup.base is None else lookup.base.chain
            prefix = self._cache.prefix(lookup) if lookup.cached_tokens else None
            sequence.restore_seconds = lookup.fetch_seconds + self._clock() - began_at
        with costing_no_answer("the KV of request %s is not kept", request.request_id):
            if self.keeps(request):
                keep = self._cache.policy(len(request.prompt_token_ids), request.branch_points)
        return prefix, keep

    def begin(self, sequence: LiveSequence, state: LiveState) -> None:
        """A sequence is open, on what `opening` returned. May raise."""
        request = sequence.request
        lookup = sequence.lookup
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
            used = self.read_ahead.take(
                sequence.chain, tenant=request.tenant, cached_tokens=report.cached_tokens
            )
            report = msgspec.structs.replace(report, read_ahead_tokens=used)
        self._count(sequence, report)
        self.release(sequence)

    def _report(self, sequence: LiveSequence, outcome: CacheOutcome) -> None:
        report = CacheReport(
            outcome=outcome,
            lookup_seconds=sequence.lookup_seconds,
            waited_for_another=sequence.waited_seconds > 0,
            waited_seconds=sequence.waited_seconds,
        )
        self._count(sequence, report)

    def _count(self, sequence: LiveSequence, report: CacheReport) -> None:
        # a preempted sequence has its first report already: now it finds mostly its own tokens
        if sequence.report is None:
            sequence.report = report
            if not sequence.request.is_idle_work:
                self._counters.count_report(report)

    @_guarded("the parked state of request %s could not be freed")
    def could_not_begin(self, sequence: LiveSequence) -> None:
        """The engine could not open a sequence: a state that was to be moved to it is spoilt."""
        base = None if sequence.lookup is None else sequence.lookup.base
        # a live chain that the sequence has by now leaves with it
        if sequence.live is None and base is not None and base.use == "moved":
            self._cache.live.leave(base.chain)

    def reused_nothing(self, sequence: LiveSequence) -> None:
        """The sequence is prefilled from its first token after all."""
        self.release(sequence)
        if sequence.report is not None and sequence.report.cached_tokens and not sequence.generated:
            sequence.report = CacheReport(outcome=CacheOutcome.FAILED)

    # -- memory and trust

    def make_room(self, *, live: Collection[LiveSequence]) -> None:
        """Free parked states for the next step, and tell the scheduler what live states hold."""
        self._count_held()
        missing_bytes = self._scheduler.missing_bytes()
        if missing_bytes:
            self._reclaim(missing_bytes)
        if any(each.lookup is not None and each.lookup.has_lost_its_base for each in live):
            self._repeat_without((), live)

    @_guarded("parked states could not be freed")
    def _reclaim(self, nbytes: int) -> None:
        self._cache.live.reclaim(nbytes)
        self._count_held()

    def _count_held(self) -> None:
        for chain in self._cache.live.newly_frozen():
            self._scheduler.hold_apart(chain.request_id, chain.held_tokens)
        held = self._cache.live.held
        self._scheduler.hold(total_bytes=held.total_bytes, parked_bytes=held.parked_bytes)

    @_guarded("the blocks of request %s could not be forgotten")
    def distrust(self, sequence: LiveSequence, *, live: Iterable[LiveSequence]) -> None:
        """A sequence failed: forget what it computed, and what it started from if that is unsound.

        What is known to be sound stays until the sequence has succeeded without it (`blame`): a
        model may fail on one prompt, and other sequences use the same blocks.
        """
        self.discard((sequence,))
        gone = self._cache.forget(tuple(sequence.handed_over))
        if sequence.may_blame_live_state and sequence.began_live is not None:
            sequence.began_live.is_stale = True
        elif not sequence.is_cold:
            unsound = self._cache.forget_unsound(sequence.began_from)
            if unsound:
                sequence.began_from = ()
            gone += unsound
        self._repeat_without(gone, [other for other in live if other is not sequence])

    @_guarded("what request %s started from could not be forgotten")
    def blame(self, sequence: LiveSequence, *, live: Iterable[LiveSequence]) -> None:
        """A sequence has succeeded without the cache: forget what it first started from."""
        began_from = sequence.began_from
        sequence.began_from = ()
        if began_from:
            self._repeat_without(self._cache.forget(began_from), live)

    @_guarded("requests may start from blocks of a forgotten session")
    def repeat_without_forgotten(self, *, live: Collection[LiveSequence]) -> None:
        """A session was forgotten: sequences that were to start from its blocks look up again."""
        wanted = {key for each in live if each.lookup is not None for key in each.lookup.plan.keys}
        self._repeat_without(self._cache.gone(wanted), live)

    # -- commit

    @_guarded(
        "the rest of request %s is not kept",
        otherwise=lambda client, sequence, *, for_good: client.give_up(sequence),
    )
    def copy_rest(self, sequence: LiveSequence, *, for_good: bool) -> None:
        """Copy out the rest of an open sequence that is about to be closed.

        `for_good` unless it is only preempted.
        """
        if not self.keeps(sequence.request):
            self._leave(sequence)
            return
        rest = self._engine.keep_rest(sequence.request.request_id)
        if rest is not None:
            self._computing.append(_Rest(sequence, rest, for_good))
        if rest is None or not for_good:
            self._leave(sequence)
        if rest is None and for_good:
            self._on_end(sequence)

    @_guarded("the state of request %s could not be freed")
    def give_up(self, sequence: LiveSequence) -> None:
        """A sequence is about to be closed, and nothing of it is kept."""
        self._leave(sequence)

    def _leave(self, sequence: LiveSequence) -> None:
        """The chain of a sequence is no longer live, if it was."""
        live = sequence.live
        sequence.live = None
        if live is not None:
            self._cache.live.leave(live)

    @_guarded("the states of a failed step could not be freed")
    def discard(self, sequences: Container[LiveSequence]) -> None:
        """Commit nothing more of what was copied out of these."""
        rests = (*self._computing, *self._computed)
        discarded = [rest.sequence for rest in rests if rest.sequence in sequences]
        self._computing = [rest for rest in self._computing if rest.sequence not in sequences]
        self._computed = [rest for rest in self._computed if rest.sequence not in sequences]
        with ExitStack() as leaving:  # all of them, whatever one of them raises
            for sequence in discarded:
                leaving.callback(self._leave, sequence)

    @_guarded("what a step computed is not kept")
    def commit_step(
        self, take_kept: Callable[[], Sequence[Kept]], sequences: tuple[LiveSequence, ...]
    ) -> None:
        """A step has succeeded: commit what it made of these sequences, and the rests before it."""
        by_id = {sequence.request.request_id: sequence for sequence in sequences}
        for kept in take_kept():
            if kept.request_id in by_id:
                self._commit(by_id[kept.request_id], kept)
        self._commit_computed()

    def flush(self) -> None:
        """Commit everything that was copied out; waits for the device."""
        self._commit_computed()
        self._commit_computed()

    def _commit_computed(self) -> None:
        """Commit the computed rests; those under computation are next."""
        while self._computed:
            rest = self._computed.pop(0)
            self._commit_rest(rest.sequence, rest)
        self._computed = self._computing
        self._computing = []

    @_guarded(
        "the rest of request %s is not kept",
        otherwise=lambda client, sequence, rest: client.give_up(sequence),
    )
    def _commit_rest(self, sequence: LiveSequence, rest: _Rest) -> None:
        self._commit(sequence, rest.kept)
        if rest.for_good and sequence.live is not None and rest.kept.is_finite:
            live = sequence.live
            sequence.live = None
            self._cache.live.park(live, bytes(sequence.chain))
        self._leave(sequence)
        if rest.for_good:
            self._on_end(sequence)

    def _commit(self, sequence: LiveSequence, kept: Kept) -> None:
        assert sequence.cursor is not None, "committed before it was opened"
        sequence.handed_over += self._cache.insert(
            sequence.cursor, sequence.chain, kept, live=sequence.live
        )
        if kept.blocks:
            stored_tokens = kept.blocks[-1].start + kept.blocks[-1].tokens
            self._free(self._in_flight.progress(sequence.request.request_id, stored_tokens))

    # -- the cache as a whole

    def figures(self) -> CacheFigures | None:
        """What is kept and how many requests wait; None for a cache that keeps nothing."""
        figures = self._cache.figures()
        if figures is None:
            return None
        return msgspec.structs.replace(
            figures, waiting=self._in_flight.waiting, waits=self._in_flight.waits
        )

    @_guarded("not everything that was cached is saved to disk")
    def offer_rest(self) -> None:
        """Save what is not saved yet; the worker is shutting down."""
        self._cache.offer_rest()

    def close(self) -> None:
        """Write what is queued, and close the cache."""
        self._cache.close()


class ReadAheadRuns:
    """What was prefilled ahead lately and has not been used yet. For the figures only."""

    def __init__(self) -> None:
        self._runs: deque[ReadAheadRun] = deque(maxlen=_MOST_REMEMBERED)

    def add(self, sequence: LiveSequence) -> None:
        """A sequence has prefilled its prompt ahead, or a part of it."""
        start = 0 if sequence.report is None else sequence.report.cached_tokens
        if sequence.read_to > start:
            request = sequence.request
            token_ids = request.prompt_token_ids[: sequence.read_to]
            self.note(ReadAheadRun(tenant=request.tenant, token_ids=token_ids, start=start))

    def note(self, run: ReadAheadRun) -> None:
        """Remember what this worker, or an earlier one, prefilled ahead."""
        self._runs.append(run)

    def take(self, chain: bytes | bytearray, *, tenant: str, cached_tokens: int) -> int:
        """How many of the first `cached_tokens` tokens of a chain were prefilled ahead.

        They count once. A run that is no longer cached, so that the request prefills it itself,
        does not count.
        """
        found = 0
        for run in tuple(self._runs):
            common = common_tokens(run.token_ids.packed, chain) if run.tenant == tenant else 0
            if common > run.start:
                found += max(0, min(common, cached_tokens) - run.start)
                self._runs.remove(run)
        return found


def _reusable(sequence: LiveSequence, chain: bytes) -> bytes:
    """The part of a chain that may come from the cache, and one token that is prefilled."""
    request = sequence.request
    is_all_reusable = request.reusable_tokens == len(request.prompt_token_ids) - 1
    return chain if is_all_reusable else chain[: (request.reusable_tokens + 1) * TOKEN_BYTES]
