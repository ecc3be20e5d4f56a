"""Quantized keys and values, chosen for each request of a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fakes.server_process import ServerProcess, running_server
from tests.fakes.tiny_models import write_tiny

NOTES = "Notes:\n" + "".join(
    f"- The code of shed {shed} is {shed * 37}.\n" for shed in range(1, 60)
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("kv bits")
    write_tiny(folder / "narrow", "llama", changes={"head_dim": 24})
    (folder / "models.toml").write_text(
        '[models.demo]\nid = "holdfast-demo"\nkv_bits = 8\n[models.narrow]\npath = "narrow"\n'
    )
    with running_server(
        "--models", str(folder / "models.toml"), "--store", str(folder / "store")
    ) as process:
        yield process


def chat(server: ServerProcess, **more: Any) -> httpx.Response:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": NOTES + "What is the code of shed 7?"}],
        "temperature": 0,
        "max_tokens": 24,
        **more,
    }
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)


def answered(server: ServerProcess, **more: Any) -> tuple[str, int]:
    answer = chat(server, **more).raise_for_status().json()
    usage = answer["usage"]["prompt_tokens_details"]
    return answer["choices"][0]["message"]["content"], usage["cached_tokens"]


def test_each_kv_form_answers_and_caches_separately(server: ServerProcess) -> None:
    for kv_bits in ("native", 4, "8/4", None):
        asked = {} if kv_bits is None else {"kv_bits": kv_bits}
        first, before = answered(server, **asked)
        again, after = answered(server, **asked)
        assert first == again
        assert before == 0, f"nothing is cached in {kv_bits} yet"
        assert after >= 512
    _, cached = answered(server, kv_bits="8")
    assert cached >= 512, "8 is the setting of the model"


def test_health_shows_kv_bits_and_bytes(server: ServerProcess) -> None:
    answered(server)
    health = httpx.get(f"{server.url}/health").raise_for_status().json()
    kv = next(model["kv"] for model in health["models"] if model["id"] == "demo")
    assert kv["bits"] == "8"
    assert kv["bytes_per_token"] == kv["forms"]["8"] < 0.28 * kv["forms"]["native"]
    assert kv["forms"]["4"] < 0.16 * kv["forms"]["native"]
    assert kv["refused"] == {}


def test_unsupported_kv_bits_are_refused_with_the_supported_ones(
    server: ServerProcess,
) -> None:
    refused = chat(server, kv_bits=3)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "kv_bits"
    for name in ("native", "'8'", "'4'"):
        assert name in refused.json()["error"]["message"]
    refused = chat(server, model="narrow", kv_bits=8, messages=[{"role": "user", "content": "a"}])
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "kv_bits"
    assert "heads have 24 dimensions" in error["message"]
    assert "possible: auto, native" in error["message"]
