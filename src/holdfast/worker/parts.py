"""What the loop works with, as protocols: the engine behind them needs MLX, the loop and its tests do not."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Protocol

from holdfast.engine.plan import KeepPolicy, StepPlan, StepResult
from holdfast.messages.commands import SequenceRequest
from holdfast.messages.events import CacheReport
from holdfast.messages.figures import CacheFigures
from holdfast.messages.requests import RequestId
from holdfast.messages.sessions import SessionAnswer, SessionCommand
from holdfast.store.block import BlockKey


class Engine(Protocol):
    """Executes plans on the device. Device thread only.

    Any method may raise; the loop then builds the sequences concerned anew and runs each alone.
    """

    @property
    def runs_ahead(self) -> bool:
        """Whether a step is to be dispatched before the one before it is collected."""
        ...

    def open(
        self,
        request: SequenceRequest,
        *,
        generated: tuple[int, ...] = (),
        capacity_tokens: int,
        prefix: Any = None,
        keep: KeepPolicy | None = None,
    ) -> object:
        """Make room for a sequence; `generated`: tokens drawn before it was preempted.

        prefix: snapshots to begin from, of which nothing is read again. keep: what to copy out while it runs.
        """
        ...

    def grow(self, request_id: RequestId, capacity_tokens: int) -> None:
        """Make more room for an open sequence."""
        ...

    def close(self, request_id: RequestId) -> None:
        """Forget an open sequence; a plan that is under way with a span of it still runs."""
        ...

    def dispatch(self, plan: StepPlan) -> Any:
        """Start one step and return what `collect` needs, without waiting for the device."""
        ...

    def collect(self, pending: Any) -> StepResult:
        """Wait for a dispatched step and return its results, one per span."""
        ...

    def take_kept(self, pending: Any) -> Sequence[Any]:
        """The snapshots that a collected step has made, each with the `request_id` that it belongs to."""
        ...

    def keep_rest(self, request_id: RequestId) -> Any | None:
        """Copy out what has not been kept of an open sequence, without waiting; None when nothing can be."""
        ...

    def abandon_pending(self) -> None:
        """Forget dispatched steps that will not be collected, because one of them failed."""
        ...


class Lookup(Protocol):
    """What one request can begin from, held until it is released."""

    @property
    def cached_tokens(self) -> int:
        """Tokens that need not be read, fewer than the request knows."""
        ...

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        """What it stands on, parents before children."""
        ...

    def report(self) -> CacheReport:
        """What was found, and why not more. The times are the caller's, but for that of the disk."""
        ...

    def release(self) -> None:
        """Let it go."""
        ...


class Memory(Protocol):
    """Keeps what sequences leave behind and finds what new ones can begin from."""

    def boundaries(self, prompt_tokens: int, branch_points: Sequence[int] = ()) -> tuple[int, ...]:
        """Positions in a prompt of that length at which spans have to end."""
        ...

    def policy(self, prompt_tokens: int, branch_points: Sequence[int] = ()) -> KeepPolicy:
        """What the engine is to copy out of a sequence with such a prompt."""
        ...

    def recall(self, tokens: array[int], *, tenant: str = "") -> Lookup:
        """Ask what a sequence that knows these tokens can begin from; what is on disk is fetched meanwhile."""
        ...

    def is_settled(self, recall: Any) -> bool:
        """Whether all of it has been fetched."""
        ...

    def prefix(self, recall: Any) -> Any | None:
        """What to give to the engine; None when there is nothing."""
        ...

    def keep(self, tokens: array[int], kept: Any, *, tenant: str = "") -> tuple[BlockKey, ...]:
        """Take in what a sequence that knows `tokens` has left behind; returns what is new of it."""
        ...

    def forget(self, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """Forget blocks that cannot be trusted; returns what is gone by that."""
        ...

    def forget_unsound(self, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """Of a chain, forget everything from the first block on that is not known to be sound; returns what is gone by that."""
        ...

    def tend(self) -> None:
        """Housekeeping; call often."""
        ...

    def figures(self) -> CacheFigures:
        """What is kept. Who asked for what is the caller's to count."""
        ...

    def close(self) -> None:
        """Write what is queued and let go."""
        ...


class Sessions(Protocol):
    """The worker's sessions. Device thread only; any method but `is_busy` may raise, which harms no request."""

    @property
    def is_busy(self) -> bool:
        """Whether something is under way that `tend` has to go on with."""
        ...

    def carry_out(self, command: SessionCommand) -> SessionAnswer | None:
        """The answer to a command; None when it comes later, out of `tend`."""
        ...

    def used(self, session_id: str, *, tenant: str, chain: array[int]) -> None:
        """A request of a session has ended, and what it leaves is put away."""
        ...

    def tend(self) -> list[SessionAnswer]:
        """Housekeeping; answers that are due."""
        ...

    def close(self) -> None:
        """Write what is not written yet."""
        ...

    def abandon(self) -> None:
        """End the threads, and nothing else."""
        ...
