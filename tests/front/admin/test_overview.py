from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from holdfast.agents import AGENTS, LIBRARIES
from holdfast.config import ServerSettings
from holdfast.wire.events import WorkerStatistics
from tests.fakes.http_clients import client_of
from tests.fakes.scripted_gateway import MODEL, ScriptedDirectory, ScriptedGateway


@pytest.mark.parametrize("key", ["", "sesame"])
async def test_callers_learn_what_they_may_do(key: str) -> None:
    server = ServerSettings(api_key=key)
    headers = {"x-api-key": key} if key else {}
    async with client_of(ScriptedGateway(), server=server) as client:
        told = (await client.get("/admin/caller", headers=headers)).json()
        unknown = await client.get("/admin/caller", headers={"x-api-key": "wrong"})
    assert told == {"key": "", "is_admin": True, "needs_key": bool(key), "version": "0.1.0"}
    assert unknown.status_code == (401 if key else 200)


async def test_strangers_without_keys_learn_that_they_are_read_only() -> None:
    async with client_of(ScriptedGateway(), address="192.168.1.9") as client:
        told = (await client.get("/admin/caller")).json()
        catalog = await client.get("/admin/models")
        requests = await client.get("/admin/requests")
    assert told["is_admin"] is False
    assert (catalog.status_code, requests.status_code) == (403, 403)


async def test_the_work_of_each_worker_is_shown() -> None:
    directory = ScriptedDirectory(numbers={MODEL: WorkerStatistics(steps=3, running=2)})
    async with client_of(ScriptedGateway(), directory=directory) as client:
        (shown,) = (await client.get("/admin/activity")).json()["models"]
    assert shown["model"] == MODEL
    assert (shown["steps"], shown["running"], shown["step_seconds"]) == (3, 2, None)


async def test_the_catalog_has_the_state_of_each_model() -> None:
    async with client_of(ScriptedGateway()) as client:
        shown = (await client.get("/admin/models")).json()
    (model,) = shown["models"]
    assert (model["id"], model["health"]["state"]) == (MODEL, "ready")
    assert shown["downloads"] == {}


@pytest.mark.parametrize("key", ["", "sesame"])
async def test_every_client_has_a_recipe_with_this_servers_address(
    key: str, tmp_path: Path
) -> None:
    server = ServerSettings(api_key=key, allowed_hosts=("box.local",))
    headers = {"host": "box.local:9000", **({"x-api-key": key} if key else {})}
    async with client_of(ScriptedGateway(), server=server) as client:
        told = (await client.get("/admin/clients", headers=headers)).json()
    assert told["url"] == "http://box.local:9000"
    assert [each["name"] for each in told["clients"]] == [
        *AGENTS,
        *(library.name for library in LIBRARIES),
    ]
    for each in told["clients"]:
        assert "box.local:9000" in each["text"], each["name"]
        assert "sesame" not in each["text"]
        if each["language"] == "python":
            ast.parse(each["text"])
        elif not each["launch"]:
            subprocess.run(["sh", "-n", "-c", each["text"]], check=True)
