"""The lifetimes of accepted requests from admission to Finished: open, grow, preempt, restart,
close.

Before a sequence is closed in the engine, the part of its state that the prefix cache lacks is
copied, to be cached. A sequence that restarts is prefilled again, but keeps its answer so far.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from holdfast.errors import InvalidRequest
from holdfast.wire.events import FinishReason
from holdfast.wire.requests import RequestId
from holdfast.worker.kv.bits import AUTO_WHEN_SHORT
from holdfast.worker.loop.cache_client import CacheClient
from holdfast.worker.loop.device_steps import DeviceFailed, device_call
from holdfast.worker.loop.sequences import Ledger, LiveSequence
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.sequence import SequenceCosts

if TYPE_CHECKING:  # this module imports MLX, which is not needed here at run time
    from holdfast.worker.engine.engine import Engine

logger = logging.getLogger("holdfast.worker")


class Lifetimes:
    """Opens, restarts and closes sequences in the engine, the scheduler, the cache and the ledger
    together, so that these four agree. Device thread only.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        ledger: Ledger,
        cache_client: CacheClient,
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._ledger = ledger
        self._cache_client = cache_client

    def preempt(self, request_id: RequestId) -> None:
        """Close a preempted sequence, which then waits again, unless it has ended."""
        sequence = self._ledger.find(request_id)
        if sequence is None:
            return
        self.close(sequence, has_ended=False)
        self._look_up_unless_paused(sequence)

    def grow(self, request_id: RequestId) -> None:
        """Enlarge the buffers of an open sequence to its new capacity; if the engine cannot, the
        request fails.
        """
        sequence = self._ledger.find(request_id)
        if sequence is None or not sequence.is_open:
            return
        try:
            with device_call():
                self._engine.reserve_tokens(request_id, sequence.scheduled.capacity_tokens)
        except DeviceFailed as failure:
            logger.exception("request %s could not be given more memory", sequence.id)
            self.drop(sequence, FinishReason.FAILED, error=f"no memory for the request: {failure}")

    def quantize(self, sequence: LiveSequence, costs: SequenceCosts) -> None:
        """Quantize the state of an open sequence, and reserve less memory for it. No pending step
        may contain the sequence. costs: its new costs in the scheduler. If the device fails, the
        sequence stays unquantized.
        """
        sizes = None
        try:
            with device_call():
                sizes = self._cache_client.quantize(sequence)
        except DeviceFailed:
            logger.exception("the KV of request %s could not be quantized", sequence.id)
        if sizes is None:  # not in the except block, where the traceback keeps arrays alive
            self._keep_native(sequence)
            return
        held_tokens = 0 if sequence.live_chain is None else sequence.live_chain.held_tokens
        sequence.scheduled.quantize(costs, held_tokens=held_tokens)
        self._ledger.counters.quantized += 1
        logger.info(
            "memory is critically short: the KV of request %s (%d tokens) was quantized to %s bits; "
            "it takes %.1f MiB instead of %.1f MiB",
            sequence.id,
            sequence.known_tokens,
            AUTO_WHEN_SHORT,
            sizes.after / (1 << 20),
            sizes.before / (1 << 20),
        )

    def _keep_native(self, sequence: LiveSequence) -> None:
        """Continue a sequence that could not be quantized: from its unquantized state, or, if a part
        of that is lost, from the cache.
        """
        sequence.stays_native = True
        if self._engine.is_state_valid(sequence.id):
            return
        logger.warning("request %s restarts: a part of its KV is lost", sequence.id)
        self.close(sequence, is_healthy=False)
        self._scheduler.restart(sequence.id)
        self._look_up_unless_paused(sequence)

    def admit(self, request_ids: Iterable[RequestId]) -> None:
        """Open the sequences that the scheduler has admitted, each from its cached prefix."""
        unopened: list[tuple[LiveSequence, DeviceFailed]] = []
        for request_id in request_ids:
            sequence = self._ledger[request_id]
            # another sequence admitted in this step took the live state that this one wanted
            if sequence.start.lookup is not None and sequence.start.lookup.has_lost_its_base:
                self._scheduler.restart(sequence.id)
                self._cache_client.look_up(sequence)
                continue
            sequence.admit(now=self._ledger.clock())
            try:
                with device_call():
                    self._cache_client.open(sequence)
            except DeviceFailed as failure_to_open:
                unopened.append((sequence, failure_to_open))
        # only after all others have started, so that no sequence is between waiting and running
        for sequence, failure in unopened:
            self._give_up_unopened(sequence, failure)

    def _give_up_unopened(self, sequence: LiveSequence, failure: DeviceFailed) -> None:
        """Restart a sequence that could not be opened, if its cached prefix may be the cause; otherwise
        end it.
        """
        cause = failure.__cause__
        if isinstance(cause, InvalidRequest):  # the cached prefix is not to blame
            logger.warning("request %s cannot be served: %s", sequence.id, cause.loggable)
            self.drop(sequence, FinishReason.REFUSED, error=str(cause))
            return
        if sequence.start.may_be_blamed:
            self.give_up_state(
                sequence, f"the request cannot start from its cached prefix: {failure}"
            )
            return
        logger.error("request %s could not be opened", sequence.id, exc_info=failure)
        message = f"the request could not be started: {failure}"
        self.drop(sequence, FinishReason.FAILED, error=message)

    def reopen_without_cache(self, sequence: LiveSequence) -> None:
        """Close an open sequence after a failure and reopen it without any computed state.

        May raise any exception of the engine.
        """
        self.close(sequence, is_healthy=False)
        sequence.answer.prompt_logprobs.clear()
        self._forget_cached_start(sequence)
        self._engine.open(
            sequence.request,
            generated=tuple(sequence.answer.token_ids),
            # the scheduler may have just decided to preempt it
            capacity_tokens=max(sequence.scheduled.capacity_tokens, sequence.known_tokens),
            form=sequence.form,
        )
        sequence.is_open = True
        sequence.scheduled.unquantize()
        sequence.scheduled.held_tokens = 0

    def wait_for_room(self, sequence: LiveSequence) -> bool:
        """If there is not enough memory for a sequence to have its own copy of a prefix that it shares
        with others, close the sequence and let it wait. Returns False if there is enough memory.
        """
        if self._scheduler.has_room_for_copy(sequence.id):
            return False
        self._restart_from_nothing(sequence)
        return True

    def wait_for_images(self, sequence: LiveSequence, *, end: int) -> bool:
        """If images before a position of an open sequence's prompt must be processed again, close
        the sequence and let it start again, once. Returns False if it need not or must not wait.
        """
        if sequence.has_waited_for_images or self._engine.has_all_images(sequence.id, end=end):
            return False
        sequence.has_waited_for_images = True
        self._restart_from_nothing(sequence)
        return True

    def _restart_from_nothing(self, sequence: LiveSequence) -> None:
        """Close a sequence and let it wait to be prefilled again, without the cache."""
        sequence.drop_state()
        self.close(sequence, is_healthy=False)
        self._forget_cached_start(sequence)
        self._restart(sequence)

    def give_up_state(self, sequence: LiveSequence, reason: str) -> None:
        """Drop all state that a failed sequence has computed.

        The sequence restarts if the cached state that it started from may have caused the failure.
        If that was a live state, the sequence restarts from cached blocks; if it was blocks, from
        nothing. In all other cases, the caller must end the sequence.
        """
        is_live = self._ledger.is_live(sequence)
        restarts = is_live and sequence.start.may_be_blamed
        blames_live_state = sequence.start.may_blame_live
        if is_live:
            outcome = "fails"
            if restarts:
                outcome = "restarts from blocks" if blames_live_state else "restarts from nothing"
            logger.warning("request %s %s: %s", sequence.id, outcome, reason)
        self._cache_client.distrust(sequence)
        sequence.drop_state()
        if not restarts:
            return
        self.close(sequence, is_healthy=False)
        sequence.reuse_nothing()
        self._restart(sequence)
        if blames_live_state:
            self._look_up_unless_paused(sequence)

    def drop(self, sequence: LiveSequence, reason: FinishReason, *, error: str = "") -> None:
        """End a sequence that the scheduler still knows."""
        self._scheduler.cancel(sequence.id)
        self._ledger.finish(sequence, reason, error=error)
        self.close(sequence, is_healthy=reason is not FinishReason.FAILED)

    def close(
        self, sequence: LiveSequence, *, is_healthy: bool = True, has_ended: bool = True
    ) -> None:
        """Free a sequence's state in the engine, after copying what is not cached yet.

        is_healthy: False if the state must not be cached. has_ended: False if it continues later.
        """
        self._cache_client.release_sequence(sequence, is_healthy=is_healthy, has_ended=has_ended)
        if sequence.is_open:
            sequence.is_open = False
            self._engine.close(sequence.id)
            sequence.is_quantized = False

    def suspend(self, sequence: LiveSequence) -> None:
        """Interrupt idle work, the prefill of a prompt that is expected later, because a request has
        arrived. Its computed state is cached. A new sequence for the same prompt takes its place in
        the ledger; the scheduler gets that one when the worker is idle again.
        """
        self._scheduler.cancel(sequence.id)
        self._ledger.replace(sequence)
        self.close(sequence)

    def cancel_all(self, *, unhealthy: tuple[LiveSequence, ...]) -> None:
        """End all sequences; no state of the `unhealthy` ones is cached."""
        for sequence in self._ledger.live():
            self._ledger.finish(sequence, FinishReason.CANCELLED)
            self.close(sequence, is_healthy=sequence not in unhealthy)

    def _look_up_unless_paused(self, sequence: LiveSequence) -> None:
        """Look up the cached prefix of a sequence that will start again."""
        # a paused sequence is looked up when it is resumed
        if not sequence.scheduled.is_paused:
            self._cache_client.look_up(sequence)

    def _restart(self, sequence: LiveSequence) -> None:
        """Let the scheduler admit a closed sequence again, to start from its first token."""
        self._scheduler.restart(sequence.id)
        if not sequence.scheduled.is_paused:
            self._ledger.allow_admission(sequence)

    def _forget_cached_start(self, sequence: LiveSequence) -> None:
        """Forget which cached state a sequence has started from: it starts without any now, so no
        later failure or success says anything about that state.
        """
        sequence.reuse_nothing()
        sequence.start.blocks = ()
        sequence.start.live = None
