"""Tests of comparing result files."""

from __future__ import annotations

import pytest

from holdfast.errors import HoldfastError
from holdfast_bench.compare import changes_between, shown_change
from holdfast_bench.results import CaseResult, ContenderResult, Results, Sample


def results_of(
    ours: list[float], control: list[float] | None = None, *, metric: str = "step_seconds"
) -> Results:
    contenders = [
        ContenderResult(
            label="engine", rounds=[Sample(metrics={metric: [value]}) for value in ours]
        )
    ]
    if control is not None:
        contenders.append(
            ContenderResult(
                label="bare", rounds=[Sample(metrics={metric: [value]}) for value in control]
            )
        )
    return Results(
        cases=[CaseResult(scenario="engine", case="1 stream", model="m", contenders=contenders)]
    )


def verdict(before: Results, after: Results) -> str:
    (change,) = changes_between(before, after)
    assert shown_change(change)
    return change.verdict


def test_differences_beyond_the_noise_are_worse_or_better() -> None:
    assert verdict(results_of([1.0, 1.01, 0.99]), results_of([1.2, 1.21, 1.19])) == "worse"
    assert verdict(results_of([1.2, 1.21, 1.19]), results_of([1.0, 1.01, 0.99])) == "better"
    assert (
        verdict(results_of([1.0, 1.01, 0.99]), results_of([1.01, 1.02, 1.0]))
        == "no difference seen"
    )


def test_the_better_direction_depends_on_the_metric() -> None:
    slow, fast = ([value] * 3 for value in (100.0, 150.0))
    assert (
        verdict(
            results_of(slow, metric="tokens_per_second"),
            results_of(fast, metric="tokens_per_second"),
        )
        == "better"
    )
    assert (
        verdict(
            results_of(fast, metric="tokens_per_second"),
            results_of(slow, metric="tokens_per_second"),
        )
        == "worse"
    )


def test_wide_spreads_and_single_rounds_need_larger_differences() -> None:
    assert (
        verdict(results_of([1.0, 2.0, 3.0, 1.5]), results_of([1.5, 3.0, 2.5, 2.0]))
        == "no difference seen"
    )
    assert verdict(results_of([1.0]), results_of([1.08])) == "no difference seen"
    assert verdict(results_of([1.0]), results_of([1.2])) == "worse"


def test_a_slower_machine_is_not_a_regression() -> None:
    assert (
        verdict(results_of([1.0] * 3, [1.0] * 3), results_of([2.0] * 3, [2.0] * 3))
        == "no difference seen"
    )
    assert verdict(results_of([1.0] * 3, [1.0] * 3), results_of([2.0] * 3, [1.0] * 3)) == "worse"


def test_files_without_a_common_case_are_rejected() -> None:
    with pytest.raises(HoldfastError, match="no case in common"):
        changes_between(results_of([1.0]), Results())
    with pytest.raises(HoldfastError, match="cannot be compared"):
        changes_between(results_of([1.0]), Results(kind="engine"))
