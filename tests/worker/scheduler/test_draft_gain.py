"""How many drafted tokens are verified, on machines whose steps cost differently."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.scheduler.draft_gain import DraftGain, RowCosts

SURE = [0.95**count for count in range(1, 9)]
DOUBTFUL = [0.2**count for count in range(1, 9)]


def memory_bound(rows: int) -> float:
    """Seconds of a step: up to 8 rows, reading the weights takes all of the time."""
    return 0.010 * max(1.0, rows / 8)


def compute_bound(rows: int) -> float:
    return 0.010 * rows


def learned(seconds: Callable[[int], float], *, steps: int = 20) -> DraftGain:
    gain = DraftGain()
    for _ in range(steps):
        for rows in (1, 2, 4, 8, 9, 16, 33, 64):
            gain.learn(rows, seconds(rows))
    return gain


@pytest.mark.parametrize("seconds", [memory_bound, compute_bound])
def test_costs_are_learned_wherever_there_were_steps(seconds: Callable[[int], float]) -> None:
    costs = RowCosts()
    for _ in range(40):
        for rows in (1, 8, 16, 64):
            costs.learn(rows, seconds(rows))
    for rows in (8, 16, 64):
        factor = math.exp(costs.log_seconds(rows) - costs.log_seconds(1))
        assert factor == pytest.approx(seconds(rows) / seconds(1), rel=0.05)


def test_ranges_without_steps_follow_the_nearest_ones() -> None:
    costs = RowCosts()
    for _ in range(40):
        costs.learn(1, 0.010)
        costs.learn(16, 0.010)
    between = [costs.log_seconds(rows) - costs.log_seconds(1) for rows in (1, 2, 4, 8, 12, 16)]
    assert max(map(abs, between)) < 0.6  # the guess for 16 rows: 1.2


def test_one_interrupted_step_changes_little() -> None:
    costs = RowCosts()
    for _ in range(40):
        costs.learn(1, 0.010)
        costs.learn(4, 0.012)
    before = costs.log_seconds(4) - costs.log_seconds(1)
    costs.learn(4, 60.0)
    assert costs.log_seconds(4) - costs.log_seconds(1) == pytest.approx(before, abs=0.1)


def test_a_sure_draft_is_verified_where_rows_cost_little() -> None:
    assert learned(memory_bound).choose({"a": SURE}, rows=1, most=100) == {"a": 7}
    assert learned(compute_bound).choose({"a": SURE}, rows=1, most=100) == {}


def test_a_doubtful_draft_is_verified_only_where_rows_cost_nothing() -> None:
    assert learned(lambda rows: 0.010).choose({"a": DOUBTFUL}, rows=1, most=100)
    assert learned(lambda rows: 0.010 + 0.003 * rows).choose({"a": DOUBTFUL}, rows=1, most=99) == {}


def test_one_sequence_is_not_sped_up_at_the_expense_of_many() -> None:
    gain = learned(lambda rows: 0.010 + 0.002 * rows)
    assert gain.choose({"a": SURE}, rows=1, most=100)
    assert gain.choose({"a": SURE}, rows=30, most=100) == {}


def test_the_best_drafts_of_several_sequences_are_taken() -> None:
    gain = learned(lambda rows: 0.010 + 0.0012 * rows)
    chosen = gain.choose({"a": DOUBTFUL, "b": SURE, "c": DOUBTFUL}, rows=3, most=100)
    assert chosen.keys() == {"b"}


@given(
    offers=st.dictionaries(
        st.sampled_from("abcdef"),
        st.lists(st.floats(0.01, 0.99), min_size=1, max_size=8).map(
            lambda chances: sorted(chances, reverse=True)
        ),
    ),
    most=st.integers(0, 20),
)
def test_never_more_than_there_is_room_for_or_than_a_draft_has(
    offers: dict[str, list[float]], most: int
) -> None:
    chosen = learned(memory_bound).choose(offers, rows=6, most=most)
    assert sum(chosen.values()) <= most
    assert all(1 <= chosen[name] <= len(offers[name]) for name in chosen)


def test_now_and_then_a_step_verifies_nothing_so_that_its_time_stays_known() -> None:
    gain = learned(memory_bound)
    chosen = [bool(gain.choose({"a": SURE}, rows=1, most=8)) for _ in range(200)]
    assert 190 <= sum(chosen) < 200


def test_drafts_that_never_pay_are_tried_again_ever_more_rarely() -> None:
    gain = learned(compute_bound)
    tried = [at for at in range(4000) if gain.choose({"a": SURE}, rows=1, most=8)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert 3 <= len(tried) <= 8
    assert gaps == sorted(gaps)
