"""What the front process does for an agent's request besides tokenizing: 50 KB with 13 tools over Anthropic's Messages.

The model has read the prompt before but for its last words, and draws one token. The front's processor time comes from the system
(HTTP, checking, rendering, history, the way to the worker and back, the stream); tokenizing is measured apart, on the same text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from holdfast.intake.tokenize import load_tokenizer
from holdfast_bench.lexicon import text_of
from holdfast_bench.results import Sample
from holdfast_bench.scenario import Case, Scale, Scenario, Trial
from holdfast_bench.wire import Call, split_answer

_TOOLS, _TURNS = 13, 3
_MARK = {"cache_control": {"type": "ephemeral"}}
_PROPERTIES: Mapping[str, Any] = {
    "file_path": {"type": "string"},
    "offset": {"type": "integer", "minimum": 0, "maximum": 9007199254740991},
    "limit": {"type": "integer", "exclusiveMinimum": 0},
    "mode": {"type": "string", "enum": ["content", "files", "count"]},
    "edits": {
        "type": "array",
        "items": {"type": "object", "properties": {"old": {"type": "string"}, "new": {"type": "string"}}, "required": ["old"]},
    },
    "options": {"type": "object", "properties": {"deep": {"type": "boolean"}}, "additionalProperties": False},
}


def _cases(scale: Scale) -> Sequence[Case]:
    requests = {"quick": 10, "normal": 40, "full": 100}[scale]
    return (Case(name="50 KB, 13 tools", settings={"requests": requests, "kilobytes": 50}, rounds=3),)


def _text(characters: int, seed: str) -> str:
    return text_of(characters // 4, seed=seed)[:characters]


def _body(model: str, *, kilobytes: int, question: str) -> dict[str, Any]:
    """A request as Claude Code shapes them: a fifth system, half tools, the rest a conversation that has called some."""
    share = kilobytes * 10  # characters of a hundredth
    described = share * 36 // _TOOLS
    properties = {
        name: {**kind, "description": _text(described // 12, f"{name}/description")} for name, kind in _PROPERTIES.items()
    }
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": properties,
        "required": ["file_path"],
        "additionalProperties": False,
    }
    tools = [
        {"name": f"Tool{number}", "description": _text(described // 2, f"tool {number}"), "input_schema": schema}
        for number in range(_TOOLS)
    ]
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": _text(share * 4, "task")}]}]
    for turn in range(_TURNS):
        call = {
            "type": "tool_use",
            "id": f"toolu_{turn}",
            "name": f"Tool{turn}",
            "input": {"file_path": f"/home/{turn}", "limit": 9},
        }
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": _text(share * 5, f"result {turn}")}
        messages += [
            {"role": "assistant", "content": [{"type": "text", "text": _text(200, f"said {turn}")}, call]},
            {"role": "user", "content": [result]},
        ]
    messages[-1]["content"].append({"type": "text", "text": question, **_MARK})
    return {
        "model": model,
        "messages": messages,
        "system": [
            {"type": "text", "text": "You are an agent."},
            {"type": "text", "text": _text(share * 22, "system"), **_MARK},
        ],
        "tools": tools,
        "metadata": {"user_id": "{}"},
        "max_tokens": 1,
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "stream": True,
    }


def _tokenizing_seconds(folder: Path, body: Mapping[str, Any], *, tokens: int, repeats: int) -> float:
    """Processor time of cutting a text of as many tokens as the server has counted: the request's own texts, and their like."""
    tokenizer = load_tokenizer(folder)
    text = json.dumps({name: body[name] for name in ("system", "tools", "messages")}, indent=1)
    found = tokenizer.backend.encode(text, add_special_tokens=False).offsets
    if len(found) < tokens:
        text += _text((tokens - len(found)) * 4, "rest")
        found = tokenizer.backend.encode(text, add_special_tokens=False).offsets
    text = text[: found[min(tokens, len(found)) - 1][1]]
    began = time.process_time()
    for _ in range(repeats):
        tokenizer.backend.encode_batch([text], add_special_tokens=False)  # with places, as where there are cache breakpoints
    return (time.process_time() - began) / repeats


async def _measure(trial: Trial) -> Sample:
    server, settings = await trial.stage.server(trial.contender), trial.settings
    if server.process is None:
        return Sample(errors=["only a server that is started from here can be measured"])
    front = psutil.Process(server.process.pid)
    used, tokens = 0.0, 0
    for number in range(settings["requests"] + 1):
        body = _body(server.target.model, kilobytes=settings["kilobytes"], question=f"{trial.seed}: {number}")
        call = Call(url=f"{server.target.base_url}/v1/messages", body=body, api_key=server.target.api_key)
        before = front.cpu_times()
        raw = await call.run()
        after = front.cpu_times()
        status, content = split_answer(raw.content())
        if status != 200 or b"message_stop" not in content:
            return Sample(errors=[raw.error or f"status {status}: {content[:200].decode(errors='replace')}"])
        if number:  # the first one is read whole
            used += after.user + after.system - before.user - before.system
        tokens = _prompt_tokens(content)
    seconds = used / settings["requests"]
    cutting = _tokenizing_seconds(trial.stage.model_folder, body, tokens=tokens, repeats=settings["requests"])
    metrics = {
        "request_bytes": [float(len(json.dumps(body)))],
        "context_tokens": [float(tokens)],
        "front_seconds": [seconds],
        "tokenizing_seconds": [cutting],
        "beyond_tokenizing_seconds": [seconds - cutting],
    }
    return Sample(metrics=metrics)


def _prompt_tokens(stream: bytes) -> int:
    """All tokens of the prompt, by the usage at the end."""
    usage: dict[str, int] = {}
    for line in stream.splitlines():
        if line.startswith(b"data:"):
            event = json.loads(line[5:])
            usage |= event.get("usage") or event.get("message", {}).get("usage") or {}
    return sum(usage.get(name) or 0 for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"))


SCENARIO = Scenario(
    name="front",
    summary="what the front process does for an agent's request of 50 KB besides tokenizing",
    model="holdfast-demo-endless",
    cases=_cases,
    measure=_measure,
    needs_start=True,
)
