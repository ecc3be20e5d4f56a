"""The lag of the event loop."""

from __future__ import annotations

import asyncio
import time

from holdfast.front.telemetry.metrics import Lag, LoopLag, Metrics

TICK_SECONDS = 0.002
BLOCKED_SECONDS = 0.01  # several ticks are due during it


async def blocked(lag: LoopLag) -> None:
    with lag.watched():
        await asyncio.sleep(0)
        time.sleep(0.01)  # must not be done on an event loop
        await asyncio.sleep(0.002)


async def test_a_blocked_loop_is_reported_once() -> None:
    lag = LoopLag(TICK_SECONDS)
    await blocked(lag)
    assert lag.take().late >= BLOCKED_SECONDS - 2 * TICK_SECONDS
    assert lag.take() == Lag()


async def test_the_loops_own_work_is_distinguished_from_waiting() -> None:
    lag = LoopLag(TICK_SECONDS)
    await blocked(lag)
    waited = lag.take()
    with lag.watched():
        used = time.thread_time()
        while time.thread_time() - used < BLOCKED_SECONDS:
            pass
        await asyncio.sleep(0.002)
    assert lag.take().busy >= BLOCKED_SECONDS > waited.busy


async def test_nothing_ticks_when_no_request_is_served() -> None:
    lag = LoopLag(TICK_SECONDS)
    with lag.watched(), lag.watched():
        await asyncio.sleep(0.002)
    while lag._tick is not None:
        await asyncio.sleep(0.002)
    lag.take()
    time.sleep(0.01)
    await asyncio.sleep(0.002)
    assert lag.take() == Lag()
    await blocked(lag)
    assert lag.take().late > 0.0


async def test_the_lag_is_in_the_exposition() -> None:
    metrics = Metrics(loop_tick_seconds=TICK_SECONDS)
    await blocked(metrics.loop_lag)
    shown = [
        line
        for line in metrics.exposition({}).decode().splitlines()
        if line.startswith("holdfast_event_loop_lag_seconds ")
    ]
    assert float(shown[0].split()[1]) >= BLOCKED_SECONDS - 2 * TICK_SECONDS
