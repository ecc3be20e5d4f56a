"""Extreme requests to a real server: each is answered or refused by name, and the server continues."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.fakes.server_process import ServerProcess, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def post(server: ServerProcess, path: str, body: dict[str, Any] | bytes) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps({"max_tokens": 4, **body}).encode()
    return httpx.post(f"{server.url}{path}", content=content, timeout=60)


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def context_tokens(server: ServerProcess) -> int:
    (model,) = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    return int(model["max_model_len"])


SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "an empty message": (CHAT, user("")),
    "no parts": (CHAT, user([])),
    "a zero byte": (CHAT, user("\0")),
    "only special tokens as text": (CHAT, user("<|im_start|><|im_end|><|im_start|>")),
    "only special tokens as ids": (COMPLETIONS, {"prompt": [0, 1, 2, 2, 1, 0]}),
    "the same special token again and again": (COMPLETIONS, {"prompt": [2] * 500}),
    "one token": (COMPLETIONS, {"prompt": [7]}),
    "blanks": (COMPLETIONS, {"prompt": " \t\n\r" * 200}),
    "controls and marks of direction": (COMPLETIONS, {"prompt": "\x1b[31m\u202e\ufeff\u200b" * 50}),
    "a letter with a hundred accents": (COMPLETIONS, {"prompt": "e" + "\u0301" * 100}),
    "families of emoji": (COMPLETIONS, {"prompt": "👩‍👩‍👧‍👦" * 10}),
    "an unfinished character as ids": (COMPLETIONS, {"prompt": [100, 200, 150]}),
    "a word of a thousand letters": (COMPLETIONS, {"prompt": "a" * 1000}),
    "all choices at once": (COMPLETIONS, {"prompt": "a", "n": 16, "max_tokens": 2}),
    "a ban on all that is likely": (
        COMPLETIONS,
        {"prompt": "a", "logit_bias": {str(each): -100 for each in range(1000)}},
    ),
    "the strongest penalties": (
        COMPLETIONS,
        {"prompt": [5] * 200, "repetition_penalty": 100, "frequency_penalty": -2},
    ),
    "the narrowest draw": (
        COMPLETIONS,
        {"prompt": "a", "temperature": 2, "top_p": 1e-9, "min_p": 1, "top_k": 1},
    ),
    "the hottest draw": (COMPLETIONS, {"prompt": "a", "temperature": 2, "min_p": 0}),
    "the coldest draw": (COMPLETIONS, {"prompt": "a", "temperature": 1e-300}),
    "more tokens than fit": (
        COMPLETIONS,
        {"prompt": "a", "max_tokens": 2**31 - 1, "stop": ["a", "e", "i", "o", " ", "\n"]},
    ),
}

REFUSED: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "an id beyond the vocabulary": (COMPLETIONS, {"prompt": [10**6]}, "prompt"),
    "an id beyond all numbers": (COMPLETIONS, {"prompt": [10**30]}, "prompt.0"),
    "a hundred thousand tokens": (COMPLETIONS, {"prompt": [5] * 100_000}, "prompt"),
    "a hundred thousand words": (COMPLETIONS, {"prompt": "word " * 100_000}, "prompt"),
    "twenty thousand messages": (
        CHAT,
        {"messages": user("a")["messages"] * 20_000},
        "messages",
    ),
    "ten million letters": (CHAT, user("a" * 10_000_000), "messages"),
    "one bad prompt among good ones": (COMPLETIONS, {"prompt": [[5], [10**6], [6]]}, "prompt.1"),
    "a huge n": (COMPLETIONS, {"prompt": "a", "n": 10**9}, "n"),
    "a temperature below zero": (CHAT, {**user("a"), "temperature": -0.1}, "temperature"),
    "a bias on no token": (CHAT, {**user("a"), "logit_bias": {"1000000": 1}}, "logit_bias"),
    "a tool for a completion": (
        COMPLETIONS,
        {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools",
    ),
    "a form that the worker cannot make": (
        CHAT,
        {**user("a"), "guided_regex": "(a|b)*" * 2500},
        "guided_regex",
    ),
    "an unknown model": (CHAT, {**user("a"), "model": "gpt-4o"}, "model"),
}

BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "half an object": b'{"messages": [',
    "a list": b"[]",
    "bytes that are no UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe\xc3"}]}',
    "not a number": b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    "infinity": b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
    "a hundred thousand brackets": b'{"messages": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("name", SERVED)
def test_extreme_requests_are_answered(server: ServerProcess, name: str) -> None:
    path, body = SERVED[name]
    response = post(server, path, body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert {choice["finish_reason"] for choice in answer["choices"]} <= {"stop", "length"}
    assert answer["usage"]["completion_tokens"] >= 1


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_requests_are_refused_by_name(server: ServerProcess, name: str) -> None:
    path, body, field = REFUSED[name]
    response = post(server, path, body)
    error = response.json()["error"]
    status = {"model": 404, "max_tokens": 422}.get(field, 400)
    assert (response.status_code, error["param"]) == (status, field)
    assert len(error["message"]) < 300


@pytest.mark.parametrize("name", BROKEN)
def test_malformed_requests_are_refused(server: ServerProcess, name: str) -> None:
    response = post(server, CHAT, BROKEN[name])
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_half_of_a_surrogate_pair_is_answered(server: ServerProcess) -> None:
    body = b'{"messages": [{"role": "user", "content": "a\\ud83d", "\\ude00": 1}], "max_tokens": 1}'
    whole = body.replace(b"\\ud83d", b"\\ufffd")
    halved, replaced = (
        post(server, CHAT, each).json()["usage"]["prompt_tokens"] for each in (body, whole)
    )
    assert halved == replaced


@pytest.mark.slow
def test_a_prompt_may_fill_the_context_but_not_exceed_it(server: ServerProcess) -> None:
    most = context_tokens(server) - 1
    with httpx.stream(
        "POST",
        f"{server.url}{COMPLETIONS}",
        json={"prompt": [5] * most, "stream": True},
        timeout=60,
    ) as response:
        assert response.status_code == 200  # and the client leaves, because the prefill takes long
    refused = post(server, COMPLETIONS, {"prompt": [5] * (most + 1)})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    until(lambda: server.model()["running"] == 0, "the work that nobody waits for has stopped")


def test_a_stream_of_broken_characters_is_valid_text(server: ServerProcess) -> None:
    # Single-byte tokens are by far the likeliest, so most output is not UTF-8.
    bias = {str(token): 100 for token in range(100, 190)}
    body = {
        "prompt": "a",
        "max_tokens": 30,
        "temperature": 1,
        "seed": 3,
        "logit_bias": bias,
        "ignore_eos": True,
    }
    whole = post(server, COMPLETIONS, body).json()["choices"][0]["text"]
    pieces = []
    with httpx.stream(
        "POST", f"{server.url}{COMPLETIONS}", json={**body, "stream": True}, timeout=60
    ) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                pieces += [
                    choice["text"] for choice in json.loads(line.removeprefix("data: "))["choices"]
                ]
    assert "".join(pieces) == whole
    assert REPLACEMENT in whole


def test_the_server_still_answers_as_before(server: ServerProcess) -> None:
    assert post(server, CHAT, user("Hello")).status_code == 200
    assert server.model()["state"] == "ready"
    assert "Traceback" not in server.log()
