"""Token counts are right in every dialect, for cold, warm, extended and restarted requests,
streamed and whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.fakes.http_clients import events_of
from tests.fakes.server_process import ServerProcess, running_server

SYSTEM = (
    "You keep the book of a lighthouse: every ship, its name, its flag and the weather of the day. "
    * 6
)
FIRST = [{"role": "user", "content": "hello"}]
NEXT = [{"role": "user", "content": "And who are you?"}]
MOST_TOKENS = 12
LEFT_TO_TEMPLATE = 16  # tokens that the template writes after the last turn


class Figures(NamedTuple):
    """One answer's token counts."""

    prompt: int
    cached: int
    answer: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How to request a conversation, and where its answer and counts are."""

    path: str
    body: Callable[[list[dict[str, str]]], dict[str, Any]]
    whole: Callable[[Any], Figures]
    streamed: Callable[[str], Figures]
    # how the next turn refers to an answer instead of repeating it
    goes_on: Callable[[str], dict[str, Any]] | None = None


def chat_figures(usage: Any, text: str) -> Figures:
    prompt, answer = usage["prompt_tokens"], usage["completion_tokens"]
    assert usage["total_tokens"] == prompt + answer
    return Figures(prompt, usage["prompt_tokens_details"]["cached_tokens"], answer, text)


def streamed_chat(text: str) -> Figures:
    chunks = events_of(text)[:-1]
    deltas = [
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    ]
    return chat_figures(chunks[-1]["usage"], "".join(deltas))


def response_figures(response: Any) -> Figures:
    usage, text = (
        response["usage"],
        "".join(part["text"] for item in response["output"] for part in item.get("content") or ()),
    )
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    return Figures(
        usage["input_tokens"],
        usage["input_tokens_details"]["cached_tokens"],
        usage["output_tokens"],
        text,
    )


def data_of(text: str) -> list[Any]:
    """The events of a stream with named events."""
    return [
        json.loads(line.removeprefix("data: "))
        for line in text.splitlines()
        if line.startswith("data: ")
    ]


def streamed_response(text: str) -> Figures:
    last = data_of(text)[-1]
    assert last["type"] in ("response.completed", "response.incomplete")
    return response_figures(last["response"])


def named_response(text: str) -> dict[str, Any]:
    response = data_of(text)[-1]["response"] if text.startswith("event:") else json.loads(text)
    return {"previous_response_id": response["id"]}


def response_body(turns: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "instructions": SYSTEM,
        "input": turns,
        "max_output_tokens": MOST_TOKENS,
        "temperature": 0,
        "reasoning": {"effort": "none"},
    }


def message_figures(usage: Any, text: str) -> Figures:
    """The last turn's prompt is marked up to its end, except the generation prompt."""
    read, created, rest = (
        usage[name]
        for name in ("cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens")
    )
    assert 0 <= rest <= LEFT_TO_TEMPLATE
    assert created > 0 or rest == 1, "what is not cached is read, and marked to be"
    assert sum(usage["cache_creation"].values()) == created
    return Figures(read + created + rest, read, usage["output_tokens"], text)


def streamed_message(text: str) -> Figures:
    events = data_of(text)
    said = "".join(
        event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"
    )
    (start,) = [event["message"] for event in events if event["type"] == "message_start"]
    (end,) = [event for event in events if event["type"] == "message_delta"]
    figures = message_figures(end["usage"], said)
    assert (
        sum(
            start["usage"][name]
            for name in ("cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens")
        )
        == figures.prompt
    )
    return figures


def marked(turns: list[dict[str, str]]) -> list[dict[str, Any]]:
    """A conversation whose client wants the last turn cached, as Claude Code does."""
    last = {"type": "text", "text": turns[-1]["content"], "cache_control": {"type": "ephemeral"}}
    return [*turns[:-1], {"role": turns[-1]["role"], "content": [last]}]


def ollama_figures(end: Any, text: str) -> Figures:
    return Figures(end["prompt_eval_count"], end["cached_tokens"], end["eval_count"], text)


def streamed_ollama(text: str) -> Figures:
    lines = [json.loads(line) for line in text.splitlines()]
    return ollama_figures(lines[-1], "".join(line["message"]["content"] for line in lines))


DIALECTS = {
    "chat completions": Dialect(
        path="/v1/chat/completions",
        body=lambda turns: {
            "messages": [{"role": "system", "content": SYSTEM}, *turns],
            "max_tokens": MOST_TOKENS,
            "temperature": 0,
            "enable_thinking": False,  # the default of Messages
            "stream_options": {"include_usage": True},
        },
        whole=lambda answer: chat_figures(
            answer["usage"], answer["choices"][0]["message"]["content"]
        ),
        streamed=streamed_chat,
    ),
    "Responses": Dialect(
        path="/v1/responses",
        body=lambda turns: {**response_body(turns), "store": False},
        whole=response_figures,
        streamed=streamed_response,
    ),
    "Responses by id": Dialect(
        path="/v1/responses",
        body=response_body,
        whole=response_figures,
        streamed=streamed_response,
        goes_on=named_response,
    ),
    "Messages": Dialect(
        path="/v1/messages",
        body=lambda turns: {
            "system": SYSTEM,
            "messages": marked(turns),
            "max_tokens": MOST_TOKENS,
            "temperature": 0,
        },
        whole=lambda answer: message_figures(
            answer["usage"], "".join(block.get("text", "") for block in answer["content"])
        ),
        streamed=streamed_message,
    ),
    "Ollama": Dialect(
        path="/api/chat",
        body=lambda turns: {
            "messages": [{"role": "system", "content": SYSTEM}, *turns],
            "options": {"num_predict": MOST_TOKENS, "temperature": 0},
            "think": False,
        },
        whole=lambda answer: ollama_figures(answer, answer["message"]["content"]),
        streamed=streamed_ollama,
    ),
}
REFERENCE = "chat completions"
# by dialect and streaming, then by turn
Asked = dict[tuple[str, bool], dict[str, Figures]]


def ask(
    server: ServerProcess, name: str, body: dict[str, Any], *, streams: bool, test: str = ""
) -> tuple[Figures, str]:
    """One request and its answer; each dialect and way has a separate tenant, which finds only its
    own tokens.
    """
    dialect = DIALECTS[name]
    body = {"model": "demo", "stream": streams, **body}
    if not streams:
        body.pop("stream_options", None)
    headers = {"X-Holdfast-Tenant": f"{name} {streams} {test}".strip()}
    answer = httpx.post(server.url + dialect.path, json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return (dialect.streamed(answer.text) if streams else dialect.whole(answer.json())), answer.text


ONLY_READING = {  # fields that prevent generation, and the answer's finish reason
    "chat completions": ({"max_tokens": 0}, '"finish_reason":"length"'),
    "Responses": ({"max_output_tokens": 0}, '"reason":"max_output_tokens"'),
    "Messages": ({"max_tokens": 0}, '"stop_reason":"max_tokens"'),
}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", ONLY_READING)
def test_a_request_with_max_tokens_0_warms_the_cache(
    server: ServerProcess, name: str, streams: bool
) -> None:
    fields, end = ONLY_READING[name]
    body = DIALECTS[name].body(FIRST)
    read, answer = ask(server, name, {**body, **fields}, streams=streams, test="warming")
    assert (read.cached, read.answer, read.text) == (0, 0, "")
    assert end in answer
    found, _ = ask(server, name, body, streams=streams, test="warming")
    assert (found.prompt, found.cached, found.answer > 0) == (read.prompt, read.prompt - 1, True)


@pytest.mark.parametrize("choices", [1, 2])
def test_completions_with_max_tokens_0_prefill_their_prompt(
    server: ServerProcess, choices: int
) -> None:
    headers = {"X-Holdfast-Tenant": f"completions of no tokens {choices}"}
    usages = []
    for fields in ({"max_tokens": 0, "n": choices}, {"max_tokens": 1}):
        response = httpx.post(
            f"{server.url}/v1/completions",
            json={"prompt": SYSTEM, **fields},
            headers=headers,
            timeout=60,
        )
        assert response.status_code == 200, response.text
        usages.append(response.json()["usage"])
        if fields["max_tokens"] == 0:
            ends = [
                (choice["text"], choice["finish_reason"]) for choice in response.json()["choices"]
            ]
            assert ends == [("", "length")] * choices
    prompt_tokens = usages[0]["prompt_tokens"]
    assert usages[0]["completion_tokens"] == 0
    assert usages[1]["prompt_tokens_details"]["cached_tokens"] == prompt_tokens - 1


def next_turn(dialect: Dialect, figures: Figures, answer: str) -> dict[str, Any]:
    """The request of the conversation's second turn."""
    if dialect.goes_on is not None:
        return {**dialect.body(NEXT), **dialect.goes_on(answer)}
    return dialect.body([*FIRST, {"role": "assistant", "content": figures.text}, *NEXT])


EVERY_WAY = [(name, streams) for name in DIALECTS for streams in (False, True)]


@pytest.fixture(scope="module")
def asked(server: ServerProcess) -> Asked:
    """All answers except those after a restart."""
    found: Asked = {}
    for name, streams in EVERY_WAY:
        first = DIALECTS[name].body(FIRST)
        cold, _ = ask(server, name, first, streams=streams)
        warm, answer = ask(server, name, first, streams=streams)
        further = next_turn(DIALECTS[name], warm, answer)
        extended, _ = ask(server, name, further, streams=streams)
        found[name, streams] = {"cold": cold, "warm": warm, "extended": extended}
    return found


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", DIALECTS)
def test_cached_tokens_equal_those_prefilled_before_in_every_dialect(
    asked: Asked, name: str, streams: bool
) -> None:
    cold, warm, extended = (asked[name, streams][turn] for turn in ("cold", "warm", "extended"))
    assert cold.cached == 0
    assert (warm.prompt, warm.cached) == (cold.prompt, cold.prompt - 1), (
        "the last token is always read"
    )
    assert (warm.text, warm.answer) == (cold.text, cold.answer)
    assert cold.prompt <= extended.cached < extended.prompt - len(NEXT), (
        "the answer was read when it was written"
    )
    assert asked[name, streams] == asked[REFERENCE, False]


@pytest.mark.slow
def test_a_restart_changes_only_the_prefill_figures(model_folder: Path, tmp_path: Path) -> None:
    arguments = (str(model_folder), "--name", "demo", "--store", str(tmp_path / "store"))
    before: dict[tuple[str, bool], Figures] = {}
    further: dict[tuple[str, bool], dict[str, Any]] = {}
    with running_server(*arguments) as server:
        for name, streams in EVERY_WAY:
            dialect, way = DIALECTS[name], (name, streams)
            figures, answer = ask(server, name, dialect.body(FIRST), streams=streams)
            further[way] = next_turn(dialect, figures, answer)
            before[way], _ = ask(server, name, further[way], streams=streams)
    with running_server(*arguments) as server:
        for (name, streams), figures in before.items():
            again, _ = ask(server, name, further[name, streams], streams=streams)
            assert again == figures._replace(cached=figures.prompt - 1)
