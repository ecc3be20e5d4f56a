"""A step under way, and what of its results is still wanted when it has come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.worker.engine.plan import Span, SpanResult, StepPlan
from holdfast.worker.loop.sequences import LiveSequence

if TYPE_CHECKING:
    from holdfast.worker.engine.sequence import Kept


def _nothing_kept() -> Sequence[Kept]:
    return ()


@dataclass(slots=True, kw_only=True)
class Flight:
    """A step under way. `sequences`: whose spans they are, in the order of `plan`."""

    decided: StepPlan  # the scheduler's, which wants it back
    plan: StepPlan  # what of it was dispatched: without sequences that could not be opened
    sequences: tuple[LiveSequence, ...]
    lives: tuple[int, ...]  # of the sequences, when it was dispatched
    started_at: float
    expected_seconds: float | None  # what it takes at most; None: nothing like it was measured
    collect: Callable[[], tuple[SpanResult, ...]] | None = None  # None: it was not dispatched
    take_kept: Callable[[], Sequence[Kept]] = _nothing_kept
    # its dispatch raised, or the step before it failed: what it gives cannot be trusted
    is_suspect: bool = False

    def wanted(
        self, results: Sequence[SpanResult]
    ) -> Iterator[tuple[Span, LiveSequence, SpanResult]]:
        """What it gave for sequences whose state was not given up since."""
        for span, sequence, life, given in zip(
            self.plan.spans, self.sequences, self.lives, results, strict=True
        ):
            if sequence.lives == life:
                yield span, sequence, given

    def unhealthy(self, results: Sequence[SpanResult]) -> tuple[LiveSequence, ...]:
        """For whom it did not come out right."""
        return tuple(sequence for _, sequence, given in self.wanted(results) if given.failure)

    def healthy(self, results: Sequence[SpanResult]) -> tuple[LiveSequence, ...]:
        """For whom it did."""
        return tuple(sequence for _, sequence, given in self.wanted(results) if not given.failure)


def expected_together(expected_seconds: float | None, ahead: Flight | None) -> float | None:
    """What a step takes at most that is dispatched behind another one; None when one of them is of
    a kind not measured yet.
    """
    if ahead is None or expected_seconds is None:
        return expected_seconds
    return None if ahead.expected_seconds is None else ahead.expected_seconds + expected_seconds
