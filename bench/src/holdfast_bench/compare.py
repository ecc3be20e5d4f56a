"""Compares two result files of two commits beyond the noise of both.

If both have the same second contender, figures are taken relative to it, round by round: a slower
machine slows both, and the commits differ in the first contender only.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.errors import HoldfastError
from holdfast_bench.comparison import Verdict
from holdfast_bench.figures import pairwise_ratios, spread
from holdfast_bench.metrics import metric_of, shown
from holdfast_bench.results import CaseResult, Results, median_of_rounds

SMALLEST_CHANGE = 0.03  # a smaller change counts as none
_SINGLE_ROUND_NOISE = 0.10  # if there are too few rounds for a spread
_ROUNDS_FOR_SPREAD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One figure of the first contender, before and after."""

    where: str  # scenario / case / model
    metric: str
    before: float
    after: float
    ratio: float  # after / before; relative to the control if there is one
    allowed: float  # how far chance may move the ratio from 1
    control: str  # label of the contender that both are relative to, or ""
    verdict: Verdict


def changes_between(before: Results, after: Results) -> list[Change]:
    """All figures that both files contain.

    Raises HoldfastError if there are none, or if the kinds differ.
    """
    if before.kind != after.kind:
        raise HoldfastError(f"{before.kind} results cannot be compared with {after.kind} results")
    old = {_key(case): case for case in before.cases}
    found = [
        change
        for case in after.cases
        if (one := old.get(_key(case)))
        for change in _of_case(one, case)
    ]
    if not found:
        raise HoldfastError("the files have no case in common")
    return found


def shown_change(change: Change) -> str:
    """One line for a terminal."""
    unit = metric_of(change.metric).unit
    mark = {"worse": "WORSE ", "better": "better", "no difference seen": "same  ", "": "      "}[
        change.verdict
    ]
    relative = f", relative to {change.control}" if change.control else ""
    return (
        f"{mark} {change.where}: {change.metric} {shown(change.before, unit)} → "
        f"{shown(change.after, unit)} "
        f"({change.ratio:.3f} ×{relative}; ±{change.allowed:.1%} may be chance)"
    )


def _key(case: CaseResult) -> tuple[str, str, str]:
    return case.scenario, case.case, case.model


def _of_case(old: CaseResult, new: CaseResult) -> Iterator[Change]:
    if (
        not old.contenders
        or not new.contenders
        or old.contenders[0].label != new.contenders[0].label
    ):
        return
    control = _control(old, new)
    for metric in new.metric_names():
        before = median_of_rounds(old.contenders[0].values(metric))
        after = median_of_rounds(new.contenders[0].values(metric))
        if not before or not after:
            continue
        related = _related(old, control, metric), _related(new, control, metric)
        is_related = bool(control and all(related))
        one, other = related if is_related else (before, after)
        base = statistics.median(one)
        if base <= 0:
            continue
        ratio, allowed = statistics.median(other) / base, _allowed(one, other)
        yield Change(
            where=" / ".join(part for part in _key(new) if part),
            metric=metric,
            before=statistics.median(before),
            after=statistics.median(after),
            ratio=ratio,
            allowed=allowed,
            control=control if is_related else "",
            verdict=_verdict(ratio, allowed, metric),
        )


def _control(old: CaseResult, new: CaseResult) -> str:
    labels = [each.label for each in new.contenders[1:]]
    return next((each.label for each in old.contenders[1:] if each.label in labels), "")


def _related(case: CaseResult, control: str, metric: str) -> list[float]:
    other = next((each for each in case.contenders if each.label == control), None)
    return (
        pairwise_ratios(case.contenders[0].values(metric), other.values(metric))
        if other is not None
        else []
    )


def _allowed(before: Sequence[float], after: Sequence[float]) -> float:
    if min(len(before), len(after)) < _ROUNDS_FOR_SPREAD:
        return _SINGLE_ROUND_NOISE
    spreads = [found for values in (before, after) if (found := spread(values)) is not None]
    return max(
        SMALLEST_CHANGE, sum(found.iqr / found.median for found in spreads if found.median > 0)
    )


def _verdict(ratio: float, allowed: float, metric: str) -> Verdict:
    better = metric_of(metric).better
    if better == "neither":
        return ""
    if 1 / (1 + allowed) <= ratio <= 1 + allowed:
        return "no difference seen"
    return "better" if (ratio > 1) == (better == "higher") else "worse"
