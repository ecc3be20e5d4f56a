"""A server of three models with room for two: they are loaded on demand, swapped, and keep their
caches.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from holdfast.models.download import demo_folder
from tests.fakes.server_process import ServerProcess, running_server

MODELS = ("demo", "draft", "copy")
LONG = "The river rose in the night, and in the morning the bridge was gone. " * 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models")
    copy = shutil.copytree(demo_folder(), folder / "copy")
    (folder / "models.toml").write_text(f"""
[models.demo]
id = "holdfast-demo"

[models.draft]
id = "holdfast-demo-draft"

[models.copy]
path = "{copy}"
""")
    arguments = (
        *("--models", str(folder / "models.toml"), "--store", str(folder / "store")),
        *("--set", "residency.max_loaded=2", "--set", "residency.turn_seconds=0.5"),
    )
    with running_server(*arguments) as server:
        yield server


def states(server: ServerProcess) -> dict[str, str]:
    health = httpx.get(f"{server.url}/health", timeout=60)
    assert health.status_code == 200
    found = {model["id"]: model for model in health.json()["models"] if model["id"] in MODELS}
    assert all((model["pid"] is None) == (model["state"] == "unloaded") for model in found.values())
    return {name: model["state"] for name, model in found.items()}


def loads(server: ServerProcess, model: str) -> int:
    return int(server.metric("holdfast_model_changes_total", change="loaded", model=model))


def ask(server: ServerProcess, model: str, text: str, **fields: Any) -> dict[str, Any]:
    body = {
        "model": model,
        "prompt": text,
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_thirty_requests_for_a_cold_model_cause_one_load(
    server: ServerProcess,
) -> None:
    assert states(server) == dict.fromkeys(MODELS, "unloaded")
    with ThreadPoolExecutor(30) as threads:
        answers = list(
            threads.map(lambda number: ask(server, "draft", f"number {number}"), range(30))
        )
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [4] * 30
    assert loads(server, "draft") == 1
    assert states(server) == {"demo": "unloaded", "draft": "ready", "copy": "unloaded"}


@pytest.mark.slow
def test_ninety_requests_over_three_models_are_answered_without_cut_streams(
    server: ServerProcess,
) -> None:
    def stream() -> int:
        body = {
            "model": "demo",
            "prompt": "Once",
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body, timeout=120
        ) as response:
            events = [
                json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")
            ]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        return len(events)

    with ThreadPoolExecutor(40) as threads:
        streamed = threads.submit(stream)
        answers = list(
            threads.map(
                lambda number: ask(server, MODELS[number % 3], f"number {number}"), range(90)
            )
        )
    assert streamed.result() > 0
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [4] * 90
    assert sum(state != "unloaded" for state in states(server).values()) <= 2


@pytest.mark.slow
def test_a_reloaded_model_still_has_its_cache(server: ServerProcess) -> None:
    before = {model: ask(server, model, LONG) for model in MODELS}
    for model in MODELS:  # the one whose turn it is has made room for those after it
        assert states(server)[model] == "unloaded"
        known = loads(server, model)
        again = ask(server, model, LONG)
        assert loads(server, model) == known + 1
        assert again["choices"][0]["text"] == before[model]["choices"][0]["text"]
        usage = again["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 0.95 * usage["prompt_tokens"]
