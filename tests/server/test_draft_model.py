"""A real server whose second model drafts, compared with the same model without drafts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.models.download import demo_folder
from tests.fakes.draft_models import write_larger_demo
from tests.fakes.server_process import ServerProcess, running_server
from tests.fakes.slow import slow
from tests.fakes.speculating_server import COPY, chat, metric, resumed_answer, texts
from tests.fakes.tiny_models import write_tiny

DRAFT = "holdfast-demo-draft"
SUM: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 17 plus 25?"}]}
TURNS = 3  # two of which come before the restart
KINDS = ("model_drafted", "model_accepted")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a store and a model for which a draft model is profitable."""
    folder = tmp_path_factory.mktemp("draft-model")
    model = folder / "model"
    write_larger_demo(model)
    (folder / "models.toml").write_text(
        f'[models.drafting]\npath = "{model}"\nspeculation = "{DRAFT}"\npin = true\n'
        f'[models.plain]\npath = "{model}"\nspeculation = "off"\npin = true\n'
    )
    arguments = ("--models", str(folder / "models.toml"), "--store", str(folder / "store"))
    with running_server(*arguments) as process:
        yield process


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"n": 3, "temperature": 1.0, "seed": 11},
        *slow(
            {"logprobs": True, "top_logprobs": 2},
            {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.2, "seed": 5},
            {"temperature": 0.7, "top_k": 20, "min_p": 0.05, "seed": 6},
        ),
    ],
)
def test_drafts_do_not_change_the_answer(server: ServerProcess, asked: dict[str, Any]) -> None:
    for question in (SUM, COPY):
        asked = {**question, **asked}
        assert texts(chat(server, "drafting", **asked)) == texts(chat(server, "plain", **asked))


def test_drafted_tokens_are_counted(server: ServerProcess) -> None:
    for number in range(4):
        body = {"messages": [{"role": "user", "content": f"What is {number} plus 25?"}]}
        chat(server, "drafting", **body)
    drafted, accepted = (
        metric(server, f"holdfast_worker_{kind}_tokens_total", "drafting") for kind in KINDS
    )
    assert 0 < accepted <= drafted
    health = httpx.get(f"{server.url}/health", timeout=60).json()
    assert {each["id"]: each["draft_model"] for each in health["models"]} == {
        "drafting": DRAFT,
        "plain": None,
    }


def test_a_stream_continues_after_its_worker_is_killed(server: ServerProcess) -> None:
    whole = texts(chat(server, "plain", max_tokens=200))
    assert [resumed_answer(server, "drafting")] == whole


def test_drafting_does_not_change_cached_tokens_even_after_a_restart(
    server: ServerProcess,
) -> None:
    def cached(model: str, messages: list[dict[str, Any]]) -> int:
        # both write the same blocks to disk
        answer = chat(server, model, messages=messages, max_tokens=200, cache_salt=model)
        messages += [
            {"role": "assistant", "content": texts(answer)[0]},
            {"role": "user", "content": "Who lives in Paris?"},
        ]
        tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    messages: dict[str, list[dict[str, Any]]] = {
        model: list(COPY["messages"]) for model in ("drafting", "plain")
    }
    found: list[tuple[int, int]] = []
    for turn in range(TURNS):
        if turn == 2:
            server.restart()
        drafting, plain = (cached(model, each) for model, each in messages.items())
        found.append((drafting, plain))
    assert messages["drafting"] == messages["plain"]
    assert all(drafting == plain for drafting, plain in found)
    assert [drafting > 0 for drafting, _ in found] == [False, *[True] * (TURNS - 1)]


def test_a_draft_model_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other", "llama")
    command = [sys.executable, "-m", "holdfast.cli.main", "serve", str(demo_folder())]
    done = subprocess.run(
        [*command, "--port", "0", "--store", "off", "--speculation", str(other)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert f"{other} cannot draft for holdfast-demo" in done.stderr
