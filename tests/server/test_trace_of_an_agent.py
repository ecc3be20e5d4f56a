"""An agent that calls tools thirty times: each turn prefills only new text, even after a restart."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.http_clients import CHAT
from tests.fakes.scripted_model import OVER, calls, write_scripted
from tests.fakes.server_process import ServerProcess

TURNS, RESTART_BEFORE = 30, 15
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a part of a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "lines": {"type": "array"}},
        },
    },
}


def said(turn: int) -> str:
    """A call, sometimes after a thought or a text."""
    call = calls(
        ("read_file", {"path": f"src/part{turn}/é{turn}.py", "lines": [turn, turn + 40.0]}),
        text=f"Part {turn}:" if turn % 4 == 1 else "",
    )
    return f"<think>\nIt may be in {turn}.\n</think>\n\n{call}" if turn % 3 == 0 else call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted(
        tmp_path_factory.mktemp("scripted"), [said(turn) for turn in range(TURNS)]
    )


def start(model: Path, store: Path) -> ServerProcess:
    server = ServerProcess(str(model), "--name", "scripted", "--store", str(store))
    server.wait_ready()
    return server


def sent_back(message: dict[str, Any], turn: int, choose: random.Random) -> list[dict[str, Any]]:
    """As agents do: arguments rewritten, other fields left out, and the thought dropped by clients
    that do not know it.
    """
    (call,) = message["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    names = choose.sample(sorted(arguments), len(arguments))
    again = json.dumps(
        {name: arguments[name] for name in names},
        indent=choose.choice([None, 2]),
        ensure_ascii=choose.random() < 0.5,
    )
    function = {"name": call["function"]["name"], "arguments": again}
    answer = {"role": "assistant", "content": message["content"] or choose.choice([None, ""])}
    answer["tool_calls"] = [{"id": call["id"], "type": "function", "function": function}]
    if message.get("reasoning") and choose.random() < 0.5:
        answer["reasoning"] = message["reasoning"]
    result = f"def part_{turn}():\n    return {turn}\n"
    content: Any = choose.choice([result, [{"type": "text", "text": result}]])
    return [answer, {"role": "tool", "tool_call_id": call["id"], "content": content}]


@pytest.mark.slow
def test_thirty_calls_prefill_only_new_text_even_after_a_restart(
    model: Path, tmp_path: Path
) -> None:
    choose = random.Random(11)
    system = "You read files, a part at a time. " * 20
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": system}]}
    ]
    messages.append({"role": "user", "content": "Where is it?"})
    known, read = 0, []
    server = start(model, tmp_path / "store")
    try:
        for turn in range(TURNS):
            if turn == RESTART_BEFORE:
                assert server.stop() == 0, server.log()
                server = start(model, tmp_path / "store")
            messages[0]["content"] = choose.choice([system, [{"type": "text", "text": system}]])
            body = {
                "model": "scripted",
                "messages": messages,
                "tools": [TOOL],
                "holdfast": {"explain": True},
            }
            answer = (
                httpx.post(f"{server.url}{CHAT}", json=body, timeout=60).raise_for_status().json()
            )
            usage, (choice,) = answer["usage"], answer["choices"]
            new = usage["prompt_tokens"] - known
            read.append(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
            assert turn == 0 or read[-1] <= new + 16, (turn, answer["holdfast"])
            assert answer["holdfast"]["put_back_tokens"] >= 10 * turn
            known = usage["prompt_tokens"] + usage["completion_tokens"]
            assert choice["finish_reason"] == "tool_calls", choice
            messages += sent_back(choice["message"], turn, choose)
        assert sum(read) < known
        final = httpx.post(
            f"{server.url}{CHAT}", json={"model": "scripted", "messages": messages}, timeout=60
        ).json()
        assert final["choices"][0]["message"]["content"] == OVER
    finally:
        server.stop()
