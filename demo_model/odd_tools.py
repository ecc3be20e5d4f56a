"""Invented tools, whose names, descriptions and schemas the model must read in the prompt, and
requests for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from rules import complete, draw, function, picked, some
from toolbox import Call, defined
from words import is_allowed, wide_word

Value = str | int | float | bool | list[str]


@dataclass(frozen=True)
class Parameter:
    """A parameter: name, JSON schema without description, and a source of values."""

    name: str
    schema: dict[str, Any]
    draw: Callable[[Random], Value]
    optional: bool = False

    @property
    def words(self) -> str:
        """The name in words."""
        return spaced(self.name)


@dataclass(frozen=True)
class SchemaStyle:
    """A client's style of schemas."""

    described: bool
    titled: bool
    closed: bool
    strict: bool
    sort_keys: bool
    bare: bool

    @classmethod
    def draw(cls, rng: Random) -> SchemaStyle:
        """Draw a style."""
        return cls(*(rng.random() < share for share in (0.4, 0.12, 0.25, 0.1, 0.1, 0.2)))


@dataclass(frozen=True)
class OddTool:
    """A tool that does something (verb) with something (noun)."""

    name: str
    verb: str
    noun: str
    parameters: list[Parameter]
    description: str
    getter: bool
    """It looks something up: `What is the NOUN of VALUE?`."""
    object_first: bool
    """The first parameter is the object of the verb: `VERB the VALUE`."""

    def schema(self, rng: Random, style: SchemaStyle) -> dict[str, Any]:
        """The tool as an OpenAI client sends it."""
        properties: dict[str, Any] = {}
        for one in self.parameters:
            made: dict[str, Any] = {"type": one.schema["type"]}
            if style.titled:
                made = {"title": one.words.title(), **made}
            if style.described or rng.random() < 0.15:
                about = draw(rng, "parameter_about", name=one.words, thing=self.noun)
                made["description"] = about
            properties[one.name] = made | one.schema
        parameters: dict[str, Any] = {"type": "object", "properties": properties}
        required = [one.name for one in self.parameters if not one.optional]
        if required or not style.bare:
            parameters["required"] = required
        if style.closed:
            parameters["additionalProperties"] = False
        more = {"strict": True} if style.strict else {}
        return defined(self.name, self.description, parameters, sort_keys=style.sort_keys, **more)


def spaced(name: str) -> str:
    """Split `snake_case` and `camelCase` into words."""
    out = ""
    for before, letter in zip(" " + name, name, strict=False):
        if letter in "_-.":
            out += " "
        else:
            out += (" " if letter.isupper() and before.islower() else "") + letter.lower()
    return " ".join(out.split())


def cased_name(parts: list[str], style: int) -> str:
    """Join words in a style."""
    if style == 0:
        return "_".join(parts)
    if style == 1:
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    return "".join(part.capitalize() for part in parts) if style == 2 else "-".join(parts)


def _parameter_name(rng: Random, style: int, taken: set[str]) -> str:
    while True:
        parts = draw(rng, "parameter_name").split()
        name = cased_name(parts, style if len(parts) > 1 else 0)
        if name not in taken and is_allowed(name):
            taken.add(name)
            return name


@function
def odd_path(rng: Random) -> str:
    """A file path."""
    folders = "".join(f"{wide_word(rng)}/" for _ in some(rng, (0, 0, 1, 1, 2, 3)))
    name = "_".join(wide_word(rng) for _ in some(rng, (1, 1, 2)))
    ending = draw(rng, "odd_endings")
    return f"{'/' if folders and rng.random() < 0.3 else ''}{folders}{name}.{ending}"


def _parameter(rng: Random, style: int, taken: set[str], first: bool) -> Parameter:
    name = _parameter_name(rng, style, taken)
    optional = not first and rng.random() < 0.35
    kind = rng.random()

    def made(schema: dict[str, Any], source: Callable[[Random], Value]) -> Parameter:
        return Parameter(name, schema, source, optional)

    if kind < 0.5 or (first and kind < 0.75):
        form = picked(rng, "odd_strings") if rng.random() < 0.85 else "{wide_phrase 3}"
        return made({"type": "string"}, lambda r: complete(r, form, {}))
    if kind < 0.7:
        most = rng.choice((9, 12, 99, 100, 500, 9999))
        return made({"type": "integer"}, lambda r: r.randint(0, most))
    if kind < 0.78:
        return made({"type": "number"}, lambda r: round(r.uniform(0, 100), r.choice((1, 1, 2))))
    if kind < 0.86:
        return made({"type": "boolean"}, lambda r: r.random() < 0.5)
    if kind < 0.95:
        choices = list(dict.fromkeys(wide_word(rng) for _ in range(rng.randint(2, 5))))
        return made({"type": "string", "enum": choices}, lambda r: r.choice(choices))
    return made(
        {"type": "array", "items": {"type": "string"}},
        lambda r: [draw(r, "wide_value") for _ in range(r.randint(1, 4))],
    )


def odd_tool(rng: Random, shared_noun: str, shared_verb: str, space: str, style: int) -> OddTool:
    """An invented tool. A shared noun, verb or namespace makes it part of a family."""
    while True:
        made = _odd_tool(rng, shared_noun, shared_verb, space, style)
        if is_allowed(f"{made.name} {made.description} {spaced(made.name)}"):
            return made


def _odd_tool(rng: Random, shared_noun: str, shared_verb: str, space: str, style: int) -> OddTool:
    getter = not shared_verb and rng.random() < 0.3
    doing = "get" if getter and rng.random() < 0.7 else shared_verb or draw(rng, "wide_verb")
    thing = shared_noun or draw(rng, "odd_thing")
    taken: set[str] = set()
    count = rng.choice((1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 4, 5, 6))
    parameters = [_parameter(rng, style, taken, not place) for place in range(count)]
    object_first = not getter and rng.random() < 0.35 and parameters[0].schema == {"type": "string"}
    if object_first:
        thing = parameters[0].words
    name = space + cased_name(draw(rng, "odd_name", verb=doing, noun=thing).split(), style)
    others = [parameter.words for parameter in parameters]
    named = {"first": others[0], "last": others[-1], "some": " and ".join(others[:3])}
    about = draw(rng, "odd_about", doing=doing, thing=thing, **named)
    if object_first:
        about = draw(rng, "odd_about_object", doing=doing, thing=thing)
    if rng.random() < 0.2:
        about = f"{about.rstrip('.')}. {draw(rng, 'odd_about_end')}"
    return OddTool(name, doing, thing, parameters, about, getter, object_first)


def family(rng: Random, most: int) -> list[OddTool]:
    """Tools with different names, often with a common noun, verb or namespace, so that the model
    must look closely.
    """
    count = rng.randint(1, most)
    space = ""
    if rng.random() < 0.22:
        space = f"{wide_word(rng)}{rng.choice(('.', '.', '__', '/', ':'))}"
    style = rng.choice((0, 0, 0, 1, 1, 2, 3))
    shared_noun, shared_verb = draw(rng, "wide_noun"), draw(rng, "wide_verb")
    tools: dict[str, OddTool] = {}
    acts: set[tuple[str, str]] = set()
    while len(tools) < count:
        kind = rng.random()
        noun = shared_noun if kind < 0.2 else ""
        tool = odd_tool(rng, noun, shared_verb if 0.15 < kind < 0.3 else "", space, style)
        is_taken = tool.getter and any(tool.noun == one for _, one in acts)
        if (tool.verb, tool.noun) not in acts and not is_taken:
            acts.add((tool.verb, tool.noun))
            tools.setdefault(tool.name, tool)
    return list(tools.values())


# -- requests


def listed(values: list[Any]) -> str:
    """The values with commas and `and`."""
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def said(rng: Random, value: Value, last: bool) -> str:
    """A value as one types it; words with spaces are quoted, unless they end the request."""
    if isinstance(value, list):
        return listed(value)
    has_spaces = isinstance(value, str) and " " in value
    ends_bare = has_spaces and last and rng.random() < 0.5
    if isinstance(value, str) and ((has_spaces and not ends_bare) or rng.random() < 0.1):
        mark = rng.choice(("'", "'", '"', "`"))
        return f"{mark}{value}{mark}"
    return str(value)


def _clause(rng: Random, parameter: Parameter, value: Value, last: bool) -> str:
    """A name and a value in one of several forms."""
    if isinstance(value, bool):
        name = rng.choice((parameter.name, parameter.words))
        on, off = rng.choice((("true", "false"), ("yes", "no"), ("on", "off")))
        return draw(rng, "switches", name=name, word=on if value else off)
    name = parameter.words if rng.random() < 0.7 else parameter.name
    return draw(rng, "clauses", name=name, text=said(rng, value, last))


def _clauses(rng: Random, chosen: list[tuple[Parameter, Value]]) -> str:
    clauses = [_clause(rng, *pair, pair is chosen[-1]) for pair in chosen]
    if len(clauses) == 1:
        return clauses[0]
    if rng.random() < 0.3:
        return ", ".join(clauses)
    return f"{', '.join(clauses[:-1])} {rng.choice(('and', 'and', 'with'))} {clauses[-1]}"


def _deed(rng: Random, tool: OddTool, value: str) -> str:
    """The task, with the value of the first parameter if it needs no name."""
    if tool.object_first and value:
        return f"{tool.verb} {rng.choice(('the ', 'the ', 'the ', '', 'a '))}{value}"
    if tool.getter and value:
        return f"{tool.verb} the {tool.noun} {rng.choice(('of', 'of', 'for', 'of the'))} {value}"
    act = f"{tool.verb} {rng.choice(('the ', 'the ', 'a ', ''))}{tool.noun}"
    if value:
        link = rng.choice(("", "of", "for", "in", "to", "from", "called", "named"))
        act = f"{act} {link} {value}".replace("  ", " ")
    return act


def _in_words(rng: Random, tool: OddTool, chosen: list[tuple[Parameter, Value]]) -> str:
    value = ""
    can_be_bare = chosen and chosen[0][0] is tool.parameters[0]
    can_be_bare = can_be_bare and not isinstance(chosen[0][1], bool | list)
    if can_be_bare and (tool.object_first or tool.getter or rng.random() < 0.6):
        value = said(rng, chosen[0][1], len(chosen) == 1)
    rest = chosen[1:] if value else chosen
    if tool.getter and value and rng.random() < 0.6:
        text = draw(rng, "get_requests", noun=tool.noun, value=value)
        is_question = text.startswith("Wh")
    else:
        text = draw(rng, "deed_requests", deed=_deed(rng, tool, value))
        text = text[0].upper() + text[1:]
        is_question = text.startswith(("Can", "Could", "Would"))
    if rest:
        joint = rng.choice((" with", " with", " with", " and", ",", ":", " using", " where"))
        text += f"{joint} {_clauses(rng, rest)}"
    if rng.random() < 0.12 and not is_question:
        return f"{text}, please."
    return text + ("?" if is_question else rng.choice((".", ".", ".", "", "!")))


def _by_name(rng: Random, tool: OddTool, chosen: list[tuple[Parameter, Value]]) -> str:
    """A request that names the tool."""
    start = draw(rng, "requests_by_name", tool=tool.name)
    if not chosen:
        return f"{start}."
    if rng.random() < 0.2:
        values = {parameter.name: value for parameter, value in chosen}
        return f"{start} with {json.dumps(values, ensure_ascii=False)}"
    joint = rng.choice((" with", " with", ":", " for"))
    return f"{start}{joint} {_clauses(rng, chosen)}{rng.choice(('.', '.', ''))}"


def ask(rng: Random, tool: OddTool) -> tuple[str, Call]:
    """A request and its call. Optional parameters are given only if the request names them."""
    while True:
        chosen = [
            (parameter, parameter.draw(rng))
            for parameter in tool.parameters
            if not parameter.optional or rng.random() < 0.4
        ]
        make = _by_name if rng.random() < 0.2 else _in_words
        request = make(rng, tool, chosen)
        if rng.random() < 0.12 and request[0].isupper() and not request.startswith(tool.name):
            request = request[0].lower() + request[1:]
        if is_allowed(request):
            arguments = {parameter.name: value for parameter, value in chosen}
            return request, {"name": tool.name, "arguments": arguments}


def ask_sentence(rng: Random, tool: OddTool) -> tuple[str, Call]:
    """A request that ends with a mark, and its call."""
    request, call = ask(rng, tool)
    return request if request[-1] in ".?!" else f"{request}.", call


def ask_for_many(rng: Random, tool: OddTool) -> tuple[str, list[Call]] | None:
    """A request for two to four calls of the same tool, which has one parameter; None for other
    tools.
    """
    if len(tool.parameters) != 1 or tool.parameters[0].schema["type"] not in ("string", "integer"):
        return None
    parameter = tool.parameters[0]
    values = [parameter.draw(rng) for _ in some(rng, (2, 2, 3, 4))]
    if any(" " in str(value) for value in values):
        return None
    if tool.object_first:
        deed = f"{tool.verb} {listed(values)}"
    elif tool.getter:
        deed = f"{tool.verb} the {tool.noun} of {listed(values)}"
    else:
        link = rng.choice(("for", "of", "with"))
        deed = f"{tool.verb} the {tool.noun} {link} {listed(values)}"
    request = draw(rng, "many_requests", deed=deed)
    request = request[0].upper() + request[1:]
    if not is_allowed(request):
        return None
    return request, [{"name": tool.name, "arguments": {parameter.name: value}} for value in values]
