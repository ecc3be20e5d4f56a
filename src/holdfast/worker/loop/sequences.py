"""What the worker keeps of one accepted request until its Finished."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from holdfast.store.block import BlockKey
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import CacheReport, Finished, FinishReason, Started, Timings, TokenLogprob
from holdfast.worker.prefix.chain import Cursor, pack_tokens
from holdfast.worker.prefix.lookup import LiveChain, Lookup
from holdfast.worker.scheduler.stopping import Ending, ending


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
