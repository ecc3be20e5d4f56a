"""What the worker keeps of one accepted request until its Finished."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import HoldfastError, InvalidRequest, QueueFull, TooLargeForMemory
from holdfast.store.block import BlockKey
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import (
    Accepted,
    CacheReport,
    Event,
    Finished,
    FinishReason,
    PromptRead,
    Rejected,
    RejectionKind,
    Started,
    Timings,
    TokenLogprob,
    TokensGenerated,
)
from holdfast.wire.requests import RequestId
from holdfast.worker.engine.plan import Span, SpanResult, StepPlan
from holdfast.worker.loop.counters import Counters
from holdfast.worker.prefix.chain import Cursor, pack_tokens
from holdfast.worker.prefix.lookup import LiveChain, Lookup

if TYPE_CHECKING:
    from holdfast.worker.engine.sequence import Kept

PROGRESS_SECONDS = 0.5  # at least, between two messages about how far the same prompt is read


@dataclass(frozen=True, slots=True)
class Ending:
    """What counts of a step's tokens, and whether the sequence is over with them."""

    # the first so many belong to the answer, a stop token included; the rest is dropped
    counted_tokens: int
    reason: FinishReason | None  # STOP, LENGTH, or None: it goes on


_GOES_ON = Ending(1, None)  # nearly every call ends here: one token, not the last


def ending(
    drawn: Sequence[int], *, stop_token_ids: Set[int], generated_before: int, max_tokens: int
) -> Ending:
    """Decide about the tokens that one step drew for one sequence.

    `generated_before`: tokens of the answer before these. A stop token in the last allowed place is
    a STOP, not a LENGTH.
    """
    allowed = max_tokens - generated_before
    if len(drawn) == 1 and allowed > 1 and drawn[0] not in stop_token_ids:
        return _GOES_ON
    for index, token_id in enumerate(drawn[: max(allowed, 0)]):
        if token_id in stop_token_ids:
            return Ending(index + 1, FinishReason.STOP)
    if len(drawn) >= allowed:
        return Ending(max(allowed, 0), FinishReason.LENGTH)
    return Ending(len(drawn), None)


@dataclass(slots=True, kw_only=True, eq=False)
class LiveSequence:
    """An accepted request.

    Its identity (not its id) says which results are still wanted: an id may be used again later.
    """

    request: SequenceRequest
    submitted_at: float
    admitted_at: float | None = None
    progress_told_at: float = -math.inf  # how far its prompt is read
    first_token_at: float | None = None
    last_token_at: float | None = None
    capacity_tokens: int = 0
    read_to: int = 0  # tokens of the prompt, from its beginning, that it has or began from
    is_open: bool = False  # the engine holds state for it
    generated: list[int] = field(default_factory=list)
    stop_token_ids: frozenset[int] = frozenset()
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    embedding: bytes = b""
    chain: bytearray = field(default_factory=bytearray)  # prompt and what was generated, packed
    # how far the chain is known to be cached; None before it is opened
    cursor: Cursor | None = None
    live: LiveChain | None = None  # while it is open, and until what it leaves is committed
    lookup: Lookup | None = None  # what it is to begin from, until the engine has it
    lookup_seconds: float = 0.0
    waits_since: float | None = None  # for another one that reads the same beginning
    waited_seconds: float = 0.0
    report: CacheReport | None = None  # what it began from; None before it does
    # the blocks that its state was restored from, for the last time that it was
    began_from: tuple[BlockKey, ...] = ()
    began_live: LiveChain | None = None  # the live chain that its state was made of, if it was
    restore_seconds: float = 0.0
    # the blocks that it has brought into the cache
    handed_over: list[BlockKey] = field(default_factory=list)
    lives: int = 0  # how often its state was given up: results of an earlier life are not wanted
    avoids_live: bool = False  # it came to grief with a live state, and begins from blocks only
    # it came to grief with what it began from, and begins from nothing any more
    is_cold: bool = False

    def __post_init__(self) -> None:
        self.stop_token_ids = frozenset(self.request.stop_token_ids)
        self.generated += self.request.generated_token_ids
        self.chain += self.request.prompt_token_ids.packed + self.request.generated_token_ids.packed

    def admit(self, *, now: float, capacity_tokens: int) -> None:
        """It may run from now on; a second time after a preemption, when its prompt is read once
        more.
        """
        if self.admitted_at is None:
            self.admitted_at = now
        self.capacity_tokens = capacity_tokens
        self.prompt_logprobs.clear()

    @property
    def can_begin_anew(self) -> bool:
        """Whether what it began from may be why it does not come out right; only once."""
        return self.may_blame_live_state or (bool(self.began_from) and not self.is_cold)

    @property
    def may_blame_live_state(self) -> bool:
        """Whether a live state that it began from may be why."""
        return self.began_live is not None and not self.avoids_live

    @property
    def next_attempt(self) -> str:
        """How it begins anew, in words."""
        return (
            "begins again, from blocks"
            if self.may_blame_live_state
            else "is read again from its beginning"
        )

    def stop_waiting(self, *, now: float) -> None:
        """It no longer waits for another one, if it did."""
        if self.waits_since is not None:
            self.waited_seconds += now - self.waits_since
            self.waits_since = None

    def give_up_state(self) -> None:
        """Nothing that it has computed since it was opened counts any more, in steps under way
        neither.
        """
        self.lives += 1
        self.handed_over.clear()

    def ending(self, token_ids: tuple[int, ...]) -> Ending:
        """What counts of newly drawn tokens, and whether they end the sequence."""
        return ending(
            token_ids,
            stop_token_ids=self.stop_token_ids,
            generated_before=len(self.generated),
            max_tokens=self.request.max_tokens,
        )

    def take(self, token_ids: tuple[int, ...], *, now: float) -> None:
        """Count drawn tokens."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self.generated += token_ids
        self.chain += pack_tokens(token_ids)

    def finished(self, reason: FinishReason, *, now: float, error: str = "") -> Finished:
        """The last message about it."""
        return Finished(
            request_id=self.request.request_id,
            reason=reason,
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=len(self.generated),
            error=error,
            timings=self._timings(now),
            memory=self.report or CacheReport(),
            embedding=self.embedding if reason is FinishReason.LENGTH else b"",
        )

    def started(self, *, now: float) -> Started:
        """What is said about it right before its first token."""
        return Started(
            request_id=self.request.request_id,
            memory=self.report or CacheReport(),
            timings=self._timings(now),
            logprobs=tuple(self.prompt_logprobs),
        )

    def _timings(self, now: float) -> Timings:
        admitted = now if self.admitted_at is None else self.admitted_at
        first = now if self.first_token_at is None else self.first_token_at
        last = first if self.last_token_at is None else self.last_token_at
        return Timings(
            queue_seconds=admitted - self.submitted_at,
            prefill_seconds=max(0.0, first - admitted),
            decode_seconds=last - first,
        )


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


def _nothing_kept() -> Sequence[Kept]:
    return ()


@dataclass(slots=True, kw_only=True)
class Flight:
    """A step under way. `sequences`: whose spans they are, in the order of `plan`."""

    decided: StepPlan  # the scheduler's, which wants it back
    plan: StepPlan  # what of it was dispatched: without sequences that could not be opened
    sequences: tuple[LiveSequence, ...]
    lives: tuple[int, ...]  # of the sequences, when it was dispatched
    started_at: float
    expected_seconds: float | None  # what it takes at most; None: nothing like it was measured
    collect: Callable[[], tuple[SpanResult, ...]] | None = None  # None: it was not dispatched
    take_kept: Callable[[], Sequence[Kept]] = _nothing_kept
    # its dispatch raised, or the step before it failed: what it gives cannot be trusted
    is_suspect: bool = False

    def wanted(
        self, results: Sequence[SpanResult]
    ) -> Iterator[tuple[Span, LiveSequence, SpanResult]]:
        """What it gave for sequences whose state was not given up since."""
        for span, sequence, life, given in zip(
            self.plan.spans, self.sequences, self.lives, results, strict=True
        ):
            if sequence.lives == life:
                yield span, sequence, given

    def unhealthy(self, results: Sequence[SpanResult]) -> tuple[LiveSequence, ...]:
        """For whom it did not come out right."""
        return tuple(sequence for _, sequence, given in self.wanted(results) if given.failure)

    def healthy(self, results: Sequence[SpanResult]) -> tuple[LiveSequence, ...]:
        """For whom it did."""
        return tuple(sequence for _, sequence, given in self.wanted(results) if not given.failure)


def expected_together(expected_seconds: float | None, ahead: Flight | None) -> float | None:
    """What a step takes at most that is dispatched behind another one; None when one of them is of
    a kind not measured yet.
    """
    if ahead is None or expected_seconds is None:
        return expected_seconds
    return None if ahead.expected_seconds is None else ahead.expected_seconds + expected_seconds
