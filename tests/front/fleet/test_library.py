from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import InvalidRequest, ModelInUse, ModelPinned, NoSuchModel
from holdfast.front.fleet import library as library_module
from holdfast.front.fleet.library import PullStep
from holdfast.models.download import OnStep, PulledModel
from holdfast.models.hub import ModelSource
from tests.fakes.hub import HubState, add_demo, hub_in_place
from tests.fakes.hub_library import TWO, HubLibrary

MODEL = "coast/kelp-small"
SOURCE = ModelSource(kind="hub", name=MODEL)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubState]:
    with hub_in_place(monkeypatch, tmp_path / "cache") as state:
        add_demo(state, MODEL)
        yield state


def library_in(folder: Path, **facts: object) -> HubLibrary:
    return HubLibrary(folder=folder, cache=folder / "cache", **facts)  # type: ignore[arg-type]


async def pull(made: HubLibrary, source: ModelSource = SOURCE) -> list[PullStep]:
    with made.library.pulled(source) as pulling:
        return [step async for step in pulling.steps()]


async def test_a_pulled_model_is_served_until_it_is_removed(hub: HubState, tmp_path: Path) -> None:
    made = library_in(tmp_path)
    steps = await pull(made)
    assert {step.stage for step in steps} == {"download", "checking"}
    assert all(step.done_bytes <= step.total_bytes for step in steps)
    assert steps[-1].done_bytes == steps[-1].total_bytes > 0
    assert made.names == ["first", "second", MODEL]
    await made.library.remove(SOURCE)
    assert made.names == ["first", "second"]
    with pytest.raises(NoSuchModel):
        await made.library.remove(SOURCE)


async def test_a_removed_model_of_the_file_is_fetched_again(hub: HubState, tmp_path: Path) -> None:
    made = library_in(tmp_path, models=f"{TWO}[models.mine]\nid = '{MODEL}'\n", hub_cache=False)
    forgotten: list[str] = []
    made.residency.on_changed_entry = forgotten.append
    await pull(made)
    first = await made.residency.files("mine")
    await made.library.remove(SOURCE)
    assert forgotten == ["mine", "mine"]
    assert await made.residency.files("mine") is not first
    assert made.names == ["first", "second", "mine"]


async def test_a_model_that_could_not_be_served_is_not_pulled(
    hub: HubState, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match="serves only the models that it was started with"):
        await pull(library_in(tmp_path, hub_cache=False))
    assert hub.requests == []


async def test_a_failed_pull_fails_for_all_and_can_be_repeated(
    hub: HubState, tmp_path: Path
) -> None:
    made, none = library_in(tmp_path), ModelSource(kind="hub", name="coast/none")
    failures = await asyncio.gather(pull(made, none), pull(made, none), return_exceptions=True)
    assert [type(failure) for failure in failures] == [NoSuchModel, NoSuchModel]
    hub.repositories["coast/none"] = hub.repositories[MODEL]
    await pull(made, none)
    assert "coast/none" in made.names


class HeldPulls:
    """Pulls that run until they are stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.stopped = 0, 0
        self._tick = threading.Event()  # never set
        monkeypatch.setattr(library_module, "pull_model", self._pull)

    def _pull(self, source: ModelSource, *, with_code: bool, on_step: OnStep) -> PulledModel:
        self.begun += 1
        try:
            while True:
                on_step("download", 1, 2)
                self._tick.wait(0.001)
        finally:
            self.stopped += 1


async def until(condition: object) -> None:
    while not condition():  # type: ignore[operator]
        await asyncio.sleep(0.001)


async def test_a_shared_pull_stops_when_its_last_waiter_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    held, made = HeldPulls(monkeypatch), library_in(tmp_path)
    with made.library.pulled(SOURCE) as first:
        with made.library.pulled(SOURCE) as second:
            assert second is first
            assert await anext(first.steps()) == PullStep(
                stage="download", done_bytes=1, total_bytes=2
            )
            with pytest.raises(NoSuchModel):  # nothing can be removed yet
                await made.library.remove(SOURCE)
        assert (held.begun, held.stopped, first.is_stopped) == (1, 0, False)
    await until(lambda: held.stopped == 1)
    with made.library.pulled(SOURCE) as third:
        assert third is not first
        await until(lambda: held.begun == 2)
        await made.library.close()
    assert held.stopped == 2


async def test_a_pulled_or_pinned_model_is_not_removed(
    hub: HubState, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = library_in(tmp_path, models=f"{TWO}[models.mine]\nid = '{MODEL}'\npin = true\n")
    await pull(made)
    with pytest.raises(ModelPinned):
        await made.library.remove(SOURCE)
    HeldPulls(monkeypatch)
    with made.library.pulled(SOURCE), pytest.raises(ModelInUse, match="is being pulled"):
        await made.library.remove(SOURCE)
    await made.library.close()
