"""Accepted requests until their Finished, and the events that wait to be sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

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
    Started,
    Timings,
    TokenLogprob,
    TokensGenerated,
    WaitReason,
)
from holdfast.wire.requests import RequestId
from holdfast.worker.loop.counters import Counters
from holdfast.worker.prefix.chain import Cursor, pack_tokens
from holdfast.worker.prefix.lookup import LiveChain, Lookup

PROGRESS_SECONDS = 0.5  # least time between two progress events of one prompt


@dataclass(frozen=True, slots=True)
class Ending:
    """How many tokens of a step belong to the answer, and why the answer ends with them."""

    counted_tokens: int  # a stop token included; the rest is dropped
    reason: FinishReason | None  # STOP, LENGTH, or None to go on


_GOES_ON = Ending(1, None)  # nearly every call: one token, and not the last


def ending(
    drawn: Sequence[int], *, stop_token_ids: Set[int], generated_before: int, max_tokens: int
) -> Ending:
    """Decide whether the tokens that one step drew end the answer. No other place decides it.

    A stop token in the last allowed place is a STOP, not a LENGTH.
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
    """An accepted request: its tokens, its times, and what it started from.

    Compared by identity: an id may be used again after the Finished.
    """

    request: SequenceRequest
    submitted_at: float
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    progress_sent_at: float = -math.inf
    is_open: bool = False  # the engine has state for it
    attempts: int = 0  # how often its state was given up; results of earlier attempts are dropped

    chain: bytearray = field(default_factory=bytearray)  # prompt and answer, packed
    generated: list[int] = field(default_factory=list)
    stop_token_ids: frozenset[int] = frozenset()
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    embedding: bytes = b""
    prefilled_tokens: int = 0  # of idle work, cached ones included

    waits_for: WaitReason | None = None
    waits_since: float = 0.0
    waited: dict[WaitReason, float] = field(default_factory=dict)  # seconds

    lookup: Lookup | None = None  # what to start from, until the engine has it
    lookup_seconds: float = 0.0
    restore_seconds: float = 0.0
    report: CacheReport | None = None  # of its first start
    cursor: Cursor | None = None  # how far its chain is known to be stored; None before its start
    live: LiveChain | None = None  # while it is open, and until its rest is committed
    began_from: tuple[BlockKey, ...] = ()  # the blocks that its state was restored from
    began_live: LiveChain | None = None  # the live chain that its state was made of
    inserted: list[BlockKey] = field(default_factory=list)  # blocks that it added to the cache
    avoids_live: bool = False  # failed on a live state: starts from blocks only
    is_cold: bool = False  # failed on cached blocks: starts from nothing

    def __post_init__(self) -> None:
        self.stop_token_ids = frozenset(self.request.stop_token_ids)
        self.generated += self.request.generated_token_ids
        self.chain += self.request.prompt_token_ids.packed + self.request.generated_token_ids.packed

    @property
    def id(self) -> RequestId:
        """The request's id."""
        return self.request.request_id

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def known_tokens(self) -> int:
        """The length of prompt and answer so far."""
        return self.prompt_tokens + len(self.generated)

    @property
    def may_restart(self) -> bool:
        """Whether what it started from may be why it fails, so that it deserves another attempt."""
        return self.may_blame_live_state or (bool(self.began_from) and not self.is_cold)

    @property
    def may_blame_live_state(self) -> bool:
        """Whether a live state that it started from may be why it fails."""
        return self.began_live is not None and not self.avoids_live

    def wait(self, reason: WaitReason | None, *, now: float) -> None:
        """From now on the request waits for `reason`; None: for nothing."""
        if self.waits_for is not None:
            before = self.waited.get(self.waits_for, 0.0)
            self.waited[self.waits_for] = before + now - self.waits_since
        self.waits_for = reason
        self.waits_since = now

    def admit(self, *, now: float) -> None:
        """The scheduler lets it run, for the first time or after a preemption."""
        self.wait(None, now=now)
        if self.admitted_at is None:
            self.admitted_at = now
        self.prompt_logprobs.clear()

    def drop_state(self) -> None:
        """Results of everything computed so far, steps under way included, no longer count."""
        self.attempts += 1
        self.inserted.clear()

    def ending(self, token_ids: tuple[int, ...]) -> Ending:
        """Which of the newly drawn tokens count, and whether they end the answer."""
        return ending(
            token_ids,
            stop_token_ids=self.stop_token_ids,
            generated_before=len(self.generated),
            max_tokens=self.request.max_tokens,
        )

    def extend(self, token_ids: tuple[int, ...], *, now: float) -> None:
        """Append drawn tokens to the answer."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self.generated += token_ids
        self.chain += pack_tokens(token_ids)

    def timings(self, now: float) -> Timings:
        """Where the time has gone so far."""
        admitted = now if self.admitted_at is None else self.admitted_at
        first = now if self.first_token_at is None else self.first_token_at
        last = first if self.last_token_at is None else self.last_token_at
        return Timings(
            queue_seconds=admitted - self.submitted_at,
            prefill_seconds=max(0.0, first - admitted),
            decode_seconds=last - first,
            waited=dict(self.waited),
        )


class Ledger:
    """Live sequences by id, events that wait to be sent, and counters. Device thread only."""

    def __init__(self, *, clock: Callable[[], float], counters: Counters | None = None) -> None:
        self.counters = counters or Counters()
        self._clock = clock
        self._live: dict[RequestId, LiveSequence] = {}
        self._outbox: list[Event] = []

    def __getitem__(self, request_id: RequestId) -> LiveSequence:
        return self._live[request_id]

    def live(self) -> tuple[LiveSequence, ...]:
        """All sequences without a Finished, oldest first."""
        return tuple(self._live.values())

    def find(self, request_id: RequestId) -> LiveSequence | None:
        """The live sequence of that id, if there is one."""
        return self._live.get(request_id)

    def is_live(self, sequence: LiveSequence) -> bool:
        """Whether this very sequence, not another one with its id, has no Finished yet."""
        return self._live.get(sequence.id) is sequence

    def accept(self, request: SequenceRequest) -> LiveSequence:
        """Add a request; exactly one Finished will follow."""
        assert request.request_id not in self._live
        sequence = LiveSequence(request=request, submitted_at=self._clock())
        self._live[sequence.id] = sequence
        self.emit(Accepted(request_id=sequence.id))
        return sequence

    def reject(self, request: SequenceRequest, refusal: HoldfastError) -> None:
        """Refuse a request; nothing follows."""
        self.counters.rejected += 1
        self.emit(_rejected(request.request_id, refusal))

    def finish(self, sequence: LiveSequence, reason: FinishReason, *, error: str = "") -> None:
        """Remove a live sequence and emit its only Finished."""
        assert self.is_live(sequence)
        del self._live[sequence.id]
        now = self._clock()
        is_complete = reason is FinishReason.LENGTH
        if sequence.prompt_logprobs and is_complete:  # nothing was drawn, only the prompt scored
            self._emit_started(sequence, now=now)
        self.counters.finished[reason] += not sequence.request.is_idle_work
        self.emit(
            Finished(
                request_id=sequence.id,
                reason=reason,
                prompt_tokens=sequence.prompt_tokens,
                completion_tokens=len(sequence.generated),
                error=error,
                timings=sequence.timings(now),
                memory=sequence.report or CacheReport(),
                embedding=sequence.embedding if is_complete else b"",
            )
        )

    def replace(self, sequence: LiveSequence) -> LiveSequence:
        """Put a fresh sequence of the same request in the place of a live one; emits nothing."""
        assert self.is_live(sequence)
        fresh = LiveSequence(request=sequence.request, submitted_at=sequence.submitted_at)
        self._live[fresh.id] = fresh
        return fresh

    def count_prompt(self, sequence: LiveSequence, *, start: int, tokens: int) -> None:
        """Count the part of a computed span that lies in the prompt."""
        end = min(start + tokens, sequence.prompt_tokens)
        if sequence.request.is_idle_work:
            self.counters.read_ahead_tokens += end - start
            sequence.prefilled_tokens = end
            return
        self.counters.prompt_tokens += max(0, end - start)
        if end < sequence.prompt_tokens:
            self._emit_progress(sequence, read_tokens=end)

    def score(self, sequence: LiveSequence, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Collect scores of the prompt until they are complete."""
        if sequence.first_token_at is None:
            sequence.prompt_logprobs += logprobs

    def generate(
        self, sequence: LiveSequence, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> None:
        """Emit drawn tokens; a Started precedes the first of them."""
        now = self._clock()
        if not sequence.generated:
            self._emit_started(sequence, now=now)
        sequence.extend(token_ids, now=now)
        self.counters.generated_tokens += len(token_ids)
        self.emit(TokensGenerated(request_id=sequence.id, token_ids=token_ids, logprobs=logprobs))

    def emit(self, event: Event) -> None:
        """Put an event into the next message."""
        self._outbox.append(event)

    def take_outbox(self) -> list[Event]:
        """All events since the last call, in order."""
        events = self._outbox
        self._outbox = []
        return events

    def waits(self) -> dict[RequestId, WaitReason]:
        """Which live requests wait, and for what."""
        return {
            sequence.id: sequence.waits_for
            for sequence in self._live.values()
            if sequence.waits_for is not None and not sequence.request.is_idle_work
        }

    def check_invariants(self) -> None:
        """Assert that every sequence is under its id and has no more tokens than requested."""
        for request_id, sequence in self._live.items():
            assert sequence.id == request_id
            assert len(sequence.generated) <= sequence.request.max_tokens

    def _emit_progress(self, sequence: LiveSequence, *, read_tokens: int) -> None:
        now = self._clock()
        admitted_at = now if sequence.admitted_at is None else sequence.admitted_at
        if now - max(admitted_at, sequence.progress_sent_at) < PROGRESS_SECONDS:
            return
        sequence.progress_sent_at = now
        self.emit(
            PromptRead(
                request_id=sequence.id,
                total_tokens=sequence.prompt_tokens,
                cached_tokens=0 if sequence.report is None else sequence.report.cached_tokens,
                read_tokens=read_tokens,
                seconds=now - admitted_at,
            )
        )

    def _emit_started(self, sequence: LiveSequence, *, now: float) -> None:
        self.emit(
            Started(
                request_id=sequence.id,
                memory=sequence.report or CacheReport(),
                timings=sequence.timings(now),
                logprobs=tuple(sequence.prompt_logprobs),
            )
        )
        sequence.prompt_logprobs.clear()


def _rejected(request_id: RequestId, refusal: HoldfastError) -> Rejected:
    message = str(refusal)
    if isinstance(refusal, QueueFull):
        return Rejected(
            request_id=request_id,
            kind="queue_full",
            message=message,
            retry_after_seconds=refusal.retry_after_seconds,
            queued=refusal.queued,
            queue_limit=refusal.limit,
        )
    if isinstance(refusal, TooLargeForMemory):
        return Rejected(
            request_id=request_id,
            kind="too_large",
            message=message,
            field=refusal.field,
            needed_bytes=refusal.needed_bytes,
            budget_bytes=refusal.budget_bytes,
        )
    if isinstance(refusal, InvalidRequest):
        return Rejected(request_id=request_id, kind="invalid", message=message, field=refusal.field)
    return Rejected(request_id=request_id, kind="shutting_down", message=message)
