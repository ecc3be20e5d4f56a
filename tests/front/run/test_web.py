from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from holdfast.config import CatalogSettings, Settings, StoreSettings
from holdfast.errors import ModelLoadError
from holdfast.front.fleet.catalog import CatalogEntry, catalog_of
from holdfast.front.fleet.residency import Residency
from holdfast.front.fleet.slot import ModelFiles
from holdfast.front.run.web import Awake, build_application
from holdfast.machine.memory_plan import MemoryShare
from holdfast.models.download import demo_folder, resolve_model
from holdfast.wire.commands import WorkerSettings
from tests.fakes.server_process import children_running

CAFFEINATE = f"""#!{sys.executable}
import pathlib, sys, threading
pathlib.Path(__file__).with_name("asked").write_text(" ".join(sys.argv[1:]))
threading.Event().wait()
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In place of macOS's own program: records its arguments and keeps running; a failing test's
    leftovers are ended.
    """
    path = tmp_path / "caffeinate"
    path.write_text(CAFFEINATE)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    yield path
    for child in children(path):
        child.kill()
        child.wait()


def children(program: Path) -> list[psutil.Process]:
    return children_running(str(program))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_one_program_runs_from_the_first_request_to_the_last(program: Path) -> None:
    awake = Awake(platform="darwin", linger_seconds=0.001)
    awake.note_running(1)
    await until(
        lambda: (program.parent / "asked").exists() and bool((program.parent / "asked").read_text())
    )
    assert (program.parent / "asked").read_text() == f"-i -w {os.getpid()}"
    (first,) = children(program)
    awake.note_running(2)
    awake.note_running(1)
    assert children(program) == [first]
    awake.note_running(0)
    await until(lambda: not first.is_running())
    awake.note_running(1)
    assert children(program) != [first]
    awake.close()
    assert children(program) == []


async def test_the_program_lingers_for_the_next_request(program: Path) -> None:
    awake = Awake(platform="darwin", linger_seconds=60.0)
    awake.note_running(1)
    await until((program.parent / "asked").exists)
    (first,) = children(program)
    awake.note_running(0)
    awake.note_running(1)
    assert children(program) == [first]
    awake.close()


async def test_other_systems_start_no_program(program: Path) -> None:
    awake = Awake(platform="linux")
    awake.note_running(1)
    assert children(program) == []
    assert not (program.parent / "asked").exists()


async def test_a_program_that_cannot_start_fails_no_request(
    program: Path, caplog: pytest.LogCaptureFixture
) -> None:
    awake = Awake(platform="darwin")
    program.write_text("#!/no/such/interpreter\n")
    awake.note_running(1)
    awake.note_running(0)
    awake.note_running(1)
    assert len(caplog.records) == 1


# A model with damaged files is not listed; a request for it gets an error with the file and the
# remedy, in each protocol's form, which no SDK retries.

HI = [{"role": "user", "content": "Hi"}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/rerank": {"query": "Hi", "documents": ["Hello"]},
    "/tokenize": {"prompt": "Hi"},
    "/api/chat": {"messages": HI},
    "/api/generate": {"prompt": "Hi"},
    "/api/embed": {"input": "Hi"},
}
# this model is refused when it is loaded, not when the catalog is read
LATER = "later"
IN_HUB_CACHE = "coast/kelp"


def spoil(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


@pytest.fixture
async def client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("broken", LATER):
        shutil.copytree(demo_folder("holdfast-demo-draft"), tmp_path / name)
    snapshot = tmp_path / "hub" / "models--coast--kelp" / "snapshots" / "c1"
    shutil.copytree(demo_folder("holdfast-demo-draft"), snapshot)
    (tmp_path / "hub" / "models--coast--half" / "blobs").mkdir(parents=True)
    (tmp_path / "hub" / "models--coast--half" / "blobs" / "0.incomplete").write_bytes(b"x")
    for folder in (tmp_path / "broken", snapshot):
        spoil(folder)
    file = tmp_path / "models.toml"
    file.write_text(
        "[models.good]\nid = 'holdfast-demo'\n"
        "[models.broken]\npath = 'broken'\n[models.later]\npath = 'later'\n"
    )
    settings = Settings(
        catalog=CatalogSettings(file=str(file), folders=()), store=StoreSettings(folder="off")
    )
    catalog = catalog_of(settings, {"HF_HUB_CACHE": str(tmp_path / "hub")})
    spoil(tmp_path / LATER)

    def fetch(entry: CatalogEntry) -> ModelFiles:
        return ModelFiles(folder=resolve_model(entry.model, progress=lambda *_: None))

    def worker_of(entry: CatalogEntry, files: ModelFiles, share: MemoryShare) -> WorkerSettings:
        raise ModelLoadError("nothing is loaded here")

    residency = Residency(catalog, settings.residency, fetch=fetch, worker_of=worker_of)
    app = build_application(settings, residency)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8321") as made:
        yield made
    await residency.stop()


async def test_a_damaged_model_is_not_listed(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed if card["owned_by"] == "holdfast"] == ["good", LATER]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_request_for_a_damaged_model_gets_its_protocols_error(
    client: httpx.AsyncClient, path: str, stream: bool
) -> None:
    words = {
        "broken": (404, "model.safetensors is damaged or cut short"),
        LATER: (422, "model.safetensors is damaged or cut short"),
        IN_HUB_CACHE: (404, f"download the file again: holdfast models pull {IN_HUB_CACHE}"),
        "coast/half": (404, "was interrupted; to complete it: holdfast models pull coast/half"),
    }
    for model, (status, said) in words.items():
        body = {"model": model, **PATHS[path], **({"stream": True} if stream else {})}
        answer = await client.post(path, json=body)
        assert answer.status_code == status, answer.text
        assert said in message_of(path, answer)
        assert "retry-after" not in answer.headers


def message_of(path: str, answer: httpx.Response) -> str:
    """The message of an error in the protocol's own field."""
    content = json.loads(answer.content)
    if path.startswith("/api/"):
        return str(content["error"])
    error = content["error"]
    if path.startswith("/v1/messages"):
        assert content["type"] == "error"
        kinds = {404: "not_found_error", 422: "invalid_request_error"}
        assert error["type"] == kinds[answer.status_code]
    else:
        codes = {404: "model_not_found", 422: "model_unusable"}
        assert error["code"] == codes[answer.status_code]
    with contextlib.suppress(KeyError):
        assert error["param"] in ("model", None)
    return str(error["message"])
