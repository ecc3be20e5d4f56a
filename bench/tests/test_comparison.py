"""Tests of statistics, of the agreement of answers, and of comparing result files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import HoldfastError
from holdfast_bench.comparison import (
    agreement,
    changes_between,
    common_prefix,
    ratios_by_round,
    shown_change,
    spread,
)
from holdfast_bench.results import CaseResult, ContenderResult, Results, Sample


def test_the_spread_of_an_empty_sample_is_none() -> None:
    assert spread([]) is None
    found = spread([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found is not None
    assert (found.median, found.low, found.high, found.count) == (3.0, 2.0, 4.0, 5)


def test_ratios_skip_rounds_without_a_pair() -> None:
    assert ratios_by_round([[2.0], [], [9.0, 9.0], [1.0]], [[1.0], [1.0], [3.0]]) == [2.0, 3.0]


words = st.lists(st.sampled_from(["a", "b", "c"]), max_size=8)


def test_tokens_agree_up_to_the_first_difference() -> None:
    found = agreement(["a b c d", "x"], ["a b X d", "x"], cut=str.split)
    assert found is not None
    assert (found.tokens, found.agreeing_tokens, found.answers, found.equal_answers) == (5, 3, 2, 1)
    assert found.rate == 0.6


def test_a_longer_answer_does_not_fully_agree() -> None:
    found = agreement(["a b"], ["a b c"], cut=str.split)
    assert found is not None
    assert (found.agreeing_tokens, found.tokens) == (2, 3)


def test_without_answers_the_agreement_is_none() -> None:
    assert agreement([], [], cut=str.split) is None


@given(words, words)
def test_the_common_prefix_is_the_longest_one(left: list[str], right: list[str]) -> None:
    length = common_prefix(left, right)
    assert left[:length] == right[:length]
    assert length == min(len(left), len(right)) or left[length] != right[length]


def results_of(
    ours: list[float], control: list[float] | None = None, *, metric: str = "step_seconds"
) -> Results:
    contenders = [
        ContenderResult(label=label, rounds=[Sample(metrics={metric: [value]}) for value in values])
        for label, values in (("engine", ours), ("bare", control or ()))
    ]
    case = CaseResult(scenario="engine", case="1 stream", model="m", contenders=contenders)
    return Results(cases=[case])


def verdict(before: Results, after: Results) -> str:
    (change,) = changes_between(before, after)
    assert shown_change(change)
    return change.verdict


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([1.0, 1.01, 0.99], [1.2, 1.21, 1.19], "worse"),
        ([1.2, 1.21, 1.19], [1.0, 1.01, 0.99], "better"),
        ([1.0, 1.01, 0.99], [1.01, 1.02, 1.0], "no difference seen"),
        ([1.0, 2.0, 3.0, 1.5], [1.5, 3.0, 2.5, 2.0], "no difference seen"),  # a wide spread
        ([1.0], [1.08], "no difference seen"),  # a single round
        ([1.0], [1.2], "worse"),
    ],
)
def test_only_differences_beyond_the_noise_are_worse_or_better(
    before: list[float], after: list[float], expected: str
) -> None:
    assert verdict(results_of(before), results_of(after)) == expected


def test_the_better_direction_depends_on_the_metric() -> None:
    slow, fast = (results_of([value] * 3, metric="tokens_per_second") for value in (100.0, 150.0))
    assert verdict(slow, fast) == "better"
    assert verdict(fast, slow) == "worse"


def test_a_slower_machine_is_not_a_regression() -> None:
    before = results_of([1.0] * 3, [1.0] * 3)
    assert verdict(before, results_of([2.0] * 3, [2.0] * 3)) == "no difference seen"
    assert verdict(before, results_of([2.0] * 3, [1.0] * 3)) == "worse"


def test_files_without_a_common_case_are_rejected() -> None:
    with pytest.raises(HoldfastError, match="no case in common"):
        changes_between(results_of([1.0]), Results())
    with pytest.raises(HoldfastError, match="cannot be compared"):
        changes_between(results_of([1.0]), Results(kind="engine"))
