from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config import ResidencySettings
from holdfast.front.fleet.process import PATIENCE, Watchdog
from holdfast.wire.events import Heartbeat
from holdfast.worker.loop.inbox import Pulse

DEFAULTS = ResidencySettings()
PROMISED_SECONDS = 10.0


def watchdog(*, heartbeat: float = 1.0, hang: float = 7.0, unmeasured: float = 600.0) -> Watchdog:
    return Watchdog(heartbeat_seconds=heartbeat, hang_seconds=hang, unmeasured_seconds=unmeasured)


def working(lasting_seconds: float, *, expected_seconds: float | None = 0.02) -> Heartbeat:
    return Heartbeat(
        activity="working", lasting_seconds=lasting_seconds, expected_seconds=expected_seconds
    )


RESTING = Heartbeat(activity="resting", lasting_seconds=0.0)


def looks_until_verdict(
    dog: Watchdog, beats: list[Heartbeat | None], *, elapsed_seconds: float = 1.0
) -> int | None:
    """The number of the poll that finds the worker hanging, from 1."""
    for number, beat in enumerate(beats, start=1):
        if dog.judge(beat, elapsed_seconds=elapsed_seconds) is not None:
            return number
    return None


def test_a_silent_worker_is_detected_within_ten_seconds_by_default() -> None:
    dog = watchdog(heartbeat=DEFAULTS.heartbeat_seconds, hang=DEFAULTS.hang_seconds)
    dog.begin_serving(load_seconds=1.0)
    looks = looks_until_verdict(
        dog, [RESTING, *[None] * 60], elapsed_seconds=DEFAULTS.heartbeat_seconds
    )
    assert looks is not None
    assert looks * DEFAULTS.heartbeat_seconds < PROMISED_SECONDS - 1.0


def test_a_fast_machine_detects_a_hanging_call_within_ten_seconds() -> None:
    pulse = Pulse(interval_seconds=DEFAULTS.heartbeat_seconds)
    dog = watchdog(heartbeat=DEFAULTS.heartbeat_seconds, hang=DEFAULTS.hang_seconds)
    pulse.work(0.05)
    beats = 0
    hang: str | None = None
    while hang is None:
        beats += 1
        hang = dog.judge(
            pulse.beat(elapsed_seconds=DEFAULTS.heartbeat_seconds, page_faults=0),
            elapsed_seconds=1.0,
        )
    assert "in the same step" in hang
    # the front may look up to one interval later
    assert (beats + 1) * DEFAULTS.heartbeat_seconds < PROMISED_SECONDS


def test_silence_before_the_first_heartbeat_is_not_judged() -> None:
    assert looks_until_verdict(watchdog(), [None] * 1000) is None


def test_a_serving_worker_is_judged_even_without_any_heartbeat() -> None:
    dog = watchdog()
    dog.begin_serving(load_seconds=1.0)
    assert looks_until_verdict(dog, [None] * 1000) == 7


def test_beginning_to_serve_does_not_reset_the_silence() -> None:
    dog = watchdog()
    assert looks_until_verdict(dog, [RESTING, *[None] * 6]) is None
    dog.begin_serving(load_seconds=1.0)
    assert looks_until_verdict(dog, [None]) == 1


def test_any_heartbeat_ends_the_silence() -> None:
    dog = watchdog()
    dog.begin_serving(load_seconds=1.0)
    assert looks_until_verdict(dog, [RESTING, *[*[None] * 6, RESTING] * 50]) is None


def test_loading_and_resting_are_unlimited() -> None:
    for activity in ("loading", "resting"):
        assert (
            watchdog().judge(Heartbeat(activity=activity, lasting_seconds=1e6), elapsed_seconds=1.0)
            is None
        )


def test_unmeasured_work_may_take_as_long_as_loading() -> None:
    assert watchdog().judge(working(599.0, expected_seconds=None), elapsed_seconds=1.0) is None
    assert watchdog().judge(working(600.0, expected_seconds=None), elapsed_seconds=1.0) is not None


def test_a_front_suspended_for_an_hour_blames_no_worker() -> None:
    dog = watchdog()
    dog.judge(RESTING, elapsed_seconds=1.0)
    dog.begin_serving(load_seconds=1.0)
    assert dog.judge(None, elapsed_seconds=3600.0) is None
    assert looks_until_verdict(dog, [None] * 5) is None


def test_a_verdict_is_a_sentence() -> None:
    dog = watchdog(heartbeat=8.2)
    dog.judge(RESTING, elapsed_seconds=1.0)
    dog.begin_serving(load_seconds=1.0)
    verdict = "has sent no heartbeat and made no progress for 8 s"
    assert dog.judge(None, elapsed_seconds=100.0) == verdict
    assert dog.judge(working(7.0), elapsed_seconds=1.0) == "has been in the same step for 7 s"


@given(expected=st.floats(0.0, 1e4), slowness=st.floats(0.0, PATIENCE * 0.99))
def test_a_worker_as_slow_as_measured_is_never_killed(expected: float, slowness: float) -> None:
    assert (
        watchdog().judge(
            working(expected * slowness, expected_seconds=expected), elapsed_seconds=1.0
        )
        is None
    )


@given(
    late=st.lists(st.floats(0.0, 30.0), min_size=1, max_size=60),
    beat_every=st.integers(1, 6),
)
def test_heartbeats_prevent_silence_however_late_the_front_polls(
    late: list[float], beat_every: int
) -> None:
    dog = watchdog()
    for number, elapsed in enumerate(late):
        beat = RESTING if number % beat_every == 0 else None
        assert dog.judge(beat, elapsed_seconds=elapsed) is None


@given(gaps=st.lists(st.floats(0.0, 5.0), min_size=1, max_size=60))
def test_silence_counts_only_while_the_front_runs(gaps: list[float]) -> None:
    dog = watchdog()
    dog.begin_serving(load_seconds=1.0)
    dog.judge(RESTING, elapsed_seconds=1.0)
    ran = 0.0
    for gap in gaps:
        ran += min(gap, 1.0)
        verdict = dog.judge(None, elapsed_seconds=gap)
        assert (verdict is not None) == (round(ran, 6) >= 7.0)


def silent_polls(dog: Watchdog, *, ran_seconds: float, has_read: bool = False) -> int | None:
    """The silent seconds after which the worker counts as hanging; None: not within an hour."""
    dog.judge(Heartbeat(activity="loading"), elapsed_seconds=1.0)
    for number in range(1, 3600):
        if dog.judge(None, elapsed_seconds=1.0, ran_seconds=ran_seconds, has_read=has_read):
            return number
    return None


@pytest.mark.parametrize("ran_seconds", [0.03, 0.1, 1.0, 8.0])
def test_a_silent_loading_worker_that_runs_is_left_alone(ran_seconds: float) -> None:
    assert silent_polls(watchdog(), ran_seconds=ran_seconds) is None


def test_a_silent_loading_worker_that_reads_is_left_alone() -> None:
    assert silent_polls(watchdog(), ran_seconds=0.0, has_read=True) is None


@pytest.mark.parametrize("ran_seconds", [0.0, 0.01])  # its threads wait for the interpreter lock
def test_a_load_without_progress_is_detected(ran_seconds: float) -> None:
    assert silent_polls(watchdog(), ran_seconds=ran_seconds) == 56


@pytest.mark.parametrize(
    ("ran_seconds", "seconds"), [(0.0, 7), (0.01, 7), (0.05, 1120), (0.5, 112), (1.0, 56)]
)
def test_a_silent_serving_worker_has_a_processor_time_limit(
    ran_seconds: float, seconds: int
) -> None:
    dog = watchdog()
    dog.begin_serving(load_seconds=1.0)
    found = silent_polls(dog, ran_seconds=ran_seconds)
    assert found is not None
    assert abs(found - seconds) <= 1  # of rounding


def test_earlier_progress_delays_the_verdict_by_less_than_the_limit() -> None:
    dog = watchdog()
    dog.begin_serving(load_seconds=1.0)
    for _ in range(20):
        assert dog.judge(None, elapsed_seconds=1.0, ran_seconds=1.0) is None
    assert looks_until_verdict(dog, [None] * 20) == 7


@pytest.mark.parametrize(("load_seconds", "patience"), [(0.5, 56), (10.0, 200), (100.0, 600)])
def test_the_limit_of_unmeasured_work_follows_from_loading_time(
    load_seconds: float, patience: int
) -> None:
    dog = watchdog()
    dog.begin_serving(load_seconds=load_seconds)
    beats: list[Heartbeat | None] = [
        working(float(seconds), expected_seconds=None) for seconds in range(1000)
    ]
    assert looks_until_verdict(dog, beats) == patience + 1
