"""Deadlines count only the time in which the process runs; ages use a clock that must be trusted."""

from __future__ import annotations

import asyncio
import logging

import pytest

from holdfast.machine import clocks
from holdfast.machine.clocks import (
    MOST_TICK_SECONDS,
    RECHECK_SECONDS,
    AwakeClock,
    RetentionClock,
    awake_timeout,
)

DAY = 86400.0


class ManualClock:
    """A clock that is moved by hand."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


async def test_time_asleep_counts_as_a_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    hand = ManualClock()
    clock = AwakeClock(clock=hand)
    began = clock.time()
    hand.now += 3
    assert clock.time() - began == 3
    hand.now += 41 * 60
    assert clock.time() - began == MOST_TICK_SECONDS
    clock._tick()
    assert clock.time() - began == MOST_TICK_SECONDS
    hand.now += 2
    assert clock.time() - began == MOST_TICK_SECONDS + 2
    assert [record.getMessage() for record in caplog.records] == ["the machine slept 41 min"]


async def test_a_timer_due_after_sleep_waits_for_its_remaining_time() -> None:
    """The event loop's clock counts the sleep, as it does on macOS."""
    hand = ManualClock()
    clock = AwakeClock(clock=hand)
    called: list[float] = []
    timer = clock.call_later(0.02, lambda: called.append(clock.time()))
    late = clock.call_later(60.0, lambda: called.append(-1.0))
    timer._look()
    assert called == []
    hand.now += 0.02
    timer._look()
    assert len(called) == 1
    hand.now += 3600
    late._look()  # as if the loop's own clock had jumped by an hour
    assert len(called) == 1
    timer.cancel()
    late.cancel()


async def test_the_awake_timeout_behaves_like_asyncios(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TimeoutError):
        async with awake_timeout(0.0):
            await asyncio.Event().wait()
    with pytest.raises(TimeoutError):
        async with awake_timeout(0.01) as limit:
            await asyncio.Event().wait()
    assert limit.expired()
    async with awake_timeout(None):
        pass
    async with awake_timeout(5.0) as limit:
        pass
    assert not limit.expired()
    assert clocks.awake_clock() is clocks.awake_clock()


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


def test_the_clock_is_checked_against_earlier_records(caplog: pytest.LogCaptureFixture) -> None:
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
    assert clocks._duration_text(seconds) == text
    assert logging.getLogger("holdfast") is clocks.logger


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
