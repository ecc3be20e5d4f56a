"""The life of an accepted request from its admission to its Finished: opened, given room,
preempted, given up, closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from holdfast.errors import InvalidRequest
from holdfast.wire.events import FinishReason
from holdfast.worker.loop.cache_client import CacheClient
from holdfast.worker.loop.device_steps import DeviceFailed, device_call
from holdfast.worker.loop.parts import StepEngine
from holdfast.worker.loop.sequences import Ledger, LiveSequence
from holdfast.worker.scheduler.admission import Reservation
from holdfast.worker.scheduler.scheduler import Scheduler

logger = logging.getLogger("holdfast.worker")


class Lifetimes:
    """Keeps engine, scheduler, cache and ledger in step about who is there. Device thread only."""

    def __init__(
        self,
        *,
        engine: StepEngine[Any],
        scheduler: Scheduler,
        ledger: Ledger,
        cache: CacheClient,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._scheduler, self._ledger, self._cache, self._clock = (
            engine,
            scheduler,
            ledger,
            cache,
            clock,
        )

    def preempt(self, sequence: LiveSequence) -> None:
        """It gives its room back, and waits again."""
        self._close(sequence, for_good=False)
        # else it is looked up when it goes on
        if not self._scheduler.is_paused(sequence.request.request_id):
            self._cache.look_up(sequence)

    def grow(self, growth: Reservation) -> None:
        """Give an open sequence more room; it ends when there is none."""
        sequence = self._ledger.find(growth.request_id)
        if sequence is None or not sequence.is_open:
            return
        sequence.capacity_tokens = growth.capacity_tokens
        try:
            with device_call():
                self._engine.grow(growth.request_id, growth.capacity_tokens)
        except DeviceFailed as failure:
            logger.exception("request %s could not be given more room", growth.request_id)
            self.drop(
                sequence, FinishReason.FAILED, error=f"no more room for the request: {failure}"
            )

    def admit(self, admitted: Iterable[Reservation]) -> None:
        """Open those that may run from now on."""
        unopened: list[tuple[LiveSequence, DeviceFailed]] = []
        for admission in admitted:
            sequence = self._ledger[admission.request_id]
            # to one that was admitted with it
            if sequence.lookup is not None and sequence.lookup.has_lost_its_base:
                self._scheduler.restart(admission.request_id)
                self._cache.release(sequence)
                self._cache.withdraw(sequence)
                self._cache.look_up(sequence)
                continue
            sequence.admit(now=self._clock(), capacity_tokens=admission.capacity_tokens)
            try:
                with device_call():
                    self._open(sequence)
            except DeviceFailed as raised:
                unopened.append((sequence, raised))
        # when the others have begun: nobody is between waiting and running
        for sequence, failure in unopened:
            if isinstance(failure.__cause__, InvalidRequest):  # what is cached is not to blame
                logger.warning(
                    "request %s cannot be served: %s",
                    sequence.request.request_id,
                    failure.__cause__.loggable,
                )
                self.drop(sequence, FinishReason.REFUSED, error=str(failure.__cause__))
                continue
            self._cache.could_not_begin(sequence)
            if sequence.can_begin_anew:
                self.give_up_state(sequence, f"it cannot begin from what is cached: {failure}")
                continue
            logger.error(
                "request %s could not be opened", sequence.request.request_id, exc_info=failure
            )
            self.drop(
                sequence, FinishReason.FAILED, error=f"the request could not be started: {failure}"
            )

    def _open(self, sequence: LiveSequence) -> None:
        prefix, keep = self._cache.opening(sequence)
        state = self._engine.open(
            sequence.request,
            generated=tuple(sequence.generated),
            capacity_tokens=sequence.capacity_tokens,
            prefix=prefix,
            keep=keep,
        )
        sequence.is_open = True
        self._cache.begin(sequence, state)

    def reopen_cold(self, sequence: LiveSequence) -> None:
        """Open an open sequence anew with nothing read, after a failure.

        Raises what the engine raises.
        """
        self._close(sequence, is_healthy=False)
        sequence.prompt_logprobs.clear()
        self._cache.reused_nothing(sequence)
        sequence.began_from, sequence.began_live = (), None
        generated = tuple(sequence.generated)
        self._engine.open(
            sequence.request, generated=generated, capacity_tokens=sequence.capacity_tokens
        )
        sequence.is_open = True
        self._scheduler.hold_apart(sequence.request.request_id, 0)

    def wait_for_room(self, sequence: LiveSequence) -> bool:
        """Have an open sequence read again later, if what it shared, read anew, has no room beside
        the others now.
        """
        request_id = sequence.request.request_id
        if self._scheduler.has_room_apart(request_id):
            return False
        sequence.give_up_state()
        self._close(sequence, is_healthy=False)
        self._cache.reused_nothing(sequence)
        sequence.began_from, sequence.began_live = (), None
        self._scheduler.restart(request_id)
        return True

    def give_up_state(self, sequence: LiveSequence, reason: str) -> None:
        """Keep nothing of what a sequence has computed.

        If what it began from may be to blame, have it read again without.
        """
        request_id = sequence.request.request_id
        is_live = self._ledger.is_live(sequence)
        begins_anew = is_live and sequence.can_begin_anew
        if is_live:
            logger.warning(
                "request %s %s: %s",
                request_id,
                sequence.next_attempt if begins_anew else "fails",
                reason,
            )
        self._cache.distrust(sequence, live=self._ledger.live())
        sequence.give_up_state()
        if begins_anew:
            self._close(sequence, is_healthy=False)
            self._cache.reused_nothing(sequence)
            blames_live_state, sequence.is_cold = (
                sequence.may_blame_live_state,
                not sequence.may_blame_live_state,
            )
            sequence.avoids_live = True
            self._scheduler.restart(request_id)
            if blames_live_state:
                self._cache.look_up(sequence)

    def drop(self, sequence: LiveSequence, reason: FinishReason, *, error: str = "") -> None:
        """End a sequence of which the scheduler does not know yet."""
        self._scheduler.cancel(sequence.request.request_id)
        self.finish(sequence, reason, error=error)

    def finish(self, sequence: LiveSequence, reason: FinishReason, *, error: str = "") -> None:
        """End a sequence that the scheduler has forgotten."""
        self._ledger.finish(sequence, reason, error=error)
        self._close(sequence, is_healthy=reason is not FinishReason.FAILED)

    def set_aside(self, sequence: LiveSequence) -> LiveSequence:
        """Close a sequence of which nothing was said yet, to begin it anew some time; what it has
        read is kept.

        Returns the one that stands for it from now on, of which the scheduler does not know.
        """
        self._scheduler.cancel(sequence.request.request_id)
        fresh = self._ledger.set_back(sequence)
        self._close(sequence)
        return fresh

    def cancel_all(self, *, unhealthy: tuple[LiveSequence, ...]) -> None:
        """End all sequences; of those that are `unhealthy` nothing is kept."""
        for sequence in self._ledger.live():
            self._ledger.finish(sequence, FinishReason.CANCELLED)
            self._close(sequence, is_healthy=sequence not in unhealthy)

    def _close(
        self, sequence: LiveSequence, *, is_healthy: bool = True, for_good: bool = True
    ) -> None:
        self._cache.release(sequence)
        if sequence.is_open:
            sequence.is_open = False
            if is_healthy:
                self._cache.copy_rest(sequence, for_good=for_good)
            else:
                self._cache.give_up(sequence)
            self._engine.close(sequence.request.request_id)
        self._cache.withdraw(sequence)
