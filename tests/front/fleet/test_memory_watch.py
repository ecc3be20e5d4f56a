"""The level of memory pressure follows the footprint of all workers: it rises immediately and falls
after a delay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config import ResidencySettings
from holdfast.front.fleet import memory_watch, residency
from holdfast.front.fleet.memory_watch import (
    MARGIN,
    RECOVERY_SECONDS,
    MemoryMeter,
    MemoryUse,
    MemoryWatch,
)
from holdfast.front.link.event_stream import WorkerClient
from holdfast.machine.device_memory import DeviceMemory, Pressure, process_footprint
from holdfast.wire.events import WorkerStatistics
from tests.fakes.fake_models import FakeModels, catalog_over
from tests.fakes.fake_worker import a_request

GIB = 1 << 30
WARNING_SECONDS = RECOVERY_SECONDS[Pressure.WARNING]
CRITICAL_SECONDS = RECOVERY_SECONDS[Pressure.CRITICAL]


def use_of(footprint: int, *, fixed: int = 0, limit: int = 100) -> MemoryUse:
    return MemoryUse(workers={"demo": footprint}, fixed_bytes=fixed, limit_bytes=limit)


def test_watermarks_are_shares_of_the_memory_left_by_weights() -> None:
    use = use_of(90, fixed=20, limit=120)
    assert use.watermark_bytes(Pressure.WARNING) == 105
    assert use.watermark_bytes(Pressure.CRITICAL) == 115
    assert use.pressure() is Pressure.NORMAL
    assert use_of(106, fixed=20, limit=120).pressure() is Pressure.WARNING
    assert use_of(116, fixed=20, limit=120).pressure() is Pressure.CRITICAL


def test_a_level_rises_immediately_and_falls_after_a_delay() -> None:
    watch = MemoryWatch()
    assert watch.update(use_of(96), now=0.0)
    assert watch.figures().level == "critical"
    assert not watch.update(use_of(91), now=5.0), "below the watermark, but not by the margin"
    assert not watch.update(use_of(50), now=6.0)
    assert not watch.update(use_of(50), now=5.9 + CRITICAL_SECONDS)
    assert watch.update(use_of(50), now=6.0 + CRITICAL_SECONDS)
    assert watch.figures().level == "warning"
    assert not watch.update(use_of(50), now=5.9 + CRITICAL_SECONDS + WARNING_SECONDS)
    assert watch.update(use_of(50), now=6.0 + CRITICAL_SECONDS + WARNING_SECONDS)
    figures = watch.figures()
    assert (figures.level, figures.footprint_bytes) == ("normal", 50)
    assert (figures.first_watermark_bytes, figures.second_watermark_bytes) == (85, 95)
    assert figures.changes == {"critical": 1, "warning": 1, "normal": 1}


def test_a_peak_during_recovery_restarts_it() -> None:
    watch = MemoryWatch()
    watch.update(use_of(86), now=0.0)
    watch.update(use_of(50), now=1.0)
    watch.update(use_of(82), now=WARNING_SECONDS)
    watch.update(use_of(50), now=1.0 + WARNING_SECONDS)
    assert not watch.update(use_of(50), now=2.0 + WARNING_SECONDS)
    assert watch.update(use_of(50), now=1.0 + 2 * WARNING_SECONDS)


@given(
    steps=st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(0, 130)), max_size=60),
    fixed=st.integers(0, 120),
)
def test_the_level_always_fits_the_footprint(steps: list[tuple[float, int]], fixed: int) -> None:
    watch = MemoryWatch()
    now = 0.0
    above_since = dict.fromkeys(Pressure, -1.0)  # the last time the footprint was that high
    for seconds, footprint in steps:
        now += seconds
        use = use_of(footprint, fixed=fixed)
        before = watch.pressure
        has_changed = watch.update(use, now=now)
        assert has_changed == (watch.pressure is not before)
        assert watch.pressure >= use.pressure(), "a level that is reached applies at once"
        if watch.pressure > before:
            assert watch.pressure is use.pressure()
        for level in (Pressure.WARNING, Pressure.CRITICAL):
            if use.pressure(margin=MARGIN) >= level:
                above_since[level] = now
            elif now - above_since[level] > CRITICAL_SECONDS + WARNING_SECONDS + 3 * 30.0:
                assert watch.pressure < level, "a level ends some time after its cause"
        if watch.pressure < before:
            assert now - above_since[before] >= RECOVERY_SECONDS[before], "no level ends early"
            assert use.pressure(margin=MARGIN) <= watch.pressure, "or although it still applies"


@given(footprint=st.integers(0, 130), fixed=st.integers(0, 120))
def test_a_constant_footprint_changes_the_level_once_at_most(footprint: int, fixed: int) -> None:
    watch = MemoryWatch()
    changes = [watch.update(use_of(footprint, fixed=fixed), now=float(now)) for now in range(60)]
    assert sum(changes) <= 1
    assert not any(changes[1:])


def test_the_reason_shows_the_arithmetic() -> None:
    watch = MemoryWatch()
    use = MemoryUse(
        workers={"demo": int(7.1 * GIB), "other": int(5.5 * GIB)},
        fixed_bytes=int(6.0 * GIB),
        limit_bytes=int(13.6 * GIB),
    )
    watch.update(use, now=0.0)
    assert watch.reason == (
        "footprint 12.6 GiB = worker demo 7.1 + worker other 5.5; first watermark 12.5 = 6.0 for "
        "weights and steps + 85% of the other 7.6 of 13.6"
    )


def test_a_missing_process_has_zero_footprint() -> None:
    assert process_footprint(os.getpid()) > 10_000_000
    assert process_footprint(2**22 + 1) == 0


class Meter:
    """Memory set by a test: of each worker process, and of the machine."""

    def __init__(self, total_bytes: int) -> None:
        self.each_bytes = 0
        self.available_bytes = total_bytes
        self.total_bytes = total_bytes

    def footprint(self, pid: int) -> int:
        return self.each_bytes

    def machine(self) -> DeviceMemory:
        return DeviceMemory(total_bytes=self.total_bytes, available_bytes=self.available_bytes)


async def until_pressure(made: FakeModels, pressure: Pressure) -> None:
    async with asyncio.timeout(60):
        while made.memory.pressure is not pressure:
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def two_answers(client: WorkerClient) -> AsyncIterator[None]:
    """Two long answers, read so that neither is paused."""

    async def read(name: str) -> None:
        async for _ in client.submit(a_request(name, max_tokens=900_000)):
            pass

    readers = [asyncio.create_task(read(name)) for name in "xy"]
    try:
        yield
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def until_running(made: FakeModels, wanted: tuple[int, int], *, model: str = "a") -> None:
    """Wait until a worker reports this many running and queued sequences."""
    async with asyncio.timeout(60):
        while True:
            figures = (await made.statistics()).get(model, WorkerStatistics())
            if (figures.running, figures.queued) == wanted:
                return
            await asyncio.sleep(0.01)


async def test_workers_are_told_their_common_memory_pressure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(residency, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(memory_watch, "RECOVERY_SECONDS", dict.fromkeys(Pressure, 0.05))
    meter = Meter(1000)
    made = FakeModels(
        catalog_over("a", "b", at_start=["a", "b"]),
        ResidencySettings(max_loaded=2, memory_bytes=1 << 40),
        meter=MemoryMeter(footprint=meter.footprint, machine=meter.machine),
    )
    with caplog.at_level(logging.INFO, logger="holdfast.front.fleet"):
        await made.start()
        try:
            await made.wait_ready()
            meter.each_bytes = 440  # a single one would be far below the first watermark
            meter.available_bytes = 120
            await until_pressure(made, Pressure.WARNING)
            meter.each_bytes = 490
            meter.available_bytes = 20
            await until_pressure(made, Pressure.CRITICAL)
            async with made.lease("a", 2) as client, two_answers(client):
                await until_running(made, (1, 1))
                psutil.Process(made.statuses()[0].pid).kill()
                await client.worker.lost  # type: ignore[attr-defined]
                await until_running(made, (1, 1))  # the next worker learns the pressure, too
                meter.each_bytes = 100
                meter.available_bytes = 800
                await until_pressure(made, Pressure.NORMAL)
                await until_running(made, (2, 0))
        finally:
            await made.stop()
    lines = [record.message for record in caplog.records if "memory pressure" in record.message]
    assert len(lines) == 4
    assert lines[0].startswith("memory pressure of all workers: now warning, before normal: ")
    assert "worker a" in lines[0]
    assert "worker b" in lines[0]
    assert made.memory.figures().changes == {"warning": 2, "critical": 1, "normal": 1}


async def test_a_model_added_by_a_reload_is_told_the_pressure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(residency, "WATCH_SECONDS", 0.01)
    meter = Meter(1000)
    made = FakeModels(
        catalog_over("a", at_start=["a"]),
        ResidencySettings(max_loaded=2, memory_bytes=1 << 40),
        meter=MemoryMeter(footprint=meter.footprint, machine=meter.machine),
    )
    await made.start()
    try:
        await made.wait_ready()
        meter.each_bytes = 980
        meter.available_bytes = 20
        await until_pressure(made, Pressure.CRITICAL)
        await made.replace_catalog(catalog_over("a", "b"))
        async with made.lease("b", 2) as client, two_answers(client):
            await until_running(made, (1, 1), model="b")
        assert made.memory.pressure is Pressure.CRITICAL
    finally:
        await made.stop()


async def test_the_watch_continues_after_an_unexpected_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(residency, "WATCH_SECONDS", 0.01)
    meter = Meter(1000)
    failures: list[Exception] = []
    raised = 0

    def machine() -> DeviceMemory:
        nonlocal raised
        for failure in failures:
            raised += 1
            raise failure
        return meter.machine()

    made = FakeModels(
        catalog_over("a", at_start=["a"]),
        meter=MemoryMeter(footprint=meter.footprint, machine=machine),
    )
    await made.start()
    try:
        await made.wait_ready()
        for failure in (ValueError("a bug"), KeyError("another")):
            raised = 0
            failures[:] = [failure]
            async with asyncio.timeout(60):
                while raised < 5:
                    await asyncio.sleep(0.01)
        failures.clear()
        meter.each_bytes = 960
        meter.available_bytes = 40
        await until_pressure(made, Pressure.CRITICAL)
    finally:
        await made.stop()
    logged = [each for each in caplog.records if each.levelno == logging.CRITICAL]
    assert [each.message for each in logged] == ["the memory watch failed"] * 2, (
        "a failure that lasts is logged once"
    )
    assert [str(each.exc_info and each.exc_info[1]) for each in logged] == ["a bug", "'another'"]


async def test_other_programs_and_the_setting_lower_the_watermarks() -> None:
    made = FakeModels(catalog_over("a", "b"), ResidencySettings(memory_bytes=500))
    made.update_pressure({"a": 300}, DeviceMemory(total_bytes=1000, available_bytes=700))
    assert made.memory.use.limit_bytes == 500
    made.update_pressure({"a": 300}, DeviceMemory(total_bytes=1000, available_bytes=50))
    assert made.memory.use.limit_bytes == 350
