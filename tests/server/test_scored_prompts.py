"""A real server that returns log-probabilities of long prompts over a large vocabulary."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest

from tests.fakes.reference_sampler import log_probabilities
from tests.fakes.server_process import ServerProcess, running_server, until
from tests.fakes.tiny_models import make_tiny, write_tiny

LARGE_VOCAB = 30_000  # logits of 279 positions fit into a piece
# 3 chunks of 512 tokens
TEXT = "".join(f"{number} sheep are {'black' if number % 3 else 'white'}. " for number in range(60))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("models") / "large"
    write_tiny(folder, "llama", changes={"vocab_size": LARGE_VOCAB})
    with running_server(str(folder), "--name", "large", "--store", "off") as server:
        yield server


def complete(server: ServerProcess, **body: Any) -> dict[str, Any]:
    response = httpx.post(
        f"{server.url}/v1/completions", json={"temperature": 0, **body}, timeout=120
    )
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_an_echoed_prompt_has_the_log_probabilities_of_the_model(server: ServerProcess) -> None:
    answer = complete(server, prompt=TEXT, echo=True, logprobs=3, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["text"] == TEXT
    tokens = list(TEXT.encode())
    assert answer["usage"]["prompt_tokens"] == len(tokens) > 2 * 512
    model: Any = make_tiny("llama", vocab_size=LARGE_VOCAB)
    scored = choice["logprobs"]
    assert scored["token_logprobs"][0] is None
    hidden = model.model(mx.array([tokens]))[0]
    for start in range(0, len(tokens) - 1, 200):
        expected = log_probabilities(
            np.array(model.model.embed_tokens.as_linear(hidden[start]), dtype=np.float64)
        )
        assert scored["token_logprobs"][start + 1] == pytest.approx(
            expected[tokens[start + 1]], abs=1e-3
        )
        assert max(scored["top_logprobs"][start + 1].values()) == pytest.approx(
            expected.max(), abs=1e-3
        )
    assert len(scored["token_logprobs"]) == len(tokens)


def test_prompt_scores_are_the_same_with_and_without_an_answer(
    server: ServerProcess,
) -> None:
    alone = complete(server, prompt=TEXT, echo=True, logprobs=0, max_tokens=0)["choices"][0][
        "logprobs"
    ]["token_logprobs"]
    followed = complete(server, prompt=TEXT, echo=True, logprobs=0, max_tokens=3)["choices"][0][
        "logprobs"
    ]["token_logprobs"]
    assert len(followed) == len(alone) + 3
    assert followed[1 : len(alone)] == pytest.approx(alone[1:], abs=1e-4)


async def test_a_disconnect_during_scoring_leaves_nothing_behind(
    server: ServerProcess,
) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        body = {"prompt": [TEXT * 2] * 12, "echo": True, "logprobs": 5, "max_tokens": 0}
        leaving = asyncio.create_task(client.post("/v1/completions", json=body))
        await asyncio.to_thread(
            until, lambda: bool(server.model()["running"]), "the prompts are scored"
        )
        assert not leaving.done(), leaving.result().text
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving
    until(
        lambda: (server.model()["running"], server.model()["queued"]) == (0, 0),
        "the work of who left has stopped",
    )
    until(
        lambda: server.metric("holdfast_worker_cancelled_total") > 0,
        "the cancelled prompts are counted",
    )
    assert server.metric("holdfast_worker_kv_reserved_bytes") == 0
    assert complete(server, prompt="one sheep", max_tokens=2)["usage"]["completion_tokens"] == 2
