"""Looking up what waiting sequences can begin from: at arrival, after a preemption, and again when
what was found is gone.

A sequence waits in the scheduler's queue, without being ready, while what it begins from comes from
disk, or while another one reads what both begin with. Whatever is freed here is looked up again in
`advance`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from holdfast.store.block import BlockKey
from holdfast.wire.requests import RequestId
from holdfast.wire.token_ids import TOKEN_BYTES
from holdfast.worker.loop.parts import Cache
from holdfast.worker.loop.sequences import LiveSequence
from holdfast.worker.prefix.in_flight import InFlightPrefills
from holdfast.worker.scheduler.scheduler import Scheduler

LEAST_SHARED_TOKENS = 64  # fewer are read faster than waited for


class Lookups:
    """Sequences that are to begin, by what they wait for.

    Device thread only; may raise what the cache raises.
    """

    def __init__(self, cache: Cache, scheduler: Scheduler, *, clock: Callable[[], float]) -> None:
        self._cache, self._scheduler, self._clock = cache, scheduler, clock
        self._in_flight = InFlightPrefills()
        # wait until another one has read what they share
        self._behind: dict[RequestId, LiveSequence] = {}
        self._fetching: list[LiveSequence] = []  # wait for the disk
        # no longer wait for another one, and have to be looked up again
        self._to_repeat: list[LiveSequence] = []

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody waits for what only `advance` can find out."""
        return bool(self._fetching or self._to_repeat)

    @property
    def has_to_repeat(self) -> bool:
        """Whether `advance` will look something up again."""
        return bool(self._to_repeat)

    @property
    def waiting(self) -> int:
        """Requests that wait for another one's reading now."""
        return self._in_flight.waiting

    @property
    def waits(self) -> int:
        """How often one has waited so, since the start."""
        return self._in_flight.waits

    def begin(self, sequence: LiveSequence) -> None:
        """Find what a waiting sequence can begin from, and tell the scheduler when it is at hand."""
        began_at = self._clock()
        sequence.stop_waiting(now=began_at)
        request = sequence.request
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
                boundaries=self._cache.boundaries(
                    len(request.prompt_token_ids), request.branch_points
                )
                or None,
            )
        if not self._begin_if_it_is_there(sequence):
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

    def _begin_if_it_is_there(self, sequence: LiveSequence) -> bool:
        assert sequence.lookup is not None
        is_there = self._cache.advance(sequence.lookup)
        if is_there:
            lookup = sequence.lookup
            self._scheduler.begin_behind(
                sequence.request.request_id, lookup.cached_tokens, held_tokens=lookup.held_tokens
            )
        return is_there

    def advance(self) -> None:
        """Look up again whoever is free to, and let those begin whose blocks have come from the
        disk.
        """
        while self._to_repeat:
            sequence = self._to_repeat.pop(0)
            try:
                self.begin(sequence)
            except BaseException:
                self.restart_cold(sequence)  # the others are looked up the next time
                raise
        for sequence in self._fetching[:]:
            if self._begin_if_it_is_there(sequence):
                self._fetching.remove(sequence)

    def restart_cold(self, sequence: LiveSequence) -> None:
        """Let a waiting sequence begin from its first token."""
        sequence.stop_waiting(now=self._clock())
        self.release(sequence)
        self._scheduler.begin_behind(sequence.request.request_id, 0)

    def restart_all_cold(self) -> None:
        """Let all that wait, for the disk or for another one, begin from their first token."""
        waiting = (*self._fetching, *self._behind.values(), *self._to_repeat)
        self._behind.clear()
        self._to_repeat.clear()
        for sequence in waiting:
            self._in_flight.withdraw(sequence.request.request_id)
            self.restart_cold(sequence)

    def withdraw(self, sequence: LiveSequence) -> None:
        """The sequence has ended, is preempted or paused: it neither reads nor waits.

        Who waits for it is looked up again.
        """
        self._behind.pop(sequence.request.request_id, None)
        if sequence in self._to_repeat:
            self._to_repeat.remove(sequence)
        self._free(self._in_flight.withdraw(sequence.request.request_id))

    def progress(self, sequence: LiveSequence, tokens: int) -> None:
        """The first tokens of a sequence are in the cache now: who has waited for that is looked up
        again.
        """
        self._free(self._in_flight.progress(sequence.request.request_id, tokens))

    def repeat_without(self, gone: tuple[BlockKey, ...], live: Iterable[LiveSequence]) -> None:
        """Blocks or live states are gone: who of `live` was to begin from them is looked up again.

        Who has just been admitted begins from what it holds, as those do that have begun: it finds
        out by itself.
        """
        lost = set(gone)
        for other in live:
            request_id = other.request.request_id
            lookup = other.lookup
            stands_on_it = lookup is not None and (
                lookup.has_lost_its_base or not lost.isdisjoint(lookup.plan.keys)
            )
            if stands_on_it and self._scheduler.is_waiting(request_id):
                self._scheduler.hold_back(request_id)
                self.release(other)
                self._to_repeat.append(other)
                self._free(self._in_flight.withdraw(request_id))

    def release(self, sequence: LiveSequence) -> None:
        """Let go of what a sequence was to begin from: it has begun, or never will."""
        if sequence.lookup is not None:
            sequence.lookup.release()
            sequence.lookup = None
            if sequence in self._fetching:
                self._fetching.remove(sequence)

    def _free(self, request_ids: tuple[RequestId, ...]) -> None:
        self._to_repeat += [self._behind.pop(request_id) for request_id in request_ids]


def _reusable(sequence: LiveSequence, chain: bytes) -> bytes:
    """The part of a chain that may be looked up: of all but its last token it is found out what is
    cached.
    """
    request = sequence.request
    read_to_its_end = request.reusable_tokens == len(request.prompt_token_ids) - 1
    return chain if read_to_its_end else chain[: (request.reusable_tokens + 1) * TOKEN_BYTES]
