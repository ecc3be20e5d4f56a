"""Leases: granted, waited for, given back and refused."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from holdfast.errors import QueueFull, WorkerUnavailable
from holdfast.front.fleet.leases import Leases

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
