"""Several models in few places: loaded, used, drained and swapped. Real worker processes with a fake
engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import psutil
import pytest

from holdfast.config import ModelSettings, ResidencySettings
from holdfast.errors import (
    HoldfastError,
    InvalidRequest,
    ModelPinned,
    UnknownModel,
    UnusableModel,
    WorkerUnavailable,
)
from holdfast.front.fleet import residency as residency_module
from holdfast.front.fleet.catalog import Catalog
from holdfast.front.fleet.residency import ModelState, Residency
from holdfast.machine.memory_plan import MemoryShare
from holdfast.wire.commands import SchedulerLimits
from holdfast.wire.events import Finished, FinishReason
from tests.fakes.fake_models import FakeModels, catalog_over
from tests.fakes.fake_worker import a_request

TWO = ResidencySettings(max_loaded=2, turn_seconds=0.0)
ONE = replace(TWO, max_loaded=1)
LONG = 900_000


@asynccontextmanager
async def models(
    catalog: Catalog, settings: ResidencySettings = TWO, **bytes_of: int
) -> AsyncIterator[FakeModels]:
    made = FakeModels(catalog, settings, **bytes_of)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
        assert {(status.state, status.pid) for status in made.statuses()} <= {
            ("unloaded", None),
            ("failed", None),
        }


def states(made: Residency) -> dict[str, ModelState]:
    return {status.id: status.state for status in made.statuses()}


async def until(made: Residency, **wanted: ModelState) -> None:
    while states(made) | wanted != states(made):
        await asyncio.sleep(0.005)


async def answered(made: Residency, model: str, *, name: str = "a", max_tokens: int = 10) -> int:
    """Request an answer; returns the process that generated it."""
    async with made.lease(model) as client:
        (pid,) = (status.pid for status in made.statuses() if status.id == model)
        *_, end = [event async for event in client.submit(a_request(name, max_tokens=max_tokens))]
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.LENGTH
    assert pid is not None
    return pid


async def test_concurrent_requests_load_a_model_once() -> None:
    async with models(catalog_over("a", "b", "c")) as made:
        await made.wait_ready()
        assert states(made) == {"a": "unloaded", "b": "unloaded", "c": "unloaded"}
        processes = await asyncio.gather(
            *(answered(made, "b", name=f"r{number}") for number in range(30))
        )
        assert len(set(processes)) == 1
        assert states(made) == {"a": "unloaded", "b": "ready", "c": "unloaded"}
        assert made.statuses()[1].figures.changes == {"loaded": 1}
        with pytest.raises(UnknownModel, match="available: a, b, c"):
            await answered(made, "other")


async def test_a_configured_context_window_is_known_before_the_load() -> None:
    said = {"model": ModelSettings(path="b", context_tokens=2048), "own_context_tokens": 4096}
    made = FakeModels(catalog_over("a", "b", "c", b=said, c={"own_context_tokens": 4096}))
    assert [status.context_tokens for status in made.statuses()] == [None, 2048, 4096]


async def test_many_requests_over_three_models_in_two_places_are_answered() -> None:
    async with models(catalog_over("a", "b", "c")) as made:
        most = 0

        async def watched(number: int) -> int:
            nonlocal most
            pid = await answered(
                made, "abc"[number % 3], name=f"r{number}", max_tokens=1 + number % 7
            )
            most = max(most, sum(status.pid is not None for status in made.statuses()))
            return pid

        processes = await asyncio.gather(*map(watched, range(90)))
        assert len(processes) == 90
        assert most <= 2


async def test_a_model_in_use_stays_until_it_is_drained() -> None:
    async with models(catalog_over("a", "b"), ONE) as made:
        async with made.lease("a") as client:
            stream = client.submit(a_request(max_tokens=LONG))
            await anext(stream)
            waiting = asyncio.create_task(answered(made, "b"))
            await until(made, a="stopping")
            # it has had its turn: later requests come after b
            late = asyncio.create_task(answered(made, "a"))
            for _ in range(200):
                await anext(stream)
            assert not waiting.done()
            await stream.aclose()
        first = await waiting
        again = await late
        assert first != again
        assert states(made) == {"a": "ready", "b": "unloaded"}
        assert made.statuses()[0].figures.changes == {"loaded": 2, "room": 1}


async def test_a_request_waits_for_a_place_no_longer_than_set() -> None:
    settings = replace(ONE, place_seconds=0.05, turn_seconds=LONG)
    async with models(catalog_over("a", "b"), settings) as made, made.lease("a"):
        with pytest.raises(WorkerUnavailable, match=r"no room for model 'b'.*in use \(a\)"):
            await answered(made, "b")
        assert states(made) == {"a": "ready", "b": "unloaded"}


async def test_a_cancelled_wait_unloads_nothing() -> None:
    async with models(catalog_over("a", "b"), ONE) as made:
        async with made.lease("a"):
            waiting = asyncio.create_task(answered(made, "b"))
            await until(made, a="stopping")
            waiting.cancel()
            await until(made, a="ready")
            await answered(made, "a")
        assert states(made) == {"a": "ready", "b": "unloaded"}


async def test_requests_fail_immediately_if_the_models_files_are_bad() -> None:
    async with models(catalog_over("a", "b")) as made:
        made.behaviours["a"] = "damaged"
        outcomes = await asyncio.gather(
            *(answered(made, "a", name=f"r{n}") for n in range(3)), return_exceptions=True
        )
        await until(made, a="failed")
        with pytest.raises(UnusableModel) as refused:
            await answered(made, "a")
        assert {(type(each), str(each)) for each in (*outcomes, refused.value)} == {
            (UnusableModel, "model 'a' cannot be served: a file is damaged")
        }


async def test_a_failed_load_fails_all_waiters_and_is_retried_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with models(catalog_over("a", "b")) as made:
        made.behaviours["a"] = "bad"
        outcomes = await asyncio.gather(
            *(answered(made, "a", name=f"r{n}") for n in range(9)), return_exceptions=True
        )
        assert {(type(outcome), str(outcome)) for outcome in outcomes} == {
            (WorkerUnavailable, "model 'a' cannot be served: the folder is bad")
        }
        await until(made, a="failed")
        with pytest.raises(WorkerUnavailable, match="the folder is bad") as refused:
            await answered(made, "a")
        assert 0 < refused.value.retry_after_seconds <= 1
        (status, other) = made.statuses()
        assert (status.failure, status.figures.changes, other.state) == (
            "the folder is bad",
            {"failed": 1},
            "unloaded",
        )
        made.behaviours["a"] = "good"
        monkeypatch.setattr(made._slots["a"], "retry_at", 0.0)  # as after the back-off
        await answered(made, "a")
        assert made.statuses()[0].failure == ""


async def test_a_model_unloaded_for_a_failed_load_is_reloaded() -> None:
    async with models(catalog_over("a", "b"), ONE) as made:
        before = await answered(made, "a")
        made.behaviours["b"] = "bad"
        with pytest.raises(WorkerUnavailable, match="the folder is bad"):
            await answered(made, "b")
        await until(made, a="ready", b="failed")
        assert await answered(made, "a") != before


async def test_an_idle_model_is_unloaded() -> None:
    catalog = catalog_over("a", "b", a={"idle_seconds": 0.05}, b={"idle_seconds": 0.0})
    async with models(catalog) as made:
        pid = await answered(made, "a")
        left = made.statuses()[0].idle_seconds_left
        assert left is not None
        assert left <= 0.05
        await answered(made, "b")
        await until(made, a="unloaded", b="unloaded")
        assert not psutil.pid_exists(pid)
        assert made.statuses()[0].figures.changes == {"loaded": 1, "idle": 1}
        assert await answered(made, "a") != pid


async def test_pinned_models_are_loaded_at_the_start_and_block_others() -> None:
    async with models(catalog_over("a", "b", a={"is_pinned": True}), ONE) as made:
        await made.wait_ready()
        assert states(made) == {"a": "ready", "b": "unloaded"}
        with pytest.raises(WorkerUnavailable, match=r"pinned models \(a\) leave no room"):
            await answered(made, "b")
        with pytest.raises(ModelPinned):
            await made.unload("a")
        with pytest.raises(HoldfastError, match="leave no room"):
            await made.pin("b", pinned=True)
        await made.pin("a", pinned=False)
        await made.pin("b", pinned=True)
        assert [(status.state, status.is_pinned) for status in made.statuses()] == [
            ("unloaded", False),
            ("ready", True),
        ]


async def test_a_model_is_loaded_and_unloaded_on_request() -> None:
    async with models(catalog_over("a", "b")) as made:
        await made.load("a")
        assert states(made)["a"] == "ready"
        async with made.lease("a"):
            unloading = asyncio.create_task(made.unload("a"))
            await until(made, a="stopping")
            late = asyncio.create_task(answered(made, "a"))
            await asyncio.sleep(0)
        await unloading
        await late
        await made.unload("a")
        await made.unload("b")  # it is unloaded
        assert states(made) == {"a": "unloaded", "b": "unloaded"}
        assert made.statuses()[0].figures.changes == {"loaded": 2, "asked": 2}


async def test_changed_limits_survive_restarts_and_loads_until_the_stop() -> None:
    async with models(catalog_over("a", "b")) as made:
        with pytest.raises(InvalidRequest, match="a is not loaded"):
            await made.set_limits("a", max_running=3)
        loading = asyncio.create_task(made.load("a"))
        while made.statuses()[0].pid is None:
            await asyncio.sleep(0.001)
        # its process already knows others
        changed = await made.set_limits("a", max_running=3, step_tokens=48)
        assert changed == SchedulerLimits(max_running=3, step_tokens=48)
        await loading
        assert (await made.statistics())["a"].step_tokens == 48
        psutil.Process(made.statuses()[0].pid).kill()
        await answered(made, "a")
        assert (await made.statistics())["a"].step_tokens == 48
        await made.unload("a")
        await made.load("a")
        assert (await made.statistics())["a"].step_tokens == 48
        assert await made.set_limits("a") == changed
        with pytest.raises(InvalidRequest, match="step_tokens"):
            await made.set_limits("a", max_running=49)
        assert await made.set_limits("a") == changed


async def test_the_catalog_can_change_while_models_are_used() -> None:
    async with models(catalog_over("a", "b", "c"), ONE) as made:
        forgotten: list[str] = []
        made.on_changed_entry = forgotten.append
        async with made.lease("a") as client:
            stream = client.submit(a_request(max_tokens=LONG))
            await anext(stream)
            waiting = asyncio.create_task(answered(made, "b"))
            await until(made, a="stopping")
            change = await made.replace_catalog(catalog_over("c", "d", c={"aliases": ("e",)}))
            assert (change.added, change.removed, change.changed) == (("d",), ("a", "b"), ("c",))
            with pytest.raises(UnknownModel, match="available: c, d, e"):
                await waiting
            with pytest.raises(UnknownModel):
                await answered(made, "a")
            assert states(made) == {"c": "unloaded", "d": "unloaded", "a": "stopping"}
            for _ in range(100):
                await anext(stream)
            await stream.aclose()
        async with made.lease("e"):
            await until(made, c="ready")
            assert states(made) == {"c": "ready", "d": "unloaded"}
        assert forgotten == ["c", "b", "a"]


async def test_changed_entries_apply_at_the_next_load_except_pins() -> None:
    async with models(catalog_over("a", "b")) as made:
        pid = await answered(made, "a")
        await made.replace_catalog(
            catalog_over(
                "a", "b", a={"idle_seconds": LONG, "own_context_tokens": 9}, b={"is_pinned": True}
            )
        )
        await until(made, b="ready")
        assert (made.entry("a").own_context_tokens, await answered(made, "a")) == (0, pid)
        assert made.statuses()[0].idle_seconds_left is not None
        await made.unload("a")
        assert made.entry("a").own_context_tokens == 9
        await made.replace_catalog(catalog_over("b"))
        await made.unload("b")
        await made.replace_catalog(catalog_over("a", "b"))
        assert states(made)["a"] == "unloaded"
        assert await answered(made, "a") != pid


async def test_a_model_removed_and_added_while_in_use_stays() -> None:
    async with models(catalog_over("a", "b")) as made:
        pid = await answered(made, "a")
        async with made.lease("a"):
            await made.replace_catalog(catalog_over("b"))
            assert states(made) == {"b": "unloaded", "a": "stopping"}
            await made.replace_catalog(catalog_over("a", "b"))
        assert await answered(made, "a") == pid


async def test_loaded_models_are_limited_by_memory_and_divide_kv() -> None:
    async with models(
        catalog_over("a", "b", "c"), replace(TWO, max_loaded=None, memory_bytes=10), a=6, b=6, c=11
    ) as made:
        await answered(made, "a")
        await answered(made, "b")
        assert states(made) == {"a": "unloaded", "b": "ready", "c": "unloaded"}
        await answered(made, "c")  # larger than the budget: it is tried alone
        assert states(made) == {"a": "unloaded", "b": "unloaded", "c": "ready"}
    async with models(catalog_over("a", "b", "c"), TWO) as made:
        await made.load("a")
        while not made.statuses()[0].figures.footprint_bytes:  # until its worker has reported
            await asyncio.sleep(0.005)
        await made.load("b")
        assert [made.shares[name].parts for name in "ab"] == [2, 1]
        assert made.shares["b"].taken_bytes > 0
        assert made.shares["b"].promised_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_loaded", "parts"), [(None, [2, 2, 2, 1]), (4, [4, 3, 2, 1]), (2, [2, 1])]
)
async def test_each_model_gets_its_part_of_the_kv_memory(
    max_loaded: int | None, parts: list[int]
) -> None:
    async with models(catalog_over(*"abcd"), replace(TWO, max_loaded=max_loaded)) as made:
        for name in "abcd"[: len(parts)]:
            await made.load(name)
        assert [made.shares[name].parts for name in "abcd"[: len(parts)]] == parts
    together = replace(TWO, max_loaded=max_loaded)
    async with models(catalog_over(*"abcd", at_start="ab"), together) as made:
        await made.wait_ready()
        assert {made.shares[name].parts for name in "ab"} <= {parts[0], parts[1], parts[1] + 1}


async def test_the_log_says_that_a_single_model_keeps_its_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with models(catalog_over("a")) as made:
        await made.load("a")
        with caplog.at_level(logging.INFO, logger="holdfast.front.fleet"):
            await made.replace_catalog(catalog_over("a", "b"))
        assert "model a may use all memory until it is loaded again" in caplog.text


async def test_a_wait_for_an_unload_ends_when_the_server_stops() -> None:
    made = FakeModels(catalog_over("a", "b"))
    await made.start()
    async with AsyncExitStack() as held:
        await held.enter_async_context(made.lease("a"))
        unloading = asyncio.create_task(made.unload("a"))
        await until(made, a="stopping")
        await made.stop()
        await unloading
    assert states(made)["a"] == "unloaded"


async def test_only_a_named_models_failure_stops_the_server() -> None:
    async with models(catalog_over("a", "b", a={"is_pinned": True}, b={"is_pinned": True})) as made:
        made.behaviours["a"] = "bad"
        await made.wait_ready()
    made = FakeModels(catalog_over("a", "b", at_start=["a"]))
    made.behaviours["a"] = "bad"
    await made.start()
    with pytest.raises(HoldfastError, match="the folder is bad"):
        await made.wait_ready()
    await made.stop()


async def test_a_stopping_server_refuses_everything() -> None:
    made = FakeModels(catalog_over("a", "b"), replace(ONE, turn_seconds=LONG))
    await made.start()
    async with made.lease("a"):
        waiting = asyncio.create_task(answered(made, "b"))
        await asyncio.sleep(0.01)
        await made.stop()
    with pytest.raises(WorkerUnavailable, match="shutting down"):
        await waiting
    with pytest.raises(WorkerUnavailable, match="shutting down"):
        await answered(made, "a")


async def kv_budgets(made: Residency, **wanted: int) -> None:
    """Wait until the workers report these budgets."""
    async with asyncio.timeout(60):
        while {
            name: figures.kv_budget_bytes for name, figures in (await made.statistics()).items()
        } != wanted:
            await asyncio.sleep(0.01)


async def context_of(made: Residency, model: str, wanted: int) -> None:
    """Wait until the usable context has this length, in the status and for requests."""
    async with asyncio.timeout(60):
        while made.statuses()[0].context_tokens != wanted:
            await asyncio.sleep(0.01)
    assert made.statuses()[0].id == model
    async with made.lease(model) as client:
        assert client.info.context_tokens == wanted


async def test_models_divide_the_rest_of_a_macs_working_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(residency_module, "HAS_UNIFIED_MEMORY", True)
    settings = replace(TWO, memory_bytes=1 << 40)  # the fakes report less than their processes use
    async with models(catalog_over("a", "b"), settings, a=1_000_000, b=1_000_000) as made:
        made.behaviours.update(a="on-a-mac", b="on-a-mac")
        await answered(made, "a")
        assert made.shares["a"] == MemoryShare(parts=1), (
            "nobody knows the working set before a worker has told it"
        )
        await kv_budgets(made, a=18_500_000)
        await answered(made, "b")
        assert made.shares["b"].wired_bytes == 1_000_000
        assert made.shares["b"].state_bytes is not None
        await kv_budgets(made, a=8_500_000, b=8_500_000)  # (20 - 2 * 1.5) / 2 MB each
        await context_of(made, "a", 850_000)
        await made.unload("b")
        await kv_budgets(made, a=18_500_000)
        await context_of(made, "a", 1_000_000)
