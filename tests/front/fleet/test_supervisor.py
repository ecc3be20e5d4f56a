from __future__ import annotations

import asyncio

import psutil
import pytest

from holdfast.config import ModelSettings, SchedulerSettings, StoreSettings
from holdfast.errors import InvalidRequest
from holdfast.front.fleet.supervisor import (
    LONGEST_BACKOFF_SECONDS,
    RestartDelay,
    WorkerSupervisor,
    backoff_seconds,
)
from holdfast.front.fleet.worker_process import WorkerProcess
from holdfast.wire.commands import SchedulerLimits, WorkerSettings
from tests.fakes.fake_worker import fake_settings


def test_the_first_restart_is_at_once_and_the_wait_doubles_up_to_a_limit() -> None:
    assert [backoff_seconds(failures) for failures in (1, 2, 3, 4, 5)] == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert backoff_seconds(10_000) == LONGEST_BACKOFF_SECONDS


def delays(
    ended_at: list[float], *, had_progress: bool, served_seconds: float = 1.0
) -> list[float]:
    restart_delay = RestartDelay()
    return [
        restart_delay.worker_ended(
            now=now, served_seconds=served_seconds, had_progress=had_progress
        )
        for now in ended_at
    ]


def test_workers_without_a_new_token_are_waited_for_longer_and_longer() -> None:
    assert delays([0.0, 100.0, 200.0, 300.0], had_progress=False) == [0.0, 1.0, 2.0, 4.0]


def test_workers_that_die_often_are_waited_for_although_each_made_progress() -> None:
    assert delays([float(second) for second in range(8)], had_progress=True) == [0.0] * 5 + [
        1.0,
        2.0,
        4.0,
    ]
    assert delays([20.0 * number for number in range(20)], had_progress=True) == [0.0] * 20


def test_a_worker_that_served_for_long_counts_as_healthy() -> None:
    assert delays([0.0, 100.0, 200.0], had_progress=False, served_seconds=100.0) == [0.0, 0.0, 0.0]


async def test_limits_are_kept_for_the_workers_to_come_and_bad_ones_change_nothing() -> None:
    settings = WorkerSettings(
        folder="/nowhere",
        model=ModelSettings(),
        scheduler=SchedulerSettings(),
        store=StoreSettings(),
    )
    supervisor = WorkerSupervisor("m", settings, on_progress=lambda model, progress: None)
    assert await supervisor.set_limits(max_running=4, step_tokens=64) == SchedulerLimits(
        max_running=4, step_tokens=64
    )
    assert await supervisor.set_limits(max_running=8) == SchedulerLimits(
        max_running=8, step_tokens=64
    )
    for wrong in (
        {"max_running": 0},
        {"max_running": 65},
        {"step_tokens": 7},
        {"step_tokens": 1 << 30},
    ):
        with pytest.raises(
            InvalidRequest,
            match=next(iter(wrong)) if wrong != {"max_running": 65} else "step_tokens",
        ):
            await supervisor.set_limits(**wrong)
    assert await supervisor.set_limits() == SchedulerLimits(max_running=8, step_tokens=64)


async def test_a_worker_that_begins_later_has_the_level_of_the_log_of_then() -> None:
    levels: list[str] = []

    class Noted(WorkerSupervisor):
        async def _launch(self) -> WorkerProcess:
            levels.append(self._settings.log.level)
            return await super()._launch()

    supervisor = Noted("m", fake_settings(), on_progress=lambda model, progress: None)
    supervisor.set_log_level("error")
    try:
        await supervisor.start()
        supervisor.set_log_level("debug")  # it is still loading
        await supervisor.wait_ready()
        assert supervisor.pid is not None
        psutil.Process(supervisor.pid).kill()
        while len(levels) == 1 or supervisor.client is None:
            await asyncio.sleep(0.005)
    finally:
        await supervisor.stop()
    assert levels == ["error", "debug"]
