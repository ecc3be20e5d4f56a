"""Compares contenders with each other, and a result file with that of another commit: medians,
spreads, ratios, and whether they exceed the noise. Small samples, no assumptions about their
distribution.

If two files have the same second contender, their figures are taken relative to it, round by round:
a slower machine slows both, and the commits differ in the first contender only.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from holdfast.errors import HoldfastError
from holdfast_bench.metrics import metric_of, shown
from holdfast_bench.results import Agreement, CaseResult, ContenderResult, Results

Verdict = Literal["better", "worse", "no difference seen", ""]
SMALLEST_NOISE = 0.02  # a smaller difference never counts
SMALLEST_CHANGE = 0.03  # a smaller change between commits counts as none
_SINGLE_ROUND_NOISE = 0.10  # if there are too few rounds for a spread
_ROUNDS_FOR_SPREAD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and quartiles of a sample."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    count: int


def spread(values: Sequence[float]) -> Spread | None:
    """Median and quartiles; None for an empty sample."""
    if not values:
        return None
    low, high = percentile(values, 25), percentile(values, 75)
    return Spread(median=statistics.median(values), low=low, high=high, count=len(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest values. `values` must not be empty."""
    return float(np.percentile(values, percent))


def ratios_by_round(
    numerators: Sequence[Sequence[float]], denominators: Sequence[Sequence[float]]
) -> list[float]:
    """Ratios of the medians, round by round; rounds without both are skipped."""
    return [
        statistics.median(above) / statistics.median(below)
        for above, below in zip(numerators, denominators, strict=False)
        if above and below and statistics.median(below)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The first contender relative to another one, round by round."""

    spread: Spread
    verdict: Verdict


def ratio_of(case: CaseResult, other: ContenderResult, metric: str) -> Ratio | None:
    """The first contender's metric relative to that of `other`; None if no round has both."""
    found = spread(ratios_by_round(case.contenders[0].values(metric), other.values(metric)))
    if found is None:
        return None
    itself = [ratio for ratio in case.noise.get(metric, ()) if ratio > 0]
    noise = max([SMALLEST_NOISE, *(max(ratio, 1 / ratio) - 1 for ratio in itself)])
    return Ratio(spread=found, verdict=_verdict(found.median, noise=noise, metric=metric))


def _verdict(ratio: float, *, noise: float, metric: str) -> Verdict:
    better = metric_of(metric).better
    if better == "neither":
        return ""
    if 1 / (1 + noise) <= ratio <= 1 + noise:
        return "no difference seen"
    return "better" if (ratio > 1) == (better == "higher") else "worse"


def agreement(
    expected: Sequence[str], got: Sequence[str], *, cut: Callable[[str], list[str]]
) -> Agreement | None:
    """Compare greedy answers to the same prompts; None if there are none. Speed counts only if
    answers agree.

    cut: splits a text into tokens. Tokens agree up to the first difference, after which two correct
    answers have nothing in common. An answer that is longer than expected differs at its end.
    """
    if not expected or not got:
        return None
    tokens = agreeing = equal = 0
    for wanted, given in zip(expected, got, strict=False):
        # Texts are stripped; with a space before it, the first word is one token.
        pair = cut(f" {wanted}"), cut(f" {given}")
        tokens += max(map(len, pair))
        agreeing += common_prefix(*pair)
        equal += pair[0] == pair[1]
    return Agreement(
        answers=min(len(expected), len(got)),
        equal_answers=equal,
        tokens=tokens,
        agreeing_tokens=agreeing,
    )


def common_prefix(left: Sequence[str], right: Sequence[str]) -> int:
    """How many tokens are equal from the start."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


# -- two commits


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
        for change in _changes_of(one, case)
    ]
    if not found:
        raise HoldfastError("the files have no case in common")
    return found


def shown_change(change: Change) -> str:
    """One line for a terminal."""
    unit = metric_of(change.metric).unit
    mark = {"worse": "WORSE", "no difference seen": "same"}.get(change.verdict, change.verdict)
    relative = f", relative to {change.control}" if change.control else ""
    return (
        f"{mark:6} {change.where}: {change.metric} {shown(change.before, unit)} → "
        f"{shown(change.after, unit)} "
        f"({change.ratio:.3f} ×{relative}; ±{change.allowed:.1%} may be chance)"
    )


def _key(case: CaseResult) -> tuple[str, str, str]:
    return case.scenario, case.case, case.model


def _changes_of(old: CaseResult, new: CaseResult) -> Iterator[Change]:
    if [each.label for each in old.contenders[:1]] != [each.label for each in new.contenders[:1]]:
        return
    labels = [each.label for each in new.contenders[1:]]
    control = next((each.label for each in old.contenders[1:] if each.label in labels), "")
    for metric in new.metric_names():
        before, after = (_medians(case.contenders[0].values(metric)) for case in (old, new))
        if not before or not after:
            continue
        related = _relative(old, control, metric), _relative(new, control, metric)
        is_related = all(related)
        one, other = related if is_related else (before, after)
        if (base := statistics.median(one)) <= 0:
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
            verdict=_verdict(ratio, noise=allowed, metric=metric),
        )


def _medians(values: list[list[float]]) -> list[float]:
    return [statistics.median(each) for each in values if each]


def _relative(case: CaseResult, control: str, metric: str) -> list[float]:
    others = [each for each in case.contenders if each.label == control]
    ours = case.contenders[0].values(metric)
    return ratios_by_round(ours, others[0].values(metric)) if others else []


def _allowed(*sides: Sequence[float]) -> float:
    if min(map(len, sides)) < _ROUNDS_FOR_SPREAD:
        return _SINGLE_ROUND_NOISE
    spreads = [found for values in sides if (found := spread(values)) is not None]
    widths = [(found.high - found.low) / found.median for found in spreads if found.median > 0]
    return max(SMALLEST_CHANGE, sum(widths))
