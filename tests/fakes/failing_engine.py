"""An engine one of whose steps fails after it was computed, as a device's late error does."""

from __future__ import annotations

from typing import Any

from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.plan import SpanResult


class FailingOnce(Engine):
    """The real one, but that one collect raises, the `fails_at`-th."""

    fails_at = 0
    collected = 0

    def collect(self, pending: Any) -> tuple[SpanResult, ...]:
        result = super().collect(pending)
        self.collected += 1
        if self.collected == self.fails_at:
            raise RuntimeError("the device failed in this step")
        return result
