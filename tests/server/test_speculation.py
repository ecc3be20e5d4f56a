"""A real server that verifies drafts, of earlier text and of a draft model, compared with the same
model without drafts.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from holdfast.models.download import demo_folder
from tests.fakes.draft_models import write_larger_demo
from tests.fakes.features import TEXT
from tests.fakes.server_process import ServerProcess, running_server
from tests.fakes.slow import slow
from tests.fakes.tiny_models import write_tiny

COPY: dict[str, Any] = {"messages": [{"role": "user", "content": f"Repeat exactly: {TEXT}"}]}
DRAFT = "holdfast-demo-draft"
DRAFTING = ("drafting", "larger")
KINDS = ("drafted", "accepted")
TURNS = 3  # two of which come before the restart
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "occupation": {"type": "string", "maxLength": 20},
        "place_of_birth": {"enum": ["Paris", "Rome"]},
    },
    "required": ["occupation", "place_of_birth"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The bundled model with drafts and without, and a larger model with the same answers, for
    which a draft model is profitable.
    """
    folder = tmp_path_factory.mktemp("speculation")
    larger = write_larger_demo(folder / "larger")
    (folder / "models.toml").write_text(
        '[models.drafting]\nid = "holdfast-demo"\npin = true\n'
        '[models.plain]\nid = "holdfast-demo"\nspeculation = "off"\npin = true\n'
        f'[models.larger]\npath = "{larger}"\nspeculation = "{DRAFT}"\npin = true\n'
    )
    arguments = ("--models", str(folder / "models.toml"), "--store", str(folder / "store"))
    with running_server(*arguments) as process:
        yield process


def chat(server: ServerProcess, model: str, **body: Any) -> dict[str, Any]:
    asked = {"model": model, "temperature": 0, "max_tokens": 120, **COPY, **body}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=120)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in answer["choices"]]


def resumed_answer(server: ServerProcess, model: str) -> str:
    """A streamed answer whose worker is killed after its beginning."""
    health = httpx.get(f"{server.url}/health", timeout=60).json()
    pid = next(each["pid"] for each in health["models"] if each["id"] == model)
    body = {"model": model, "temperature": 0, "max_tokens": 200, "stream": True, **COPY}
    text = ""
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=body, timeout=120
    ) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                text += "".join(choice["delta"].get("content") or "" for choice in choices)
            if len(text) > 20 and pid is not None:
                psutil.Process(pid).send_signal(signal.SIGKILL)
                pid = None
    assert pid is None
    return text


def drafted(answer: dict[str, Any]) -> tuple[int, int]:
    """Accepted and rejected drafted tokens."""
    details = answer["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def chat_with_drafts(server: ServerProcess, model: str, **body: Any) -> dict[str, Any]:
    """An answer with accepted drafts. Whether a draft is verified depends on measured times, so on a
    busy machine the first answers may have none.
    """
    for _ in range(20):
        answer = chat(server, model, **body)
        if drafted(answer)[0]:
            return answer
    pytest.fail(f"{model} verified no right drafts")


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"logprobs": True, "top_logprobs": 2},
        {"n": 3, "temperature": 1.0, "seed": 11},
        {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.2, "seed": 5},
        {"temperature": 0.7, "top_k": 20, "min_p": 0.05, "seed": 6},
        {"messages": [{"role": "user", "content": "What is 17 plus 25?"}]},
        {"stop": ["Friday"]},
        {
            "messages": [{"role": "user", "content": "Write as JSON: occupation baker"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "person", "strict": True, "schema": SCHEMA},
            },
        },
    ],
    ids=["greedy", "logprobs", "n=3", "sampled", "top-k", "sum", "stop string", "schema"],
)
def test_drafts_do_not_change_the_answer(server: ServerProcess, asked: dict[str, Any]) -> None:
    plain = chat(server, "plain", **asked)
    assert drafted(plain) == (0, 0)
    for model in DRAFTING:
        answer = chat(server, model, **asked)
        assert texts(answer) == texts(plain)
        assert answer["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]


def test_accepted_and_rejected_tokens_are_counted(server: ServerProcess) -> None:
    def counted() -> list[float]:
        return [
            server.metric(f"holdfast_worker_{name}_tokens_total", model="drafting")
            for name in KINDS
        ]

    chat_with_drafts(server, "drafting", max_tokens=200)
    before = counted()
    answer = chat(server, "drafting", max_tokens=200)
    assert texts(answer) == [TEXT]
    accepted, rejected = drafted(answer)
    assert accepted < answer["usage"]["completion_tokens"]
    after = counted()
    assert after[0] - before[0] == accepted + rejected
    assert after[1] - before[1] == accepted
    assert server.metric("holdfast_worker_drafted_tokens_total", model="plain") == 0


def test_a_prediction_changes_only_the_number_of_drafted_tokens(
    server: ServerProcess,
) -> None:
    asked = {"messages": [{"role": "user", "content": "What can you do?"}], "seed": 1}
    plain = texts(chat(server, "plain", **asked))[0]
    for content in (plain, [{"type": "text", "text": plain}], f"x {plain}", "wrong"):
        predicted = {"type": "content", "content": content}
        ask = chat if content == "wrong" else chat_with_drafts
        answer = ask(server, "drafting", prediction=predicted, **asked)
        assert texts(answer) == [plain]
        accepted, rejected = drafted(answer)
        assert content == "wrong" or accepted > rejected
    unused = chat(server, "plain", prediction=predicted, **asked)
    assert drafted(unused) == (0, 0)


def test_a_prediction_must_be_text(server: ServerProcess) -> None:
    for predicted, field in (
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content.0"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "guess", "content": "x"}, "prediction.type"),
    ):
        body = {"model": "drafting", **COPY, "prediction": predicted}
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == field


def test_tokens_of_the_draft_model_are_counted(server: ServerProcess) -> None:
    # Where its drafts do not seem profitable, it only drafts in trials, every few hundred tokens.
    for number in range(200):
        body = {"messages": [{"role": "user", "content": f"What is {number} plus 25?"}]}
        chat(server, "larger", **body)
        drafted, accepted = (
            server.metric(f"holdfast_worker_model_{kind}_tokens_total", model="larger")
            for kind in KINDS
        )
        if accepted:
            break
    assert 0 < accepted <= drafted


def test_health_shows_whether_drafts_are_possible(server: ServerProcess) -> None:
    health = httpx.get(f"{server.url}/health", timeout=60).json()
    found = {each["id"]: each for each in health["models"]}
    assert found["drafting"]["speculation_refused"] is None
    assert {model: each["draft_model"] for model, each in found.items()} == {
        "drafting": None,
        "plain": None,
        "larger": DRAFT,
    }


@pytest.mark.parametrize("model", ["larger", *slow("drafting")])
def test_a_stream_continues_after_its_worker_is_killed(server: ServerProcess, model: str) -> None:
    assert [resumed_answer(server, model)] == texts(chat(server, "plain", max_tokens=200))


@pytest.mark.parametrize("restarts", [False, *slow(True)])
def test_drafting_does_not_change_cached_tokens_even_after_a_restart(
    server: ServerProcess, restarts: bool
) -> None:
    salt = f"restarts: {restarts}"

    def usage(model: str, messages: list[dict[str, Any]]) -> tuple[int, int]:
        # all write the same blocks to disk
        answer = chat(
            server, model, messages=messages, max_tokens=200, cache_salt=f"{salt}, {model}"
        )
        messages += [
            {"role": "assistant", "content": texts(answer)[0]},
            {"role": "user", "content": "Who lives in Paris?"},
        ]
        found = answer["usage"]
        return found["prompt_tokens"], found["prompt_tokens_details"]["cached_tokens"]

    messages: dict[str, list[dict[str, Any]]] = {
        model: list(COPY["messages"]) for model in ("plain", *DRAFTING)
    }
    found: list[tuple[int, int]] = []
    for turn in range(TURNS):
        if restarts and turn == TURNS - 1:
            server.restart()
        plain, *drafting = (usage(model, each) for model, each in messages.items())
        assert drafting == [plain] * len(DRAFTING)
        found.append(plain)
    assert messages["drafting"] == messages["larger"] == messages["plain"]
    (first_prompt, first), *later = found
    assert first == 0
    assert all(cached > first_prompt for _, cached in later)  # the answer is cached, too


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
