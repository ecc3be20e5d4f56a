"""Usual and made-up tools, requests for them, calls and results."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from conversation import Conversation
from rules import HERE, blocks, draw, function, some, texts

Call = dict[str, Any]


@dataclass(frozen=True)
class Argument:
    """An argument. kind: a JSON type or `enum`. source: a range, choices, or a rule."""

    name: str
    kind: str
    source: str

    @property
    def choices(self) -> list[str]:
        """The values of an enum."""
        return self.source.split("|") if self.kind == "enum" else []

    def draw(self, rng: Random) -> str | int:
        """A value."""
        if self.kind == "integer":
            low, high = self.source.split("-")
            return rng.randint(int(low), int(high))
        return rng.choice(self.choices) if self.choices else draw(rng, self.source)

    def schema(self, described: bool) -> dict[str, Any]:
        """Its JSON schema."""
        schema: dict[str, Any] = {"type": "string" if self.choices else self.kind}
        if described:
            schema["description"] = f"The {self.name.replace('_', ' ')}"
        if self.choices:
            schema["enum"] = self.choices
        return schema


@dataclass(frozen=True)
class Tool:
    """A tool and requests for it, with its arguments in braces."""

    name: str
    description: str
    arguments: list[Argument]
    requests: list[str]

    def schema(self, described: bool, sort_keys: bool) -> dict[str, Any]:
        """The definition of the tool as OpenAI clients send it."""
        properties = {one.name: one.schema(described) for one in self.arguments}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        return defined(self.name, self.description, parameters, sort_keys=sort_keys)

    def ask_for_two(self, rng: Random) -> tuple[str, list[Call]] | None:
        """A request for two calls, such as `Weather in Oslo and Lima?`; None for tools whose
        argument may contain `and`.
        """
        argument = self.arguments[0]
        splits = argument.name in ("city", "location", "name", "path", "item")
        if len(self.arguments) != 1 or not splits:
            return None
        first, second = argument.draw(rng), argument.draw(rng)
        request = rng.choice(self.requests).format(**{argument.name: f"{first} and {second}"})
        return request, [
            {"name": self.name, "arguments": {argument.name: value}} for value in (first, second)
        ]

    def ask(self, rng: Random) -> tuple[str, Call]:
        """A request and its call."""
        values = {one.name: one.draw(rng) for one in self.arguments}
        request = rng.choice(self.requests).format(**values)
        return request, {"name": self.name, "arguments": values}


def defined(
    name: str, about: str, parameters: dict[str, Any], *, sort_keys: bool = False, **more: Any
) -> dict[str, Any]:
    """The definition of a tool as an OpenAI client sends it."""
    function = {"name": name, "description": about, "parameters": parameters, **more}
    schema = {"type": "function", "function": function}
    return json.loads(json.dumps(schema, sort_keys=True)) if sort_keys else schema


CATALOGUE = [
    Tool(
        block["name"][0],
        block["about"][0],
        [Argument(*line.split(" ", 2)) for line in block["argument"]],
        block["ask"],
    )
    for block in blocks((HERE / "catalogue.txt").read_text("utf-8"))
]


@function
def three_stems(rng: Random) -> str:
    """Three choices of an enum."""
    return "|".join(rng.sample(texts("stems"), 3))


def _argument(rng: Random) -> Argument:
    return Argument(*draw(rng, "argument_kinds").split(" ", 2))


def made_up(rng: Random, strange: float = 0.0) -> Tool:
    """A tool named `verb_noun`, whose requests use these words. strange: the probability of
    arguments with unusual names.
    """
    verb, noun = draw(rng, "made_up_verb"), draw(rng, "made_up_noun")
    first, second = _argument(rng), _argument(rng)
    if strange and rng.random() < strange:
        first = replace(first, name=draw(rng, "strange_name"))
        second = replace(second, name=draw(rng, "strange_name"))
        if strange > 0.6 and rng.random() < 0.5:
            noun = f"{draw(rng, 'common')} {noun}"
    name = f"{verb}{noun.title().replace(' ', '')}"
    if rng.random() < 0.85:
        name = f"{verb}_{noun.replace(' ', '_')}"
    start = draw(rng, "made_up_starts", v=verb, noun=noun)
    end = "?" if start.startswith("Can") else "."
    requests = [
        text.format(start=start, first=first.name, end=end) for text in texts("made_up_requests")
    ]
    about = draw(rng, "made_up_about", v=verb, noun=noun, first=first.name)
    if rng.random() < 0.5 or first.name == second.name:
        return Tool(name, about, [first], requests)
    two = [
        f"{request[:-1]} {joint} {second.name} {{{second.name}}}{end}"
        for request in requests
        for joint in ("and", "with", "for")
    ]
    return Tool(name, about, [first, second], two)


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
    schemas = [tool.schema(described, sort_keys) for tool in tools]
    talk = Conversation(tools=schemas, offered=tools)
    if rng.random() < 0.5:
        talk.say("system", draw(rng, "tool_system"))
    return talk


def result_of(rng: Random) -> tuple[str, str]:
    """A tool result and how the answer states it."""
    kind = rng.random()
    if kind < 0.6:
        keys = rng.sample(texts("result_keys"), rng.randint(1, 3))
        values = {
            key: rng.randint(0, 9999) if rng.random() < 0.4 else draw(rng, "anything")
            for key in keys
        }
        return json.dumps(values), ", ".join(f"{key} {value}" for key, value in values.items())
    if kind < 0.9:
        text = draw(rng, "result_text")
        return text, text
    text = draw(rng, "result_error")
    return json.dumps({"error": text}), f"error {text}"


def told_results(told: list[str]) -> str:
    """The answer after results."""
    if len(told) == 1:
        return f"The result is: {told[0]}."
    return f"The results are: {'; '.join(told)}."


def _plan(rng: Random, tools: list[Tool]) -> tuple[str, list[list[Call]]]:
    """A request and its calls: one, in parallel, or in sequence."""
    kind = rng.random()
    if kind < 0.15 and (pair := rng.choice(tools).ask_for_two(rng)):
        return pair[0], [pair[1]]
    if kind < 0.65:
        request, call = rng.choice(tools).ask(rng)
        return request, [[call]]
    if kind < 0.87:
        asked = [rng.choice(tools).ask(rng) for _ in some(rng, (2, 2, 2, 3))]
        joint = rng.choice((" ", " And ", " Also: "))
        return joint.join(text for text, _ in asked), [[call for _, call in asked]]
    (first, call), (second, next_call) = rng.choice(tools).ask(rng), rng.choice(tools).ask(rng)
    return f"First: {first} Then: {second}", [[call], [next_call]]


def use_tools(rng: Random, talk: Conversation) -> None:
    """One request, its calls, their results and the answer."""
    request, steps = _plan(rng, talk.offered)
    answer_with(talk, request, [(calls, [result_of(rng) for _ in calls]) for calls in steps])


def answer_with(
    talk: Conversation, request: str, steps: list[tuple[list[Call], list[tuple[str, str]]]]
) -> None:
    """A request, steps of calls and their results, and the answer that states the results."""
    talk.say("user", request)
    for calls, results in steps:
        talk.call(calls, [result for result, _ in results])
    talk.say("assistant", told_results([told for _, results in steps for _, told in results]))
