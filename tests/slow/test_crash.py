"""Killed at any instant, a server with the same store answers unchanged and has kept its cache."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from tests.fakes.server_process import ServerProcess
from tests.fakes.tiny_models import write_tiny

CRASHES = int(os.environ.get("CRASHES", "100"))
CLIENTS = 4
DURABLE_SECONDS = 1.0  # blocks of prompts from this long before the crash must exist
FOUND_SHARE = 0.9
PLAIN_TOKENS = 256  # of the tiny models' vocabulary; the rest are special

log = logging.getLogger(__name__)


@dataclass
class Known:
    """Prompts, the answers of an undisturbed server, and the times of answers."""

    prompts: list[list[int]]
    answers: list[str] = field(default_factory=list)
    answered_at: dict[int, float] = field(default_factory=dict)


def random_prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Some with a common prefix, some without."""
    common = [rng.randrange(PLAIN_TOKENS) for _ in range(500)]
    return [
        (common if rng.random() < 0.5 else [])
        + [rng.randrange(PLAIN_TOKENS) for _ in range(rng.randint(50, 900))]
        for _ in range(count)
    ]


def ask(url: str, prompt: Sequence[int]) -> tuple[str, int]:
    """The greedy answer and how many tokens of the prompt were cached."""
    body = {"prompt": list(prompt), "max_tokens": 6, "temperature": 0}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    response.raise_for_status()
    answer = response.json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def load(url: str, known: Known, order: Sequence[int], wrong: list[int]) -> None:
    """Send one prompt after another until the server is gone."""
    with suppress(httpx.HTTPError):
        for index in order:
            answer, _ = ask(url, known.prompts[index])
            known.answered_at.setdefault(index, time.monotonic())
            if answer != known.answers[index]:
                wrong.append(index)


def kill_tree(server: ServerProcess) -> None:
    tree = [
        psutil.Process(server.process.pid),
        *psutil.Process(server.process.pid).children(recursive=True),
    ]
    for process in tree:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(tree, timeout=30)
    server.process.wait(30)


@pytest.mark.slow
@pytest.mark.timeout(120 + CRASHES * 30)
def test_kills_at_random_instants_cost_no_answer_and_little_cache(tmp_path: Path) -> None:
    rng = random.Random(7)
    model = str(write_tiny(tmp_path / "model", "llama"))
    known = Known(random_prompts(rng, 24 * max(1, CRASHES // 10)))
    undisturbed = ServerProcess(model)
    undisturbed.wait_ready()
    known.answers = [ask(undisturbed.url, prompt)[0] for prompt in known.prompts]
    undisturbed.stop()

    durable_tokens = found_tokens = 0
    wrong: list[int] = []
    last_answered: dict[int, float] = {}
    crashed_at = 0.0
    for crash in range(CRASHES + 1):
        server = ServerProcess(model, "--store", str(tmp_path / "store"))
        server.wait_ready()
        for index, at in last_answered.items():
            if at < crashed_at - DURABLE_SECONDS:
                answer, cached = ask(server.url, known.prompts[index])
                wrong += [index] if answer != known.answers[index] else []
                durable_tokens += len(known.prompts[index]) - 1
                found_tokens += cached
        if crash == CRASHES:
            server.stop()
            break
        known.answered_at = {}
        orders = [rng.sample(range(len(known.prompts)), 20) for _ in range(CLIENTS)]
        clients = [
            threading.Thread(target=load, args=(server.url, known, order, wrong))
            for order in orders
        ]
        for client in clients:
            client.start()
        threading.Event().wait(rng.uniform(0.0, 3.0))
        crashed_at = time.monotonic()
        kill_tree(server)
        for client in clients:
            client.join()
        last_answered = known.answered_at
    log.info("found %d of %d tokens again after %d crashes", found_tokens, durable_tokens, CRASHES)
    assert not wrong
    assert durable_tokens > 0
    assert found_tokens >= FOUND_SHARE * durable_tokens
