"""Prefills prompts ahead while the device is idle: one at a time, the newest first.

A new request waits for at most one idle-work step. Then the prompt that is being prefilled is
closed like a cancelled request, so that all state computed so far can be reused, even by the new
request. The prefill continues when the device is idle again, unless the conversation has continued
since then or memory is short.

All these prompts are in the ledger; the scheduler has only the one that is being prefilled.
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
        scheduler: Scheduler,
        ledger: Ledger,
        cache_client: CacheClient,
        lifetimes: Lifetimes,
    ) -> None:
        self._ledger = ledger
        self._scheduler = scheduler
        self._cache_client = cache_client
        self._lifetimes = lifetimes
        # the prompt that the scheduler has, even if it has ended since (`_current_prompt`)
        self._submitted: LiveSequence | None = None

    def accept(self, sequence: LiveSequence) -> None:
        """Accept a prompt to prefill ahead, or drop it immediately if its KV would not be cached."""
        self._ledger.accept(sequence)
        self._drop_oldest()
        if not self._cache_client.caches_state_of(sequence.request):
            self._drop(sequence)

    def give_way(self, request: SequenceRequest) -> None:
        """Stop idle work, because a new request has arrived. The state computed so far is cached.
        Prompts whose conversation the request continues are dropped.

        No step of idle work may be under way.
        """
        current = self._current_prompt()
        if current is not None:
            self._submitted = None
            self._lifetimes.suspend(current)
            self._drop_oldest()
        for sequence in self._prompts():
            if _is_stale(sequence.request, request):
                self._drop(sequence)

    def begin(self) -> None:
        """Give the newest prompt to the scheduler if there is no other work."""
        live = self._ledger.live()  # oldest first
        if self._current_prompt() is not None or not all(
            each.scheduled.is_idle_work for each in live
        ):
            return
        if not live:
            return
        sequence = live[-1]
        try:
            self._scheduler.submit(sequence.scheduled)
        except (QueueFull, InvalidRequest):  # too long, or needs too much memory
            self._drop(sequence)
        else:
            self._submitted = sequence
            self._cache_client.look_up(sequence)

    def give_up_if_stuck(self) -> None:
        """Drop the prompt that the scheduler has but does not start, although there is no other work:
        it needs too much memory.
        """
        sequence = self._current_prompt()
        if sequence is None or self._cache_client.is_waited_for:
            return
        if not sequence.scheduled.is_running:
            self._drop(sequence)

    def forget_session(self, session_id: str, *, tenant: str) -> None:
        """Drop the prompts of a session that is being closed."""
        for sequence in self._prompts():
            if (sequence.request.session_id, sequence.request.tenant) == (session_id, tenant):
                self._drop(sequence)

    def check_invariants(self) -> None:
        """Assert that idle work runs only without requests, and that few prompts wait."""
        current = self._current_prompt()
        prompts = self._prompts()
        assert current is None or len(prompts) == len(self._ledger.live()), (
            "idle work runs together with a request"
        )
        waiting = len(prompts) - (current is not None)
        assert waiting <= MOST_WAITING, "too many conversations wait"

    def _prompts(self) -> list[LiveSequence]:
        """The prompts that wait and the one that is being prefilled, oldest first."""
        return [each for each in self._ledger.live() if each.scheduled.is_idle_work]

    def _current_prompt(self) -> LiveSequence | None:
        """The sequence whose prompt is being prefilled as idle work; None if there is none."""
        if self._submitted is not None and not self._ledger.is_live(self._submitted):
            self._submitted = None
        return self._submitted

    def _drop_oldest(self) -> None:
        """Drop the oldest waiting prompts if more than `MOST_WAITING` wait."""
        waiting = [each for each in self._prompts() if each is not self._submitted]
        for sequence in waiting[:-MOST_WAITING]:
            self._drop(sequence)

    def _drop(self, sequence: LiveSequence) -> None:
        self._lifetimes.drop(sequence, FinishReason.CANCELLED)


def _is_stale(idle_request: SequenceRequest, request: SequenceRequest) -> bool:
    """Whether a request continues, in any way, the conversation that idle work prefills: it begins
    with all tokens that belong to the conversation so far.
    """
    assert idle_request.read_ahead is not None
    conversation_tokens = idle_request.read_ahead.known_tokens
    packed = request.prompt_token_ids.packed
    return (
        idle_request.tenant == request.tenant
        and common_tokens(idle_request.prompt_token_ids.packed, packed) >= conversation_tokens > 0
    )
