"""Medians, spreads and ratios. Small samples, no assumptions about their distribution."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and quartiles of a sample."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    count: int

    @property
    def iqr(self) -> float:
        """Distance of the quartiles."""
        return self.high - self.low


def spread(values: Sequence[float]) -> Spread | None:
    """Median and quartiles; None for an empty sample."""
    if not values:
        return None
    return Spread(
        median=statistics.median(values),
        low=percentile(values, 25),
        high=percentile(values, 75),
        count=len(values),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest values. `values` must not be empty."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def pairwise_ratios(
    numerators: Sequence[Sequence[float]], denominators: Sequence[Sequence[float]]
) -> list[float]:
    """Ratios of the medians, round by round; rounds without both are skipped."""
    ratios = []
    for above, below in zip(numerators, denominators, strict=False):
        if above and below and statistics.median(below):
            ratios.append(statistics.median(above) / statistics.median(below))
    return ratios
