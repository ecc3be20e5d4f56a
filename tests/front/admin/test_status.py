from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.front.admin.status import Health
from holdfast.front.prompt.dialects import DialectReport, ThinkingReport
from holdfast.front.telemetry.metrics import ResidencyFigures
from holdfast.models.quality import QualityReport, save_quality
from holdfast.wire.events import (
    CacheFigures,
    FinishReason,
    Histogram,
    StoreFigures,
    WorkerStatistics,
)
from holdfast.wire.images import VisionInfo
from tests.fakes.http_clients import CHAT, chat_body, client_of
from tests.fakes.quality_report import REPORT
from tests.fakes.scripted_gateway import (
    INFO,
    MODEL,
    ScriptedDirectory,
    ScriptedGateway,
    answer,
    model_status,
)


async def get(path: str, directory: ScriptedDirectory | None = None) -> Any:
    async with client_of(ScriptedGateway(), directory=directory) as client:
        return await client.get(path)


@pytest.mark.parametrize("refused", ["", "mlx-vlm is not installed"])
async def test_health_says_whether_a_model_with_vision_takes_images(refused: str) -> None:
    vision = VisionInfo(
        template_placeholder="", written="", placeholder="", refused=refused, reuse_refused="why"
    )
    model = model_status(info=msgspec.structs.replace(INFO, vision=vision))
    (health,) = (await get("/health", ScriptedDirectory(models=[model]))).json()["models"]
    assert health["vision"] == {"refused": refused or None, "reuse_refused": "why"}


async def test_models_are_listed_with_their_context_state_and_aliases() -> None:
    models = (
        model_status(aliases=("tiny",), own_context_tokens=4096, sampling={"temperature": 0.6}),
        model_status(
            id="b", state="loading", weights_read=0.25, info=None, can_see=True, can_chat=False
        ),
    )
    response = await get("/v1/models", ScriptedDirectory(models=models))
    usual = {
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "holdfast",
        "parent": None,
        "kv_quality": None,
    }
    lengths = {
        "max_model_len": 2048,
        "context_length": 2048,
        "context_window": 2048,
        "max_context_length": 4096,
        "max_output_tokens": 512,
        "default_sampling": {"temperature": 0.6},
    }
    first = usual | lengths | {"id": MODEL, "state": "ready", "aliases": ["tiny"]}
    first |= {"weights_read": None, "can_chat": True}
    first["architecture"] = {"input_modalities": ["text"], "output_modalities": ["text"]}
    second = usual | dict.fromkeys(lengths) | {"id": "b", "state": "loading", "aliases": []}
    second |= {"weights_read": 0.25, "can_chat": False}
    second["architecture"] = {"input_modalities": ["text", "image"], "output_modalities": ["text"]}
    assert response.json() == {"object": "list", "data": [first, second]}


async def test_the_measured_quality_is_shown_until_the_model_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_quality(REPORT, os.environ)

    async def shown(fingerprint: str, **facts: Any) -> Any:
        info = msgspec.structs.replace(INFO, fingerprint=fingerprint)
        models = (model_status(info=info, **facts),)
        response = await get(f"/v1/models/{MODEL}", ScriptedDirectory(models=models))
        return response.json()["kv_quality"]

    assert msgspec.convert(await shown(REPORT.fingerprint), QualityReport) == REPORT
    assert await shown("b" * 64) is None
    assert await shown("") is None


async def test_adapters_are_listed_after_their_model_with_its_state() -> None:
    models = (
        model_status(id="a", aliases=("x",), adapters=("sql", "tone")),
        model_status(id="b", state="loading", info=None),
    )
    response = await get("/v1/models", ScriptedDirectory(models=models))
    shown = [
        (card["id"], card["parent"], card["state"], card["aliases"])
        for card in response.json()["data"]
    ]
    assert shown == [
        ("a", None, "ready", ["x"]),
        ("a:sql", "a", "ready", ["x:sql"]),
        ("a:tone", "a", "ready", ["x:tone"]),
        ("b", None, "loading", []),
    ]


async def test_a_model_is_found_by_its_alias() -> None:
    response = await get(
        "/v1/models/small",
        ScriptedDirectory(models=(model_status(), model_status(id="b", aliases=("small",)))),
    )
    assert response.json()["id"] == "b"


@pytest.mark.parametrize("path", [f"/v1/models/{MODEL}", "/v1/models/demo%2Ftiny"])
async def test_a_model_is_found_by_an_id_with_a_slash(path: str) -> None:
    response = await get(path)
    assert (response.status_code, response.json()["id"]) == (200, MODEL)


@pytest.mark.parametrize("model_id", ["other", "demo", "../demo/tiny"])
async def test_an_unknown_model_is_a_404(model_id: str) -> None:
    response = await get(f"/v1/models/{model_id}")
    assert response.status_code == 404


async def test_an_unknown_model_is_told_the_nearest_names() -> None:
    response = await get(
        "/v1/models/tinny",
        ScriptedDirectory(models=(model_status(), model_status(id="kelp", aliases=("tony",)))),
    )
    assert response.status_code == 404
    assert response.json()["error"]["message"] == (
        f"model 'tinny' does not exist on this server; available: {MODEL}, kelp, tony; did you mean {MODEL} "
        "or tony?"
    )


@pytest.mark.parametrize("path", ["/v1/models/", "/models", "/v1/v1/models", "//v1//models"])
async def test_the_models_list_is_found_under_any_base_url(path: str) -> None:
    assert (await get(path)).json()["data"][0]["id"] == MODEL


async def test_health_shows_the_models_layout_and_load() -> None:
    response = await get("/health")
    assert response.status_code == 200
    assert response.json() == {
        "status": "ok",
        "version": "0.1.0",
        "memory_pressure": {
            "level": "normal",
            "footprint_bytes": 0,
            "limit_bytes": 0,
            "first_watermark_bytes": 0,
            "second_watermark_bytes": 0,
            "changes": {},
        },
        "models": [
            {
                "id": MODEL,
                "state": "ready",
                "adapters": [],
                "pid": 4711,
                "pinned": False,
                "leases": 0,
                "idle_seconds_left": None,
                "footprint_bytes": 0,
                "failure": None,
                "layout": "rows",
                "layout_reason": "both ways agree",
                "running": 2,
                "queued": 1,
                "waiting": [],
                "memory": None,
                "dialect": None,
                "kv_bytes_per_token": 8,
                "fixed_bytes_per_sequence": 0,
                "kv": {"bits": "native", "bytes_per_token": 8, "forms": {}, "refused": {}},
                "speculation_refused": None,
                "vision": None,
                "draft_model": None,
                "context_length": 2048,
                "max_context_length": None,
            }
        ],
    }


async def test_health_shows_the_formats_of_calls_and_thoughts() -> None:
    thinking = ThinkingReport(
        start="<think>",
        end="</think>",
        opened_by_prompt=True,
        switch=("thinking",),
        efforts={"off": {"thinking": False}},
    )
    report = DialectReport(
        family="hermes", tools="text", proven=True, why="shows no tools", thinking=thinking
    )
    response = await get("/health", ScriptedDirectory(dialects={MODEL: report}))
    msgspec.json.decode(response.content, type=Health, strict=True)
    assert response.json()["models"][0]["dialect"] == msgspec.json.decode(
        msgspec.json.encode(report)
    )


async def test_health_shows_the_cache_and_whether_the_store_is_writable() -> None:
    store = StoreFigures(
        model="f00d",
        mode="memory-only",
        blocks=3,
        stored_bytes=70,
        allowed_bytes=100,
        written_today_bytes=9,
    )
    memory = CacheFigures(
        kept_tokens=9,
        ram_bytes=5,
        ram_budget_bytes=10,
        parked_sequences=3,
        parked_bytes=7,
        store=store,
    )
    kept = {
        "kept_tokens": 9,
        "ram_bytes": 5,
        "ram_budget_bytes": 10,
        "parked_sequences": 3,
        "parked_bytes": 7,
    }
    for given, shown in (
        (
            memory,
            {
                "model": "f00d",
                "mode": "memory-only",
                "blocks": 3,
                "stored_bytes": 70,
                "allowed_bytes": 100,
                "written_today_bytes": 9,
            },
        ),
        (msgspec.structs.replace(memory, store=None), None),
    ):
        response = await get("/health", ScriptedDirectory(models=(model_status(cache=given),)))
        msgspec.json.decode(response.content, type=Health, strict=True)
        assert response.json()["models"][0]["memory"] == {**kept, "store": shown}


@pytest.mark.parametrize("state", ["loading", "failed"])
async def test_health_is_503_while_the_only_model_loads_or_cannot(state: str) -> None:
    response = await get(
        "/health", ScriptedDirectory(models=(model_status(state=state, pid=None, info=None),))
    )
    body = response.json()
    assert (response.status_code, body["status"], body["models"][0]["state"]) == (503, state, state)
    assert (body["models"][0]["pid"], body["models"][0]["layout"]) == (None, None)


async def test_health_is_ok_without_a_loaded_model() -> None:
    unloaded = model_status(id="b", state="unloaded", pid=None, is_awaited=False)
    for other, status in (
        (model_status(state="unloaded"), "ok"),
        (model_status(state="loading", is_awaited=False), "ok"),  # somebody requested it
        (model_status(state="failed", failure="no room"), "ok"),
        (model_status(state="loading"), "loading"),
    ):
        body = (await get("/health", ScriptedDirectory(models=(unloaded, other)))).json()
        assert body["status"] == status
        assert body["models"][1]["failure"] == (other.failure or None)


async def test_health_is_not_ready_before_the_first_tokenizer_is_loaded() -> None:
    """A broken tokenizer ends the server, which used to report that it was ready first."""
    for unread, status in (((MODEL,), "loading"), ((), "ok"), (("other",), "ok")):
        body = (await get("/health", ScriptedDirectory(awaited_tokenizers=unread))).json()
        assert (body["status"], body["models"][0]["state"]) == (status, "ready")


async def test_health_and_metrics_show_a_models_users_and_idle_time() -> None:
    figures = ResidencyFigures(
        loaded=1,
        leases=3,
        footprint_bytes=77,
        changes={"loaded": 2, "room": 1},
        wait_seconds={"place": 1.5, "load": 2.5},
    )
    directory = ScriptedDirectory(
        models=(model_status(figures=figures, is_pinned=True, idle_seconds_left=4.5),)
    )
    (model,) = (await get("/health", directory)).json()["models"]
    assert {
        name: model[name] for name in ("pinned", "leases", "idle_seconds_left", "footprint_bytes")
    } == {
        "pinned": True,
        "leases": 3,
        "idle_seconds_left": 4.5,
        "footprint_bytes": 77,
    }
    lines = set((await get("/metrics", directory)).text.splitlines())
    name = f'model="{MODEL}"'
    assert {
        f"holdfast_model_loaded{{{name}}} 1.0",
        f"holdfast_model_leases{{{name}}} 3.0",
        f"holdfast_model_footprint_bytes{{{name}}} 77.0",
        f'holdfast_model_changes_total{{change="loaded",{name}}} 2.0',
        f'holdfast_model_changes_total{{change="room",{name}}} 1.0',
        f'holdfast_model_wait_seconds_total{{for="place",{name}}} 1.5',
    } <= lines


async def test_health_is_loading_before_any_model_is_known() -> None:
    response = await get("/health", ScriptedDirectory(models=()))
    assert (response.status_code, response.json()["status"]) == (503, "loading")


async def test_metrics_show_answers_and_the_work_of_workers() -> None:
    steps = Histogram(bounds=(0.1, 1.0), counts=(3, 1, 1), total=4.5)
    numbers = WorkerStatistics(
        running=2,
        queued=5,
        kv_reserved_bytes=512,
        kv_budget_bytes=1024,
        generated_tokens=99,
        step_seconds=steps,
    )
    gateway = ScriptedGateway(script=answer("a", "b", reason=FinishReason.LENGTH, cached_tokens=3))
    async with client_of(gateway, directory=ScriptedDirectory(numbers={MODEL: numbers})) as client:
        await client.post(CHAT, json=chat_body())
        await client.post(CHAT, json={})
        await client.get("/nope/with/a/name/of/its/own")
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = set(response.text.splitlines())
    model = f'model="{MODEL}"'
    assert {
        f'holdfast_http_requests_total{{method="POST",path="{CHAT}",status="200"}} 1.0',
        f'holdfast_http_requests_total{{method="POST",path="{CHAT}",status="400"}} 1.0',
        'holdfast_http_requests_total{method="GET",path="other",status="404"} 1.0',
        f'holdfast_requests_total{{{model},reason="length"}} 1.0',
        f"holdfast_request_completion_tokens_total{{{model}}} 2.0",
        f"holdfast_request_cached_tokens_total{{{model}}} 3.0",
        f"holdfast_load_seconds{{{model}}} {INFO.load_seconds}",
        f'holdfast_worker_restarts_total{{cause="hung",{model}}} 2.0',
        f"holdfast_worker_running{{{model}}} 2.0",
        f"holdfast_worker_queued{{{model}}} 5.0",
        f"holdfast_worker_kv_reserved_bytes{{{model}}} 512.0",
        f"holdfast_worker_generated_tokens_total{{{model}}} 99.0",
        f'holdfast_worker_step_seconds_bucket{{le="1.0",{model}}} 4.0',
        f'holdfast_worker_step_seconds_bucket{{le="+Inf",{model}}} 5.0',
        f"holdfast_worker_step_seconds_sum{{{model}}} 4.5",
    } <= lines
    for name in ("queue", "prefill", "first_token", "inter_token", "request"):
        assert f"holdfast_{name}_seconds_count{{{model}}} 1.0" in lines
