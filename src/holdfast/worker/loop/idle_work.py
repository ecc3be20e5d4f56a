"""Prefills prompts ahead while the device is idle: one at a time, the newest first.

A new request waits for at most one idle-work step. Then the prompt that is being prefilled is
closed like a cancelled request, so that all state computed so far can be reused, even by the new
request. The prefill continues when the device is idle again, unless the conversation has continued
since then or memory is short.
"""

from __future__ import annotations

from holdfast.errors import InvalidRequest, QueueFull
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import FinishReason
from holdfast.wire.requests import common_tokens
from holdfast.worker.loop.cache_client import CacheClient
from holdfast.worker.loop.lifetimes import Lifetimes
from holdfast.worker.loop.sequences import Ledger, LiveSequence
from holdfast.worker.scheduler.scheduler import Scheduler

MOST_WAITING = 8  # conversations; if there are more, the oldest is dropped


class IdleWork:
    """The prompts to prefill ahead: the scheduler has one of them at most. Device thread only."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        scheduler: Scheduler,
        cache_client: CacheClient,
        lifetimes: Lifetimes,
    ) -> None:
        self._ledger = ledger
        self._scheduler = scheduler
        self._cache_client = cache_client
        self._lifetimes = lifetimes
        self._running: LiveSequence | None = None  # the others wait in the ledger

    def accept(self, sequence: LiveSequence) -> None:
        """Accept a prompt to prefill ahead, or drop it immediately if its KV would not be cached."""
        self._ledger.accept(sequence)
        self._drop_oldest()
        if not self._cache_client.keeps(sequence.request):
            self._drop(sequence)

    def give_way(self, request: SequenceRequest) -> None:
        """Stop idle work, because a new request has arrived. The state computed so far is cached.
        Prompts whose conversation the request continues are dropped.

        No step of idle work may be under way.
        """
        running = self._current()
        if running is not None:
            self._running = None
            self._lifetimes.suspend(running)
            self._drop_oldest()
        for sequence in self._prompts():
            if _is_stale(sequence.request, request):
                self._drop(sequence)

    def begin(self) -> None:
        """Give the newest prompt to the scheduler if there is no other work."""
        live = self._ledger.live()
        if self._current() is not None or not all(each.scheduled.is_idle_work for each in live):
            return
        if not live:
            return
        sequence = live[-1]
        try:
            self._scheduler.submit(sequence.scheduled)
        except (QueueFull, InvalidRequest):  # too long, or needs too much memory
            self._drop(sequence)
        else:
            self._running = sequence
            self._cache_client.look_up(sequence)

    def give_up_if_stuck(self) -> None:
        """Drop a ready prompt that did not start without other work: it needs too much memory."""
        sequence = self._current()
        if sequence is None or self._cache_client.is_waited_for:
            return
        if not sequence.scheduled.is_running:
            self._drop(sequence)

    def forget_session(self, session_id: str, *, tenant: str) -> None:
        self._current()
        for sequence in self._prompts():
            if (sequence.request.session_id, sequence.request.tenant) == (session_id, tenant):
                self._drop(sequence)

    def check_invariants(self) -> None:
        """Assert that idle work runs only while there is no request, and that few prompts wait."""
        running = self._current()
        prompts = self._prompts()
        assert running is None or len(prompts) == len(self._ledger.live()), (
            "idle work runs together with a request"
        )
        waiting = len(prompts) - (running is not None)
        assert waiting <= MOST_WAITING, "too many conversations wait"

    def _prompts(self) -> list[LiveSequence]:
        """The prompts that wait and the one that is being prefilled, oldest first."""
        return [each for each in self._ledger.live() if each.scheduled.is_idle_work]

    def _current(self) -> LiveSequence | None:
        """The sequence whose prompt is being prefilled as idle work; None if there is none."""
        if self._running is not None and not self._ledger.is_live(self._running):
            self._running = None
        return self._running

    def _drop_oldest(self) -> None:
        waiting = [each for each in self._prompts() if each is not self._running]
        for sequence in waiting[:-MOST_WAITING]:
            self._drop(sequence)

    def _drop(self, sequence: LiveSequence) -> None:
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
