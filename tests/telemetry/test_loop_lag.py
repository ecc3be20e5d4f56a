"""How late the event loop comes round."""

from __future__ import annotations

import asyncio
import time

from holdfast.telemetry.loop_lag import TICK_SECONDS, LoopLag
from holdfast.telemetry.metrics import Metrics

BLOCKED_SECONDS = 0.01  # in which several ticks are due


async def blocked(lag: LoopLag) -> None:
    with lag.watched():
        await asyncio.sleep(0)
        time.sleep(0.01)  # what must not be done on a loop
        await asyncio.sleep(0.002)


async def test_what_holds_the_loop_is_seen_once() -> None:
    lag = LoopLag()
    await blocked(lag)
    assert lag.take() >= BLOCKED_SECONDS - 2 * TICK_SECONDS
    assert lag.take() == 0.0


async def test_nothing_ticks_when_no_request_is_served() -> None:
    lag = LoopLag()
    with lag.watched(), lag.watched():
        await asyncio.sleep(0.002)
    while lag._tick is not None:
        await asyncio.sleep(0.002)
    lag.take()
    time.sleep(0.01)
    await asyncio.sleep(0.002)
    assert lag.take() == 0.0
    await blocked(lag)
    assert lag.take() > 0.0


async def test_the_lag_stands_in_the_exposition() -> None:
    metrics = Metrics()
    await blocked(metrics.loop_lag)
    shown = [line for line in metrics.exposition({}).decode().splitlines() if line.startswith("holdfast_event_loop_lag_seconds ")]
    assert float(shown[0].split()[1]) >= BLOCKED_SECONDS - 2 * TICK_SECONDS
