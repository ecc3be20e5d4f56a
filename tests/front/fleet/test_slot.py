"""One slot: its states, its worker's restarts, and its settings. Real processes, a fake engine."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence

import psutil
import pytest

from holdfast.config import ResidencySettings
from holdfast.errors import HoldfastError, InvalidRequest, QueueFull, WorkerUnavailable
from holdfast.front.fleet.process import WorkerProcess
from holdfast.front.fleet.slot import (
    LONGEST_BACKOFF_SECONDS,
    TRANSITIONS,
    Leases,
    ModelSlot,
    RestartDelay,
    State,
    backoff_seconds,
)
from holdfast.wire.commands import SchedulerLimits, WorkerSettings
from holdfast.wire.events import Event, LoadProgress
from tests.fakes.fake_models import FakeModels, OneModel, catalog_over
from tests.fakes.fake_worker import a_request, fake_settings


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


async def a_while(polls: int) -> None:
    """Let the other tasks run."""
    for _ in range(polls):
        await asyncio.sleep(0.01)


async def test_states_stay_consistent_during_deaths_and_model_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Concurrent requests, kills, unloads and pins, for three models in one place."""
    entered: list[tuple[State, State]] = []
    enter = ModelSlot._enter

    def checked(slot: ModelSlot, state: State) -> None:
        entered.append((slot.state, state))
        enter(slot, state)

    monkeypatch.setattr(ModelSlot, "_enter", checked)
    monkeypatch.setattr("holdfast.front.fleet.slot.backoff_seconds", lambda failures: 0.0)
    chance = random.Random(7)
    made = FakeModels(
        catalog_over("a", "b", "c"), ResidencySettings(max_loaded=1, turn_seconds=0.0)
    )
    made.behaviours["c"] = "bad"
    await made.start()
    answers = 0
    is_over = False

    async def ask(number: int) -> None:
        nonlocal answers
        await a_while(chance.randrange(100))
        model = chance.choice("aabbc")
        try:
            async with made.lease(model) as client:
                stream = client.submit(a_request(f"r{number}", max_tokens=1 + number % 300))
                answers += sum([1 async for _ in stream]) > 0
        except HoldfastError:
            assert model == "c"

    async def disturb() -> None:
        while not is_over:
            await a_while(5 + chance.randrange(10))
            model = chance.choice("ab")
            if chance.random() < 0.3:
                made.unload_when_unused(model)
            for status in made.statuses():
                if status.id == model and status.pid is not None and status.state == "ready":
                    psutil.Process(status.pid).kill()

    async def check() -> None:
        while not is_over:
            for slot in made._slots.values():
                slot.check_invariants()
            await asyncio.sleep(0.001)  # one that only yields would take a whole core

    others = [asyncio.create_task(disturb()), asyncio.create_task(check())]
    try:
        async with asyncio.timeout(60):
            await asyncio.gather(*(ask(number) for number in range(40)))
    finally:
        is_over = True
        await asyncio.gather(*others)
        await made.stop()
    assert answers > 0
    assert all(after in TRANSITIONS[before] for before, after in entered)
    for slot in made._slots.values():
        slot.check_invariants()
        assert slot.state in (State.UNLOADED, State.FAILED)


async def test_a_slot_refuses_a_transition_outside_its_table() -> None:
    made = OneModel(fake_settings())
    (slot,) = made._slots.values()
    with pytest.raises(AssertionError, match=r"from State.UNLOADED to State.READY"):
        slot._enter(State.READY)
    with pytest.raises(AssertionError):
        slot.begin_unload(reason="idle")


LONG = 60.0


class Counted(Leases):
    """Counts its notifications."""

    def __init__(self, *, places: int = 9) -> None:
        self.changes = 0
        super().__init__(
            max_waiting_sequences=places, arrival_numbers=itertools.count(), on_change=self.count
        )

    def count(self) -> None:
        self.changes += 1


async def waiting(
    leases: Leases, *, sequences: int = 1, seconds: float = LONG
) -> asyncio.Task[None]:
    task = asyncio.create_task(leases.acquire(sequences=sequences, seconds=seconds))
    await asyncio.sleep(0)
    return task


async def test_an_open_model_grants_leases_immediately() -> None:
    leases = Counted()
    leases.open()
    await leases.acquire(sequences=1, seconds=0)
    assert (leases.held, leases.waiting_since) == (1, None)
    leases.release()
    assert (leases.held, leases.changes) == (0, 1)


async def test_opening_grants_leases_to_all_waiters() -> None:
    leases = Counted()
    tasks = [await waiting(leases) for _ in range(3)]
    assert (leases.held, leases.waiting, leases.waiting_since) == (0, 3, 0)
    leases.open()
    assert (leases.held, leases.waiting, leases.waiting_since) == (3, 0, None)
    await asyncio.gather(*tasks)
    assert leases.held == 3


async def test_a_cancelled_wait_leaves_the_queue() -> None:
    leases = Counted()
    first, second = await waiting(leases), await waiting(leases)
    first.cancel()
    await asyncio.wait([first])
    assert (leases.waiting, leases.waiting_since) == (1, 1)
    second.cancel()
    await asyncio.wait([second])
    assert (leases.waiting, leases.waiting_since, leases.changes) == (0, None, 4)


async def test_a_wait_cancelled_during_opening_returns_the_lease() -> None:
    leases = Counted()
    task = await waiting(leases)
    leases.open()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert leases.held == 0


async def test_a_wait_times_out() -> None:
    leases = Counted()
    with pytest.raises(TimeoutError):
        await leases.acquire(sequences=1, seconds=0.0)
    assert (leases.waiting, leases.held) == (0, 0)


async def test_waiters_get_the_error_when_turned_away() -> None:
    leases = Counted()
    tasks = [await waiting(leases) for _ in range(3)]
    leases.refuse_waiting(WorkerUnavailable("it is broken"))
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["it is broken"] * 3
    assert (leases.waiting, leases.held) == (0, 0)


async def test_the_queue_is_bounded() -> None:
    leases = Counted(places=3)
    task = await waiting(leases, sequences=2)
    with pytest.raises(QueueFull) as refused:
        await leases.acquire(sequences=2, seconds=LONG)
    assert (refused.value.queued, refused.value.limit) == (2, 3)
    task.cancel()
    await asyncio.wait([task])
