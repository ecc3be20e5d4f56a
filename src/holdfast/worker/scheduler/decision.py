"""What the scheduler tells the worker and what it is told in return. Pure data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.wire.requests import RequestId
from holdfast.worker.engine.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCosts:
    """What KV memory a sequence of the loaded model takes."""

    kv_bytes_per_token: int  # growing layers only
    fixed_bytes_per_sequence: int  # windows and recurrent states
    reserve_step_tokens: int = 256  # capacities are multiples of it


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBounds:
    """What a chunk of a prompt may take, however much room its step has.

    By default nothing is bounded.

    seconds: of a step in which no sequence decodes. The GPU watchdog of macOS ends a command that
        runs too long, and a new
    request waits for the step under way.
    score_bytes_per_pair: what attention stores for each pair of a query and a key; 0 where a fused
        kernel stores no scores.
    score_bytes: the memory that there is for these.
    """

    seconds: float = math.inf
    score_bytes_per_pair: int = 0
    score_bytes: int = 0


UNBOUNDED = ChunkBounds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A sequence and for how many tokens there is room for it now."""

    request_id: RequestId
    capacity_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One step. The worker closes what is preempted, grows, opens what is admitted, then dispatches
    the plan, in this order.

    A step that is already under way may still draw a token for a sequence that is preempted here.
    It counts and is reported with `observe` like any other: the sequence is not admitted again
    before that.
    """

    # read from their first token that is not cached, after a preemption too
    admitted: tuple[Reservation, ...] = ()
    preempted: tuple[RequestId, ...] = ()
    grown: tuple[Reservation, ...] = ()
    plan: StepPlan = StepPlan()
    # what it takes at most, room made before included; None: not measured yet
    expected_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What became of one plan.

    Every plan with spans is reported exactly once, in the order they were given out.

    `seconds`: how long the device was busy with it, from its dispatch (or the end of the step
    before it, if that was later) to its end.
    """

    plan: StepPlan
    drawn: Mapping[RequestId, int]  # tokens of each sequence that has drawn any
    ended: tuple[RequestId, ...]  # by a stop token or a failure
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStatistics:
    """The scheduler at one moment."""

    running: int
    queued: int
    reading: int  # running sequences that still read their prompt
    # of running sequences, live states that they share included, and of ended ones that a step
    # still touches
    reserved_bytes: int
    budget_bytes: int
    preemptions: int  # since the start
    max_running: int  # the limits that count
    step_tokens: int
