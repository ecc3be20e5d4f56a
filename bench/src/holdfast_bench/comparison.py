"""Ratios between two contenders, and whether they exceed the noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast_bench.figures import Spread, pairwise_ratios, spread
from holdfast_bench.metrics import Better
from holdfast_bench.results import CaseResult, ContenderResult

Verdict = Literal["better", "worse", "no difference seen", ""]
SMALLEST_NOISE = 0.02  # a smaller difference never counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The first contender relative to another one, round by round."""

    spread: Spread
    verdict: Verdict


def ratio_of(
    case: CaseResult, other: ContenderResult, metric: str, *, better: Better
) -> Ratio | None:
    """The first contender's metric relative to that of `other`; None if no round has both."""
    ratios = pairwise_ratios(case.contenders[0].values(metric), other.values(metric))
    found = spread(ratios)
    if found is None:
        return None
    return Ratio(
        spread=found,
        verdict=_verdict(found, noise=noise_of(case.noise.get(metric, ())), better=better),
    )


def noise_of(ratios: Sequence[float]) -> float:
    """The largest deviation from 1 of a server's ratio to itself."""
    return max([SMALLEST_NOISE, *(max(ratio, 1 / ratio) - 1 for ratio in ratios if ratio > 0)])


def _verdict(ratio: Spread, *, noise: float, better: Better) -> Verdict:
    if better == "neither":
        return ""
    if (
        ratio.median > 1 + noise
        or (ratio.median > 0 and 1 / ratio.median > 1 + noise)
        or ratio.median <= 0
    ):
        return "better" if (ratio.median > 1) == (better == "higher") else "worse"
    return "no difference seen"
