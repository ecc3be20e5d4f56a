"""Requests for invented tools, and their calls."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from odd_tools import OddTool, Parameter, Value
from wide_words import is_allowed


def _quoted(rng: Random, text: str) -> str:
    mark = rng.choice(("'", "'", '"', "`"))
    return f"{mark}{text}{mark}"


def said(rng: Random, value: Value, last: bool) -> str:
    """A value as one types it; words with spaces stand in quotes, unless they end the request."""
    if isinstance(value, bool):
        return ""
    if isinstance(value, list):
        parts = [_plain(part) for part in value]
        return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    if isinstance(value, str):
        if (" " in value and not (last and rng.random() < 0.5)) or rng.random() < 0.1:
            return _quoted(rng, value)
        return value
    return str(value)


def _plain(part: str) -> str:
    return part


def _switch(rng: Random, parameter: Parameter, value: bool) -> str:
    name = rng.choice((parameter.name, parameter.words))
    on, off = rng.choice((("true", "false"), ("yes", "no"), ("on", "off")))
    word = on if value else off
    return rng.choice(
        (f"{name} {word}", f"{name}: {word}", f"{name} = {word}", f"{name} set to {word}")
    )


def _clause(rng: Random, parameter: Parameter, value: Value, last: bool) -> str:
    """A name and a value in one of several forms."""
    if isinstance(value, bool):
        return _switch(rng, parameter, value)
    name = parameter.words if rng.random() < 0.7 else parameter.name
    text = said(rng, value, last)
    return rng.choice(
        (
            f"{name} {text}",
            f"{name} {text}",
            f"{name} {text}",
            f"{name}: {text}",
            f"{name} = {text}",
            f"{name} is {text}",
            f"{text} as {name}",
        )
    )


def _clauses(rng: Random, chosen: list[tuple[Parameter, Value]]) -> str:
    texts = [
        _clause(rng, parameter, value, place == len(chosen) - 1)
        for place, (parameter, value) in enumerate(chosen)
    ]
    if len(texts) == 1:
        return texts[0]
    if rng.random() < 0.3:
        return ", ".join(texts)
    return f"{', '.join(texts[:-1])} {rng.choice(('and', 'and', 'with'))} {texts[-1]}"


def _opening(rng: Random, tool: OddTool, implicit: str, start: str) -> str:
    """The task, with the value of the first parameter if it needs no name."""
    act = f"{tool.verb} {tool.noun}"
    if tool.object_first and implicit:
        return f"{tool.verb} {rng.choice(('the ', 'the ', 'the ', '', 'a '))}{implicit}"
    if tool.getter and implicit:
        return f"{tool.verb} the {tool.noun} {rng.choice(('of', 'of', 'for', 'of the'))} {implicit}"
    act = f"{tool.verb} {rng.choice(('the ', 'the ', 'a ', ''))}{tool.noun}"
    if implicit:
        return f"{act} {rng.choice(('', 'of', 'for', 'in', 'to', 'from', 'called', 'named'))} {implicit}".replace(
            "  ", " "
        )
    return act


def _in_words(rng: Random, tool: OddTool, chosen: list[tuple[Parameter, Value]]) -> str:
    first_value = chosen[0][1] if chosen else None
    first_is_required = bool(chosen) and chosen[0][0] is tool.parameters[0]
    implicit = ""
    may_be_implicit = (
        first_is_required
        and isinstance(first_value, str | int | float)
        and not isinstance(first_value, bool)
    )
    if may_be_implicit and (tool.object_first or tool.getter or rng.random() < 0.6):
        implicit = said(rng, first_value, len(chosen) == 1)
    rest = chosen[1:] if implicit else chosen
    if tool.getter and implicit and rng.random() < 0.6:
        text = rng.choice(
            (
                f"What is the {tool.noun} of {implicit}",
                f"What is the {tool.noun} of the {implicit}",
                f"What's the {tool.noun} of {implicit}",
                f"What is the {tool.noun} for {implicit}",
                f"Which {tool.noun} does {implicit} have",
                f"Tell me the {tool.noun} of {implicit}",
                f"Show me the {tool.noun} of {implicit}",
                f"I need the {tool.noun} of {implicit}",
            )
        )
        question = text.startswith("Wh")
    else:
        deed = _opening(rng, tool, implicit, "")
        text = rng.choice(
            (
                "{}",
                "{}",
                "{}",
                "Please {}",
                "Please {}",
                "Can you {}",
                "Could you {}",
                "I want you to {}",
                "Would you {}",
                "Now {}",
                "I need to {}",
                "Let's {}",
                "Go and {}",
            )
        ).format(deed)
        text = text[0].upper() + text[1:]
        question = text.startswith(("Can", "Could", "Would"))
    if rest:
        text += (
            f"{rng.choice((' with', ' with', ' with', ' and', ',', ':', ' using', ' where'))} "
            f"{_clauses(rng, rest)}"
        )
    if rng.random() < 0.12 and not question:
        return f"{text}, please."
    return text + ("?" if question else rng.choice((".", ".", ".", "", "!")))


def _by_name(rng: Random, tool: OddTool, chosen: list[tuple[Parameter, Value]]) -> str:
    """A request that names the tool."""
    start = rng.choice(
        (
            f"Call {tool.name}",
            f"Use {tool.name}",
            f"Run {tool.name}",
            f"Use the tool {tool.name}",
            f"Call the {tool.name} tool",
            f"Please use {tool.name}",
            f"{tool.name}",
            f"Invoke {tool.name}",
        )
    )
    if not chosen:
        return f"{start}."
    if rng.random() < 0.2:
        return (
            f"{start} with "
            f"{json.dumps({parameter.name: value for parameter, value in chosen}, ensure_ascii=False)}"
        )
    return (
        f"{start}{rng.choice((' with', ' with', ':', ' for'))} "
        f"{_clauses(rng, chosen)}{rng.choice(('.', '.', ''))}"
    )


def ask(rng: Random, tool: OddTool) -> tuple[str, dict[str, Any]]:
    """A request and its call. Optional parameters are given only if the request names them."""
    while True:
        chosen = [
            (parameter, parameter.draw(rng))
            for parameter in tool.parameters
            if not parameter.optional or rng.random() < 0.4
        ]
        request = (
            _by_name(rng, tool, chosen) if rng.random() < 0.2 else _in_words(rng, tool, chosen)
        )
        if rng.random() < 0.12 and request[0].isupper() and not request.startswith(tool.name):
            request = request[0].lower() + request[1:]
        if is_allowed(request):
            return request, {
                "name": tool.name,
                "arguments": {parameter.name: value for parameter, value in chosen},
            }


def ask_for_many(rng: Random, tool: OddTool) -> tuple[str, list[dict[str, Any]]] | None:
    """A request for two to four calls of the same tool, which has one parameter; None for other
    tools.
    """
    if len(tool.parameters) != 1 or tool.parameters[0].schema["type"] not in ("string", "integer"):
        return None
    parameter = tool.parameters[0]
    values = [parameter.draw(rng) for _ in range(rng.choice((2, 2, 3, 4)))]
    if any(" " in str(value) for value in values):
        return None
    listed = f"{', '.join(str(value) for value in values[:-1])} and {values[-1]}"
    if tool.object_first:
        deed = f"{tool.verb} {listed}"
    elif tool.getter:
        deed = f"{tool.verb} the {tool.noun} of {listed}"
    else:
        deed = f"{tool.verb} the {tool.noun} {rng.choice(('for', 'of', 'with'))} {listed}"
    request = rng.choice(("{}.", "Please {}.", "Can you {}?", "{}")).format(deed)
    request = request[0].upper() + request[1:]
    if not is_allowed(request):
        return None
    return request, [{"name": tool.name, "arguments": {parameter.name: value}} for value in values]
