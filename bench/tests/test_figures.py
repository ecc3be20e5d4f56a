"""Tests of statistics."""

from __future__ import annotations

import statistics

from hypothesis import given
from hypothesis import strategies as st

from holdfast_bench.figures import pairwise_ratios, percentile, spread

values = st.lists(st.floats(min_value=-1e6, max_value=1e6), min_size=1, max_size=30)


@given(values)
def test_percentiles_increase_and_the_50th_is_the_median(found: list[float]) -> None:
    assert abs(percentile(found, 50) - statistics.median(found)) <= 1e-6
    assert percentile(found, 0) == min(found)
    assert percentile(found, 100) == max(found)
    assert percentile(found, 25) <= percentile(found, 75)


def test_the_spread_of_an_empty_sample_is_none() -> None:
    assert spread([]) is None
    found = spread([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found is not None
    assert (found.median, found.low, found.high, found.iqr, found.count) == (3.0, 2.0, 4.0, 2.0, 5)


def test_ratios_skip_rounds_without_a_pair() -> None:
    assert pairwise_ratios([[2.0], [], [9.0, 9.0], [1.0]], [[1.0], [1.0], [3.0]]) == [2.0, 3.0]
