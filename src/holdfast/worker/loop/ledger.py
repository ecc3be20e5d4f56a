"""The books of the worker: who is live, which events wait to be sent.

Sees to it that each accepted request gets one Finished.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.errors import HoldfastError, InvalidRequest, QueueFull, TooLargeForMemory
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import (
    Accepted,
    Event,
    FinishReason,
    PromptRead,
    Rejected,
    RejectionKind,
    TokenLogprob,
    TokensGenerated,
)
from holdfast.wire.requests import RequestId
from holdfast.worker.loop.counters import Counters
from holdfast.worker.loop.sequences import LiveSequence

PROGRESS_SECONDS = 0.5  # at least, between two messages about how far the same prompt is read


class Ledger:
    """Live sequences by id, events that wait to be sent, and counters. Device thread only."""

    def __init__(self, *, clock: Callable[[], float], counters: Counters | None = None) -> None:
        self.counters = counters or Counters()
        self._clock = clock
        self._live: dict[RequestId, LiveSequence] = {}
        self._outbox: list[Event] = []

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._live

    def __getitem__(self, request_id: RequestId) -> LiveSequence:
        return self._live[request_id]

    def live(self) -> tuple[LiveSequence, ...]:
        """All sequences that have not ended, oldest first."""
        return tuple(self._live.values())

    def find(self, request_id: RequestId) -> LiveSequence | None:
        """The live sequence of that id, if there is one."""
        return self._live.get(request_id)

    def is_live(self, sequence: LiveSequence) -> bool:
        """Whether this very sequence (not another one with its id) has not ended."""
        return self._live.get(sequence.request.request_id) is sequence

    def accept(self, request: SequenceRequest) -> LiveSequence:
        """Enter a request; one Finished will follow."""
        assert request.request_id not in self._live
        sequence = LiveSequence(request=request, submitted_at=self._clock())
        self._live[request.request_id] = sequence
        self.emit(Accepted(request_id=request.request_id))
        return sequence

    def reject(self, request: SequenceRequest, refusal: HoldfastError) -> None:
        """Turn a request away; nothing more will be said about it."""
        self.counters.rejected += 1
        rejected = Rejected(
            request_id=request.request_id, kind=_kind(refusal), message=str(refusal)
        )
        if isinstance(refusal, QueueFull):
            rejected = msgspec.structs.replace(
                rejected,
                retry_after_seconds=refusal.retry_after_seconds,
                queued=refusal.queued,
                queue_limit=refusal.limit,
            )
        elif isinstance(refusal, InvalidRequest):
            rejected = msgspec.structs.replace(rejected, field=refusal.field)
        if isinstance(refusal, TooLargeForMemory):
            rejected = msgspec.structs.replace(
                rejected, needed_bytes=refusal.needed_bytes, budget_bytes=refusal.budget_bytes
            )
        self.emit(rejected)

    def finish(self, sequence: LiveSequence, reason: FinishReason, *, error: str = "") -> None:
        """Strike a live sequence off; says its one and only Finished."""
        assert self.is_live(sequence)
        del self._live[sequence.request.request_id]
        now = self._clock()
        # nothing was to be drawn, only the prompt scored
        if sequence.prompt_logprobs and reason is FinishReason.LENGTH:
            self._emit_started(sequence, now=now)
        self.counters.finished[reason] += not sequence.request.is_idle_work
        self.emit(sequence.finished(reason, now=now, error=error))

    def count_prompt(self, sequence: LiveSequence, *, start: int, tokens: int) -> None:
        """Count the part of a span that lies in the prompt as read."""
        end = min(start + tokens, len(sequence.request.prompt_token_ids))
        if sequence.request.is_idle_work:
            self.counters.read_ahead_tokens += end - start
            sequence.read_to = end
        else:
            self.counters.prompt_tokens += max(0, end - start)
            if end < len(sequence.request.prompt_token_ids):
                self._tell_progress(sequence, read_tokens=end)

    def set_back(self, sequence: LiveSequence) -> LiveSequence:
        """Put a new one, of which nothing has begun, in the place of a live sequence; nothing is
        said about it.
        """
        assert self.is_live(sequence)
        fresh = LiveSequence(request=sequence.request, submitted_at=sequence.submitted_at)
        self._live[sequence.request.request_id] = fresh
        return fresh

    def score(self, sequence: LiveSequence, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Keep scores of a part of the prompt until they are complete."""
        if sequence.first_token_at is None:
            sequence.prompt_logprobs += logprobs

    def generate(
        self, sequence: LiveSequence, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> None:
        """Emit drawn tokens; before the answer's first, what it begins from, and the prompt's
        scores if they are wanted.
        """
        now = self._clock()
        if not sequence.generated:
            self._emit_started(sequence, now=now)
        sequence.take(token_ids, now=now)
        self.counters.generated_tokens += len(token_ids)
        self.emit(
            TokensGenerated(
                request_id=sequence.request.request_id, token_ids=token_ids, logprobs=logprobs
            )
        )

    def emit(self, event: Event) -> None:
        """Put an event into the next message."""
        self._outbox.append(event)

    def take_outbox(self) -> list[Event]:
        """All events since the last call, in order."""
        events, self._outbox = self._outbox, []
        return events

    def check_invariants(self) -> None:
        """Raise AssertionError when an id stands under a wrong key or a sequence has more tokens
        than it asked for.
        """
        for request_id, sequence in self._live.items():
            assert sequence.request.request_id == request_id
            assert len(sequence.generated) <= sequence.request.max_tokens

    def _tell_progress(self, sequence: LiveSequence, *, read_tokens: int) -> None:
        now = self._clock()
        admitted_at = now if sequence.admitted_at is None else sequence.admitted_at
        if now - max(admitted_at, sequence.progress_told_at) < PROGRESS_SECONDS:
            return
        sequence.progress_told_at = now
        self.emit(
            PromptRead(
                request_id=sequence.request.request_id,
                total_tokens=len(sequence.request.prompt_token_ids),
                cached_tokens=0 if sequence.report is None else sequence.report.cached_tokens,
                read_tokens=read_tokens,
                seconds=now - admitted_at,
            )
        )

    def _emit_started(self, sequence: LiveSequence, *, now: float) -> None:
        self.emit(sequence.started(now=now))
        sequence.prompt_logprobs.clear()


def _kind(refusal: HoldfastError) -> RejectionKind:
    if isinstance(refusal, QueueFull):
        return "queue_full"
    if isinstance(refusal, TooLargeForMemory):
        return "too_large"
    return "invalid" if isinstance(refusal, InvalidRequest) else "shutting_down"
