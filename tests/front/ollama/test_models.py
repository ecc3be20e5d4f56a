from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec
import ollama
import pytest

from holdfast.config import ServerSettings
from holdfast.front.application import create_application
from holdfast.front.fleet.residency import ModelStatus
from holdfast.models.download import demo_folder
from tests.fakes.http_clients import client_of
from tests.fakes.hub import HubState, hub_in_place
from tests.fakes.hub_library import TWO, HubLibrary
from tests.fakes.ollama_bodies import ABLE, UNABLE, asked, directory_of, lines_of
from tests.fakes.scripted_gateway import (
    INFO,
    MODEL,
    ScriptedDirectory,
    ScriptedGateway,
    model_status,
    scripted_services,
)


async def got(path: str, *models: ModelStatus) -> Any:
    directory = directory_of(models=models or (model_status(),))
    async with client_of(ScriptedGateway(), directory=directory) as client:
        return (await client.get(path)).json()


def sized(**facts: Any) -> ModelStatus:
    return model_status(info=msgspec.structs.replace(INFO, **facts))


async def test_the_models_list_has_the_fields_clients_read() -> None:
    (model,) = ollama.ListResponse(
        **await got("/api/tags", sized(parameters=4_022_468_096, weight_bytes=2_263_000_000))
    ).models
    assert model.model == f"{MODEL}:latest"
    assert (model.size, model.modified_at is not None, len(model.digest or "")) == (
        2_263_000_000,
        True,
        64,
    )
    assert model.details is not None
    assert (
        model.details.family,
        model.details.parameter_size,
        model.details.quantization_level,
    ) == ("qwen3", "4.0B", "Q4")


async def test_every_listed_name_has_a_tag_and_is_accepted() -> None:
    for model_id, shown in (("a/b", "a/b:latest"), ("b:4bit", "b:4bit"), ("c:d/b", "c:d/b:latest")):
        listed = await got("/api/tags", model_status(id=model_id))
        assert listed["models"][0]["name"] == listed["models"][0]["model"] == shown
        directory = directory_of(models=(model_status(id=model_id),))
        async with client_of(ScriptedGateway(), directory=directory) as client:
            for name in (shown, model_id):
                assert (await client.post("/api/show", json={"model": name})).status_code == 200


async def test_a_ready_model_is_listed_as_running() -> None:
    found = await got(
        "/api/ps", model_status(), model_status(id="other", state="loading", info=None)
    )
    (model,) = ollama.ProcessResponse(**found).models
    assert (model.name, model.context_length, model.expires_at is not None) == (
        f"{MODEL}:latest",
        2048,
        True,
    )


async def test_the_unload_time_of_a_model_is_shown() -> None:
    used, never = model_status(idle_seconds_left=600.0), model_status(id="other")
    found = await got("/api/ps", used, never)
    soon, late = (model.expires_at for model in ollama.ProcessResponse(**found).models)
    assert (soon is not None, late is not None) == (True, True)
    assert 0 < (soon - datetime.now(UTC)).total_seconds() <= 600
    assert late.year == 9999


@pytest.mark.parametrize(("is_on_cpu", "found"), [(True, 0), (False, INFO.weight_bytes)])
async def test_only_a_gpu_model_has_gpu_memory(is_on_cpu: bool, found: int) -> None:
    info = msgspec.structs.replace(INFO, device="AMD EPYC", is_on_cpu=is_on_cpu)
    (model,) = (await got("/api/ps", model_status(info=info)))["models"]
    assert (model["size_vram"], model["size"]) == (found, INFO.weight_bytes)


async def test_a_loading_model_is_listed_without_figures() -> None:
    (model,) = (await got("/api/tags", model_status(state="loading", info=None)))["models"]
    assert (model["size"], model["details"]["family"]) == (0, "")


@pytest.mark.parametrize(
    "fields",
    [
        {"model": MODEL},
        {"model": f"{MODEL}:latest"},
        {"model": None, "name": MODEL, "verbose": True},
    ],
)
async def test_a_model_is_shown_with_its_capabilities_and_context(fields: dict[str, Any]) -> None:
    shown = ollama.ShowResponse(**(await asked(ScriptedGateway(), "/api/show", **fields)).json())
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "qwen3"
    assert shown.modelinfo["qwen3.context_length"] == 2048
    assert set(shown.capabilities or ()) >= {"completion", "tools", "thinking"}


async def test_a_vision_model_has_ollamas_vision_capability() -> None:
    directory = directory_of(models=[model_status(can_see=True)])
    async with client_of(ScriptedGateway(), directory=directory) as client:
        shown = await client.post("/api/show", json={"model": MODEL})
    assert "vision" in shown.json()["capabilities"]


async def test_unsupported_capabilities_are_not_listed() -> None:
    able, unable = [
        (await asked(ScriptedGateway(), "/api/show", report=report)).json()
        for report in (ABLE, UNABLE)
    ]
    assert {"tools", "thinking"} <= set(able["capabilities"])
    assert not {"tools", "thinking"} & set(unable["capabilities"])
    in_text = await asked(
        ScriptedGateway(), "/api/show", report=msgspec.structs.replace(UNABLE, tools="text")
    )
    assert "tools" in in_text.json()["capabilities"]


async def test_an_unknown_model_is_not_shown() -> None:
    assert (await asked(ScriptedGateway(), "/api/show", model="other")).status_code == 404
    assert (await asked(ScriptedGateway(), "/api/show", model=None)).json() == {
        "error": "`model` is required",
        "advice": "fix_request",
    }


async def test_the_reported_version_is_accepted_by_clients() -> None:
    found = await got("/api/version")
    # required by Codex; VS Code accepts 0.6.4
    assert tuple(map(int, found["version"].split("."))) >= (0, 13, 4)
    assert found["holdfast"] == "0.1.0"


@pytest.mark.parametrize(
    ("parameters", "weight_bytes", "dtype", "size", "level"),
    [
        (494_032_768, 4 * 494_032_768, "float32", "494.03M", "F32"),
        (7, 14, "bfloat16", "7", "BF16"),
        (812_500, 812_500, "", "812.5K", "Q8"),
    ],
)
async def test_parameter_counts_are_abbreviated(
    parameters: int, weight_bytes: int, dtype: str, size: str, level: str
) -> None:
    (model,) = (
        await got(
            "/api/tags",
            sized(parameters=parameters, weight_bytes=weight_bytes, compute_dtype=dtype),
        )
    )["models"]
    assert (model["details"]["parameter_size"], model["details"]["quantization_level"]) == (
        size,
        level,
    )


PULL, DELETE = "/api/pull", "/api/delete"
KELP = "coast/kelp-small"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubState]:
    with hub_in_place(monkeypatch, tmp_path / "cache") as state:
        state.repositories[KELP] = {
            file.name: file.read_bytes() for file in demo_folder().iterdir() if file.is_file()
        }
        yield state


class Served:
    """The application over a library."""

    def __init__(
        self, folder: Path, *, server: ServerSettings | None = None, models: str = TWO
    ) -> None:
        self.made = HubLibrary(folder=folder, cache=folder / "cache", models=models)
        residency = self.made.residency

        class Directory(ScriptedDirectory):
            def catalog(self) -> Any:
                return residency.catalog

        directory = Directory(models=[model_status(id=name) for name in self.made.names])
        services = scripted_services(
            ScriptedGateway(), library=self.made.library, server=server, directory=directory
        )
        self._app = create_application(services)

    async def request(
        self, method: str, path: str, *, address: str = "127.0.0.1", **fields: Any
    ) -> httpx.Response:
        transport = httpx.ASGITransport(self._app, client=(address, 1))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1:8321"
        ) as client:
            return await client.request(method, path, json=fields)


@pytest.mark.parametrize("name", [KELP, f"hf.co/{KELP}", f"huggingface.co/{KELP}:latest"])
async def test_a_hub_model_is_pulled_with_progress_and_served(
    hub: HubState, tmp_path: Path, name: str
) -> None:
    served = Served(tmp_path)
    lines = lines_of(await served.request("POST", PULL, model=name))
    assert lines[0] == {"status": "pulling manifest"}
    assert [line["status"] for line in lines[-2:]] == ["writing manifest", "success"]
    (*_, last) = [line for line in lines if "digest" in line]
    assert last["digest"].startswith("sha256:")
    assert last["status"] == f"pulling {last['digest'][7:19]}"
    assert last["completed"] == last["total"] > len(hub.repositories[KELP]["model.safetensors"])
    assert "verifying sha256 digest" in {line["status"] for line in lines}
    assert KELP in served.made.names
    again = await served.request("POST", PULL, model=name, stream=False)
    assert (again.status_code, again.json()) == (200, {"status": "success"})


@pytest.mark.parametrize("stream", [True, False])
async def test_a_failed_pull_has_ollamas_error_form(
    hub: HubState, tmp_path: Path, stream: bool
) -> None:
    served = Served(tmp_path)
    unknown = await served.request("POST", PULL, model="coast/none", stream=stream)
    assert (unknown.status_code, "no model coast/none on the Hub" in unknown.json()["error"]) == (
        404,
        True,
    )
    hub.gated.add(KELP)
    gated = await served.request("POST", PULL, model=KELP, stream=stream)
    assert (gated.status_code, "is gated" in gated.json()["error"]) == (502, True)


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("llama3", 404),
        ("", 400),
        ("hf.co/coast/kelp:Q4_K_M", 400),
        ("http://192.0.2.1/coast/kelp", 400),
        ("/etc/passwd", 400),
        ("../../coast", 400),
        (f"{KELP}@v1", 400),
    ],
)
async def test_paths_urls_and_tags_cannot_be_pulled(
    hub: HubState, tmp_path: Path, name: str, status: int
) -> None:
    response = await Served(tmp_path).request("POST", PULL, model=name)
    assert (response.status_code, list(response.json())) == (status, ["error", "advice"])
    assert hub.requests == []


@pytest.mark.parametrize(
    "fields", [{}, {"model": None, "name": MODEL}, {"model": f"{MODEL}:latest", "insecure": True}]
)
async def test_pulling_a_served_model_succeeds(fields: dict[str, Any]) -> None:
    streamed = lines_of(await asked(ScriptedGateway(), PULL, **fields))
    whole = await asked(ScriptedGateway(), PULL, stream=False, **fields)
    assert [line["status"] for line in streamed] == ["pulling manifest", "success"]
    assert whole.json() == {"status": "success"}


async def test_a_deleted_model_is_unknown(hub: HubState, tmp_path: Path) -> None:
    served = Served(tmp_path)
    await served.request("POST", PULL, model=KELP, stream=False)
    deleted = await served.request("DELETE", DELETE, model=f"{KELP}:latest")
    assert (deleted.status_code, deleted.content) == (200, b"")
    assert KELP not in served.made.names
    again = await served.request("DELETE", DELETE, name=KELP)
    assert (again.status_code, "not found" in again.json()["error"]) == (404, True)


async def test_a_refused_deletion_says_why(hub: HubState, tmp_path: Path) -> None:
    served = Served(tmp_path, models=f"{TWO}[models.kelp]\nid = '{KELP}'\npin = true\n")
    await served.request("POST", PULL, model=KELP, stream=False)
    for name, status, words in (
        ("first", 400, "is not in the Hub's cache"),  # the bundled model
        ("kelp", 409, "is pinned"),
        ("other", 404, "not found"),
        ("", 400, "is required"),
        (f"{KELP}@main", 404, "not found"),
        ("/etc/passwd", 404, "not found"),
    ):
        response = await served.request("DELETE", DELETE, model=name)
        assert (response.status_code, words in response.json()["error"]) == (status, True), (
            response.text
        )


async def test_an_alias_pattern_deletes_and_pulls_nothing(hub: HubState, tmp_path: Path) -> None:
    served = Served(
        tmp_path,
        server=ServerSettings(model_aliases=("*=kelp",)),
        models=f"{TWO}[models.kelp]\nid = '{KELP}'\n",
    )
    await served.request("POST", PULL, model="kelp", stream=False)
    assert (await served.request("DELETE", DELETE, model="gpt-4o")).status_code == 404
    assert (await served.request("POST", PULL, model="coast/other")).status_code == 404


@pytest.mark.parametrize(("method", "path"), [("POST", PULL), ("DELETE", DELETE)])
async def test_it_takes_an_administrator(
    hub: HubState, tmp_path: Path, method: str, path: str
) -> None:
    refused = await Served(tmp_path).request(method, path, address="192.0.2.1", model=KELP)
    assert (refused.status_code, hub.requests) == (403, [])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("POST", "/api/push"),
        ("POST", "/api/blobs/sha256:00"),
    ],
)
async def test_models_cannot_be_created_over_http(method: str, path: str) -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.request(method, path, content=json.dumps({"model": MODEL}))
    assert response.status_code == 400
    assert "is not supported" in response.json()["error"]
