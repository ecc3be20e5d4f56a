"""Reads a complete answer as it would be read while streaming, to prove a model's detected dialect.
Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.front.answers.reader import AnswerReader, TextSeparators
from holdfast.front.output import OutputDelta, TextDelta, ToolCallFinished, tool_calls_of
from holdfast.front.toolcalls.call_format import Call
from holdfast.front.toolcalls.declared import DeclaredTools
from holdfast.front.toolcalls.dialect import ModelDialect


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeAnswer:
    """The parts of an answer. A call without an end does not count."""

    text: str
    reasoning: str
    calls: tuple[Call, ...]
    repairs: tuple[str, ...]  # of all calls


def read_answer(
    text: str, dialect: ModelDialect, *, tools: DeclaredTools, in_reasoning: bool = False
) -> WholeAnswer:
    """Read a model's output with markers as text; those that are tokens of the model count as such."""
    reader = AnswerReader(dialect, tools=tools, in_reasoning=in_reasoning)
    return whole_answer([*reader.push(dialect.markers.encode(text)), *reader.flush()])


def whole_answer(parts: Sequence[OutputDelta]) -> WholeAnswer:
    """The parts of an answer, joined. Raises ValueError if a call's arguments are not a JSON
    object.
    """
    texts: dict[str, list[str]] = {"text": [], "reasoning": []}
    joints = TextSeparators()
    repairs: list[str] = []
    for part in parts:
        separator = joints.separator(part)
        if isinstance(part, TextDelta):
            texts[part.kind].append(separator + part.text)
        elif isinstance(part, ToolCallFinished):
            repairs += part.repairs
    calls = [
        Call(call.name, _object(call.arguments), call.id)
        for call in tool_calls_of(parts)
        if call.is_complete
    ]
    return WholeAnswer(
        text="".join(texts["text"]),
        reasoning="".join(texts["reasoning"]),
        calls=tuple(calls),
        repairs=tuple(repairs),
    )


def _object(arguments: str) -> dict[str, object]:
    found = json.loads(arguments)
    if not isinstance(found, dict):
        raise ValueError("the arguments of a call are no object")
    return found
