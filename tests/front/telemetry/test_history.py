from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.telemetry import history as module
from holdfast.front.telemetry.history import (
    BUCKETS_PER_DOUBLING,
    LEAST_VALUE,
    RANGES,
    RETENTION_SECONDS,
    Cell,
    Distribution,
    PerformanceHistory,
    RangeName,
    bucket_bound,
    bucket_of,
)

NOON = 1_800_000_000.0
WIDTH = 2 ** (1 / BUCKETS_PER_DOUBLING) * (1 + 1e-9)
VALUES = st.floats(min_value=LEAST_VALUE, max_value=1e6)
SHARES = st.sampled_from((0.01, 0.05, 0.5, 0.95, 0.99, 1.0))


class Clock:
    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


def distribution(values: Sequence[float]) -> Distribution:
    made = Distribution()
    for value in values:
        made.add(value)
    return made


def answer(*, tokens: int = 10, first_token: float = 0.5) -> Cell:
    cell = Cell(answers=1, prompt_tokens=100, cached_tokens=60, generated_tokens=tokens)
    cell.add_duration("first_token", first_token)
    cell.speed.add(40.0)
    return cell


@given(value=VALUES)
def test_a_value_lies_between_the_bounds_of_its_bucket(value: float) -> None:
    bucket = bucket_of(value)
    assert value <= bucket_bound(bucket) * (1 + 1e-9)
    assert bucket == 0 or value > bucket_bound(bucket - 1) * (1 - 1e-9)


@given(values=st.lists(VALUES, min_size=1), share=SHARES)
def test_a_percentile_is_exact_to_the_width_of_a_bucket(values: list[float], share: float) -> None:
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    assert exact / WIDTH <= distribution(values).percentile(share) <= exact * WIDTH


@given(values=st.lists(st.floats(min_value=0, max_value=1e9)))
def test_values_counted_together_equal_values_counted_singly(values: list[float]) -> None:
    together = Distribution()
    together.add_all(values)
    assert together.counts == distribution(values).counts
    assert together.total == pytest.approx(distribution(values).total)


@given(parts=st.lists(st.lists(VALUES), min_size=1), share=SHARES)
def test_merged_distributions_have_the_percentiles_of_all_values(
    parts: list[list[float]], share: float
) -> None:
    merged = Distribution()
    for part in parts:
        merged.merge(distribution(part))
    together = distribution([value for part in parts for value in part])
    assert merged.counts == together.counts
    assert merged.total == pytest.approx(together.total)
    if together.counts:
        assert merged.percentile(share) == together.percentile(share)


@given(values=st.lists(VALUES, min_size=2, max_size=2), seed=st.lists(VALUES, min_size=1))
def test_percentiles_increase_with_their_share(values: list[float], seed: list[float]) -> None:
    shares = (0.01, 0.05, 0.5, 0.95, 0.99)
    found = [distribution(values + seed).percentile(share) for share in shares]
    assert found == sorted(found)


@given(
    pauses=st.lists(st.floats(min_value=0, max_value=20_000), max_size=40),
    name=st.sampled_from(list(RANGES)),
)
def test_every_answer_is_in_exactly_one_point_of_a_range(
    pauses: list[float], name: RangeName
) -> None:
    clock = Clock()
    history = PerformanceHistory(clock=clock)
    times = []
    for pause in pauses:
        clock.now += pause
        times.append(clock.now)
        history.add("m", answer())
    report = history.report(name)
    expected = sum(at >= report.since for at in times)
    assert report.total.answers == sum(each.figures.answers for each in report.points) == expected
    assert 0 < clock.now - report.since <= RANGES[name].seconds
    assert all(each.at % RANGES[name].point_seconds == 0 for each in report.points)


@given(pauses=st.lists(st.floats(min_value=0, max_value=20_000), min_size=1, max_size=40))
def test_the_history_survives_saving_and_restoring(pauses: list[float]) -> None:
    clock = Clock()
    before = PerformanceHistory(clock=clock)
    for number, pause in enumerate(pauses):
        clock.now += pause
        before.add(f"model {number % 3}", answer(first_token=pause + 0.1))
    after = PerformanceHistory(clock=clock)
    after.restore(before.serialize())
    for name in RANGES:
        assert after.report(name) == before.report(name)
    assert len(after.serialize()) == len(before.serialize())


def test_models_are_shown_singly_and_together() -> None:
    history = PerformanceHistory(clock=Clock())
    history.add("a", answer(first_token=0.1))
    history.add("b", answer(first_token=8.0))
    history.add("b", answer(first_token=8.0))
    assert history.report("1h").total.answers == 3
    alone = history.report("1h", model="b")
    assert alone.total.answers == 2
    assert alone.total.first_token is not None
    assert alone.total.first_token.p50 == pytest.approx(8.0, rel=0.2)
    assert [(each.model, each.figures.answers) for each in alone.models] == [("a", 1), ("b", 2)]
    assert history.report("1h", model="c").total.answers == 0


def test_only_the_longest_range_is_kept_over_time() -> None:
    clock = Clock()
    history = PerformanceHistory(clock=clock, steady=clock)
    sizes = []
    for _day in range(30):
        for _ in range(24 * 12):
            clock.now += 300
            history.add("m", answer())
        sizes.append(len(history.serialize()))
    assert max(sizes[10:]) <= sizes[10] * 1.02
    assert (7 * 24 - 1) * 12 < history.report("7d").total.answers <= 7 * 24 * 12
    clock.now += max(RETENTION_SECONDS.values())
    assert history.report("7d").models == []
    history.serialize()
    assert history.models == frozenset()


def test_the_oldest_cells_are_dropped_above_the_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 20_000)
    clock = Clock()
    history = PerformanceHistory(clock=clock)
    for _ in range(1000):
        clock.now += 60
        history.add("m", answer())
    assert len(history.serialize()) < 30_000
    assert history.report("15m").total.answers == 15


def test_the_longest_idle_model_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_MODELS", 2)
    history = PerformanceHistory(clock=Clock())
    for model in ("a", "b", "a", "c"):
        history.add(model, answer())
    assert history.models == {"a", "c"}


def test_a_clock_set_back_is_harmless() -> None:
    clock = Clock()
    history = PerformanceHistory(clock=clock)
    history.add("m", answer())
    clock.now -= 40 * 86_400
    history.add("m", answer())
    assert history.report("7d").total.answers == 1
    clock.now = NOON + 1
    history.add("m", answer())
    assert history.report("15m").total.answers == 2


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\x00" * 100,
        msgspec.msgpack.encode({"version": 99, "models": {}}),
        msgspec.msgpack.encode({"version": 1, "models": {"m": 5}}),
    ],
)
def test_foreign_data_is_not_restored(damaged: bytes) -> None:
    history = PerformanceHistory(clock=Clock())
    with pytest.raises(msgspec.DecodeError):
        history.restore(damaged)
    assert history.models == frozenset()


def test_a_clock_jumping_ahead_deletes_nothing() -> None:
    clock, steady = Clock(), Clock()
    history = PerformanceHistory(clock=clock, steady=steady)
    history.add("m", answer())
    clock.now += 30 * 86_400
    saved = history.serialize()
    assert history.models == {"m"}
    again = PerformanceHistory(clock=clock, steady=steady)
    again.restore(saved)
    assert again.models == {"m"}
    steady.now += 3600
    clock.now += 3600
    again.serialize()
    assert again.models == frozenset()


def test_records_of_a_wrong_clock_are_not_trusted() -> None:
    clock, steady = Clock(), Clock()
    history = PerformanceHistory(clock=clock, steady=steady)
    history.add("m", answer())
    clock.now += 30 * 86_400
    for name in ("first", "second"):
        again = PerformanceHistory(clock=clock, steady=steady)
        again.restore(history.serialize())
        again.add(name, answer())
        assert "m" in again.models
        history = again
        clock.now += 1200
        steady.now += 1200
    clock.now += 1260
    steady.now += 1260
    again = PerformanceHistory(clock=clock, steady=steady)
    again.restore(history.serialize())
    assert again.models == {"first", "second"}
