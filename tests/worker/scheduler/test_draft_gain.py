"""The number of drafted tokens verified on machines with different step costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.engine.plan import Draft
from holdfast.worker.scheduler.draft_gain import DraftGain, RowCosts


def draft(*chances: float) -> Draft:
    return Draft(tuple(range(len(chances))), chances)


SURE = draft(*(0.95**count for count in range(1, 9)))
DOUBTFUL = draft(*(0.2**count for count in range(1, 9)))


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
def test_costs_are_learned_for_all_observed_row_counts(seconds: Callable[[int], float]) -> None:
    costs = RowCosts()
    for _ in range(40):
        for rows in (1, 8, 16, 64):
            costs.learn(rows, seconds(rows))
    for rows in (8, 16, 64):
        factor = math.exp(costs.log_seconds(rows) - costs.log_seconds(1))
        assert factor == pytest.approx(seconds(rows) / seconds(1), rel=0.05)


def test_unobserved_ranges_follow_the_nearest_ones() -> None:
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


def test_the_fixed_cost_of_verification_is_learned() -> None:
    gain = DraftGain()
    for _ in range(40):
        for rows in range(1, 9):
            gain.learn(rows, 0.010)
            gain.learn(rows, 0.013, is_verifying=True)
    assert gain.choose({"a": draft(0.9)}, rows=4, most=8) == {}
    all_four = dict.fromkeys("abcd", draft(0.9))
    assert gain.choose(all_four, rows=4, most=8) == all_four


def test_a_certain_draft_is_verified_where_rows_are_cheap() -> None:
    assert learned(memory_bound).choose({"a": SURE}, rows=1, most=100) == {"a": SURE.cut(7)}
    assert learned(compute_bound).choose({"a": SURE}, rows=1, most=100) == {}


def test_a_doubtful_draft_is_verified_only_where_rows_are_free() -> None:
    assert learned(lambda rows: 0.010).choose({"a": DOUBTFUL}, rows=1, most=100)
    assert learned(lambda rows: 0.010 + 0.003 * rows).choose({"a": DOUBTFUL}, rows=1, most=99) == {}


def test_one_sequence_is_not_accelerated_at_the_expense_of_many() -> None:
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
            lambda chances: draft(*sorted(chances, reverse=True))
        ),
    ),
    most=st.integers(0, 20),
)
def test_drafts_are_limited_by_room_and_length(offers: dict[str, Draft], most: int) -> None:
    chosen = learned(memory_bound).choose(offers, rows=6, most=most)
    assert sum(len(each.token_ids) for each in chosen.values()) <= most
    for name, each in chosen.items():
        assert each.token_ids
        assert each == offers[name].cut(len(each.token_ids))


def test_occasional_steps_without_drafts_keep_their_time_known() -> None:
    gain = learned(memory_bound)
    chosen = [bool(gain.choose({"a": SURE}, rows=1, most=8)) for _ in range(200)]
    assert 190 <= sum(chosen) < 200


def test_unprofitable_drafts_are_retried_ever_more_rarely() -> None:
    gain = learned(compute_bound)
    tried = [at for at in range(4000) if gain.choose({"a": SURE}, rows=1, most=8)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert 3 <= len(tried) <= 8
    assert gaps == sorted(gaps)


def passes(
    gain: DraftGain, model_drafts: dict[str, Draft], *, offers: dict[str, Draft], each: float
) -> int:
    return gain.passes(offers, model_drafts, rows=len(model_drafts), most=1000, pass_seconds=each)


def tried(seconds: Callable[[int], float]) -> DraftGain:
    """Like `learned`, after an unprofitable draft model has been tried."""
    gain = learned(seconds)
    assert passes(gain, {"a": DOUBTFUL}, offers={}, each=0.005) == 4
    return gain


def test_a_draft_model_drafts_only_profitable_tokens() -> None:
    gain = learned(memory_bound)
    assert passes(gain, {"a": SURE}, offers={}, each=0.0002) == 7
    assert 0 < passes(gain, {"a": SURE}, offers={}, each=0.003) < 7
    assert passes(tried(memory_bound), {"a": SURE}, offers={}, each=0.02) == 0
    assert passes(tried(compute_bound), {"a": SURE}, offers={}, each=0.0) == 0


def test_a_free_draft_is_preferred_if_it_promises_as_much() -> None:
    gain = tried(memory_bound)
    assert passes(gain, {"a": SURE}, offers={"a": SURE}, each=0.0002) == 0
    assert passes(learned(memory_bound), {"a": SURE}, offers={"a": DOUBTFUL}, each=0.0002) > 0


def test_a_draft_model_is_unused_if_the_batch_fills_the_machine() -> None:
    crowd = {str(number): SURE for number in range(60)}
    assert passes(learned(compute_bound), crowd, offers={}, each=0.001) == 0


def test_unprofitable_draft_models_are_tried_rarely() -> None:
    gain = DraftGain()
    spent = 0.0
    total = 0.0
    for _ in range(4000):
        for rows in (1, 9):
            gain.learn(rows, compute_bound(rows))
        total += compute_bound(1) + compute_bound(9)
        spent += 0.02 * passes(gain, {"a": DOUBTFUL}, offers={}, each=0.02)
    assert 0.001 * total < spent < 0.01 * total


def test_a_draft_model_pauses_sometimes_to_measure_plain_steps() -> None:
    gain = learned(memory_bound)
    counts = []
    for _ in range(200):
        counts.append(passes(gain, {"a": SURE}, offers={}, each=0.0002))
        offers = {"a": SURE.cut(counts[-1])} if counts[-1] else {}
        gain.choose(offers, rows=1, most=100)
    assert 1 <= counts.count(0) <= 10


def test_a_draft_models_prefill_must_pay_off() -> None:
    gain = learned(memory_bound)

    def pays(generated: int) -> bool:
        return gain.approve_prefill(
            SURE.chances, rows=1, pass_seconds=0.0002, seconds=0.5, generated=generated
        )

    assert not pays(5)
    assert pays(200)
    slow = learned(compute_bound)
    assert not slow.approve_prefill(
        SURE.chances, rows=1, pass_seconds=0.02, seconds=1.0, generated=1_000_000
    )
