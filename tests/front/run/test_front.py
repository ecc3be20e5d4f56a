from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from holdfast.front.run.front import _EarlySignals


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


async def _serves(signals: list[_EarlySignals], *, disarms: bool) -> str:
    signals.append(_EarlySignals())
    os.kill(os.getpid(), signal.SIGTERM)  # while the loop is busy with this line
    if disarms:
        signals[0].disarm()
    for _ in range(3):
        await asyncio.sleep(0)
    return "went on"


async def test_an_early_signal_cuts_the_start_short() -> None:
    signals: list[_EarlySignals] = []
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(_serves(signals, disarms=False))
    assert signals[0].came


async def test_a_signal_after_disarm_cancels_nothing() -> None:
    signals: list[_EarlySignals] = []
    assert await asyncio.create_task(_serves(signals, disarms=True)) == "went on"
    assert signals[0].came


def test_a_signal_after_the_end_does_nothing() -> None:
    signals: list[_EarlySignals] = []
    assert asyncio.run(_serves(signals, disarms=True)) == "went on"
    os.kill(os.getpid(), signal.SIGTERM)  # the loop is closed by now
