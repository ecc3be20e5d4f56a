"""The accepted requests without a Finished event, and the events to send.

A sequence is *open* while the engine has state for it. *Idle work* is a request that only prefills a
prompt that is expected later, while there is no other request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, InvalidRequest, QueueFull, TooLargeForMemory
from holdfast.store.block import BlockKey
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import (
    Accepted,
    CacheOutcome,
    CacheReport,
    Event,
    Finished,
    FinishReason,
    PrefillFinished,
    PromptRead,
    Rejected,
    Timings,
    TokenLogprob,
    TokensGenerated,
    WaitReason,
)
from holdfast.wire.requests import RequestId
from holdfast.worker.drafting.suffix import SuffixDrafter
from holdfast.worker.kv.bits import KVBits
from holdfast.worker.loop.counters import Counters
from holdfast.worker.prefix.chain import pack_tokens
from holdfast.worker.prefix.lookup import CachedStart, LiveChain
from holdfast.worker.scheduler.sequence import ScheduledSequence

if TYPE_CHECKING:  # this module imports MLX, which is not needed here at run time
    from holdfast.worker.drafting.draft_model import DraftState

LEAST_GENERATED = 4  # tokens of an answer before a draft model is considered
PROGRESS_SECONDS = 0.5  # minimum time between two progress events of one prompt


@dataclass(frozen=True, slots=True)
class Ending:
    """How many tokens of a step are part of the answer, and why it ends with them, if it does."""

    counted_tokens: int  # including a stop token; the rest is dropped
    reason: FinishReason | None  # STOP or LENGTH; None if the answer continues


_CONTINUES = Ending(1, None)  # the usual case: one token that is not the last


@dataclass(slots=True)
class LiveAnswer:
    """The answer to a request as far as it is generated, and the rule that ends it; or the scores or the
    embedding of the prompt.
    """

    max_tokens: int
    stop_token_ids: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # until they are sent
    embedding: bytes = b""  # empty: not an embedding

    def ending(self, token_ids: Sequence[int]) -> Ending:
        """Decide whether the tokens that one step generated end the answer; no other function decides
        this. If the last allowed token is a stop token, the reason is STOP, not LENGTH.
        """
        allowed = self.max_tokens - len(self.token_ids)
        if len(token_ids) == 1 and allowed > 1 and token_ids[0] not in self.stop_token_ids:
            return _CONTINUES
        for index, token_id in enumerate(token_ids[: max(allowed, 0)]):
            if token_id in self.stop_token_ids:
                return Ending(index + 1, FinishReason.STOP)
        if len(token_ids) >= allowed:
            return Ending(max(allowed, 0), FinishReason.LENGTH)
        return Ending(len(token_ids), None)


@dataclass(slots=True)
class Times:
    """When a request reached each phase, and how long it waited for what."""

    submitted_at: float
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    progress_sent_at: float = -math.inf
    waiting: tuple[WaitReason, float] | None = None  # what it waits for, and since when
    waited: dict[WaitReason, float] = field(default_factory=dict)  # seconds

    def set_wait_reason(self, reason: WaitReason | None, *, now: float) -> None:
        """Record what the request waits for from now on; None: it does not wait."""
        if self.waiting is not None:
            last_reason, since = self.waiting
            self.waited[last_reason] = self.waited.get(last_reason, 0.0) + now - since
        self.waiting = None if reason is None else (reason, now)

    def record_tokens(self, *, now: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now

    def sum_up(self, now: float) -> Timings:
        """The durations of the phases; a phase that is not over ends `now`."""
        admitted_at = now if self.admitted_at is None else self.admitted_at
        first_token_at = now if self.first_token_at is None else self.first_token_at
        last_token_at = first_token_at if self.last_token_at is None else self.last_token_at
        return Timings(
            queue_seconds=admitted_at - self.submitted_at,
            prefill_seconds=max(0.0, first_token_at - admitted_at),
            decode_seconds=last_token_at - first_token_at,
            waited=dict(self.waited),
        )


@dataclass(slots=True)
class SequenceDrafts:
    """Where the drafts of one answer come from, and how many drafted tokens were right."""

    drafter: SuffixDrafter | None = None  # None until the first draft
    model_state: DraftState | None = None  # in the draft model, while it drafts for the answer
    # length of the answer, in tokens, from which the model is considered
    consider_model_at: int = 0
    accepted_tokens: int = 0  # drafted tokens that became part of the answer
    rejected_tokens: int = 0

    def count(self, *, drafted: int, accepted: int) -> None:
        self.accepted_tokens += accepted
        self.rejected_tokens += drafted - accepted

    def is_model_due(self, generated_tokens: int) -> bool:
        """Whether to consider the draft model for an answer of this length."""
        return generated_tokens >= max(LEAST_GENERATED, self.consider_model_at)

    def consider_model_later(self, generated_tokens: int) -> None:
        """Consider the draft model again when the answer is half as long again."""
        self.consider_model_at = 3 * generated_tokens // 2 + 1


@dataclass(slots=True, kw_only=True, eq=False)
class LiveSequence:
    """An accepted request: the one object that holds what the worker knows about it, apart from its
    state in the engine.

    Compared by identity, because an id may be used again after its Finished event.
    """

    request: SequenceRequest
    scheduled: ScheduledSequence  # the scheduler's view
    times: Times
    answer: LiveAnswer = field(init=False)
    start: CachedStart = field(default_factory=CachedStart)  # the cached state it starts from
    drafts: SequenceDrafts = field(default_factory=SequenceDrafts)
    chain: bytearray = field(default_factory=bytearray)  # tokens of prompt and answer, packed
    has_final_form: bool = False  # whether `form` is final, even if memory is short
    is_open: bool = False  # whether the engine has state for this sequence
    is_quantized: bool = False  # whether that state was quantized while the sequence ran
    stays_native: bool = False  # after a failed attempt to quantize its state
    attempts: int = 0  # how often the state was given up; earlier results are then ignored
    # its state in the cache, for other sequences; set from its opening until all of the state is
    # committed
    live_chain: LiveChain | None = None
    inserted: list[BlockKey] = field(default_factory=list)  # blocks added to the cache
    prefilled_tokens: int = 0  # for idle work; includes cached tokens
    # images that need no more work before the sequence is opened, including unusable ones
    prepared_images: set[str] = field(default_factory=set)
    # whether it has restarted once because images had to be processed again; it does so only once
    has_waited_for_images: bool = False

    def __post_init__(self) -> None:
        request = self.request
        # idle work has the form of its conversation, and an answer that was begun keeps it
        self.has_final_form = request.is_idle_work or bool(request.generated_token_ids)
        self.answer = LiveAnswer(
            request.max_tokens, frozenset(request.stop_token_ids), list(request.generated_token_ids)
        )
        self.chain += request.prompt_token_ids.packed + request.generated_token_ids.packed

    @property
    def id(self) -> RequestId:
        return self.request.request_id

    @property
    def form(self) -> KVBits:
        """The form of keys and values in which the sequence started."""
        return (self.scheduled.native_costs or self.scheduled.costs).form

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def known_tokens(self) -> int:
        return self.prompt_tokens + len(self.answer.token_ids)

    def set_wait_reason(
        self, reason: WaitReason | None, *, now: float, reported: WaitReason | None = None
    ) -> None:
        """Record what the request waits for from now on; None: it does not wait. The scheduler only
        admits it while this is MEMORY or None.

        reported: the reason that users see, if that is another one.
        """
        self.times.set_wait_reason(reported or reason, now=now)
        self.scheduled.waits_for = reason

    def admit(self, *, now: float) -> None:
        """Record that the scheduler has admitted the sequence, possibly after a preemption."""
        self.set_wait_reason(None, now=now)
        self.has_final_form = True
        if self.times.admitted_at is None:
            self.times.admitted_at = now
        self.answer.prompt_logprobs.clear()

    def drop_state(self) -> None:
        """Invalidate all results computed so far, including those of steps under way."""
        self.attempts += 1
        self.inserted.clear()

    def reuse_nothing(self) -> None:
        """Record that the sequence is prefilled from its first token, without the cache."""
        start = self.start
        start.release()
        # a hit that was reported before did not help, because its tokens are prefilled after all
        if start.report is not None and start.report.cached_tokens and not self.answer.token_ids:
            start.report = CacheReport(outcome=CacheOutcome.FAILED)

    def extend(self, token_ids: tuple[int, ...], *, now: float) -> None:
        """Add generated tokens to the answer."""
        self.times.record_tokens(now=now)
        self.answer.token_ids += token_ids
        self.chain += pack_tokens(token_ids)


class Ledger:
    """Keeps account of the requests: the live sequences (those without a Finished event) by id, the
    events to send, and the worker's counters. Device thread only.
    """

    def __init__(self, *, clock: Callable[[], float], counters: Counters | None = None) -> None:
        self.counters = counters or Counters()
        self.clock = clock
        self._live: dict[RequestId, LiveSequence] = {}
        self._outbox: list[Event] = []

    def __getitem__(self, request_id: RequestId) -> LiveSequence:
        return self._live[request_id]

    def live(self) -> tuple[LiveSequence, ...]:
        """All sequences without a Finished event, oldest first."""
        return tuple(self._live.values())

    def find(self, request_id: RequestId) -> LiveSequence | None:
        return self._live.get(request_id)

    def is_live(self, sequence: LiveSequence) -> bool:
        """Whether this sequence, not a later one with the same id, has no Finished event yet."""
        return self._live.get(sequence.id) is sequence

    def set_wait_reason(
        self,
        sequence: LiveSequence,
        reason: WaitReason | None,
        *,
        reported: WaitReason | None = None,
    ) -> None:
        """Record what a sequence waits for from now on; None: it does not wait. reported: the reason
        that users see, if that is another one.
        """
        sequence.set_wait_reason(reason, now=self.clock(), reported=reported)

    def allow_admission(self, sequence: LiveSequence) -> None:
        """Let the scheduler admit a waiting sequence: it waits for nothing but a running slot and
        memory.
        """
        self.set_wait_reason(sequence, WaitReason.MEMORY)

    def accept(self, sequence: LiveSequence) -> None:
        """Add a request; exactly one Finished event will follow."""
        assert sequence.id not in self._live
        self._live[sequence.id] = sequence
        self.emit(Accepted(request_id=sequence.id))

    def reject(self, request: SequenceRequest, refusal: HoldfastError) -> None:
        """Refuse a request; no other event follows."""
        self.counters.rejected += 1
        self.emit(_rejection_event(request.request_id, refusal))

    def finish(self, sequence: LiveSequence, reason: FinishReason, *, error: str = "") -> None:
        """Remove a live sequence and emit its Finished event."""
        assert self.is_live(sequence)
        del self._live[sequence.id]
        now = self.clock()
        is_complete = reason is FinishReason.LENGTH
        if sequence.answer.prompt_logprobs and is_complete:  # the prompt was only scored
            self._emit_started(sequence, now=now)
        self.counters.finished[reason] += not sequence.request.is_idle_work
        self.emit(
            Finished(
                request_id=sequence.id,
                reason=reason,
                prompt_tokens=sequence.prompt_tokens,
                completion_tokens=len(sequence.answer.token_ids),
                error=error,
                timings=sequence.times.sum_up(now),
                cache_report=sequence.start.report or CacheReport(),
                embedding=sequence.answer.embedding if is_complete else b"",
                accepted_tokens=sequence.drafts.accepted_tokens,
                rejected_tokens=sequence.drafts.rejected_tokens,
            )
        )

    def replace(self, sequence: LiveSequence) -> None:
        """Replace a sequence by a new, youngest one for the same request. Emits no event."""
        assert self.is_live(sequence)
        del self._live[sequence.id]
        fresh = LiveSequence(
            request=sequence.request,
            scheduled=replace(sequence.scheduled, waits_for=None),
            times=Times(sequence.times.submitted_at),
        )
        self._live[fresh.id] = fresh

    def count_prompt(self, sequence: LiveSequence, *, start: int, tokens: int) -> None:
        """Count the tokens of a computed span that are in the prompt, and report the progress of the
        prefill.
        """
        end = min(start + tokens, sequence.prompt_tokens)
        if sequence.request.is_idle_work:
            self.counters.read_ahead_tokens += end - start
            sequence.prefilled_tokens = end
            return
        self.counters.prompt_tokens += max(0, end - start)
        if end < sequence.prompt_tokens:
            self._emit_progress(sequence, read_tokens=end)

    def score(self, sequence: LiveSequence, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Collect log-probabilities of the prompt until they are complete."""
        if sequence.times.first_token_at is None:
            sequence.answer.prompt_logprobs += logprobs

    def generate(
        self, sequence: LiveSequence, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> None:
        """Emit generated tokens; `PrefillFinished` precedes the first ones."""
        now = self.clock()
        if not sequence.answer.token_ids:
            self._emit_started(sequence, now=now)
        sequence.extend(token_ids, now=now)
        self.counters.generated_tokens += len(token_ids)
        self.emit(TokensGenerated(request_id=sequence.id, token_ids=token_ids, logprobs=logprobs))

    def emit(self, event: Event) -> None:
        self._outbox.append(event)

    def take_outbox(self) -> list[Event]:
        events = self._outbox
        self._outbox = []
        return events

    def wait_reasons(self) -> dict[RequestId, WaitReason]:
        """The live requests that wait, each with the reason for its wait."""
        return {
            sequence.id: sequence.times.waiting[0]
            for sequence in self._live.values()
            if sequence.times.waiting is not None and not sequence.request.is_idle_work
        }

    def check_invariants(self) -> None:
        """Assert that every sequence is listed under its own id, and that no answer exceeds its
        `max_tokens`.
        """
        for request_id, sequence in self._live.items():
            assert sequence.id == request_id
            assert len(sequence.answer.token_ids) <= sequence.request.max_tokens

    def _emit_progress(self, sequence: LiveSequence, *, read_tokens: int) -> None:
        """Emit how many prompt tokens are prefilled or cached, at most every `PROGRESS_SECONDS`."""
        now = self.clock()
        admitted_at = now if sequence.times.admitted_at is None else sequence.times.admitted_at
        if now - max(admitted_at, sequence.times.progress_sent_at) < PROGRESS_SECONDS:
            return
        sequence.times.progress_sent_at = now
        report = sequence.start.report
        self.emit(
            PromptRead(
                request_id=sequence.id,
                total_tokens=sequence.prompt_tokens,
                cached_tokens=0 if report is None else report.cached_tokens,
                read_tokens=read_tokens,
                seconds=now - admitted_at,
            )
        )

    def _emit_started(self, sequence: LiveSequence, *, now: float) -> None:
        self.emit(
            PrefillFinished(
                request_id=sequence.id,
                cache_report=sequence.start.report or CacheReport(),
                timings=sequence.times.sum_up(now),
                logprobs=tuple(sequence.answer.prompt_logprobs),
            )
        )
        sequence.answer.prompt_logprobs.clear()


def _rejection_event(request_id: RequestId, refusal: HoldfastError) -> Rejected:
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
