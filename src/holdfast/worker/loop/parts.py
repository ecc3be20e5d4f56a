"""What the loop works with: engine, cache and sessions need MLX, the loop does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from holdfast.errors import SessionFailure
from holdfast.store.block import BlockKey
from holdfast.wire.commands import PinnedPrefix, SequenceRequest, ThinkingBudget
from holdfast.wire.requests import RequestId
from holdfast.wire.sessions import SessionAnswer, SessionCommand
from holdfast.worker.engine.plan import KeepPolicy, SpanResult, StepPlan

if TYPE_CHECKING:  # at run time these import MLX
    from holdfast.worker.engine.sequence import Kept, Prefix
    from holdfast.worker.kv.live import LiveState
    from holdfast.worker.prefix.cache import PrefixCache
    from holdfast.worker.prefix.no_cache import NoCache
    from holdfast.worker.sessions.service import SessionService

Cache: TypeAlias = "PrefixCache | NoCache"
WorkerSessions: TypeAlias = "SessionService | NoSessions"
Step = TypeVar("Step")  # a step under way; only the engine looks into it


class StepEngine(Protocol[Step]):
    """Holds the state of open sequences and executes plans over them. Device thread only.

    Any method may raise; the loop then reopens the sequences concerned and runs each alone.
    """

    @property
    def runs_ahead(self) -> bool:
        """Whether a step is to be dispatched before the previous one is collected."""

    def open(
        self,
        request: SequenceRequest,
        *,
        generated: tuple[int, ...] = (),
        capacity_tokens: int,
        prefix: Prefix | None = None,
        keep: KeepPolicy | None = None,
    ) -> LiveState:
        """Make room for a sequence and return its state.

        generated: tokens drawn before a preemption. prefix: what to start from, without prefill.
        keep: what to copy out while it runs.
        """

    def grow(self, request_id: RequestId, capacity_tokens: int) -> None:
        """Make more room for an open sequence."""

    def limit_thoughts(
        self, request_id: RequestId, budget: ThinkingBudget, *, generated: Sequence[int]
    ) -> None:
        """Change the thinking budget of an open sequence without a span under way.

        generated: every token drawn so far.
        """

    def close(self, request_id: RequestId) -> None:
        """Forget an open sequence; a span under way still runs."""

    def keep_rest(self, request_id: RequestId) -> Kept | None:
        """Copy out what was not kept of an open sequence yet, without waiting; None if nothing."""

    def check_device(self) -> None:
        """Compute something with a known result; raises if the device computes nothing any more."""

    def abandon_pending(self) -> None:
        """Forget dispatched steps that are not collected, because one of them failed."""

    def dispatch(self, plan: StepPlan) -> Step:
        """Start a step without waiting for the device."""

    def collect(self, pending: Step) -> tuple[SpanResult, ...]:
        """Wait for a dispatched step; returns a result per span."""

    def take_kept(self, pending: Step) -> Sequence[Kept]:
        """The snapshots that a collected step has made."""


class NoSessions:
    """The sessions of a worker that keeps nothing: refuses every command."""

    is_busy = False

    def carry_out(self, command: SessionCommand) -> SessionAnswer:
        """Refuse."""
        message = "this model has no prefix cache, so there are no sessions"
        return SessionAnswer(call_id=command.call_id, failure=SessionFailure.OFF, message=message)

    def used(self, session_id: str, *, tenant: str, chain: bytes | bytearray) -> None:
        """Nothing was kept."""

    def keep_prefixes(
        self,
        wanted: Sequence[PinnedPrefix],
        *,
        tenant: str,
        chain: bytes | bytearray,
        began_from: Sequence[BlockKey],
    ) -> None:
        """Nothing was kept."""

    def tend(self) -> list[SessionAnswer]:
        """Nothing is due."""
        return []

    def close(self) -> None:
        """Nothing is open."""

    def abandon(self) -> None:
        """There are no threads."""
