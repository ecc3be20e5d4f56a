from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from holdfast.config import Settings, StoreSettings
from holdfast.front.application import create_application
from holdfast.store.store import BlockStore
from tests.fakes.scripted_gateway import ScriptedGateway, scripted_services
from tests.fakes.stored_blocks import FINGERPRINT, make_chain


def client(folder: str) -> httpx.AsyncClient:
    services = replace(
        scripted_services(ScriptedGateway()),
        settings=Settings(store=StoreSettings(folder=folder, disk_bytes=1 << 20)),
    )
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(create_application(services)), base_url="http://localhost"
    )


@pytest.mark.parametrize("folder", ["", "off"])
async def test_without_a_store_there_is_nothing(folder: str) -> None:
    async with client(folder) as asking:
        found = (await asking.get("/admin/store")).json()
    assert (found["folder"], found["blocks"], found["models"]) == (None, 0, [])


async def test_a_foreign_folder_is_reported_as_such(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    async with client(str(tmp_path)) as asking:
        refused = await asking.get("/admin/store")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")


async def test_the_store_is_shown_with_its_models_while_being_written(tmp_path: Path) -> None:
    with BlockStore(tmp_path / "s", fingerprint=FINGERPRINT) as store:
        for block in make_chain(3):
            store.put(block)
        store.flush()
        async with client(str(tmp_path / "s")) as asking:
            found = (await asking.get("/admin/store")).json()
    assert (found["folder"], found["blocks"]) == (str(tmp_path / "s"), 3)
    assert found["allowed_bytes"] == 1 << 20
    (model,) = found["models"]
    assert (model["blocks"], model["tokens"], model["file_bytes"]) == (3, 12, found["file_bytes"])
