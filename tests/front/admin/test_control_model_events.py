from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.front.admin import control as model_events
from holdfast.front.fleet.memory_watch import MemoryUse
from holdfast.models.download import demo_folder
from holdfast.models.hub import ModelSource
from tests.fakes.http_clients import Exchange, client_of
from tests.fakes.hub import hub_in_place
from tests.fakes.hub_library import HubLibrary
from tests.fakes.scripted_gateway import (
    MODEL,
    ScriptedControl,
    ScriptedDirectory,
    ScriptedGateway,
    model_status,
)

EVENTS = "/admin/models/events"
KELP = "coast/kelp-small"


@pytest.fixture(autouse=True)
def _polls_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_events, "POLL_SECONDS", 0.001)


def events(exchange: Exchange) -> list[Any]:
    frames = exchange.text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in frames if line.startswith("data: ")]


async def test_the_stream_begins_with_all_models_and_continues_with_changes() -> None:
    directory = ScriptedDirectory(models=(model_status(), model_status(id="b", state="unloaded")))
    exchange = Exchange(ScriptedGateway(), directory=directory)
    following = asyncio.create_task(exchange.run(EVENTS, {}, method="GET"))
    async with asyncio.timeout(60):
        await exchange.until(lambda: len(events(exchange)) == 2)
        for state, failure in (("loading", ""), ("failed", "no weights")):
            changed = model_status(id="b", state=state, failure=failure)
            directory.models = (model_status(), changed)
            count = len(events(exchange)) + 1
            await exchange.until(lambda count=count: len(events(exchange)) == count)
        directory.models = (model_status(),)
        await exchange.until(lambda: len(events(exchange)) == 5)
        exchange.gone.set()
        await following
    failed = {"status": "unloaded", "failed": True, "message": "no weights"}
    assert events(exchange) == [
        {"model": MODEL, "event": "model_status", "data": {"status": "loaded"}},
        {"model": "b", "event": "model_status", "data": {"status": "unloaded"}},
        {"model": "b", "event": "model_status", "data": {"status": "loading"}},
        {"model": "b", "event": "model_status", "data": failed},
        {"model": "b", "event": "model_remove", "data": {}},
    ]


async def test_a_memory_pressure_change_is_an_event_with_its_figures() -> None:
    control = ScriptedControl()
    exchange = Exchange(ScriptedGateway(), control=control)
    following = asyncio.create_task(exchange.run(EVENTS, {}, method="GET"))
    async with asyncio.timeout(60):
        await exchange.until(lambda: len(events(exchange)) == 1)
        use = MemoryUse(workers={"kelp": 90 << 20}, limit_bytes=100 << 20)
        control.memory.update(use, now=0.0)
        await exchange.until(lambda: len(events(exchange)) == 2)
        exchange.gone.set()
        await following
    assert events(exchange)[1] == {
        "model": "",
        "event": "memory_pressure",
        "data": {
            "level": "warning",
            "reason": "footprint 90.0 MiB = worker kelp 90.0; first watermark 85.0 = 0.0 for "
            "weights and steps + 85% of the other 100.0 of 100.0",
        },
    }


async def test_a_download_shows_its_bytes_and_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {file.name: file.read_bytes() for file in demo_folder().iterdir() if file.is_file()}
    made = HubLibrary(folder=tmp_path, cache=tmp_path / "cache")
    with hub_in_place(monkeypatch, tmp_path / "cache") as hub:
        hub.repositories[KELP] = files
        hub.sends_files.clear()
        exchange = Exchange(ScriptedGateway(), library=made.library)
        following = asyncio.create_task(exchange.run(EVENTS, {}, method="GET"))
        try:
            async with asyncio.timeout(60):
                with made.library.pulled(ModelSource(kind="hub", name=KELP)) as pull:
                    await exchange.until(lambda: "download_" in exchange.text)
                    hub.sends_files.set()
                    async for _ in pull.steps():
                        pass
                await exchange.until(lambda: "download_end" in exchange.text)
        finally:
            hub.sends_files.set()
            exchange.gone.set()
            await following
    downloads = [event for event in events(exchange) if event["event"].startswith("download")]
    fetched = (tmp_path / "cache").rglob("snapshots/*/*")
    total = sum(file.stat().st_size for file in fetched)
    nothing_yet = {"download": {"done": 0, "total": total}}
    assert downloads[0] == {"model": KELP, "event": "download_progress", "data": nothing_yet}
    assert downloads[-1] == {"model": KELP, "event": "download_end", "data": {}}


async def test_the_stream_ends_when_the_server_stops() -> None:
    exchange = Exchange(ScriptedGateway())
    following = asyncio.create_task(exchange.run(EVENTS, {}, method="GET"))
    async with asyncio.timeout(60):
        await exchange.until(lambda: bool(events(exchange)))
        exchange.app.state.services.access.drain.begin(60)
        await following
    assert exchange.messages[-1]["more_body"] is False


async def test_it_takes_an_administrator() -> None:
    async with client_of(ScriptedGateway(), address="192.168.1.7") as client:
        response = await client.get(EVENTS)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "admin_only")
