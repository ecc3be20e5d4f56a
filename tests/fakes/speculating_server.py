"""Requests to a real server that drafts, and the figures of its answers and metrics."""

from __future__ import annotations

import json
import signal
from typing import Any

import httpx
import psutil

from tests.fakes.server_process import ServerProcess

TEXT = (
    "Ada lives in Paris. The red lamp is in the kitchen. The meeting is on Friday. Tom is 41 years "
    "old. The port of the mirror is 8080. Mia works as a baker. The code of the shed is 4711."
)
COPY: dict[str, Any] = {"messages": [{"role": "user", "content": f"Repeat exactly: {TEXT}"}]}


def chat(server: ServerProcess, model: str, **body: Any) -> dict[str, Any]:
    asked = {"model": model, "temperature": 0, "max_tokens": 120, **COPY, **body}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=120)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in answer["choices"]]


def metric(server: ServerProcess, name: str, model: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    (line,) = [
        each for each in lines if each.startswith(f"{name}{{") and f'model="{model}"' in each
    ]
    return float(line.split()[-1])


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
