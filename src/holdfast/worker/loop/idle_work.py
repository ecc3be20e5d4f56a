"""Prefills prompts ahead while the device is idle: one at a time, the newest first.

A new request waits for at most one idle-work step. Then the prompt that is being prefilled is
closed like a cancelled request, so that all state computed so far can be reused, even by the new
request. The prefill continues when the device is idle again, unless the conversation has continued
since then or memory is short.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.errors import InvalidRequest, QueueFull
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import FinishReason
from holdfast.wire.requests import common_tokens
from holdfast.worker.kv.bits import KVBits
from holdfast.worker.loop.cache_client import CacheClient
from holdfast.worker.loop.lifetimes import Lifetimes
from holdfast.worker.loop.sequences import Ledger, LiveSequence
from holdfast.worker.scheduler.queue import SequenceCosts
from holdfast.worker.scheduler.scheduler import Scheduler

MOST_WAITING = 8  # conversations; if there are more, the oldest is dropped


class IdleWork:
    """The prompts to prefill ahead: those that wait, and the one that the scheduler runs.

    Device thread only.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        scheduler: Scheduler,
        cache: CacheClient,
        lifetimes: Lifetimes,
        costs_of: Callable[[KVBits], SequenceCosts | None] = lambda kv_bits: None,
    ) -> None:
        """costs_of: returns the KV memory that a sequence with these bits takes; None: the
        scheduler's default.
        """
        self._ledger = ledger
        self._scheduler = scheduler
        self._cache = cache
        self._lifetimes = lifetimes
        self._costs_of = costs_of
        # oldest first; known to the ledger, not to the scheduler
        self._waiting: list[LiveSequence] = []
        self._running: LiveSequence | None = None

    def accept(self, request: SequenceRequest, kv_bits: KVBits = "native") -> None:
        """Accept a prompt to prefill ahead; drop it immediately if its KV would not be cached."""
        sequence = self._ledger.accept(request, kv_bits)
        self._wait(sequence)
        if not self._cache.keeps(request):
            self._drop(sequence)

    def give_way(self, request: SequenceRequest) -> None:
        """Stop idle work, because a new request has arrived. The state computed so far is cached.
        Prompts whose conversation the request continues are dropped.

        No step of idle work may be under way.
        """
        running = self._current()
        if running is not None:
            self._running = None
            self._wait(self._lifetimes.set_aside(running))
            self._cache.read_ahead.add(running)
        for sequence in tuple(self._waiting):
            if _is_stale(sequence.request, request):
                self._drop(sequence)

    def begin(self) -> None:
        """Give the newest prompt to the scheduler if there is no other work."""
        if self._current() is not None or not self._waiting:
            return
        self._waiting = [sequence for sequence in self._waiting if self._ledger.is_live(sequence)]
        if not self._waiting or len(self._ledger.live()) > len(self._waiting):
            return
        sequence = self._waiting.pop()
        request = sequence.request
        try:
            self._scheduler.submit(
                sequence.id,
                prompt_tokens=sequence.prompt_tokens,
                max_tokens=request.max_tokens,
                boundaries=self._cache.boundaries(request),
                indivisible=self._cache.indivisible(request),
                is_ready=False,
                is_idle_work=True,
                costs=self._costs_of(sequence.kv_bits),
            )
        except (QueueFull, InvalidRequest):  # too long, or needs too much memory
            self._drop(sequence)
        else:
            self._running = sequence
            self._cache.look_up(sequence)

    def give_up_if_stuck(self) -> None:
        """Drop a ready prompt that did not start although there was no other work: it needs more
        memory than is free.
        """
        sequence = self._current()
        if sequence is None or self._cache.is_waited_for:
            return
        if self._scheduler.is_waiting(sequence.id):
            self._running = None
            self._drop(sequence)

    def forget_session(self, session_id: str, *, tenant: str) -> None:
        """Drop the prompts of a closed session."""
        running = self._current()
        for sequence in (*self._waiting, *filter(None, (running,))):
            if (sequence.request.session_id, sequence.request.tenant) == (session_id, tenant):
                self._drop(sequence)

    def check_invariants(self) -> None:
        """Assert that idle work runs only without requests, and that no prompt is lost."""
        running = self._current()
        others = [each for each in self._ledger.live() if not each.request.is_idle_work]
        assert running is None or not others, "idle work runs together with a request"
        assert len(self._waiting) <= MOST_WAITING, "too many conversations wait"
        idle = [each for each in self._ledger.live() if each.request.is_idle_work]
        assert all(each is running or each in self._waiting for each in idle), "idle work is lost"

    def _current(self) -> LiveSequence | None:
        """The prompt that is being prefilled, or None. If its prefill has just ended, the
        prefilled tokens are recorded first.
        """
        if self._running is not None and not self._ledger.is_live(self._running):
            self._cache.read_ahead.add(self._running)
            self._running = None
        return self._running

    def _wait(self, sequence: LiveSequence) -> None:
        self._waiting.append(sequence)
        for each in self._waiting[:-MOST_WAITING]:
            self._drop(each)

    def _drop(self, sequence: LiveSequence) -> None:
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if self._ledger.is_live(sequence):
            self._lifetimes.drop(sequence, FinishReason.CANCELLED)


def _is_stale(ahead: SequenceRequest, request: SequenceRequest) -> bool:
    """Whether a request continues, in any way, the conversation that a prompt is prefilled for."""
    assert ahead.read_ahead is not None
    known = ahead.read_ahead.known_tokens
    chain = request.prompt_token_ids.packed
    return (
        ahead.tenant == request.tenant
        and common_tokens(ahead.prompt_token_ids.packed, chain) >= known > 0
    )
