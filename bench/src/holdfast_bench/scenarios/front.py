"""What the front process does for an agent's next turn: 50 KB with 13 tools over Anthropic's
Messages, or 24,000 tokens of chat.

Each request is the one before, what was answered and a few new words; the model draws one token.
The front's processor time comes from the system (HTTP, checking, rendering, tokenizing, history,
the way to the worker and back, the stream). Beside it stand that for a prompt of as many token ids,
where nothing is rendered and tokenized, and what tokenizing the whole text would take.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from holdfast.front.prompt.tokenize import Tokenizer, load_tokenizer
from holdfast_bench.lexicon import text_of
from holdfast_bench.metrics import shown
from holdfast_bench.results import CaseResult, Sample
from holdfast_bench.scenario import NOT_STARTED_HERE, Case, Scale, Scenario, Trial
from holdfast_bench.servers import RunningServer
from holdfast_bench.wire import Call, split_answer

MOST_SECONDS = 0.005
_TOOLS, _TURNS = 13, 3
_MESSAGE_TOKENS = 400
_MARK = {"cache_control": {"type": "ephemeral"}}
_USAGE_NAMES = (
    "prompt_tokens",
    "input_tokens",
    "cache_read_input_tokens",
    "cache_creation_input_tokens",
)
_PROPERTIES: Mapping[str, Any] = {
    "file_path": {"type": "string"},
    "offset": {"type": "integer", "minimum": 0, "maximum": 9007199254740991},
    "limit": {"type": "integer", "exclusiveMinimum": 0},
    "mode": {"type": "string", "enum": ["content", "files", "count"]},
    "edits": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"old": {"type": "string"}, "new": {"type": "string"}},
            "required": ["old"],
        },
    },
    "options": {
        "type": "object",
        "properties": {"deep": {"type": "boolean"}},
        "additionalProperties": False,
    },
}


def _cases(scale: Scale) -> Sequence[Case]:
    # a turn adds 190 tokens: the context has room for few more
    requests = {"quick": 10, "normal": 20, "full": 20}[scale]
    tokens = 2000 if scale == "quick" else 24_000
    return (
        Case(name="50 KB, 13 tools", settings={"requests": requests, "kilobytes": 50}, rounds=3),
        Case(
            name=f"{tokens} tokens of chat",
            settings={"requests": requests, "context_tokens": tokens},
            rounds=3,
        ),
    )


def _text(characters: int, seed: str) -> str:
    return text_of(characters // 4, seed=seed)[:characters]


def _agents_body(model: str, *, kilobytes: int, turns: Sequence[str]) -> dict[str, Any]:
    """A request as Claude Code shapes them: a fifth system, half tools, the rest a conversation
    that has called some.

    turns: results of more calls, each with the call before it; the last has the client's mark.
    """
    share = kilobytes * 10  # characters of a hundredth
    described = share * 36 // _TOOLS
    properties = {
        name: {**kind, "description": _text(described // 12, f"{name}/description")}
        for name, kind in _PROPERTIES.items()
    }
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": properties,
        "required": ["file_path"],
        "additionalProperties": False,
    }
    tools = [
        {
            "name": f"Tool{number}",
            "description": _text(described // 2, f"tool {number}"),
            "input_schema": schema,
        }
        for number in range(_TOOLS)
    ]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": _text(share * 4, "task")}]}
    ]
    for turn, result_text in enumerate(
        [*(_text(share * 5, f"result {turn}") for turn in range(_TURNS)), *turns]
    ):
        call = {
            "type": "tool_use",
            "id": f"toolu_{turn}",
            "name": f"Tool{turn % _TOOLS}",
            "input": {"file_path": f"/home/{turn}", "limit": 9},
        }
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": result_text}
        messages += [
            {
                "role": "assistant",
                "content": [{"type": "text", "text": _text(200, f"said {turn}")}, call],
            },
            {"role": "user", "content": [result]},
        ]
    messages[-1]["content"][-1] |= _MARK
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


def _chat_body(model: str, *, said: Sequence[str], turns: Sequence[str]) -> dict[str, Any]:
    """A long conversation over OpenAI's protocol. said: an odd number of messages, the user's
    first; each turn adds two.
    """
    texts = [*said, *(text for turn in turns for text in (turn[:40], turn))]
    messages = [
        {"role": ("user", "assistant")[number % 2], "content": text}
        for number, text in enumerate(texts)
    ]
    options = {"include_usage": True}
    return {
        "model": model,
        "messages": messages,
        "max_tokens": 1,
        "temperature": 0.0,
        "stream": True,
        "stream_options": options,
    }


def _tokenizing_seconds(
    tokenizer: Tokenizer, body: Mapping[str, Any], *, tokens: int, repeats: int
) -> float:
    """Processor time of cutting a text of as many tokens as the server has counted: the request's
    own texts, and their like.
    """
    text = json.dumps(
        {name: body[name] for name in ("system", "tools", "messages") if name in body}, indent=1
    )
    found = tokenizer.backend.encode(text, add_special_tokens=False).offsets
    if len(found) < tokens:
        text += _text((tokens - len(found)) * 4, "rest")
        found = tokenizer.backend.encode(text, add_special_tokens=False).offsets
    text = text[: found[min(tokens, len(found)) - 1][1]]
    began = time.process_time()
    for _ in range(repeats):
        # with places, as where there are cache breakpoints
        tokenizer.backend.encode_batch([text], add_special_tokens=False)
    return (time.process_time() - began) / repeats


class _Failed(Exception):
    """A request that was not answered."""


@dataclass(slots=True)
class _Front:
    """The front process of a server: its processor time, request by request."""

    server: RunningServer
    process: psutil.Process
    tokens: int = 0  # of the last prompt
    last: Mapping[str, Any] = field(default_factory=dict)

    async def seconds(self, path: str, bodies: Sequence[Mapping[str, Any]]) -> float:
        """Of one request, on average over these but for the first, which is read whole."""
        used = 0.0
        for number, body in enumerate(bodies):
            before = self.process.cpu_times()
            target = self.server.target
            raw = await Call(url=target.base_url + path, body=body, api_key=target.api_key).run()
            after = self.process.cpu_times()
            status, content = split_answer(raw.content())
            if status != 200 or raw.error:
                raise _Failed(
                    raw.error or f"status {status}: {content[:200].decode(errors='replace')}"
                )
            used += after.user + after.system - before.user - before.system if number else 0.0
            self.tokens, self.last = _prompt_tokens(content), body
        return used / (len(bodies) - 1)


async def _measure(trial: Trial) -> Sample:
    server, settings = await trial.stage.server(trial.contender), trial.settings
    if server.process is None:
        return Sample(errors=[NOT_STARTED_HERE])
    front, model = _Front(server, psutil.Process(server.process.pid)), server.target.model
    words = [_text(160, f"{trial.seed}: {number}") for number in range(settings["requests"] + 1)]
    begun = [words[: number + 1] for number in range(len(words))]
    if "kilobytes" in settings:
        path = "/v1/messages"
        bodies = [
            _agents_body(model, kilobytes=settings["kilobytes"], turns=turns) for turns in begun
        ]
    else:
        path = "/v1/chat/completions"
        said = [
            trial.text(_MESSAGE_TOKENS, f"said {number}")
            for number in range(settings["context_tokens"] // _MESSAGE_TOKENS | 1)
        ]
        bodies = [_chat_body(model, said=said, turns=turns) for turns in begun]
    try:
        seconds = await front.seconds(path, bodies)
        tokens, body = front.tokens, front.last
        tokenizer = load_tokenizer(trial.stage.model_folder)
        ids = tokenizer.encode(_text(tokens * 8, trial.seed), add_special_tokens=False)[:tokens]
        fields = {
            "model": model,
            "max_tokens": 1,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        raw = [{**fields, "prompt": ids + ids[: 30 * number]} for number in range(len(words))]
        ids_seconds = await front.seconds("/v1/completions", raw)
    except _Failed as error:
        return Sample(errors=[str(error)])
    metrics = {
        "request_bytes": [float(len(json.dumps(body)))],
        "context_tokens": [float(tokens)],
        "front_seconds": [seconds],
        "ids_front_seconds": [ids_seconds],
        "beyond_ids_seconds": [seconds - ids_seconds],
        "tokenizing_seconds": [
            _tokenizing_seconds(tokenizer, body, tokens=tokens, repeats=settings["requests"])
        ],
    }
    return Sample(metrics=metrics)


def _judge(case: CaseResult) -> list[str]:
    lines = []
    for name in ("front_seconds", "beyond_ids_seconds"):
        if found := case.contenders[0].pooled(name):
            seconds = statistics.median(found)
            verdict = "met" if seconds <= MOST_SECONDS else "NOT MET"
            what = name.removesuffix("_seconds").replace("_", " ")
            lines.append(
                f"{what}: {shown(seconds, 's')}, to be at most {shown(MOST_SECONDS, 's')}: "
                f"{verdict}"
            )
    return lines


def _prompt_tokens(stream: bytes) -> int:
    """All tokens of the prompt, by the usage at the end."""
    usage: dict[str, int] = {}
    for line in stream.splitlines():
        if line.startswith(b"data:") and b"[DONE]" not in line:
            event = json.loads(line[5:])
            usage |= event.get("usage") or event.get("message", {}).get("usage") or {}
    return sum(usage.get(name) or 0 for name in _USAGE_NAMES)


SCENARIO = Scenario(
    name="front",
    summary="what the front process does for the next turn of an agent: 50 KB with 13 tools, 24,000 tokens of chat",
    model="holdfast-demo-endless",
    cases=_cases,
    measure=_measure,
    judge=_judge,
    peers=(),
    needs_start=True,
)
