"""The worker of a real server dies in the middle of answers: nobody who reads one notices but by the clock."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.fakes.server_process import ServerProcess

LONG = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True}
CITY = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo, which lies in the north", "Rome, which does not"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
LIST = {
    "type": "json_schema",
    "json_schema": {
        "name": "numbers",
        "strict": True,
        "schema": {"type": "array", "items": {"type": "string", "pattern": "[a-z]{8}"}, "minItems": 20, "maxItems": 20},
    },
}


def said(text: str) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], "temperature": 0}


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", {**LONG, "temperature": 0, "logprobs": 2}),
    "seeded": ("/v1/completions", {**LONG, "temperature": 1.0, "seed": 5, "presence_penalty": 0.5}),
    "stopped within a word": ("/v1/completions", {**LONG, "temperature": 1.0, "seed": 6, "stop": ["zzzz", "qqqq"]}),
    "thinking": ("/v1/chat/completions", {**said("What is 17 + 25?"), "max_tokens": 300, "ignore_eos": True}),
    "tool": ("/v1/chat/completions", {**said("What is the weather in Oslo?"), "tools": [CITY], "tool_choice": "required"}),
    "grammar": ("/v1/chat/completions", {**said("Count."), "response_format": LIST, "max_tokens": 400}),
}


@pytest.fixture(scope="module")
def bundled() -> Iterator[ServerProcess]:
    server = ServerProcess("--name", "demo", "--set", "residency.hang_seconds=1.5", "--set", "residency.heartbeat_seconds=0.25")
    server.wait_ready()
    yield server
    assert server.stop() == 0, server.log()


def answer(server: ServerProcess, name: str, *, on_event: Callable[[], None] = lambda: None) -> str:
    """What the stream of a request comes to, without ids and times."""
    path, body = ASKED[name]
    parts: list[Any] = []
    with httpx.stream("POST", f"{server.url}{path}", json={**body, "stream": True}, timeout=120) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                parts += [_told(choice) for choice in event["choices"]]
                on_event()
    return json.dumps(_joined(parts))


def whole(server: ServerProcess, name: str) -> str:
    path, body = ASKED[name]
    response = httpx.post(f"{server.url}{path}", json=body, timeout=120)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    for call in choice.get("message", {}).get("tool_calls") or []:
        call.pop("id")
    return json.dumps(choice)


def _told(choice: dict[str, Any]) -> dict[str, Any]:
    for call in choice.get("delta", {}).get("tool_calls") or []:
        call.pop("id", None)
    return choice


def _joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """All pieces of text of an answer, each kind joined: how they were cut into events is a matter of time."""
    joined: dict[str, Any] = {"text": "", "content": "", "reasoning_content": "", "calls": "", "logprobs": [], "ends": []}
    for choice in choices:
        delta = choice.get("delta", choice)
        for kind in ("text", "content", "reasoning_content"):
            joined[kind] += delta.get(kind) or ""
        for call in delta.get("tool_calls") or []:
            joined["calls"] += call["function"].get("name") or ""
            joined["calls"] += call["function"].get("arguments") or ""
        if choice.get("logprobs"):
            joined["logprobs"] += choice["logprobs"]["token_logprobs"]
        joined["ends"] += [choice["finish_reason"]] if choice.get("finish_reason") else []
    joined["logprobs"] = [round(each, 3) for each in joined["logprobs"]]
    return joined


def resumed(server: ServerProcess) -> float:
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    (line,) = [line for line in metrics.splitlines() if line.startswith("holdfast_resumed_streams_total")]
    return float(line.split()[-1])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
def test_answers_go_on_with_the_next_worker_as_if_nothing_had_happened(bundled: ServerProcess, number: signal.Signals) -> None:
    names = list(ASKED)
    with ThreadPoolExecutor(len(names) + 1) as threads:
        expected = list(threads.map(lambda name: answer(bundled, name), names))
        expected_whole = whole(bundled, "seeded")
        before, worker = resumed(bundled), psutil.Process(bundled.model()["pid"])
        events, is_due = [0], threading.Event()

        def count() -> None:
            events[0] += 1
            if events[0] >= 40:
                is_due.set()

        answers = [threads.submit(answer, bundled, name, on_event=count) for name in names]
        one = threads.submit(whole, bundled, "seeded")
        assert is_due.wait(60)
        worker.send_signal(number)
        assert [each.result() for each in answers] == expected
        assert one.result() == expected_whole
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
    assert resumed(bundled) - before >= 3
