"""The restarts of a worker, and its settings. Real processes, a fake engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import psutil
import pytest

from holdfast.errors import InvalidRequest
from holdfast.front.fleet.process import WorkerProcess
from holdfast.front.fleet.supervised_worker import (
    LONGEST_BACKOFF_SECONDS,
    RestartDelay,
    backoff_seconds,
)
from holdfast.wire.commands import SchedulerLimits, WorkerSettings
from holdfast.wire.events import Event, LoadProgress
from tests.fakes.fake_models import OneModel
from tests.fakes.fake_worker import fake_settings


def test_restart_delays_double_up_to_a_limit() -> None:
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


def test_deaths_without_progress_delay_restarts_more_and_more() -> None:
    assert delays([0.0, 100.0, 200.0, 300.0], had_progress=False) == [0.0, 1.0, 2.0, 4.0]


def test_frequent_deaths_delay_restarts_even_with_progress() -> None:
    assert delays([float(second) for second in range(8)], had_progress=True) == [0.0] * 5 + [
        1.0,
        2.0,
        4.0,
    ]
    assert delays([20.0 * number for number in range(20)], had_progress=True) == [0.0] * 20


def test_a_worker_that_served_for_long_counts_as_healthy() -> None:
    assert delays([0.0, 100.0, 200.0], had_progress=False, served_seconds=100.0) == [0.0, 0.0, 0.0]


async def test_limits_apply_to_later_workers_and_bad_ones_change_nothing() -> None:
    made = OneModel(fake_settings())
    await made.start()
    try:
        await made.wait_ready()
        assert await made.set_limits("m", max_running=4, step_tokens=64) == SchedulerLimits(
            max_running=4, step_tokens=64
        )
        limits = SchedulerLimits(max_running=8, step_tokens=64)
        assert await made.set_limits("m", max_running=8) == limits
        for wrong, field in (
            ({"max_running": 0}, "max_running"),
            ({"max_running": 65}, "step_tokens"),
            ({"step_tokens": 7}, "step_tokens"),
            ({"step_tokens": 1 << 30}, "step_tokens"),
        ):
            with pytest.raises(InvalidRequest, match=field):
                await made.set_limits("m", **wrong)
        assert await made.set_limits("m") == limits
    finally:
        await made.stop()


async def test_a_worker_that_starts_later_has_the_current_log_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    levels: list[str] = []
    start = WorkerProcess.start

    async def noted(
        settings: WorkerSettings,
        *,
        on_progress: Callable[[LoadProgress], None],
        on_events: Callable[[Sequence[Event]], None],
    ) -> WorkerProcess:
        levels.append(settings.log.level)
        return await start(settings, on_progress=on_progress, on_events=on_events)

    monkeypatch.setattr(WorkerProcess, "start", noted)
    made = OneModel(fake_settings())
    try:
        await made.start()
        made.set_log_level("debug")  # it is still loading
        await made.wait_ready()
        pid = made.statuses()[0].pid
        psutil.Process(pid).kill()
        await (await made.client("m")).worker.lost
        await made.client("m")
        assert made.statuses()[0].pid not in (pid, None)
    finally:
        await made.stop()
    assert levels == ["warning", "debug"]
