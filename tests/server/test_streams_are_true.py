"""Random requests to a real server: stream, whole answer and library agree and are correct."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast import LLM
from tests.fakes.server_process import ServerProcess

CASES = int(os.environ.get("FUZZ_CASES", "8"))
COMPLETIONS = "/v1/completions"
WORDS = (
    "the",
    "box",
    "holds",
    "7",
    "pens.",
    "note:",
    "é",
    "日本語",
    "🙂👩‍👧",
    "<|im_start|>",
    "user\n",
    "\n",
    "Ada",
    "}",
    '"a"',
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The common result of all ways to ask."""

    texts: tuple[str, ...]
    reasons: tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> Iterator[LLM]:
    with LLM(model_folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.mark.slow
@pytest.mark.parametrize("number", range(CASES))
def test_stream_whole_and_library_agree(client: httpx.Client, llm: LLM, number: int) -> None:
    dice = random.Random(number)
    body = _request(dice)
    plain = _whole(client, body)
    assert _streamed(client, body) == plain
    assert _from_library(llm, body) == plain
    _check_reasons(body, plain)

    stops = _stops(dice, plain)
    stopped = _whole(client, {**body, "stop": list(stops)})
    assert _streamed(client, {**body, "stop": list(stops)}) == stopped
    assert _from_library(llm, {**body, "stop": list(stops)}) == stopped
    expected = [
        _cut(text, reason, stops) for text, reason in zip(plain.texts, plain.reasons, strict=True)
    ]
    assert list(zip(stopped.texts, stopped.reasons, strict=True)) == expected
    assert stopped.completion_tokens <= plain.completion_tokens


def _request(dice: random.Random) -> dict[str, Any]:
    text = " ".join(dice.choice(WORDS) for _ in range(dice.randrange(1, 40)))
    body: dict[str, Any] = {
        "prompt": text
        if dice.random() < 0.7
        else [dice.randrange(1500) for _ in range(dice.randrange(1, 100))],
        "max_tokens": dice.randrange(1, 40),
        "temperature": dice.choice([0, 0.6, 1, 2]),
        "seed": dice.randrange(2**40),
        "n": dice.choice([1, 1, 2, 3]),
        "ignore_eos": dice.random() < 0.6,
    }
    more = {
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "presence_penalty": 1,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
    }
    body |= {name: value for name, value in more.items() if dice.random() < 0.2}
    if dice.random() < 0.3:  # letters in pieces: single-byte tokens are the likeliest
        body["logit_bias"] = {str(token): 100 for token in range(100, 190)}
    return body


def _stops(dice: random.Random, plain: Answer) -> tuple[str, ...]:
    stops = ["no such thing at all"]
    for _ in range(dice.randrange(1, 4)):
        text = dice.choice(plain.texts)
        if text:
            start = dice.randrange(len(text))
            stops.append(text[start : start + dice.randrange(1, 8)])
    return tuple(stops)


def _cut(text: str, reason: str, stops: tuple[str, ...]) -> tuple[str, str]:
    """The part of a text before the first complete stop string."""
    found = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    return (text[: min(found)[1]], "stop") if found else (text, reason)


def _check_reasons(body: dict[str, Any], answer: Answer) -> None:
    most = body["max_tokens"] * body["n"]
    if body["ignore_eos"] or set(answer.reasons) == {"length"}:
        assert (set(answer.reasons), answer.completion_tokens) == ({"length"}, most)
    else:
        assert answer.completion_tokens <= most


def _whole(client: httpx.Client, body: dict[str, Any]) -> Answer:
    response = client.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    return Answer(
        texts=tuple(choice["text"] for choice in answer["choices"]),
        reasons=tuple(choice["finish_reason"] for choice in answer["choices"]),
        prompt_tokens=answer["usage"]["prompt_tokens"],
        completion_tokens=answer["usage"]["completion_tokens"],
    )


def _streamed(client: httpx.Client, body: dict[str, Any]) -> Answer:
    texts, reasons, usage = [""] * body["n"], [""] * body["n"], {}
    with client.stream(
        "POST",
        COMPLETIONS,
        json={**body, "stream": True, "stream_options": {"include_usage": True}},
    ) as response:
        # others may be comments, on a slow machine
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    for line in lines:
        event = json.loads(line.removeprefix("data: "))
        usage = event["usage"]
        for choice in event["choices"]:
            assert reasons[choice["index"]] == ""
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"] or ""
    assert usage is not None
    return Answer(
        texts=tuple(texts),
        reasons=tuple(reasons),
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
    )


def _from_library(llm: LLM, body: dict[str, Any]) -> Answer:
    options = {
        name: value
        for name, value in body.items()
        if name not in {"prompt", "n", "seed", "logit_bias"}
    }
    options["logit_bias"] = {int(token): bias for token, bias in body.get("logit_bias", {}).items()}
    answers = [
        llm.generate(body["prompt"], seed=body["seed"] + index, **options)
        for index in range(body["n"])
    ]
    return Answer(
        texts=tuple(answer.text for answer in answers),
        reasons=tuple(answer.finish_reason for answer in answers),
        prompt_tokens=answers[0].prompt_tokens,
        completion_tokens=sum(answer.completion_tokens for answer in answers),
    )
