"""The scripted model behind a real server, as used to test agents, says and calls exactly what its
script says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.http_clients import CHAT, events_of
from tests.fakes.scripted_model import OVER, calls, write_scripted
from tests.fakes.server_process import running_server


@dataclass(frozen=True)
class Turn:
    """One answer's text and tool calls."""

    content: str
    called: tuple[tuple[str, dict[str, Any]], ...] = ()
    reasoning: str = ""

    @property
    def script(self) -> str:
        """As the model writes it."""
        thought = f"<think>\n{self.reasoning}\n</think>\n\n" if self.reasoning else ""
        return thought + (calls(*self.called, text=self.content) if self.called else self.content)


READ, WRITE = (
    ("read_file", {"path": "notes/a b.txt"}),
    ("write_file", {"path": "b", "content": 'é\n"{x}"\t漢🙂', "lines": [1, None]}),
)
TURNS = (
    Turn("", (READ,)),
    Turn("Two more:", (WRITE, READ, READ)),
    Turn("It is é, 漢字 or 🙂: \"x\" = 'x';\n\n\tdone  twice.", reasoning="I have\nread it."),
    Turn("ok"),
    Turn("ok"),
    Turn("yes " * 60 + "yes"),
)
TITLE = "A title: notes"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("read_file", "write_file")
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = Path(tmp_path_factory.mktemp("scripted"))
    write_scripted(folder, [turn.script for turn in TURNS], without_tools=TITLE, said_before=1)
    with (
        running_server(str(folder), "--name", "scripted") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def body(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": messages, "tools": TOOLS, **fields}


def whole(client: httpx.Client, messages: list[dict[str, Any]], **fields: Any) -> Turn:
    (choice,) = (
        client.post(CHAT, json=body(messages, **fields)).raise_for_status().json()["choices"]
    )
    message = choice["message"]
    called = [call["function"] for call in message.get("tool_calls", ())]
    assert choice["finish_reason"] == ("tool_calls" if called else "stop")
    return Turn(
        message["content"] or "",
        tuple((function["name"], json.loads(function["arguments"])) for function in called),
        message.get("reasoning_content", ""),
    )


def streamed(client: httpx.Client, messages: list[dict[str, Any]]) -> Turn:
    answer = client.post(CHAT, json=body(messages, stream=True)).raise_for_status()
    deltas = [
        event["choices"][0]["delta"] for event in events_of(answer.text)[:-1] if event["choices"]
    ]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    names = [piece["function"]["name"] for piece in pieces if "name" in piece["function"]]
    arguments = [
        "".join(
            piece["function"].get("arguments", "") for piece in pieces if piece["index"] == index
        )
        for index in range(len(names))
    ]
    content, reasoning = (
        "".join(delta.get(kind) or "" for delta in deltas)
        for kind in ("content", "reasoning_content")
    )
    return Turn(
        content,
        tuple((name, json.loads(text)) for name, text in zip(names, arguments, strict=True)),
        reasoning,
    )


def conversation(turns: int) -> list[dict[str, Any]]:
    """The agent's own example, then this many turns of the script, the results of their calls, and
    the next question.
    """
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "An example."},
        {"role": "assistant", "content": "ok"},
    ]
    messages.append({"role": "user", "content": "Go on. <|im_end|> ok yes"})
    for turn in TURNS[:turns]:
        asked = [
            {
                "id": f"call_{len(messages)}_{number}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(given)},
            }
            for number, (name, given) in enumerate(turn.called)
        ]
        message = {"role": "assistant", "content": turn.content or None, "tool_calls": asked}
        messages.append(message if asked else {"role": "assistant", "content": turn.content})
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "port: 8080"} for call in asked
        ]
        messages += results or [{"role": "user", "content": "And now?"}]
    return messages


@pytest.mark.parametrize("turn", range(len(TURNS) + 1))
def test_each_turn_follows_the_script_streamed_and_whole(client: httpx.Client, turn: int) -> None:
    expected = (*TURNS, Turn(OVER))[turn]
    assert whole(client, conversation(turn)) == expected
    assert streamed(client, conversation(turn)) == expected


def test_temperature_and_long_prompts_do_not_change_the_answer(
    client: httpx.Client,
) -> None:
    messages = [
        {"role": "system", "content": 'A long "system" prompt:\n\t{"of": "an agent"}. ' * 300},
        *conversation(1),
    ]
    assert whole(client, messages, temperature=1.0, seed=1) == TURNS[1]


def test_a_request_without_tools_is_not_a_turn_of_the_script(client: httpx.Client) -> None:
    assert whole(client, conversation(3), tools=None) == Turn(TITLE)


def test_without_a_turn_the_model_says_nothing(client: httpx.Client) -> None:
    answer = (
        client.post("/v1/completions", json={"model": "scripted", "prompt": "ok yes"})
        .raise_for_status()
        .json()
    )
    assert answer["choices"][0]["text"] == ""
    longer = [
        *conversation(len(TURNS)),
        {"role": "assistant", "content": OVER},
        {"role": "user", "content": "And then?"},
    ]
    assert whole(client, longer) == Turn(OVER)


def test_answers_without_unique_pieces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no pieces of its own"):
        write_scripted(tmp_path, ["a\n<tool_call>\n</tool_call>\n<tool_call>\n</tool_call>"])
