"""A plan that was given out and not reported yet."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.worker.engine.plan import StepPlan
from holdfast.worker.scheduler.cost_model import StepLoad
from holdfast.worker.scheduler.sequence import ScheduledSequence


@dataclass(slots=True)
class StepUnderWay:
    """What the scheduler keeps of it."""

    number: int
    plan: StepPlan
    load: StepLoad
    # may draw nothing and are read to their end with this step
    drawless: tuple[ScheduledSequence, ...]
