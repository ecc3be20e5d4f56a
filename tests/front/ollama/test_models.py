from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import ollama
import pytest

from holdfast.front.fleet.residency import ModelStatus
from tests.fakes.http_clients import client_of
from tests.fakes.ollama_bodies import ABLE, UNABLE, asked, directory_of
from tests.fakes.scripted_gateway import INFO, MODEL, ScriptedGateway, model_status


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
async def test_a_model_is_shown_with_its_capabilities_and_context(
    fields: dict[str, Any],
) -> None:
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
