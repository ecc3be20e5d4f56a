"""If the memory for KV holds less than the model's context, the smaller one is used everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes.server_process import ServerProcess, environment, running_server

FITS = 1024


@pytest.fixture(scope="module")
def tight(
    server: ServerProcess, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """The bundled model with memory for native KV of 1024 but not 1280 tokens."""
    token_bytes = server.model()["kv_bytes_per_token"]
    arguments = [str(model_folder), "--name", "demo", "--kv-bits", "native", "--store"]
    arguments += [str(tmp_path_factory.mktemp("tight") / "store")]
    arguments += ["--set", f"model.memory_bytes={token_bytes * (FITS + 200)}"]
    with running_server(*arguments) as server:
        yield server


def test_every_protocol_shows_the_usable_and_the_models_context(
    server: ServerProcess, tight: ServerProcess
) -> None:
    own = server.model()["max_context_length"]
    assert server.model()["context_length"] == own > FITS
    (card,) = httpx.get(f"{tight.url}/v1/models").json()["data"]
    names = ("max_model_len", "context_length", "context_window")
    assert {card[name] for name in names} == {FITS}
    assert (card["max_context_length"], card["max_output_tokens"]) == (own, FITS // 4)
    headers = {"anthropic-version": "2023-06-01"}
    (model,) = httpx.get(f"{tight.url}/v1/models", headers=headers).json()["data"]
    assert (model["max_input_tokens"], model["max_context_length"]) == (FITS, own)
    shown = httpx.post(f"{tight.url}/api/show", json={"model": "demo"}).json()
    assert shown["parameters"] == f"num_ctx {FITS}"
    lengths = {name: value for name, value in shown["model_info"].items() if "context" in name}
    assert sorted(lengths.values()) == [FITS, own]
    (running,) = httpx.get(f"{tight.url}/api/ps").json()["models"]
    assert running["context_length"] == FITS
    assert (tight.model()["context_length"], tight.model()["max_context_length"]) == (FITS, own)


def test_the_server_and_ps_show_the_usable_context(
    server: ServerProcess, tight: ServerProcess
) -> None:
    own = server.model()["max_context_length"]
    assert f"{FITS:,} of the model's {own:,} tokens" in tight.output()
    assert f"limited to {FITS:,} of {own:,} tokens" in tight.log()
    ran = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "ps", "--json"],
        env={**os.environ, **environment()},
        capture_output=True,
        check=True,
    )
    models = [
        model
        for each in json.loads(ran.stdout)
        if each["url"] == tight.url
        for model in each["models"]
    ]
    assert [model["context_length"] for model in models] == [FITS]


def test_answers_may_fill_the_context_but_longer_prompts_are_refused(
    tight: ServerProcess,
) -> None:
    """Without `max_tokens`, an answer used to be refused because a full context did not fit."""
    url = f"{tight.url}/v1/completions"
    full = httpx.post(
        url,
        json={"prompt": [7] * (FITS - 8), "max_tokens": 5000, "ignore_eos": True},
        timeout=120,
    )
    assert full.status_code == 200, full.text
    assert full.json()["usage"]["total_tokens"] == FITS
    chat = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}
    answer = httpx.post(f"{tight.url}/v1/chat/completions", json=chat, timeout=120)
    assert answer.status_code == 200, answer.text
    refused = httpx.post(url, json={"prompt": [7] * FITS}, timeout=120)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert f"maximum context length is {FITS} tokens" in refused.json()["error"]["message"]


def test_quantized_kv_allows_a_longer_context(tight: ServerProcess) -> None:
    body = {"prompt": [7] * (2 * FITS), "max_tokens": 2}
    url = f"{tight.url}/v1/completions"
    refused = httpx.post(url, json={**body, "kv_bits": "native"}, timeout=120).json()["error"]
    assert refused["code"] == "context_length_exceeded"
    assert 'With "kv_bits": "auto", the maximum is ' in refused["message"]
    for kv_bits in ("8", "auto"):
        answer = httpx.post(url, json={**body, "kv_bits": kv_bits}, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == 2 * FITS
