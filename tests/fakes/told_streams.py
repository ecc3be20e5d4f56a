"""Requests of every kind to the bundled model, and the sum of their streams, independent of the
events' sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

_CITY = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {
                    "type": "string",
                    "enum": ["Oslo, which lies in the north", "Rome, which does not"],
                }
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
_LIST = {
    "type": "json_schema",
    "json_schema": {
        "name": "words",
        "strict": True,
        "schema": {
            "type": "array",
            "items": {"type": "string", "pattern": "[a-z]{8}"},
            "minItems": 20,
            "maxItems": 20,
        },
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request, and whether it is streamed."""

    name: str
    path: str
    body: dict[str, Any]
    is_streamed: bool = True


def completion(
    name: str,
    prompt: str | list[int],
    *,
    is_streamed: bool = True,
    max_tokens: int = 300,
    **options: Any,
) -> Asked:
    """A text that continues for this many tokens, greedy unless a temperature is given."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        **options,
    }
    return Asked(name=name, path="/v1/completions", body=body, is_streamed=is_streamed)


def _chat(name: str, text: str, **options: Any) -> Asked:
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **options}
    return Asked(name=name, path="/v1/chat/completions", body=body)


ONCE = "Once upon a time"
OF_EVERY_KIND = (
    completion("greedy", ONCE, logprobs=2),
    completion("seeded", ONCE, temperature=1.0, seed=5, presence_penalty=0.5),
    completion("whole", ONCE, temperature=1.0, seed=7, is_streamed=False),
    completion("stop strings", ONCE, temperature=1.0, seed=6, stop=["zzzz", "qqqq"]),
    _chat("thinking", "What is 17 + 25?", max_tokens=300, ignore_eos=True),
    _chat(
        "bounded thought",
        "What is 17 + 25?",
        max_tokens=300,
        ignore_eos=True,
        thinking_token_budget=12,
    ),
    _chat("tool", "What is the weather in Oslo?", tools=[_CITY], tool_choice="required"),
    _chat("grammar", "Count.", response_format=_LIST, max_tokens=400),
)


def answer_to(url: str, asked: Asked, *, on_event: Callable[[], None] = lambda: None) -> str:
    """An answer's content without ids and times. Raises AssertionError for a failed one."""
    body = {**asked.body, "model": "demo", "stream": asked.is_streamed}
    if not asked.is_streamed:
        response = httpx.post(f"{url}{asked.path}", json=body, timeout=300)
        assert response.status_code == 200, response.text
        return _joined(response.json()["choices"])
    choices: list[dict[str, Any]] = []
    with httpx.stream("POST", f"{url}{asked.path}", json=body, timeout=300) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                choices += event["choices"]
                on_event()
    return _joined(choices)


def _joined(choices: list[dict[str, Any]]) -> str:
    texts = {"text": "", "content": "", "reasoning_content": "", "calls": ""}
    logprobs: list[float] = []
    ends: list[str] = []
    for choice in choices:
        delta = choice.get("delta") or choice.get("message") or choice
        for kind in ("text", "content", "reasoning_content"):
            texts[kind] += delta.get(kind) or ""
        for call in delta.get("tool_calls") or []:
            texts["calls"] += (call["function"].get("name") or "") + (
                call["function"].get("arguments") or ""
            )
        logprobs += [
            round(each, 3) for each in (choice.get("logprobs") or {}).get("token_logprobs", [])
        ]
        ends += [choice["finish_reason"]] if choice.get("finish_reason") else []
    return json.dumps([texts, logprobs, ends])
