"""A request that kills its worker repeatedly is identified and refused, and the answers of others
are unaffected.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from tests.fakes.server_process import ServerProcess
from tests.fakes.tiny_models import write_tiny
from tests.fakes.told_streams import answer_to, completion

MARKER = 263  # a special token of the tiny models that is otherwise unused
INNOCENTS = [
    completion(f"innocent {first}", [first, 32, 97], max_tokens=300) for first in (65, 66, 67)
]
DEADLY = completion("deadly", [72, 105, MARKER, 33], max_tokens=600, is_streamed=False)

DIES_AFTER_THE_MARKER = """
import os

from mlx_lm.models import llama
from mlx_lm.models.llama import ModelArgs

steps_left = None


class Model(llama.Model):
    def __call__(self, inputs, cache=None, input_embeddings=None):
        global steps_left
        if steps_left is not None:
            steps_left -= 1
            if steps_left == 0:
                os.abort()
        elif MARKER in inputs.flatten().tolist():
            steps_left = 3
        return super().__call__(inputs, cache=cache, input_embeddings=input_embeddings)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_tiny(tmp_path_factory.mktemp("deadly") / "demo", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "modeling.py"}))
    (folder / "modeling.py").write_text(DIES_AFTER_THE_MARKER.replace("MARKER", str(MARKER)))
    running = ServerProcess(
        str(folder), "--name", "demo", "--store", "off", "--set", "model.trust_remote_code=true",
    )  # fmt: skip
    running.wait_ready()
    yield running
    assert running.stop() == 0, running.log()


def killed(server: ServerProcess) -> int:
    return server.log().count("ended unexpectedly")


@pytest.mark.slow
def test_a_deadly_request_is_refused_after_a_few_worker_deaths(
    server: ServerProcess,
) -> None:
    with ThreadPoolExecutor(len(INNOCENTS)) as threads:
        undisturbed = list(threads.map(partial(answer_to, server.url), INNOCENTS))
        answers = [threads.submit(partial(answer_to, server.url), asked) for asked in INNOCENTS]
        refusal = httpx.post(
            server.url + DEADLY.path, json={**DEADLY.body, "model": "demo"}, timeout=120
        )
        assert [answer.result() for answer in answers] == undisturbed
    assert "died 5 times while it had this request" in refusal.json()["error"]["message"]
    assert refusal.status_code == 500
    assert refusal.headers["x-should-retry"] == "false", "a client that retries kills five more"
    assert killed(server) == 5
    assert "is refused: it was the only request running when the worker died" in server.log()
