"""A prompt that does not fit the context is refused, or shortened if the request allows it: in
every protocol, over a real server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.http_clients import events_of
from tests.fakes.server_process import ServerProcess, running_server

CONTEXT = 640
SYSTEM = "You answer from these notes: the code of the shed is 4711."
NOTE = "The ferry to the island leaves at noon, and comes back when the sun goes down. "
Turn = dict[str, str]


@pytest.fixture(scope="module")
def small(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    store = str(tmp_path_factory.mktemp("truncation") / "store")
    arguments = (str(model_folder), "--name", "demo", "--store", store, "--context", str(CONTEXT))
    with running_server(*arguments) as server:
        yield server


def turns(number: int) -> list[Turn]:
    """A conversation that ends with a question; each turn takes about 100 tokens."""
    told: list[Turn] = []
    for turn in range(number):
        told.append({"role": "user", "content": f"Note {turn}: {NOTE * 2}"})
        told.append({"role": "assistant", "content": f"I have noted number {turn}. {NOTE}"})
    return [*told, {"role": "user", "content": "What is the code of the shed?"}]


def asked(server: ServerProcess, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"model": "demo", **body}, timeout=120)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How to send a conversation, and where the answer has the number of prefilled tokens."""

    path: str
    body: Callable[[list[Turn]], dict[str, Any]]
    # an answer's prompt tokens, and the details of left-out parts
    figures: Callable[[Any], tuple[int, dict[str, Any]]]
    message: Callable[[Any], str]  # the error's fields


def chat_body(told: list[Turn]) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": SYSTEM}, *told], "max_tokens": 20}


def anthropic_figures(answer: Any) -> tuple[int, dict[str, Any]]:
    usage = answer["usage"]
    read = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return sum(usage[name] for name in read), usage


PROTOCOLS = {
    "chat": Protocol(
        path="/v1/chat/completions",
        body=chat_body,
        figures=lambda answer: (
            answer["usage"]["prompt_tokens"],
            answer["usage"]["prompt_tokens_details"],
        ),
        message=lambda error: str(error["error"]["message"]),
    ),
    "responses": Protocol(
        path="/v1/responses",
        body=lambda told: {
            "instructions": SYSTEM,
            "input": told,
            "max_output_tokens": 20,
            "store": False,
        },
        figures=lambda answer: (
            answer["usage"]["input_tokens"],
            answer["usage"]["input_tokens_details"],
        ),
        message=lambda error: str(error["error"]["message"]),
    ),
    "messages": Protocol(
        path="/v1/messages",
        body=lambda told: {"system": SYSTEM, "messages": told, "max_tokens": 20},
        figures=anthropic_figures,
        message=lambda error: str(error["error"]["message"]),
    ),
    "ollama": Protocol(
        path="/api/chat",
        body=lambda told: {
            "messages": [{"role": "system", "content": SYSTEM}, *told],
            "options": {"num_predict": 20},
            "stream": False,
        },
        figures=lambda answer: (answer["prompt_eval_count"], answer),
        message=lambda error: str(error["error"]),
    ),
}


@pytest.fixture(params=PROTOCOLS, scope="module")
def protocol(request: pytest.FixtureRequest) -> Protocol:
    return PROTOCOLS[request.param]


def test_a_prompt_that_is_too_long_is_refused_by_default(
    small: ServerProcess, protocol: Protocol
) -> None:
    for said in ({}, {"truncation": "disabled"}, {"truncation": None}):
        refused = asked(small, protocol.path, {**protocol.body(turns(12)), **said})
        assert refused.status_code == 400
        message = protocol.message(refused.json())
        assert str(CONTEXT) in message
        if protocol.path != "/v1/messages":  # Claude Code must recognize its message
            assert '"truncation": "middle"' in message


def test_long_prompts_lose_their_middle_on_request(
    small: ServerProcess, protocol: Protocol
) -> None:
    whole = protocol.body(turns(12))
    short = asked(small, protocol.path, {**whole, "truncation": "middle"})
    assert short.status_code == 200, short.text
    tokens, details = protocol.figures(short.json())
    assert 0 < tokens <= CONTEXT - 20
    assert 0 < details["truncated_messages"] < 24
    assert details["truncated_tokens"] > 12 * 80 - tokens
    again = asked(small, protocol.path, {**whole, "truncation": "auto"})
    assert protocol.figures(again.json())[0] == tokens


def test_a_prompt_that_fits_is_unchanged(small: ServerProcess, protocol: Protocol) -> None:
    whole = protocol.body(turns(1))
    plain = asked(small, protocol.path, whole)
    short = asked(small, protocol.path, {**whole, "truncation": "middle"})
    assert short.status_code == 200
    tokens, details = protocol.figures(short.json())
    assert "truncated_tokens" not in details
    assert tokens == protocol.figures(plain.json())[0]


def test_an_unknown_truncation_is_refused_with_the_known_ones(
    small: ServerProcess, protocol: Protocol
) -> None:
    refused = asked(small, protocol.path, {**protocol.body(turns(1)), "truncation": "end"})
    assert refused.status_code == 400
    message = protocol.message(refused.json())
    assert all(word in message for word in ("truncation", "auto", "disabled", "middle"))


def test_the_next_turns_of_a_shortened_conversation_are_cached(small: ServerProcess) -> None:
    """Most prompts of a conversation that grows beyond the context extend the one before."""
    chat = PROTOCOLS["chat"]
    told = turns(8)
    cached = []
    for turn in range(10):
        answer = asked(small, chat.path, {**chat_body(told), "truncation": "middle"}).json()
        tokens, details = chat.figures(answer)
        assert tokens <= CONTEXT - 20
        cached.append(details["cached_tokens"] > tokens // 2)
        text = answer["choices"][0]["message"]["content"]
        told = [*told, {"role": "assistant", "content": text}]
        told.append({"role": "user", "content": f"What is the code of the shed? ({turn})"})
    assert cached[1:].count(True) >= 7


def test_a_stream_reports_left_out_tokens_in_its_usage(small: ServerProcess) -> None:
    body = {**chat_body(turns(12)), "truncation": "middle", "stream": True}
    streamed = asked(
        small, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}
    )
    *_, last, _ = events_of(streamed.text)
    assert last["usage"]["prompt_tokens_details"]["truncated_messages"] > 0


def test_a_call_is_never_separated_from_its_result(small: ServerProcess) -> None:
    told: list[dict[str, Any]] = [{"role": "user", "content": "Read all files."}]
    for place in range(20):
        function = {"name": "read", "arguments": json.dumps({"file": f"f{place}"})}
        call = {"id": f"call_{place}", "type": "function", "function": function}
        told.append({"role": "assistant", "content": None, "tool_calls": [call]})
        told.append({"role": "tool", "tool_call_id": f"call_{place}", "content": NOTE * 2})
    tool = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
    body = {"messages": told, "tools": [tool], "max_tokens": 8, "truncation": "middle"}
    answer = asked(small, "/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"]
    assert details["truncated_messages"] % 2 == 0
    assert details["truncated_messages"] > 0


def test_tools_that_do_not_fit_are_given_as_the_reason(small: ServerProcess) -> None:
    tools = [
        {"type": "function", "function": {"name": f"f{place}", "description": NOTE * 2}}
        for place in range(30)
    ]
    body = {**chat_body(turns(2)), "tools": tools, "truncation": "middle"}
    refused = asked(small, "/v1/chat/completions", body)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert "cannot shorten it enough: tools" in refused.json()["error"]["message"]


@pytest.mark.parametrize("form", ["text", "tokens"])
def test_the_middle_of_a_plain_text_is_left_out(small: ServerProcess, form: str) -> None:
    text = f"It begins here. {NOTE * 80} It ends here."
    prompt: Any = text
    if form == "tokens":
        prompt = asked(small, "/tokenize", {"prompt": text}).json()["tokens"]
    body = {"prompt": prompt, "max_tokens": 4, "echo": True}
    assert asked(small, "/v1/completions", body).status_code == 400
    answer = asked(small, "/v1/completions", {**body, "truncation": "middle"})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] <= CONTEXT - 4
    assert usage["prompt_tokens_details"]["truncated_tokens"] > 80
    shown = answer.json()["choices"][0]["text"]
    assert "It begins here." in shown
    assert "It ends here." in shown
    assert "tokens left out here" in shown


def test_a_long_last_message_keeps_its_beginning_and_end(small: ServerProcess) -> None:
    told = [{"role": "user", "content": f"Read this: {NOTE * 90} What is the code of the shed?"}]
    answer = asked(small, "/v1/chat/completions", {**chat_body(told), "truncation": "middle"})
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"]
    assert details["truncated_messages"] == 0
    assert details["truncated_tokens"] > 90


def test_a_response_shows_its_truncation(small: ServerProcess) -> None:
    responses = PROTOCOLS["responses"]
    body = responses.body(turns(1))
    for value in ("auto", "middle", "disabled"):
        answer = asked(small, responses.path, {**body, "truncation": value})
        assert answer.json()["truncation"] == value
    assert asked(small, responses.path, body).json()["truncation"] == "disabled"


def test_ollamas_own_field_is_supported(small: ServerProcess) -> None:
    ollama = PROTOCOLS["ollama"]
    body = ollama.body(turns(12))
    assert asked(small, ollama.path, {**body, "truncate": False}).status_code == 400
    answer = asked(small, ollama.path, {**body, "truncate": True})
    assert answer.json()["truncated_messages"] > 0
    both = {**body, "truncate": True, "truncation": "disabled"}
    assert asked(small, ollama.path, both).status_code == 400


def test_breakpoints_and_found_tools_survive_truncation(small: ServerProcess) -> None:
    """Anthropic's cache breakpoints move in the shortened conversation."""
    told: list[dict[str, Any]] = [dict(turn) for turn in turns(12)]
    for place in (3, len(told) - 3, len(told) - 1):
        part = {"type": "text", "text": told[place]["content"]}
        told[place]["content"] = [{**part, "cache_control": {"type": "ephemeral"}}]
    body = {"system": SYSTEM, "messages": told, "max_tokens": 8, "truncation": "middle"}
    first = asked(small, "/v1/messages", {**body, "cache_salt": "breakpoints"})
    assert first.status_code == 200, first.text
    usage = first.json()["usage"]
    assert usage["truncated_messages"] > 0
    assert usage["cache_creation_input_tokens"] > CONTEXT // 4
    second = asked(small, "/v1/messages", {**body, "cache_salt": "breakpoints"}).json()["usage"]
    assert second["cache_read_input_tokens"] > CONTEXT // 4
