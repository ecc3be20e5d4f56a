"""Requests to Ollama's API, and how its answers are read."""

from __future__ import annotations

import json
from typing import Any

import httpx

from holdfast.front.prompt.dialects import DialectReport, ThinkingReport
from tests.fakes.http_clients import client_of
from tests.fakes.scripted_gateway import MODEL, ScriptedDirectory, ScriptedGateway

CHAT, GENERATE = "/api/chat", "/api/generate"
HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ABLE = DialectReport(
    family="hermes",
    tools="template",
    proven=True,
    thinking=ThinkingReport(
        start="<think>", end="</think>", opened_by_prompt=False, switch=("enable_thinking",)
    ),
)
UNABLE = DialectReport()


def directory_of(report: DialectReport = ABLE, **models: Any) -> ScriptedDirectory:
    return ScriptedDirectory(dialects={MODEL: report}, **models)


async def asked(
    gateway: ScriptedGateway,
    path: str = CHAT,
    *,
    report: DialectReport = ABLE,
    method: str = "POST",
    **fields: Any,
) -> httpx.Response:
    """The answer to a request with these fields and all required ones."""
    least = {CHAT: {"messages": HELLO}, GENERATE: {"prompt": "hello"}}.get(path, {})
    async with client_of(gateway, directory=directory_of(report)) as client:
        return await client.request(method, path, json={"model": MODEL, **least, **fields})


def lines_of(response: httpx.Response) -> list[Any]:
    """The lines of a stream, each of which must be JSON."""
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.removesuffix("\n").split("\n")]


def said(lines: list[Any], key: str) -> str:
    """The joined values of this key in all lines of a chat."""
    return "".join(line["message"].get(key) or "" for line in lines)
