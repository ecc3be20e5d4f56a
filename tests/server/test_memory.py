"""A server with a cache that is separate for each tenant and can be inspected."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.fakes.server_process import ServerProcess, running_server, until

TEXT = (
    "The lighthouse keeper wrote every ship into his book, with its name, its flag and the weather "
    "of that day. " * 12
)


@pytest.fixture
def asked(server: ServerProcess, request: pytest.FixtureRequest) -> Asked:
    """The shared server; each test uses its own tenant."""
    return Asked(server, {"X-Holdfast-Tenant": request.node.name})


class Asked:
    """A server and the headers of requests to it."""

    def __init__(self, process: ServerProcess, headers: dict[str, str] | None = None) -> None:
        self.process, self._headers = process, headers or {}

    def complete(
        self, prompt: str = TEXT, *, headers: dict[str, str] | None = None, **fields: Any
    ) -> Any:
        body = {
            "prompt": prompt,
            "max_tokens": 4,
            "temperature": 0,
            "holdfast": {"explain": True},
            **fields,
        }
        asked = {**self._headers, **(headers or {})}
        response = httpx.post(
            f"{self.process.url}/v1/completions", json=body, headers=asked, timeout=60
        )
        assert response.status_code == 200, response.text
        return response.json()


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_after_a_worker_is_killed_the_next_restores_from_disk(
    asked: Asked,
) -> None:
    process = asked.process

    figure = process.metric

    def first_turn(headers: dict[str, str]) -> Any:
        kept, blocks = figure("holdfast_prefix_cache_kept_tokens"), figure("holdfast_store_blocks")
        answer = asked.complete(max_tokens=8, headers=headers)
        until(
            lambda: (
                figure("holdfast_prefix_cache_kept_tokens")
                >= kept + answer["usage"]["total_tokens"] - 1
            ),
            "all is kept",
        )
        until(
            lambda: (
                figure("holdfast_store_blocks") > blocks
                and not figure("holdfast_store_queued_blocks")
            ),
            "all is on disk",
        )
        return answer

    told = {}
    for who in ("spared", "struck"):
        headers = {"X-Holdfast-Tenant": f"{who} by a death"}
        first = first_turn(headers)
        until(lambda: process.model()["memory"]["parked_sequences"] > 0, "a parked state")
        worker = process.model()["pid"]
        if who == "struck":
            os.kill(worker, signal.SIGKILL)
            until(lambda: not psutil.pid_exists(worker), "the end of the worker")  # noqa: B023
            until(
                lambda: httpx.get(f"{process.url}/health", timeout=60).status_code == 503,
                "the death is seen",
            )
        told[who] = asked.complete(
            f"{TEXT}{first['choices'][0]['text']} And then", max_tokens=8, headers=headers
        )
        assert (process.model()["pid"] == worker) == (who == "spared")
    spared, struck = told["spared"]["holdfast"], told["struck"]["holdfast"]
    assert told["struck"]["choices"] == told["spared"]["choices"]
    assert spared["moved_tokens"] + spared["shared_tokens"] == spared["ram_tokens"] > 200
    assert (struck["ram_tokens"], struck["disk_tokens"]) == (0, spared["ram_tokens"])


@pytest.mark.slow
def test_another_key_starts_cold_and_no_key_is_on_disk(model_folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for key, expected in (("first-key", False), ("second-key", False), ("first-key", True)):
        with running_server(str(model_folder), "--store", str(store), "--api-key", key) as process:
            answer = Asked(process, {"authorization": f"Bearer {key}"}).complete()
            assert bool(cached(answer)) == expected
    kept = b"".join(path.read_bytes() for path in store.rglob("*") if path.is_file())
    assert len(kept) > 1000
    assert b"first-key" not in kept


def test_a_miss_shows_the_first_differing_token_as_text(asked: Asked) -> None:
    asked.complete()
    at = TEXT.rindex("keeper")
    explained = asked.complete(TEXT[:at] + "painter" + TEXT[at + 6 :])["holdfast"]
    assert explained["reason"] == "diverged"
    assert explained["difference"]["position"] == explained["ram_tokens"] + explained["disk_tokens"]
    assert explained["difference"]["before"].rstrip().endswith("lighthouse")
    assert explained["difference"]["stored"]["text"].strip() in "keeper"
    assert explained["difference"]["prompt"]["text"].strip() in "painter"
    assert explained["difference"]["prompt"]["text"] in explained["explanation"]


def test_usage_is_exact_when_a_stop_string_ends_the_answer(asked: Asked) -> None:
    whole = asked.complete(max_tokens=8)
    stop = whole["choices"][0]["text"][1:3]
    stopped = asked.complete(max_tokens=8, stop=stop)
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert cached(stopped) == stopped["usage"]["prompt_tokens"] - 1
    assert stopped["holdfast"]["seconds"]["prefill"] > 0


def test_requests_with_a_common_prefix_prefill_it_once(asked: Asked) -> None:
    answer = asked.complete(n=3, temperature=1, seed=1)
    explained = answer["holdfast"]
    assert explained["read_tokens"] == answer["usage"]["prompt_tokens"]
    assert [choice["read_tokens"] for choice in explained["further_choices"]] == [1, 1]


def test_metrics_and_health_show_the_cache(asked: Asked) -> None:
    asked.complete()
    asked.complete()
    process = asked.process
    until(lambda: process.model()["memory"]["store"]["blocks"] > 0, "blocks on disk")
    model = process.model()
    assert model["memory"]["store"]["mode"] == "writing"
    assert model["memory"]["store"]["model"]
    assert model["memory"]["kept_tokens"] > 100
    assert model["memory"]["ram_bytes"] > 0
    shown = dict(
        line.rsplit(" ", 1)
        for line in httpx.get(f"{process.url}/metrics", timeout=60).text.splitlines()
        if line[:1] != "#"
    )
    label = f'model="{model["id"]}"'
    assert float(shown[f'holdfast_prefix_cache_lookups_total{{{label},outcome="complete"}}']) >= 1
    assert (
        float(shown[f'holdfast_prefix_cache_lookups_total{{{label},outcome="nothing_stored"}}'])
        >= 1
    )
    assert float(shown[f"holdfast_store_writing{{{label}}}"]) == 1
