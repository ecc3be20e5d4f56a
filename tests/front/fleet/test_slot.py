"""One slot and its states. Real processes, a fake engine."""

from __future__ import annotations

import asyncio
import random

import psutil
import pytest

from holdfast.config import ResidencySettings
from holdfast.errors import HoldfastError
from holdfast.front.fleet.slot import TRANSITIONS, ModelSlot, State
from tests.fakes.fake_models import FakeModels, OneModel, catalog_over
from tests.fakes.fake_worker import a_request, fake_settings


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
    monkeypatch.setattr("holdfast.front.fleet.supervised_worker.LONGEST_BACKOFF_SECONDS", 0.0)
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
