"""What the loop works with, as protocols: the engine behind them needs MLX, the loop and its tests do not."""

from __future__ import annotations

from typing import Any, Protocol

from holdfast.engine.plan import StepPlan, StepResult
from holdfast.messages import RequestId, SequenceRequest


class Engine(Protocol):
    """Executes plans on the device. Device thread only.

    Any method may raise; the loop then builds the sequences concerned anew and runs each alone.
    """

    def open(self, request: SequenceRequest, *, generated: tuple[int, ...] = (), capacity_tokens: int) -> object:
        """Make room for a sequence of which nothing is read yet; `generated`: tokens drawn before it was preempted."""
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

    def abandon_pending(self) -> None:
        """Forget dispatched steps that will not be collected, because one of them failed."""
        ...
