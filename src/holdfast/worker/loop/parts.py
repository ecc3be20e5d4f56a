"""What the loop works with, as protocols: the engine and the cache need MLX, the loop does not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from holdfast.errors import SessionFailure
from holdfast.store.block import BlockKey
from holdfast.wire.commands import PinnedPrefix, SequenceRequest, ThinkingBudget
from holdfast.wire.figures import CacheFigures
from holdfast.wire.requests import RequestId
from holdfast.wire.sessions import SessionAnswer, SessionCommand
from holdfast.worker.engine.plan import KeepPolicy, SpanResult, StepPlan
from holdfast.worker.prefix.chain import Cursor
from holdfast.worker.prefix.lookup import HeldMemory, LiveChain, Lookup

if TYPE_CHECKING:  # at run time these import MLX
    from holdfast.worker.engine.sequence import Kept, Prefix
    from holdfast.worker.kv.live import LiveState

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


class LiveStates(Protocol):
    """States that outlive their sequences: see `prefix/live_tier.py`."""

    def begin(self, lookup: Lookup | None, live: LiveChain, state: LiveState) -> LiveChain:
        """A sequence is open: its chain, or the one that it took over, is live from now on."""

    def park(self, live: LiveChain, chain: bytes) -> None:
        """Keep the state of a sequence that has ended normally, if there is room."""

    def leave(self, live: LiveChain) -> None:
        """End a live chain; what only it has is copied into blocks, if there is room."""

    def reclaim(self, nbytes: int) -> None:
        """End parked chains until this many bytes are free."""

    def newly_frozen(self) -> Sequence[LiveChain]:
        """Running chains with more frozen tokens than at the last call."""

    @property
    def held(self) -> HeldMemory:
        """Memory of live states that no running sequence has reserved."""


class Cache(Protocol):
    """The prefix cache: see `prefix/cache.py`. Device thread only; anything may raise."""

    @property
    def live(self) -> LiveStates:
        """States of running and parked sequences."""

    @property
    def keeps_anything(self) -> bool:
        """False if it never finds anything."""

    def boundaries(self, prompt_tokens: int, branch_points: Sequence[int] = ()) -> tuple[int, ...]:
        """Where spans of a prompt must end."""

    def policy(self, prompt_tokens: int, branch_points: Sequence[int] = ()) -> KeepPolicy | None:
        """What the engine is to copy out of a sequence with such a prompt."""

    def lookup(
        self, chain: bytes, *, tenant: str = "", in_blocks_only: bool = False, may_move: bool = True
    ) -> Lookup:
        """Find what a sequence that knows these packed tokens can start from, and read it."""

    def advance(self, lookup: Lookup) -> bool:
        """Take what has come from disk; returns whether everything is there."""

    def prefix(self, lookup: Lookup) -> Prefix | None:
        """What to give to the engine; None if there is nothing."""

    def cursor(self, *, tenant: str = "") -> Cursor:
        """A cursor before the first token of a chain."""

    def insert(
        self, cursor: Cursor, chain: bytes | bytearray, kept: Kept, *, live: LiveChain | None = None
    ) -> tuple[BlockKey, ...]:
        """Keep what was copied out of a sequence; returns what is new, and moves the cursor."""

    def forget(self, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """Forget blocks that cannot be trusted; returns everything that is gone."""

    def gone(self, keys: Iterable[BlockKey]) -> tuple[BlockKey, ...]:
        """Which of these are stored nowhere any more."""

    def forget_unsound(self, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """Forget the blocks of a chain from the first one that is not known to be sound."""

    def limit_ram(self, nbytes: int, *, most_parked_bytes: int | None) -> None:
        """Limit blocks in RAM and parked states (None: as many as fit); the excess goes."""

    def tend(self) -> None:
        """Housekeeping; called often."""

    def figures(self) -> CacheFigures | None:
        """What is kept; None if nothing ever is."""

    def offer_rest(self) -> None:
        """Save what is not saved yet, before `close`. May wait for a while."""

    def close(self) -> None:
        """Write what is queued, and close."""


class WorkerSessions(Protocol):
    """The sessions of a worker: see `sessions/service.py`. Device thread only.

    Any method but `is_busy` may raise, which harms no request.
    """

    @property
    def is_busy(self) -> bool:
        """Whether `tend` has to continue something."""

    def carry_out(self, command: SessionCommand) -> SessionAnswer | None:
        """The answer to a command; None if it comes later, from `tend`."""

    def used(self, session_id: str, *, tenant: str, chain: bytes | bytearray) -> None:
        """A request of a session has ended, and what it computed is committed."""

    def keep_prefixes(
        self,
        wanted: Sequence[PinnedPrefix],
        *,
        tenant: str,
        chain: bytes | bytearray,
        began_from: Sequence[BlockKey],
    ) -> None:
        """A request has ended: keep prefixes of it for a while, and renew what it started from."""

    def tend(self) -> list[SessionAnswer]:
        """Housekeeping; returns answers that are due."""

    def close(self) -> None:
        """Write what is not written yet."""

    def abandon(self) -> None:
        """End the threads, nothing else."""


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
