"""What the loop works with, as protocols: the engine and the cache behind them need MLX, the loop
and its tests do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from holdfast.store.block import BlockKey
from holdfast.wire.commands import PinnedPrefix, SequenceRequest, ThinkingBudget
from holdfast.wire.figures import CacheFigures
from holdfast.wire.requests import RequestId
from holdfast.wire.sessions import SessionAnswer, SessionCommand
from holdfast.worker.engine.plan import KeepPolicy, SpanResult, StepPlan
from holdfast.worker.prefix.chain import Cursor
from holdfast.worker.prefix.lookup import HeldMemory, LiveChain, Lookup

if TYPE_CHECKING:  # at run time they bring MLX with them
    from holdfast.worker.engine.sequence import Kept, Prefix
    from holdfast.worker.kv.live import LiveState

Step = TypeVar("Step")  # a step under way; only the engine knows what is in it


class StepEngine(Protocol[Step]):
    """Holds the state of open sequences and executes plans over them. Device thread only.

    Any method may raise; the loop then builds the sequences concerned anew and runs each alone.
    """

    @property
    def runs_ahead(self) -> bool:
        """Whether a step is to be dispatched before the one before it is collected."""

    def open(
        self,
        request: SequenceRequest,
        *,
        generated: tuple[int, ...] = (),
        capacity_tokens: int,
        prefix: Prefix | None = None,
        keep: KeepPolicy | None = None,
    ) -> LiveState:
        """Make room for a sequence; `generated`: tokens drawn before it was preempted.

        Returns its state.

        prefix: what to begin from, of which nothing is read again. keep: what to copy out while it
        runs.
        """

    def grow(self, request_id: RequestId, capacity_tokens: int) -> None:
        """Make more room for an open sequence."""

    def limit_thoughts(
        self, request_id: RequestId, budget: ThinkingBudget, *, generated: Sequence[int]
    ) -> None:
        """Give an open sequence, of which no span is under way, another thinking budget.

        `generated`: all that it has drawn.
        """

    def close(self, request_id: RequestId) -> None:
        """Forget an open sequence; a plan that is under way with a span of it still runs."""

    def keep_rest(self, request_id: RequestId) -> Kept | None:
        """Copy out what has not been kept of an open sequence, without waiting; None when nothing
        can be.
        """

    def check_device(self) -> None:
        """Compute something that is known; raises what a device raises that computes nothing any
        more.
        """

    def abandon_pending(self) -> None:
        """Forget dispatched steps that will not be collected, because one of them failed."""

    def dispatch(self, plan: StepPlan) -> Step:
        """Start one step, without waiting for the device."""

    def collect(self, pending: Step) -> tuple[SpanResult, ...]:
        """Wait for a dispatched step and return its results, one per span."""

    def take_kept(self, pending: Step) -> Sequence[Kept]:
        """The snapshots that a collected step has made."""


class LiveStates(Protocol):
    """States that outlive their sequences. Device thread only; anything may raise."""

    def begin(self, lookup: Lookup | None, live: LiveChain, state: LiveState) -> LiveChain:
        """A sequence is open: its chain is live from now on.

        Returns that chain, which may be one that it has taken over.
        """

    def park(self, live: LiveChain, chain: bytes) -> None:
        """A sequence has ended in good order that knows `chain`, packed tokens: keep its state as
        it is, if there is room.
        """

    def leave(self, live: LiveChain) -> None:
        """A chain is live no more. What only it has is kept otherwise, if there is room."""

    def reclaim(self, nbytes: int) -> None:
        """Give up parked states until so many bytes are free."""

    def newly_frozen(self) -> Sequence[LiveChain]:
        """Chains of running sequences that have frozen more since the last call, which counts as
        held from now on.
        """

    @property
    def held(self) -> HeldMemory:
        """Memory of live states that no running sequence has reserved."""


class Cache(Protocol):
    """Keeps what sequences have computed and finds what new ones can begin from.

    Device thread only; anything may raise.
    """

    @property
    def live(self) -> LiveStates:
        """Of sequences that run, and of those that are parked."""

    @property
    def keeps_anything(self) -> bool:
        """Whether there is any use in asking."""

    def boundaries(self, prompt_tokens: int, branch_points: Sequence[int] = ()) -> tuple[int, ...]:
        """Positions in a prompt of that length at which spans have to end."""

    def policy(self, prompt_tokens: int, branch_points: Sequence[int] = ()) -> KeepPolicy | None:
        """What the engine is to copy out of a sequence with such a prompt; None when nothing is."""

    def lookup(
        self, chain: bytes, *, tenant: str = "", in_blocks_only: bool = False, may_move: bool = True
    ) -> Lookup:
        """Find what a sequence that knows these packed tokens can begin from; what is on disk is
        fetched meanwhile.

        in_blocks_only: not from live states. may_move: it leaves a state that is as good as the one
        it takes over.
        """

    def advance(self, lookup: Lookup) -> bool:
        """Take what has come from the disk; whether all of it is there. May find less than before."""

    def prefix(self, lookup: Lookup) -> Prefix | None:
        """What to give to the engine; None when there is nothing."""

    def cursor(self, *, tenant: str = "") -> Cursor:
        """A cursor before the first token of a chain."""

    def insert(
        self, cursor: Cursor, chain: bytes | bytearray, kept: Kept, *, live: LiveChain | None = None
    ) -> tuple[BlockKey, ...]:
        """Take in what was copied out of a sequence that knows `chain`, packed tokens; returns what
        is new. Moves the cursor.

        live: the sequence's live chain.
        """

    def forget(self, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """Forget blocks that cannot be trusted; returns what is gone by that."""

    def gone(self, keys: Iterable[BlockKey]) -> tuple[BlockKey, ...]:
        """Which of these are nowhere any more."""

    def forget_unsound(self, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """Of a chain, forget everything from the first block on that is not known to be sound;
        returns what is gone by that.
        """

    def limit_ram(self, nbytes: int, *, most_parked_bytes: int | None) -> None:
        """Let blocks in RAM and parked states take so much from now on; what is beyond that goes.

        None: as many as fit.
        """

    def tend(self) -> None:
        """Housekeeping; call often."""

    def figures(self) -> CacheFigures | None:
        """What is kept; None when nothing ever is. Who asked for what is the caller's to count."""

    def offer_rest(self) -> None:
        """Try once more to have written down what was not, before `close`. Waits, for a while."""

    def close(self) -> None:
        """Write what is queued and let go."""


class WorkerSessions(Protocol):
    """The worker's sessions.

    Device thread only; any method but `is_busy` may raise, which harms no request.
    """

    @property
    def is_busy(self) -> bool:
        """Whether something is under way that `tend` has to go on with."""

    def carry_out(self, command: SessionCommand) -> SessionAnswer | None:
        """The answer to a command; None when it comes later, out of `tend`."""

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
        """The same of any request: beginnings of its chain are to be kept for a while, and what it
        began from was used.
        """

    def tend(self) -> list[SessionAnswer]:
        """Housekeeping; answers that are due."""

    def close(self) -> None:
        """Write what is not written yet."""

    def abandon(self) -> None:
        """End the threads, and nothing else."""
