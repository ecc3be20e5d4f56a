"""What a forward pass gives: logits of rows that draw, the means to get those of scored rows, and
hidden states to pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import mlx.core as mx

from holdfast.wire.requests import RequestId


def _as_they_are(logits: mx.array) -> mx.array:
    return logits


@dataclass(frozen=True, slots=True)
class LaterLogits:
    """Logits of consecutive positions, computed when they are asked for, of as many of them as are
    asked for.

    source: [positions, …], what `project` turns into logits, [positions, vocabulary].
    """

    source: mx.array
    project: Callable[[mx.array], mx.array] = _as_they_are

    def __len__(self) -> int:
        return self.source.shape[0]

    def of(self, start: int, stop: int) -> mx.array:
        """Logits of some of the positions, lazily."""
        return self.project(self.source[start:stop])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLogits:
    """drawn: [spans that draw, vocabulary], in the order of the spans, None when none does. scored:
    by the span's request.

    hidden: [rows, hidden], by the span's request, of those that are to be pooled.
    """

    drawn: mx.array | None = None
    scored: Mapping[RequestId, LaterLogits] = field(default_factory=dict)
    hidden: Mapping[RequestId, mx.array] = field(default_factory=dict)
