"""An engine with one step that fails after it was computed, like a device's late error."""

from __future__ import annotations

from typing import Any

from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.plan import SpanResult


class FailingOnce(Engine):
    """The real engine, except that the `fails_at`-th collect raises."""

    fails_at = 0
    collected = 0

    def collect(self, pending: Any) -> tuple[SpanResult, ...]:
        result = super().collect(pending)
        self.collected += 1
        if self.collected == self.fails_at:
            raise RuntimeError("the device failed in this step")
        return result
