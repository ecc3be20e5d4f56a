from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from holdfast.errors import ModelLoadError, UnknownModel, WorkerUnavailable
from holdfast.messages import Finished
from holdfast.residency.catalog import Catalog, CatalogEntry
from holdfast.residency.residency import Residency
from tests.fakes.fake_worker import a_request, fake_order


@asynccontextmanager
async def residency(behaviour: str = "good") -> AsyncIterator[Residency]:
    catalog = Catalog([CatalogEntry(id="m", folder=Path("/nowhere"), created=5)])
    made = Residency(catalog, {"m": fake_order(behaviour)}, startup_seconds=30)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
        (status,) = made.statuses()
        assert (status.state, status.pid) == ("stopped", None)


async def test_a_model_is_loading_then_ready_then_leased() -> None:
    async with residency() as made:
        (loading,) = made.statuses()
        assert loading.state == "loading"
        assert loading.pid is not None
        with pytest.raises(WorkerUnavailable):
            made.lease("m")
        await made.wait_ready()
        (ready,) = made.statuses()
        assert (ready.state, ready.layout, ready.created) == ("ready", "rows", 5)
        events = [event async for event in made.lease("m").submit(a_request())]
        assert isinstance(events[-1], Finished)
        assert (await made.statistics())["m"].finished == 1


async def test_an_unknown_model_cannot_be_leased() -> None:
    async with residency() as made:
        with pytest.raises(UnknownModel, match="available: m"):
            made.lease("other")


async def test_a_dead_worker_is_replaced_at_once() -> None:
    async with residency() as made:
        await made.wait_ready()
        first = made.statuses()[0].pid
        assert first is not None
        stream = made.lease("m").submit(a_request(max_tokens=900_000))
        await anext(stream)
        psutil.Process(first).kill()
        async for _ in stream:
            continue
        async with asyncio.timeout(30):
            while made.statuses()[0].state != "ready" or made.statuses()[0].pid == first:
                await asyncio.sleep(0.005)
        events = [event async for event in made.lease("m").submit(a_request())]
        assert isinstance(events[-1], Finished)


async def test_a_model_at_fault_is_not_tried_again() -> None:
    async with residency("bad") as made:
        with pytest.raises(ModelLoadError, match="the folder is bad"):
            await made.wait_ready()
        assert made.statuses()[0].state == "failed"


async def test_a_worker_that_never_came_up_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.residency.keeper.backoff_seconds", lambda failures: 0.0)
    async with residency("dies-loading") as made:
        with pytest.raises(WorkerUnavailable, match="SIGKILL"):
            await made.wait_ready()
