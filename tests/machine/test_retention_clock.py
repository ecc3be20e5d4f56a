"""Ages use a clock that must be trusted."""

from __future__ import annotations

import logging

import pytest

from holdfast.machine import retention_clock
from holdfast.machine.retention_clock import RECHECK_SECONDS, RetentionClock, duration_text
from tests.fakes.moved_clock import ManualClock

DAY = 86400.0


def test_a_clock_jumping_ahead_is_trusted_only_after_an_hour(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wall, steady = ManualClock(50 * DAY), ManualClock(0.0)
    clock = RetentionClock(wall=wall, steady=steady)
    assert clock() == 50 * DAY
    wall.now += 400 * DAY
    steady.now += 10
    assert clock() == 50 * DAY + 10
    steady.now += RECHECK_SECONDS - 1
    wall.now += RECHECK_SECONDS - 1
    assert clock() == pytest.approx(50 * DAY + RECHECK_SECONDS + 9)
    steady.now += 2
    assert clock() == wall.now
    assert len(caplog.records) == 1
    assert "400 days ahead" in caplog.records[0].getMessage()


def test_a_jump_corrected_in_time_is_ignored() -> None:
    wall, steady = ManualClock(50 * DAY), ManualClock(0.0)
    clock = RetentionClock(wall=wall, steady=steady)
    clock()
    for _ in range(5):
        wall.now += 400 * DAY
        assert clock() < 51 * DAY
        wall.now -= 400 * DAY
        steady.now += RECHECK_SECONDS
        wall.now += RECHECK_SECONDS
        assert clock() == wall.now


def test_the_clock_is_checked_against_earlier_records(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wall, steady = ManualClock(50 * DAY), ManualClock(0.0)
    clock = RetentionClock(wall=wall, steady=steady)
    clock.start_from(49.5 * DAY)
    assert clock() == 50 * DAY
    clock = RetentionClock(wall=wall, steady=steady)
    clock.start_from(40 * DAY)
    assert clock() == 40 * DAY
    steady.now += RECHECK_SECONDS
    assert clock() == 50 * DAY
    assert not caplog.records, "a server that was off for days is nothing to warn of"


@pytest.mark.parametrize(
    ("seconds", "text"), [(61, "1 min"), (7000, "117 min"), (7200, "2 h"), (3 * DAY, "3 days")]
)
def test_durations_are_shown_in_words(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
    assert logging.getLogger("holdfast") is retention_clock.logger


def test_records_found_later_count_as_well() -> None:
    wall, steady = ManualClock(50 * DAY), ManualClock(0.0)
    clock = RetentionClock(wall=wall, steady=steady)
    assert clock() == 50 * DAY
    clock.start_from(40 * DAY)
    assert clock() == 40 * DAY
    clock.start_from(1.0)
    assert clock() == 40 * DAY


def test_recent_and_future_times_do_not_confirm_the_clock() -> None:
    wall, steady = ManualClock(50 * DAY), ManualClock(0.0)
    clock = RetentionClock(wall=wall, steady=steady)
    clock.start_from_stamps([40 * DAY, 50 * DAY - RECHECK_SECONDS + 1, 90 * DAY])
    assert clock() == 40 * DAY
    clock = RetentionClock(wall=wall, steady=steady)
    clock.start_from_stamps([40 * DAY, 50 * DAY - RECHECK_SECONDS])
    assert clock() == 50 * DAY
    clock = RetentionClock(wall=wall, steady=steady)
    clock.start_from_stamps([50 * DAY - 1])
    assert clock() == 50 * DAY, "nothing is old"
    clock.start_from_stamps([40 * DAY])
    assert clock() == 40 * DAY, "records that are found later count as well"
