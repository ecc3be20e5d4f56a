"""A real server that verifies drafts, compared with the same model without drafts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fakes.server_process import ServerProcess
from tests.fakes.speculating_server import COPY, TEXT, chat, metric, resumed_answer, texts

KINDS = ("drafted", "accepted")
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
    folder = tmp_path_factory.mktemp("speculation")
    (folder / "models.toml").write_text(
        '[models.drafting]\nid = "holdfast-demo"\n'
        '[models.plain]\nid = "holdfast-demo"\nspeculation = "off"\n'
    )
    process = ServerProcess("--models", str(folder / "models.toml"), "--store", "off")
    process.wait_ready()
    yield process
    process.stop()


def drafted(answer: dict[str, Any]) -> tuple[int, int]:
    """Accepted and rejected drafted tokens."""
    details = answer["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"logprobs": True, "top_logprobs": 2},
        {"n": 3, "temperature": 1.0, "seed": 11},
        {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.2, "seed": 5},
        {"stop": ["Friday"]},
        {
            "messages": [{"role": "user", "content": "Write as JSON: occupation baker"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "person", "strict": True, "schema": SCHEMA},
            },
        },
    ],
    ids=["greedy", "logprobs", "n=3", "sampled", "stop string", "schema"],
)
def test_drafts_do_not_change_the_answer(server: ServerProcess, asked: dict[str, Any]) -> None:
    plain = chat(server, "plain", **asked)
    answer = chat(server, "drafting", **asked)
    assert texts(answer) == texts(plain)
    assert answer["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert drafted(plain) == (0, 0)


def test_accepted_and_rejected_tokens_are_counted(server: ServerProcess) -> None:
    before = [metric(server, f"holdfast_worker_{name}_tokens_total", "drafting") for name in KINDS]
    answer = chat(server, "drafting", max_tokens=200)
    assert texts(answer) == [TEXT]
    accepted, rejected = drafted(answer)
    assert 0 < accepted < answer["usage"]["completion_tokens"]
    after = [metric(server, f"holdfast_worker_{name}_tokens_total", "drafting") for name in KINDS]
    assert after[0] - before[0] == accepted + rejected
    assert after[1] - before[1] == accepted
    assert metric(server, "holdfast_worker_drafted_tokens_total", "plain") == 0


def test_a_prediction_changes_only_the_number_of_drafted_tokens(
    server: ServerProcess,
) -> None:
    asked = {"messages": [{"role": "user", "content": "What can you do?"}], "seed": 1}
    plain = texts(chat(server, "plain", **asked))[0]
    for content in (plain, [{"type": "text", "text": plain}], f"x {plain}", "wrong"):
        predicted = {"type": "content", "content": content}
        answer = chat(server, "drafting", prediction=predicted, **asked)
        assert texts(answer) == [plain]
        accepted, rejected = drafted(answer)
        if content != "wrong":
            assert accepted > rejected
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


def test_the_next_turn_reuses_the_cached_answer(server: ServerProcess) -> None:
    for model in ("drafting", "plain"):
        first = chat(server, model, max_tokens=200)
        question = "Who lives in Paris?"
        messages = [
            *COPY["messages"],
            {"role": "assistant", "content": texts(first)[0]},
            {"role": "user", "content": question},
        ]
        following = chat(server, model, messages=messages)
        usage = following["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > first["usage"]["prompt_tokens"]


def test_a_stream_continues_after_its_worker_is_killed(server: ServerProcess) -> None:
    whole = texts(chat(server, "plain", max_tokens=200))
    assert [resumed_answer(server, "drafting")] == whole


def test_health_shows_whether_drafts_are_possible(server: ServerProcess) -> None:
    chat(server, "drafting", max_tokens=1)
    health = httpx.get(f"{server.url}/health", timeout=60).json()
    found = {each["id"]: each for each in health["models"]}
    assert found["drafting"]["speculation_refused"] is None
    assert metric(server, "holdfast_worker_drafted_tokens_total", "drafting") >= 0
