"""Connects the loop to the prefix cache: looks up arriving requests, starts them from cached state,
and commits new state.

If the cache fails, a request is prefilled from its first token, but is still answered: `_guarded`
logs the failure and calls a fallback.

A request waits in the scheduler's queue, not to be admitted yet, while its blocks are read from disk,
or while its twin, another request, prefills the same prefix. Blocks that a step copied out are
committed (stored in the cache) with that step. The rest of a sequence is copied out when the sequence
is closed, computed with the next step, and committed once that step has succeeded.

The *live state* of a sequence is its KV in the engine's buffers; the *live chain* is the cache's
record of it, from which other sequences may start. The state of a sequence that has ended may be
*parked*: kept until its memory is needed, so that a later request can take it over.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeAlias

import msgspec

from holdfast.errors import InvalidRequest
from holdfast.wire.commands import ReadAheadRun, SequenceRequest
from holdfast.wire.events import CacheFigures, CacheOutcome, CacheReport, WaitReason
from holdfast.wire.requests import TOKEN_BYTES, RequestId, common_tokens
from holdfast.worker.engine.plan import BLOCK_TOKENS, CopyPolicy, SpanResult
from holdfast.worker.kv.bits import KVBits
from holdfast.worker.loop.device_steps import DispatchedStep, log_failure
from holdfast.worker.loop.sequences import Ledger, LiveSequence
from holdfast.worker.prefix.chain import Cursor, Root
from holdfast.worker.prefix.in_flight import InFlightPrefills
from holdfast.worker.prefix.lookup import LiveChain, Trust
from holdfast.worker.scheduler.scheduler import Scheduler

if TYPE_CHECKING:  # these modules import MLX, which is not needed here at run time
    from holdfast.worker.engine.engine import Engine, PendingStep
    from holdfast.worker.kv.live import LiveState, Snapshot, StateBytes
    from holdfast.worker.prefix.cache import PrefixCache

LEAST_SHARED_TOKENS = 64  # with fewer, prefilling is faster than waiting for another prefill
_MOST_REMEMBERED = 32

logger = logging.getLogger("holdfast.worker")

P = ParamSpec("P")
_Action: TypeAlias = "Callable[Concatenate[CacheClient, P], None]"


def _guarded(
    message: str, *, otherwise: Callable[..., None] | None = None
) -> Callable[[_Action[P]], _Action[P]]:
    """Decorate a method so that any exception is logged instead of raised; then `otherwise` is
    called with the method's arguments.

    message: the log message; `%s` is the request id of the sequence that is the first argument.
    """

    def decorate(method: _Action[P]) -> _Action[P]:
        @functools.wraps(method)
        def guarded(client: CacheClient, /, *args: P.args, **more: P.kwargs) -> None:
            sequence = args[0] if args else None
            names = [sequence.id] if isinstance(sequence, LiveSequence) else []

            def fall_back(error: Exception) -> None:
                if otherwise is not None:
                    otherwise(client, *args, **more)

            with log_failure(message, *names, otherwise=fall_back):
                method(client, *args, **more)

        return guarded

    return decorate


@dataclass(frozen=True, slots=True)
class _UncommittedRest:
    """The state that was copied out of a sequence when it was closed, because no step had copied
    it yet.

    has_ended: False if the sequence was only preempted.
    """

    sequence: LiveSequence
    copies: Sequence[Snapshot]
    has_ended: bool


class CacheClient:
    """Tracks the sequences that wait for the cache, and the state to be committed to it. Device
    thread only.

    A request's twin is another request that is prefilling the same prefix. The request waits for it
    and then looks up again.

    Only `open` may raise; the caller treats an exception as a failure to open the sequence.
    """

    def __init__(
        self,
        cache: PrefixCache | None,
        *,
        engine: Engine,
        scheduler: Scheduler,
        ledger: Ledger,
        on_end: Callable[[LiveSequence], None],
    ) -> None:
        """cache: None for a model whose state cannot be cached.

        on_end: called when all state of an ended sequence is committed.
        """
        self._cache = cache
        self._engine = engine
        self._scheduler = scheduler
        self._ledger = ledger
        self._on_end = on_end
        self._read_ahead_runs = ReadAheadRuns()
        self._in_flight = InFlightPrefills()
        # copied out since the last step was dispatched
        self._computing_rests: list[_UncommittedRest] = []
        # computed with the last step, but not committed yet
        self._computed_rests: list[_UncommittedRest] = []

    @property
    def is_waited_for(self) -> bool:
        """Whether a request waits for something that `advance` does; if so, the loop must not sleep."""
        reasons = (WaitReason.LOOKUP, WaitReason.DISK, WaitReason.IMAGES)
        return bool(self._scheduler.waiting_for(*reasons))

    def _waiting(self, *reasons: WaitReason) -> list[LiveSequence]:
        """The sequences in the scheduler's queue that wait for one of these, oldest first."""
        return [self._ledger[request_id] for request_id in self._scheduler.waiting_for(*reasons)]

    def is_computing_for(self, sequences: Container[LiveSequence]) -> bool:
        """Whether one of these sequences has been closed, but the copied state is still
        being computed.
        """
        return any(rest.sequence in sequences for rest in self._computing_rests)

    def caches_state_of(self, request: SequenceRequest) -> bool:
        """Whether later requests may start from state that is computed for this request."""
        return request.is_kept and self._cache_for(request) is not None

    def root_of(self, sequence: LiveSequence) -> Root:
        """The root of the chain of a sequence. There must be a cache."""
        assert self._cache is not None
        return self._cache.index.root(tenant=sequence.request.tenant, form=sequence.form)

    def cached_tokens(self, request: SequenceRequest, form: KVBits) -> int:
        """The number of tokens of a request's prompt that need no prefill in a form of keys and
        values. An estimate: the prefix is not pinned and may be evicted.
        """
        cache = self._cache_for(request)
        if cache is None:
            return 0
        return cache.cached_tokens(
            request.prompt_token_ids.packed,
            root=cache.index.root(tenant=request.tenant, form=form),
            may_move=request.is_kept,
        )

    def boundaries(self, request: SequenceRequest) -> tuple[int, ...]:
        """The positions at which spans of the request's prompt must end; none of them divides an
        indivisible part.
        """
        cache = self._cache_for(request)
        if cache is None or not request.is_kept:
            return ()
        boundaries = cache.boundaries(len(request.prompt_token_ids), request.resume_points)
        for start, end in self._engine.indivisible(request):
            boundaries = tuple(each for each in boundaries if not start < each < end)
        return boundaries

    def _cache_for(self, request: SequenceRequest) -> PrefixCache | None:
        """The cache; None if there is none, or if no token of the prompt may come from it."""
        if request.images and self._engine.image_reuse_refused:
            return None
        return self._cache if request.reusable_tokens > 0 else None

    # -- look up

    @_guarded(
        "request %s is prefilled from its first token",
        otherwise=lambda client, sequence: client._start_without_cache(sequence),
    )
    def look_up(self, sequence: LiveSequence) -> None:
        """Find the cached prefix of a waiting sequence, instead of one that was found before. As
        soon as the prefix is in memory, the scheduler may admit the sequence.
        """
        self.withdraw(sequence)
        request = sequence.request
        cache = self._cache_for(request)
        start = sequence.start
        # after certain failures, a sequence must not start from cached state
        if cache is None or start.trust is Trust.NOTHING:
            self._start_without_cache(sequence)
            return
        if self._must_postpone_lookups():
            self._look_up_later(sequence, reported=WaitReason.MEMORY)
            return
        # first commit the latest states: the next turn often arrives right after the answer that it
        # continues
        self.flush()
        began_at = self._ledger.clock()
        chain = bytes(sequence.chain)
        reusable_chain = _reusable_chain(sequence, chain)
        start.lookup = lookup = cache.lookup(
            reusable_chain,
            root=self.root_of(sequence),
            in_blocks_only=start.trust is Trust.BLOCKS,
            may_move=request.is_kept,
        )
        start.lookup_seconds += self._ledger.clock() - began_at
        if self._begin_to_wait_for_twin(
            sequence, reusable_chain, cached_tokens=lookup.cached_tokens
        ):
            return
        if request.is_kept:
            self._in_flight.announce(
                sequence.id,
                chain,
                tenant=_in_flight_tenant(sequence),
                stored_tokens=lookup.cached_tokens,
                boundaries=self.boundaries(request) or None,
            )
        self._take_read_blocks(sequence)

    def _with_pinned_prefix(self) -> list[LiveSequence]:
        """The sequences whose cached prefix is pinned: those that wait with it, and admitted ones
        until the engine has opened them.
        """
        return [each for each in self._ledger.live() if each.start.lookup is not None]

    def _must_postpone_lookups(self) -> bool:
        """Whether memory is critically short, so that only one waiting sequence may have its prefix
        in memory, and one has it.
        """
        return self._scheduler.admits_one_at_a_time and bool(self._with_pinned_prefix())

    def _look_up_later(self, sequence: LiveSequence, *, reported: WaitReason | None = None) -> None:
        """Give up the prefix found for a sequence; `advance` looks it up again. reported: what users
        see as the reason for the wait, if that is another one.
        """
        self.withdraw(sequence)
        self._ledger.set_wait_reason(sequence, WaitReason.LOOKUP, reported=reported)

    def _begin_to_wait_for_twin(
        self, sequence: LiveSequence, chain: bytes, *, cached_tokens: int
    ) -> bool:
        """Let a sequence wait for its twin, if there is one whose prefill saves enough. Returns
        whether it waits now. chain: the packed tokens that may come from the cache.
        """
        tenant = _in_flight_tenant(sequence)
        limit = len(chain) // TOKEN_BYTES - 1
        twin = self._in_flight.ahead_of(chain, cached_tokens, tenant=tenant, limit=limit)
        if twin is None or twin.tokens - cached_tokens < LEAST_SHARED_TOKENS:
            return False
        sequence.start.release()
        self._in_flight.wait(sequence.id, twin)
        self._ledger.set_wait_reason(sequence, WaitReason.TWIN)
        return True

    def _take_read_blocks(self, sequence: LiveSequence) -> None:
        """Take blocks that were read from disk. Once the whole prefix is in memory, the sequence may be
        admitted.
        """
        assert self._cache is not None
        assert sequence.start.lookup is not None
        if self._cache.advance(sequence.start.lookup):
            self._allow_admission(sequence)
        else:
            self._ledger.set_wait_reason(sequence, WaitReason.DISK)

    def _allow_admission(self, sequence: LiveSequence) -> None:
        """Let the scheduler admit a sequence, which starts after the prefix that was found for it. If
        images after that prefix have no features yet, the sequence waits for them first.
        """
        lookup = sequence.start.lookup
        cached_tokens = sequence.start.cached_tokens
        if self._engine.has_unprepared_images(
            sequence.request, start=cached_tokens, prepared=sequence.prepared_images
        ):
            self._ledger.set_wait_reason(sequence, WaitReason.IMAGES)
            return
        held_tokens = 0 if lookup is None else lookup.held_tokens
        sequence.scheduled.start_after(cached_tokens, held_tokens=held_tokens)
        self._ledger.allow_admission(sequence)

    def _prepare_images(self) -> None:
        """Compute the features of at most one image, to limit the delay of running sequences."""
        for sequence in self._waiting(WaitReason.IMAGES):
            has_computed = True
            with log_failure("an image of request %s is not prepared", sequence.id):
                has_computed = self._engine.prepare_images(
                    sequence.request,
                    start=sequence.start.cached_tokens,
                    prepared=sequence.prepared_images,
                )
            self._allow_admission(sequence)
            if has_computed:
                return

    @_guarded(
        "cached prefixes could not be restored; the requests prefill them",
        otherwise=lambda client: client._start_all_without_cache(),
    )
    def advance(self) -> None:
        """Take blocks that were read from disk, repeat lookups, prepare images, and do the cache's
        housekeeping.
        """
        if self._cache is not None:
            self._repeat_lost_lookups(self._cache)
            # if memory is critically short, only the oldest may keep its prefix in memory
            if self._scheduler.admits_one_at_a_time:
                for sequence in self._with_pinned_prefix()[1:]:
                    self._look_up_later(sequence, reported=WaitReason.MEMORY)
        if self.is_waited_for:
            self._prepare_images()
            # `look_up` would decide the same, but search all sequences each time
            must_postpone = self._must_postpone_lookups()
            for sequence in self._waiting(WaitReason.LOOKUP):
                if must_postpone:
                    self._look_up_later(sequence, reported=WaitReason.MEMORY)
                    continue
                self.look_up(sequence)
                is_critical = self._scheduler.admits_one_at_a_time
                must_postpone = is_critical and sequence.start.lookup is not None
            for sequence in self._waiting(WaitReason.DISK):
                self._take_read_blocks(sequence)
        if self._cache is not None:
            self._cache.maintain()

    def _start_without_cache(self, sequence: LiveSequence) -> None:
        """Let a waiting sequence start from its first token, without the cache."""
        sequence.start.release()
        self._allow_admission(sequence)

    def _start_all_without_cache(self) -> None:
        """Let every sequence that waits for the cache start from its first token."""
        for sequence in self._waiting(
            WaitReason.LOOKUP, WaitReason.DISK, WaitReason.TWIN, WaitReason.IMAGES
        ):
            self._in_flight.withdraw(sequence.id)
            self._start_without_cache(sequence)

    @_guarded(
        "requests that waited for %s start from their first token",
        otherwise=lambda client, sequence: client._start_all_without_cache(),
    )
    def withdraw(self, sequence: LiveSequence) -> None:
        """Record that a sequence has ended, is preempted or paused, or caches nothing any more: no
        other request waits for its prefill, and it does not look up or hold a prefix. Requests that
        waited for its prefill look up their prefixes again.
        """
        sequence.start.release()
        self._release_twins(self._in_flight.withdraw(sequence.id))

    def _release_twins(self, request_ids: Iterable[RequestId]) -> None:
        """Let requests that waited for another one's prefill look up their prefixes again."""
        for request_id in request_ids:
            self._ledger.set_wait_reason(self._ledger[request_id], WaitReason.LOOKUP)

    @_guarded("requests may start from blocks that were forgotten")
    def _repeat_lost_lookups(self, cache: PrefixCache) -> None:
        """Repeat the lookup of waiting sequences that would have started from forgotten blocks or
        lost live states. A sequence that was just admitted still starts from the blocks that it
        holds.
        """
        forgotten = cache.index.take_forgotten()
        for sequence in self._with_pinned_prefix():
            lookup = sequence.start.lookup
            if (
                lookup is not None
                and (lookup.has_lost_its_base or not forgotten.isdisjoint(lookup.plan.keys))
                and not sequence.scheduled.is_running
            ):
                self._look_up_later(sequence)

    # -- open

    def open(self, sequence: LiveSequence) -> None:
        """Open a sequence in the engine, with the prefix that was found for it. May raise; then the
        parked state that the sequence was to take over is no longer valid, unless the request is
        refused.
        """
        try:
            self._open(sequence)
        except InvalidRequest:
            raise
        except Exception:
            self._free_state_to_take_over(sequence)
            raise

    def _open(self, sequence: LiveSequence) -> None:
        """Open a sequence from its cached prefix, if it has one. Reports why it has none."""
        request = sequence.request
        start = sequence.start
        lookup = start.lookup
        cache = self._cache_for(request)
        base = None  # the live state to start from
        snapshots: Sequence[Snapshot] = ()
        copy_policy = None
        began_at = self._ledger.clock()
        start.begin()  # if the sequence fails, what it starts from now may be the cause
        if cache is None:
            is_off = self._cache is None  # otherwise, the request must compute all its tokens
            self._report_outcome(sequence, CacheOutcome.OFF if is_off else CacheOutcome.SCORED)
        elif lookup is None:
            self._report_outcome(sequence, CacheOutcome.FAILED)
            start.cursor = Cursor(self.root_of(sequence))
        elif lookup.cached_tokens:
            snapshots = cache.snapshots(lookup)
            base = cache.live.base(lookup)
        restored_at = self._ledger.clock()
        if cache is not None and request.is_kept:
            with log_failure("the KV of request %s is not cached", sequence.id):
                boundaries = self.boundaries(request) or (sequence.prompt_tokens,)
                copy_policy = CopyPolicy(
                    block_tokens=BLOCK_TOKENS,
                    cached_tokens=0 if lookup is None else lookup.plan.tokens,
                    boundaries=frozenset(boundaries),
                )
        state = self._engine.open(
            request,
            generated=tuple(sequence.answer.token_ids),
            capacity_tokens=sequence.scheduled.capacity_tokens,
            form=sequence.form,
            base=base,
            snapshots=snapshots,
            copy_policy=copy_policy,
        )
        sequence.is_open = True
        if cache is not None:
            self._record_open(cache, sequence, state, restore_seconds=restored_at - began_at)

    def _record_open(
        self,
        cache: PrefixCache,
        sequence: LiveSequence,
        state: LiveState,
        *,
        restore_seconds: float,
    ) -> None:
        """Record that the engine has opened a sequence, so that other sequences may start from its
        live state. Reports what it has started from, and unpins the blocks.
        """
        request = sequence.request
        lookup = sequence.start.lookup
        assert sequence.start.cursor is not None
        live = LiveChain(
            request_id=sequence.id,
            session_id=request.session_id,
            chain=sequence.chain,
            prompt_tokens=sequence.prompt_tokens,
            cursor=sequence.start.cursor,
        )
        sequence.live_chain = cache.live.begin(lookup, live, state)
        sequence.scheduled.held_tokens = sequence.live_chain.held_tokens
        if lookup is None:
            return
        report = lookup.report(
            lookup_seconds=sequence.start.lookup_seconds,
            waited_seconds=sequence.times.waited.get(WaitReason.TWIN, 0.0),
            restore_seconds=lookup.fetch_seconds + restore_seconds,
        )
        if sequence.start.report is None and not request.is_idle_work:
            used_tokens = self._read_ahead_runs.count_used_tokens(
                sequence.chain, tenant=request.tenant, cached_tokens=report.cached_tokens
            )
            report = msgspec.structs.replace(report, read_ahead_tokens=used_tokens)
        self._count_report(sequence, report)
        sequence.start.release()

    def _report_outcome(self, sequence: LiveSequence, outcome: CacheOutcome) -> None:
        """Report why a sequence starts without cached tokens."""
        waited_seconds = sequence.times.waited.get(WaitReason.TWIN, 0.0)
        report = CacheReport(
            outcome=outcome,
            lookup_seconds=sequence.start.lookup_seconds,
            waited_for_another=waited_seconds > 0,
            waited_seconds=waited_seconds,
        )
        self._count_report(sequence, report)

    def _count_report(self, sequence: LiveSequence, report: CacheReport) -> None:
        # only the first start counts: after a preemption, a sequence mostly finds its own tokens
        if sequence.start.report is None:
            sequence.start.report = report
            if not sequence.request.is_idle_work:
                self._ledger.counters.count_report(report)

    @_guarded("the parked state of request %s could not be freed")
    def _free_state_to_take_over(self, sequence: LiveSequence) -> None:
        """Free the parked state that a sequence was to take over, because it could not be opened."""
        lookup = sequence.start.lookup
        base = None if lookup is None else lookup.base
        # if the sequence already has a live chain, that chain is freed with the sequence
        if sequence.live_chain is None and base is not None and base.use == "moved":
            assert self._cache is not None
            self._cache.live.end_chain(base.chain)

    # -- memory and trust

    def make_room(self) -> None:
        """Free parked states for the next step, and tell the scheduler how much memory live states
        hold.
        """
        if self._cache is None:
            return
        missing_bytes = self._record_live_states(self._cache)
        if missing_bytes:
            with log_failure("parked states could not be freed"):
                self._cache.live.reclaim(missing_bytes)
                self._record_live_states(self._cache)
        self._repeat_lost_lookups(self._cache)

    def _record_live_states(self, cache: PrefixCache) -> int:
        """Tell the scheduler how much memory live states take. Returns the bytes of parked states that
        must be freed for the next step.
        """
        for chain in cache.live.newly_frozen():
            sequence = self._ledger.find(chain.request_id)
            if sequence is not None and sequence.live_chain is chain and sequence.is_open:
                sequence.scheduled.held_tokens = chain.held_tokens
        held = cache.live.held
        return self._scheduler.record_live_states(
            total_bytes=held.total_bytes, parked_bytes=held.parked_bytes
        )

    @_guarded("the blocks of request %s could not be forgotten")
    def distrust(self, sequence: LiveSequence) -> None:
        """Forget the state that a failed sequence computed, and damaged state that it started
        from. Its next attempt starts from blocks only, or if it did already, without the cache.
        """
        try:
            self._discard_uncommitted((sequence,))
            if self._cache is not None:
                self._cache.distrust(sequence.start, tuple(sequence.inserted))
        finally:
            sequence.start.lose_trust()

    @_guarded("the blocks that request %s started from could not be forgotten")
    def _blame_blocks(self, sequence: LiveSequence) -> None:
        """Forget the blocks that a sequence first started from, because it succeeded without the
        cache.
        """
        assert self._cache is not None
        self._cache.blame(sequence.start)

    def note_read_ahead(self, run: ReadAheadRun) -> None:
        """Remember a prompt that an earlier worker prefilled as idle work."""
        self._read_ahead_runs.add_run(run)

    def quantize(self, sequence: LiveSequence) -> StateBytes:
        """Quantize the state of an open sequence. No pending step may contain the sequence. Its
        later results are not cached. Raises what the device raises.
        """
        self.withdraw(sequence)
        live_chain = sequence.live_chain
        if live_chain is not None:
            assert self._cache is not None
            self._cache.live.seclude(live_chain)
        sizes = self._engine.quantize(sequence.id)
        sequence.is_quantized = True
        # frozen tokens may be shared with other states: nothing is reserved for them
        if live_chain is not None and live_chain.state is not None and live_chain.state.can_share:
            live_chain.held_tokens = live_chain.state.frozen_tokens
        return sizes

    # -- commit

    def release_sequence(
        self, sequence: LiveSequence, *, is_healthy: bool, has_ended: bool
    ) -> None:
        """Record that a sequence ends or is preempted, before it is closed in the engine. The part
        of its state that is not cached yet is copied out and cached later.

        is_healthy: False if the state must not be cached. has_ended: False if it continues later.
        """
        if sequence.is_open:
            if is_healthy:
                self._copy_rest(sequence, has_ended=has_ended)
            else:
                self._try_to_end_live(sequence)
        self.withdraw(sequence)
        if sequence.request.is_idle_work and is_healthy and has_ended:
            self._read_ahead_runs.add(sequence)

    @_guarded(
        "the rest of request %s is not cached",
        otherwise=lambda client, sequence, *, has_ended: client._try_to_end_live(sequence),
    )
    def _copy_rest(self, sequence: LiveSequence, *, has_ended: bool) -> None:
        """Copy the rest of an open sequence's state, which no step has copied yet."""
        if not self.caches_state_of(sequence.request):
            self._end_live(sequence)
            return
        if sequence.is_quantized:
            self._end_live(sequence)
            if has_ended:
                self._on_end(sequence)
            return
        rest = self._engine.copy_remaining(sequence.id)
        if rest is not None:
            self._computing_rests.append(_UncommittedRest(sequence, rest, has_ended))
        if rest is None or not has_ended:
            self._end_live(sequence)
        if rest is None and has_ended:
            self._on_end(sequence)

    @_guarded("the state of request %s could not be freed")
    def _try_to_end_live(self, sequence: LiveSequence) -> None:
        """As `_end_live`, but a failure is only logged."""
        self._end_live(sequence)

    def _end_live(self, sequence: LiveSequence) -> None:
        """End a sequence's live chain: no other sequence may start from its state any more."""
        live_chain = sequence.live_chain
        sequence.live_chain = None
        if live_chain is not None:
            assert self._cache is not None
            self._cache.live.end_chain(live_chain)

    @_guarded("the states of a failed step could not be freed")
    def _discard_uncommitted(self, sequences: Container[LiveSequence]) -> None:
        """Discard the state that was copied out of these sequences but is not committed."""
        rests = (*self._computing_rests, *self._computed_rests)
        discarded = [rest.sequence for rest in rests if rest.sequence in sequences]
        self._computing_rests = [
            rest for rest in self._computing_rests if rest.sequence not in sequences
        ]
        self._computed_rests = [
            rest for rest in self._computed_rests if rest.sequence not in sequences
        ]
        with ExitStack() as leaving:  # runs all, even if one raises
            for sequence in discarded:
                leaving.callback(self._end_live, sequence)

    def end_step(self, step: DispatchedStep, results: tuple[SpanResult, ...] | None) -> None:
        """Commit the state that a step copied out of the sequences that have not failed in it, and
        the state of closed sequences that is computed by now. Discard the state of the others.

        results: None if the whole step failed.
        """
        if results is None:
            self._discard_uncommitted(step.sequences)
            return
        if not step.sequences:
            return
        self._commit_step(step.pending, step.healthy(results))
        self._discard_uncommitted(step.unhealthy(results))
        for _, sequence, result in step.current_results(results):
            is_success = bool(result.token_ids) and not (result.failure or result.refusal)
            if is_success and sequence.start.has_suspects and self._ledger.is_live(sequence):
                self._blame_blocks(sequence)

    @_guarded("the state that a step computed is not cached")
    def _commit_step(
        self, pending: PendingStep | None, sequences: tuple[LiveSequence, ...]
    ) -> None:
        """Commit what a step copied out of these sequences, and the rests that it computed."""
        by_id = {sequence.id: sequence for sequence in sequences}
        copied = {} if pending is None else self._engine.take_copies(pending)
        for request_id, copies in copied.items():
            # a request of a forgotten session still copies blocks, but stores none
            if request_id in by_id and self.caches_state_of(by_id[request_id].request):
                self._commit(by_id[request_id], copies)
        self._commit_computed_rests()

    def flush(self) -> bool:
        """Commit all state that was copied out; waits for the device. Returns False if there was
        none.
        """
        if not (self._computing_rests or self._computed_rests):
            return False
        self._commit_computed_rests()
        self._commit_computed_rests()
        return True

    def _commit_computed_rests(self) -> None:
        """Commit the computed state of closed sequences. The next call commits the state that is
        still being computed.
        """
        while self._computed_rests:
            rest = self._computed_rests.pop(0)
            self._commit_rest(rest.sequence, rest)
        self._computed_rests = self._computing_rests
        self._computing_rests = []

    @_guarded(
        "the rest of request %s is not cached",
        otherwise=lambda client, sequence, rest: client._try_to_end_live(sequence),
    )
    def _commit_rest(self, sequence: LiveSequence, rest: _UncommittedRest) -> None:
        """Commit the rest of a closed sequence, and park its state if it has ended."""
        is_finite = self._commit(sequence, rest.copies)
        live_chain = sequence.live_chain
        if rest.has_ended and live_chain is not None and is_finite:
            assert self._cache is not None
            sequence.live_chain = None
            self._cache.live.park(live_chain, bytes(sequence.chain))
        self._end_live(sequence)
        if rest.has_ended:
            self._on_end(sequence)

    def _commit(self, sequence: LiveSequence, copies: Sequence[Snapshot]) -> bool:
        """Commit copies of a sequence's state. Returns False if not all their values are finite."""
        assert self._cache is not None
        assert sequence.start.cursor is not None, "committed before it was opened"
        sequence.inserted += self._cache.store_snapshots(
            sequence.start.cursor, sequence.chain, copies, live=sequence.live_chain
        )
        if blocks := [each for each in copies if each.tokens]:
            self._release_twins(self._in_flight.record_progress(sequence.id, blocks[-1].end))
        is_finite = all(each.is_finite for each in copies)
        if not is_finite:
            logger.debug(
                "the KV of request %s is not cached: its values are not finite", sequence.id
            )
        return is_finite

    # -- the cache as a whole

    def figures(self) -> CacheFigures | None:
        """Figures of the cache and of waiting requests; None without a cache."""
        if self._cache is None:
            return None
        return msgspec.structs.replace(
            self._cache.figures(), waiting=self._in_flight.waiting, waits=self._in_flight.waits
        )

    def close(self, *, saves_all: bool) -> None:
        """Write queued blocks to disk, or all unsaved ones, and close the cache."""
        if self._cache is not None:
            with log_failure("some cached blocks could not be saved to disk"):
                self._cache.close(saves_all=saves_all)


class ReadAheadRuns:
    """Prompts that were prefilled recently as idle work, and that no request has used yet. They
    only serve to count how many of these tokens are used.
    """

    def __init__(self) -> None:
        self._runs: deque[ReadAheadRun] = deque(maxlen=_MOST_REMEMBERED)

    def add(self, sequence: LiveSequence) -> None:
        """Record that a sequence has prefilled its prompt, or a part of it, as idle work."""
        report = sequence.start.report
        start = 0 if report is None else report.cached_tokens
        if sequence.prefilled_tokens > start:
            request = sequence.request
            token_ids = request.prompt_token_ids[: sequence.prefilled_tokens]
            self.add_run(ReadAheadRun(tenant=request.tenant, token_ids=token_ids, start=start))

    def add_run(self, run: ReadAheadRun) -> None:
        """Remember a prompt that this worker or an earlier one prefilled as idle work."""
        self._runs.append(run)

    def count_used_tokens(
        self, chain: bytes | bytearray, *, tenant: str, cached_tokens: int
    ) -> int:
        """Return how many of the first `cached_tokens` tokens of a chain were prefilled as idle
        work. Each token is counted once, for the first request that uses it.

        Tokens that were evicted do not count, because the request prefills them itself.
        """
        used_tokens = 0
        for run in tuple(self._runs):
            shared_tokens = 0
            if run.tenant == tenant:
                shared_tokens = common_tokens(run.token_ids.packed, chain)
            if shared_tokens > run.start:
                used_tokens += max(0, min(shared_tokens, cached_tokens) - run.start)
                self._runs.remove(run)
        return used_tokens


def _in_flight_tenant(sequence: LiveSequence) -> str:
    """The tenant name under which a sequence waits for others that prefill the same prefix. The
    name contains the form of keys and values, because only sequences in the same form compute the
    same KV.
    """
    return f"{sequence.form} {sequence.request.tenant}"


def _reusable_chain(sequence: LiveSequence, chain: bytes) -> bytes:
    """The part of a chain that may come from the cache, plus one token that is always prefilled,
    because the first new token is sampled from its logits.
    """
    request = sequence.request
    is_all_reusable = request.reusable_tokens + 1 == sequence.prompt_tokens
    return chain if is_all_reusable else chain[: (request.reusable_tokens + 1) * TOKEN_BYTES]
