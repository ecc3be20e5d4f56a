"""Invented tools, whose names, descriptions and schemas the model must read in the prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import words
from wide_words import code, english, is_allowed, noun, verb, wide_phrase, wide_value, wide_word

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
class OddTool:
    """A tool. verb, noun: what it does. parameters: in their order."""

    name: str
    verb: str
    noun: str
    parameters: tuple[Parameter, ...]
    description: str
    getter: bool = False
    """It looks something up: `What is the NOUN of VALUE?`."""
    object_first: bool = False
    """The first parameter is what the verb acts on: `VERB the VALUE`."""

    def schema(self, rng: Random, style: SchemaStyle) -> dict[str, Any]:
        """The tool as an OpenAI client sends it."""
        properties: dict[str, Any] = {}
        for parameter in self.parameters:
            made: dict[str, Any] = {"type": parameter.schema["type"]}
            if style.titled:
                made = {"title": parameter.words.title(), **made}
            if style.described or rng.random() < 0.15:
                made["description"] = _told(rng, parameter, self.noun)
            properties[parameter.name] = made | parameter.schema
        parameters: dict[str, Any] = {"type": "object", "properties": properties}
        required = [parameter.name for parameter in self.parameters if not parameter.optional]
        if required or not style.bare:
            parameters["required"] = required
        if style.closed:
            parameters["additionalProperties"] = False
        function: dict[str, Any] = {
            "name": self.name,
            "description": self.description,
            "parameters": parameters,
        }
        if style.strict:
            function["strict"] = True
        schema = {"type": "function", "function": function}
        return json.loads(json.dumps(schema, sort_keys=True)) if style.sort_keys else schema


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
        return cls(
            rng.random() < 0.4,
            rng.random() < 0.12,
            rng.random() < 0.25,
            rng.random() < 0.1,
            rng.random() < 0.1,
            rng.random() < 0.2,
        )


def spaced(name: str) -> str:
    """Split `snake_case` and `camelCase` into words."""
    out = ""
    for before, letter in zip(" " + name, name, strict=False):
        if letter in "_-.":
            out += " "
        else:
            out += (" " if letter.isupper() and before.islower() else "") + letter.lower()
    return " ".join(out.split())


def _told(rng: Random, parameter: Parameter, thing: str) -> str:
    name = parameter.words
    return rng.choice(
        (
            f"The {name}",
            f"The {name} of the {thing}",
            f"{name.capitalize()} to use",
            f"{name.capitalize()}.",
            f"Which {name} to take",
            wide_phrase(rng, 4),
        )
    )


def cased_name(rng: Random, parts: list[str], style: int) -> str:
    """Join words in a style."""
    if style == 0:
        return "_".join(parts)
    if style == 1:
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    if style == 2:
        return "".join(part.capitalize() for part in parts)
    return "-".join(parts)


def _parameter_name(rng: Random, style: int, taken: set[str]) -> str:
    while True:
        kind = rng.random()
        parts = (
            [noun(rng)]
            if kind < 0.62
            else [wide_word(rng)]
            if kind < 0.75
            else [english(rng), noun(rng)]
        )
        name = cased_name(rng, parts, style if len(parts) > 1 else 0)
        if name not in taken and is_allowed(name):
            taken.add(name)
            return name


def _date(rng: Random) -> str:
    return f"{rng.randint(1990, 2039)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def path(rng: Random) -> str:
    """A file path."""
    folders = "".join(f"{wide_word(rng)}/" for _ in range(rng.choice((0, 0, 1, 1, 2, 3))))
    name = "_".join(wide_word(rng) for _ in range(rng.choice((1, 1, 2))))
    ending = rng.choice(
        "txt py md json csv log yaml toml ini cfg ts js rs go c h cpp html css sh sql xml conf env".split()
    )
    return f"{'/' if folders and rng.random() < 0.3 else ''}{folders}{name}.{ending}"


_STRINGS: tuple[Callable[[Random], str], ...] = (
    wide_value,
    wide_value,
    wide_value,
    lambda rng: wide_word(rng),
    lambda rng: rng.choice((*words.NAMES, *words.CITIES)),
    lambda rng: wide_word(rng).capitalize(),
    code,
    path,
    _date,
    lambda rng: words.digits(rng, 1, 5),
    lambda rng: f"{wide_word(rng)}@{wide_word(rng)}.{rng.choice(('com', 'org', 'net', 'io'))}",
    lambda rng: f"https://{wide_word(rng)}.{rng.choice(('com', 'org', 'dev'))}/{wide_word(rng)}",
    lambda rng: f"{rng.randint(0, 23):02d}:{rng.choice(('00', '15', '30', '45'))}",
)


def _phrases(rng: Random) -> str:
    return wide_phrase(rng, 3)


def _parameter(rng: Random, style: int, taken: set[str], first: bool) -> Parameter:
    name = _parameter_name(rng, style, taken)
    optional = not first and rng.random() < 0.35
    kind = rng.random()
    if kind < 0.5 or (first and kind < 0.75):
        draw = rng.choice(_STRINGS) if rng.random() < 0.85 else _phrases
        return Parameter(name, {"type": "string"}, draw, optional)
    if kind < 0.7:
        most = rng.choice((9, 12, 99, 100, 500, 9999))
        return Parameter(name, {"type": "integer"}, lambda r: r.randint(0, most), optional)
    if kind < 0.78:
        return Parameter(
            name,
            {"type": "number"},
            lambda r: round(r.uniform(0, 100), r.choice((1, 1, 2))),
            optional,
        )
    if kind < 0.86:
        return Parameter(name, {"type": "boolean"}, lambda r: r.random() < 0.5, optional)
    if kind < 0.95:
        choices = list(dict.fromkeys(wide_word(rng) for _ in range(rng.randint(2, 5))))
        return Parameter(
            name, {"type": "string", "enum": choices}, lambda r: r.choice(choices), optional
        )
    return Parameter(
        name,
        {"type": "array", "items": {"type": "string"}},
        lambda r: [wide_value(r) for _ in range(r.randint(1, 4))],
        optional,
    )


def odd_tool(
    rng: Random,
    shared_noun: str = "",
    shared_verb: str = "",
    space: str = "",
    style: int | None = None,
) -> OddTool:
    """An invented tool. A shared noun, verb or namespace makes it part of a family."""
    while True:
        made = _odd_tool(
            rng,
            shared_noun,
            shared_verb,
            space,
            rng.choice((0, 0, 0, 1, 1, 2, 3)) if style is None else style,
        )
        if is_allowed(f"{made.name} {made.description} {spaced(made.name)}"):
            return made


def _odd_tool(rng: Random, shared_noun: str, shared_verb: str, space: str, style: int) -> OddTool:
    getter = not shared_verb and rng.random() < 0.3
    doing = "get" if getter and rng.random() < 0.7 else shared_verb or verb(rng)
    thing = shared_noun or (noun(rng) if rng.random() < 0.7 else f"{english(rng)} {noun(rng)}")
    taken: set[str] = set()
    count = rng.choice((1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 4, 5, 6))
    parameters = tuple(_parameter(rng, style, taken, not place) for place in range(count))
    object_first = not getter and rng.random() < 0.35 and parameters[0].schema == {"type": "string"}
    if object_first:
        thing = parameters[0].words
    order = rng.random()
    named = [doing, *thing.split()]
    parts = (
        named
        if order < 0.82
        else [*thing.split(), doing]
        if order < 0.9
        else [doing]
        if order < 0.95
        else [wide_word(rng), wide_word(rng)]
    )
    name = cased_name(rng, parts, style)
    if space:
        name = f"{space}{name}"
    others = [parameter.words for parameter in parameters]
    about = rng.choice(
        (
            f"{doing.capitalize()} the {thing}",
            f"{doing.capitalize()} a {thing}",
            f"{doing.capitalize()} a {thing}.",
            f"{doing.capitalize()} the {thing} of a {others[0]}",
            f"{doing.capitalize()} a {thing} by {others[-1]}",
            f"{doing.capitalize()} a {thing} with {' and '.join(others[:3])}",
            f"This tool can {doing} the {thing}.",
            f"Use this to {doing} {thing}.",
        )
    )
    if object_first:
        about = rng.choice(
            (
                f"{doing.capitalize()} a {thing}",
                f"{doing.capitalize()} the {thing}.",
                f"{doing.capitalize()} any {thing}",
            )
        )
    if rng.random() < 0.2:
        beginning = rng.choice(
            ("Returns", "Gives", "Needs", "Only for", "Works with", "Returns the")
        )
        about = f"{about.rstrip('.')}. {beginning} {wide_phrase(rng, 6)}."
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
    shared_noun, shared_verb = noun(rng), verb(rng)
    tools: dict[str, OddTool] = {}
    acts: set[tuple[str, str]] = set()
    while len(tools) < count:
        kind = rng.random()
        tool = odd_tool(
            rng,
            shared_noun if kind < 0.2 else "",
            shared_verb if 0.15 < kind < 0.3 else "",
            space,
            style,
        )
        if (tool.verb, tool.noun) not in acts and not (
            tool.getter and any(tool.noun == one for _, one in acts)
        ):
            acts.add((tool.verb, tool.noun))
            tools.setdefault(tool.name, tool)
    return list(tools.values())
