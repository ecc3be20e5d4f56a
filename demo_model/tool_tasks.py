"""Conversations with tools: single and parallel calls, results, and unneeded tools."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import words
from conversation import Conversation
from toolbox import CATALOGUE, Tool, Value, made_up, phrase

RESULT_KEYS = [*words.ATTRIBUTES, "sky", "degrees", "shelf", "result", "owner", "total"]


def offer(rng: Random, most: int = 4, strange: float = 0.0) -> list[Tool]:
    """Tools with different names. strange: the share with unusual arguments."""
    tools: dict[str, Tool] = {}
    for _ in range(rng.randint(1, most)):
        tool = rng.choice(CATALOGUE) if rng.random() < 0.45 else made_up(rng, strange)
        tools.setdefault(tool.name, tool)
    return list(tools.values())


def begin(rng: Random, tools: list[Tool]) -> Conversation:
    """A conversation that offers these tools, with or without a system message."""
    described, sort_keys = rng.random() < 0.4, rng.random() < 0.15
    conversation = Conversation(tools=[tool.schema(rng, described, sort_keys) for tool in tools])
    if rng.random() < 0.5:
        conversation.say(
            "system",
            rng.choice(
                (
                    "You are a helpful assistant.",
                    "You are an agent. Use your tools.",
                    "Use the tools when they help.",
                    "You are a coding agent.",
                    "You are Holdfast, an assistant with tools.",
                )
            ),
        )
    return conversation


def call_message(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant message that makes these calls."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }


def result_of(rng: Random) -> tuple[str, str]:
    """A tool result and how the answer states it."""
    kind = rng.random()
    if kind < 0.6:
        keys = rng.sample(RESULT_KEYS, rng.randint(1, 3))
        values: dict[str, Value] = {
            key: rng.randint(0, 9999) if rng.random() < 0.4 else str(words.anything(rng))
            for key in keys
        }
        return json.dumps(values), ", ".join(f"{key} {value}" for key, value in values.items())
    if kind < 0.9:
        text = rng.choice(
            (
                phrase(rng),
                words.digits(rng),
                f"{words.common_word(rng)}, {words.digits(rng, 1, 2)} degrees",
                words.token_like(rng),
            )
        )
        return text, text
    text = rng.choice(("not found", "no access", "out of order", "unknown name", phrase(rng)))
    return json.dumps({"error": text}), f"error {text}"


def told_results(told: list[str]) -> str:
    """The answer after results."""
    return (
        f"The result is: {told[0]}." if len(told) == 1 else f"The results are: {'; '.join(told)}."
    )


def plan(rng: Random, tools: list[Tool]) -> tuple[str, list[list[dict[str, Any]]]]:
    """A request and its calls: one, in parallel, or in sequence."""
    kind = rng.random()
    if kind < 0.15 and (pair := rng.choice(tools).ask_for_two(rng)):
        return pair[0], [pair[1]]
    if kind < 0.65:
        request, call = rng.choice(tools).ask(rng)
        return request, [[call]]
    if kind < 0.87:
        asked = [rng.choice(tools).ask(rng) for _ in range(rng.choice((2, 2, 2, 3)))]
        return rng.choice((" ", " And ", " Also: ")).join(text for text, _ in asked), [
            [call for _, call in asked]
        ]
    (first, call), (second, next_call) = rng.choice(tools).ask(rng), rng.choice(tools).ask(rng)
    return f"First: {first} Then: {second}", [[call], [next_call]]


def use_tools(rng: Random, conversation: Conversation, tools: list[Tool]) -> None:
    """One request, its calls, their results and the answer."""
    request, steps = plan(rng, tools)
    conversation.say("user", request)
    told: list[str] = []
    for calls in steps:
        conversation.messages.append(call_message(calls))
        for _ in calls:
            result, telling = result_of(rng)
            conversation.say("tool", result)
            told.append(telling)
    conversation.say("assistant", told_results(told))
