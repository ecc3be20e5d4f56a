"""Writes questions for `holdfast bench run speculation`: `python benchmark_questions.py FILE`.

The kinds differ in how much of an answer repeats earlier text. Each has eight questions, drawn as
in `evaluate.py`. Copies and edits have at least 100 characters, so that there is something to
repeat.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import other_tasks
from questions import Question, later_turn, made, reckoned, tool_calls

_QUESTIONS = 8
_LEAST_CHARACTERS = 100


def _long(make: Callable[[Random], Question], rng: Random) -> Question:
    while len((question := make(rng)).expected) < _LEAST_CHARACTERS:
        pass
    return question


def _schema(answer: str) -> dict[str, Any]:
    """The JSON schema of an object with these keys, and values of these types."""
    types = {int: "integer", str: "string"}
    properties = {key: {"type": types[type(value)]} for key, value in json.loads(answer).items()}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _request(question: Question, *, has_schema: bool) -> dict[str, Any]:
    conversation = question.conversation
    request: dict[str, Any] = {"messages": conversation.messages}
    if conversation.tools:
        request["tools"] = conversation.tools
    if has_schema:
        schema = {"name": "answer", "strict": True, "schema": _schema(question.expected)}
        request["response_format"] = {"type": "json_schema", "json_schema": schema}
    return request


KINDS: dict[str, Callable[[Random], Question]] = {
    "copies": lambda rng: _long(lambda r: made(other_tasks.copy_exchange, r), rng),
    "edits": lambda rng: _long(lambda r: made(other_tasks.edit_exchange, r), rng),
    "turn 20 over notes": later_turn,
    "JSON with a schema": lambda rng: made(other_tasks.json_exchange, rng),
    "tool calls": lambda rng: tool_calls(rng, "several"),
    "sums": lambda rng: reckoned(other_tasks.addition, rng),
    "small talk": lambda rng: made(lambda r: r.choice(other_tasks.CHAT), rng),
}


def main(file: Path) -> None:
    """Write all questions, as the fields of chat requests."""
    kinds = {}
    for name, make in KINDS.items():
        rng = Random(name)
        kinds[name] = [_request(make(rng), has_schema="schema" in name) for _ in range(_QUESTIONS)]
    file.write_text(json.dumps(kinds, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
