"""Reading prompts of later requests ahead while there is nothing else to do: one at a time, the
newest first.

Whoever comes finds the device free after the step under way: what is being read ahead is closed, as
a request that was cancelled is, so that all it has read is there to begin from, for the very
request that came too. It goes on when there is nothing else to do again, unless the conversation
has gone on meanwhile, or memory for it is short.
"""

from __future__ import annotations

from holdfast.errors import InvalidRequest, QueueFull
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import FinishReason
from holdfast.wire.token_ids import common_tokens
from holdfast.worker.loop.cache_steps import CacheSteps
from holdfast.worker.loop.ledger import Ledger
from holdfast.worker.loop.lifetimes import Lifetimes
from holdfast.worker.loop.read_ahead import ReadAheadRuns
from holdfast.worker.loop.sequences import LiveSequence
from holdfast.worker.scheduler.scheduler import Scheduler

MOST_WAITING = 8  # conversations; of more the one that waits longest is given up


class IdleWork:
    """Requests that are read ahead: those that wait, and the one that is in the scheduler.

    Device thread only.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        scheduler: Scheduler,
        cache: CacheSteps,
        lifetimes: Lifetimes,
        runs: ReadAheadRuns,
    ) -> None:
        self._ledger, self._scheduler, self._cache, self._lifetimes, self._runs = (
            ledger,
            scheduler,
            cache,
            lifetimes,
            runs,
        )
        # oldest first; the ledger knows them, the scheduler does not
        self._waiting: list[LiveSequence] = []
        self._reading: LiveSequence | None = None

    def accept(self, request: SequenceRequest) -> None:
        """Take a request that nobody waits for.

        It is dropped at once where what is read is not kept.
        """
        sequence = self._ledger.accept(request)
        self._wait(sequence)
        if not self._cache.keeps(request):
            self._drop(sequence)

    def give_way(self, request: SequenceRequest) -> None:
        """Somebody comes: leave the device, keep what was read, and give up what a conversation
        that goes on has no use for.

        No step of idle work may be under way.
        """
        if (reading := self._settled()) is not None:
            self._reading = None
            self._wait(self._lifetimes.set_aside(reading))
            self._runs.add(reading)
        for sequence in tuple(self._waiting):
            if _is_stale(sequence.request, request):
                self._drop(sequence)

    def begin(self) -> None:
        """Hand the newest to the scheduler, if there is nothing else to do."""
        if self._settled() is not None or not self._waiting:
            return
        self._waiting = [sequence for sequence in self._waiting if self._ledger.is_live(sequence)]
        if not self._waiting or len(self._ledger.live()) > len(self._waiting):
            return
        sequence = self._waiting.pop()
        request = sequence.request
        try:
            self._scheduler.submit(
                request.request_id,
                prompt_tokens=len(request.prompt_token_ids),
                max_tokens=request.max_tokens,
                boundaries=self._cache.boundaries(request),
                is_ready=False,
                is_idle_work=True,
            )
        except (QueueFull, InvalidRequest):  # too long, or more than memory takes
            self._drop(sequence)
        else:
            self._reading = sequence
            self._cache.look_up(sequence)

    def give_up_if_stuck(self) -> None:
        """Nothing was to be done in this turn: what could begin and does not has no memory, and is
        dropped.
        """
        sequence = self._settled()
        if (
            sequence is not None
            and self._scheduler.is_waiting(sequence.request.request_id)
            and not self._cache.is_waited_for
        ):
            self._reading = None
            self._drop(sequence)

    def forget_session(self, session_id: str, *, tenant: str) -> None:
        """A session is closed: nothing more is read for it."""
        for sequence in (*self._waiting, *filter(None, (self._settled(),))):
            if (sequence.request.session_id, sequence.request.tenant) == (session_id, tenant):
                self._drop(sequence)

    def check_invariants(self) -> None:
        """Assert that idle work is in the scheduler only while nothing else is there, and that what
        waits is known.
        """
        reading = self._settled()
        others = [each for each in self._ledger.live() if not each.request.is_idle_work]
        assert reading is None or not others, "idle work goes on beside a request"
        assert len(self._waiting) <= MOST_WAITING, "too many conversations wait"
        idle = [each for each in self._ledger.live() if each.request.is_idle_work]
        assert all(each is reading or each in self._waiting for each in idle), "idle work is lost"

    def _settled(self) -> LiveSequence | None:
        """What is being read ahead, if it has not ended; of what has, the figures are taken."""
        if self._reading is not None and not self._ledger.is_live(self._reading):
            self._runs.add(self._reading)
            self._reading = None
        return self._reading

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
    """Whether a request goes on from what a prompt is read ahead for: with that prompt, or in
    another way.
    """
    assert ahead.read_ahead is not None
    known = ahead.read_ahead.known_tokens
    chain = request.prompt_token_ids.packed
    return (
        ahead.tenant == request.tenant
        and common_tokens(ahead.prompt_token_ids.packed, chain) >= known > 0
    )
