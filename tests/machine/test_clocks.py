"""Deadlines count only the time in which the process runs."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.machine import clocks
from holdfast.machine.clocks import (
    MOST_TICK_SECONDS,
    AwakeClock,
    awake_timeout,
)
from tests.fakes.moved_clock import ManualClock


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
    timer._call_if_due()
    assert called == []
    hand.now += 0.02
    timer._call_if_due()
    assert len(called) == 1
    hand.now += 3600
    late._call_if_due()  # as if the loop's own clock had jumped by an hour
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
