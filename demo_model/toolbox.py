"""Tools for training: a catalogue of usual ones, and invented ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import words
from words import lists_of

Value = str | int


@dataclass(frozen=True)
class Argument:
    """An argument: JSON type, source of values, and choices of an enum."""

    name: str
    kind: str
    draw: Callable[[Random], Value]
    choices: tuple[str, ...] = ()

    def schema(self, described: bool) -> dict[str, Any]:
        """Its JSON schema."""
        schema: dict[str, Any] = {"type": self.kind}
        if described:
            schema["description"] = f"The {self.name.replace('_', ' ')}"
        if self.choices:
            schema["enum"] = list(self.choices)
        return schema


@dataclass(frozen=True)
class Tool:
    """A tool and requests for it, with its arguments in braces."""

    name: str
    description: str
    arguments: tuple[Argument, ...]
    requests: tuple[str, ...]

    def schema(self, rng: Random, described: bool, sort_keys: bool) -> dict[str, Any]:
        """The definition of the tool as OpenAI clients send it."""
        parameters = {
            "type": "object",
            "properties": {arg.name: arg.schema(described) for arg in self.arguments},
            "required": [arg.name for arg in self.arguments],
        }
        function: dict[str, Any] = {
            "name": self.name,
            "description": self.description,
            "parameters": parameters,
        }
        schema = {"type": "function", "function": function}
        return json.loads(json.dumps(schema, sort_keys=True)) if sort_keys else schema

    def ask_for_two(self, rng: Random) -> tuple[str, list[dict[str, Any]]] | None:
        """A request for two calls, such as `Weather in Oslo and Lima?`; None for tools whose
        argument may contain `and`.
        """
        if len(self.arguments) != 1 or self.arguments[0].name not in {
            "city",
            "location",
            "name",
            "path",
            "item",
        }:
            return None
        argument = self.arguments[0]
        first, second = argument.draw(rng), argument.draw(rng)
        request = rng.choice(self.requests).format(**{argument.name: f"{first} and {second}"})
        return request, [
            {"name": self.name, "arguments": {argument.name: value}} for value in (first, second)
        ]

    def ask(self, rng: Random) -> tuple[str, dict[str, Any]]:
        """A request and its call."""
        values = {arg.name: arg.draw(rng) for arg in self.arguments}
        request = rng.choice(self.requests).format(**values)
        return request, {"name": self.name, "arguments": values}


def _text(name: str, items: list[str], invented: float = 0.2, capital: bool = False) -> Argument:
    def draw(rng: Random) -> str:
        return words.invent(rng, capital) if rng.random() < invented else rng.choice(items)

    return Argument(name, "string", draw)


def _whole(name: str, low: int, high: int) -> Argument:
    return Argument(name, "integer", lambda rng: rng.randint(low, high))


def _choice(name: str, *choices: str) -> Argument:
    return Argument(name, "string", lambda rng: rng.choice(choices), choices)


def _file_name(rng: Random) -> str:
    folder = f"{words.common_word(rng)}/" if rng.random() < 0.3 else ""
    return f"{folder}{words.common_word(rng)}.{rng.choice(['txt', 'py', 'md', 'json', 'csv', 'log', 'yaml'])}"


def phrase(rng: Random) -> str:
    """One to four words."""
    parts = [
        words.invent(rng) if rng.random() < 0.15 else words.common_word(rng)
        for _ in range(rng.randint(1, 4))
    ]
    return " ".join(parts)


CITY = _text("city", words.CITIES, capital=True)
LOCATION = _text("location", words.CITIES, capital=True)
PERSON = _text("name", words.NAMES, capital=True)
PATH = Argument("path", "string", _file_name)
QUERY = Argument("query", "string", phrase)
TEXT = Argument("text", "string", phrase)
CATALOGUE = (
    Tool(
        "get_weather",
        "Get the weather of a city",
        (CITY,),
        (
            "What is the weather in {city}?",
            "How is the weather in {city} today?",
            "What's the weather like in {city}?",
            "Weather in {city}, please.",
        ),
    ),
    Tool(
        "get_weather",
        "Get the current weather",
        (LOCATION,),
        (
            "What is the weather in {location}?",
            "How is the weather in {location}?",
            "Tell me the weather in {location}.",
        ),
    ),
    Tool(
        "get_current_weather",
        "Get the current weather in a given location",
        (LOCATION, _choice("unit", "celsius", "fahrenheit")),
        (
            "What is the weather in {location} in {unit}?",
            "Give me the weather of {location} in {unit}.",
        ),
    ),
    Tool(
        "get_forecast",
        "Get the forecast for some days",
        (CITY, _whole("days", 1, 14)),
        (
            "Give me the forecast of {city} for {days} days.",
            "What is the {days} day forecast in {city}?",
        ),
    ),
    Tool(
        "get_time",
        "Get the local time of a city",
        (CITY,),
        ("What time is it in {city}?", "Tell me the time in {city}."),
    ),
    Tool(
        "find_item",
        "Find where an item is stored",
        (_text("item", words.THINGS),),
        ("Find the {item}.", "Look up where the {item} is stored.", "Where is the {item} stored?"),
    ),
    Tool(
        "call_person", "Call a person by phone", (PERSON,), ("Call {name}.", "Please phone {name}.")
    ),
    Tool(
        "send_message",
        "Send a message to a person",
        (_text("to", words.NAMES, capital=True), TEXT),
        ("Send {to} the message '{text}'.", "Send a message to {to}: {text}", "Tell {to}: {text}"),
    ),
    Tool(
        "add",
        "Add two numbers",
        (_whole("a", 0, 999), _whole("b", 0, 999)),
        ("Add {a} and {b}.", "What is {a} plus {b}?", "What is {a} + {b}?"),
    ),
    Tool(
        "multiply",
        "Multiply two numbers",
        (_whole("a", 0, 99), _whole("b", 0, 99)),
        ("Multiply {a} by {b}.", "What is {a} times {b}?"),
    ),
    Tool(
        "read_file",
        "Read a file",
        (PATH,),
        (
            "Read {path}.",
            "Read the file {path}.",
            "Show me {path}.",
            "What is in {path}?",
            "Open the file {path}.",
        ),
    ),
    Tool(
        "write_file",
        "Write text to a file",
        (PATH, Argument("content", "string", phrase)),
        ("Write '{content}' to {path}.", "Write the text '{content}' into the file {path}."),
    ),
    Tool(
        "list_files",
        "List the files of a folder",
        (_text("path", words.PLACES),),
        ("List the files of {path}.", "Which files are in {path}?"),
    ),
    Tool(
        "run_command",
        "Run a shell command",
        (
            Argument(
                "command",
                "string",
                lambda rng: f"{rng.choice(['ls', 'cat', 'make', 'git', 'grep'])} {phrase(rng)}",
            ),
        ),
        ("Run '{command}'.", "Run the command {command}", "Please run `{command}`."),
    ),
    Tool(
        "search",
        "Search for something",
        (QUERY,),
        ("Search for {query}.", "Search: {query}", "Please search for '{query}'."),
    ),
    Tool(
        "web_search",
        "Search the web",
        (QUERY,),
        ("Search the web for {query}.", "Look up '{query}' on the web."),
    ),
    Tool(
        "set_alarm",
        "Set an alarm",
        (
            Argument(
                "time",
                "string",
                lambda rng: f"{rng.randint(5, 22)}:{rng.choice(['00', '15', '30', '45'])}",
            ),
        ),
        ("Set an alarm for {time}.", "Wake me at {time}."),
    ),
    Tool(
        "set_timer",
        "Set a timer",
        (_whole("minutes", 1, 90),),
        ("Set a timer for {minutes} minutes.", "Timer of {minutes} minutes, please."),
    ),
    Tool(
        "play_song",
        "Play a song",
        (Argument("title", "string", phrase),),
        ("Play '{title}'.", "Play the song {title}."),
    ),
    Tool(
        "translate",
        "Translate a text",
        (TEXT, _text("language", words.LANGUAGES, 0.0)),
        ("Translate '{text}' to {language}.", "How do you say '{text}' in {language}?"),
    ),
    Tool(
        "set_light",
        "Switch a light",
        (_text("room", words.PLACES), _choice("state", "on", "off")),
        ("Turn {state} the light in the {room}.", "Switch the {room} light {state}."),
    ),
    Tool(
        "order_food",
        "Order some food",
        (_text("dish", words.FOODS), _whole("count", 1, 12)),
        ("Order {count} times {dish}.", "Please order {count} {dish}."),
    ),
    Tool(
        "lookup_user",
        "Look up a user by name",
        (PERSON,),
        ("Look up the user {name}.", "Who is {name}? Look it up."),
    ),
)
VERBS = (
    "get find show check delete create open close start stop lock book move play read "
    "update list count buy sell paint clean test save load"
).split()
_LISTED = lists_of("toolbox")
NOUNS = _LISTED["NOUNS"]
KINDS: tuple[Callable[[Random], Argument], ...] = (
    lambda rng: CITY,
    lambda rng: PERSON,
    lambda rng: _text("item", words.THINGS),
    lambda rng: _whole("id", 1, 9999),
    lambda rng: PATH,
    lambda rng: QUERY,
    lambda rng: _text("room", words.PLACES),
    lambda rng: _text("colour", words.COLOURS),
    lambda rng: _whole("count", 1, 99),
    lambda rng: _text("day", words.DAYS),
    lambda rng: _choice("mode", *rng.sample(words.STEMS, 3)),
    lambda rng: _choice("size", "small", "medium", "large"),
    lambda rng: _whole("year", 1950, 2030),
    lambda rng: Argument(words.invent(rng), "string", words.anything),
    lambda rng: Argument(f"{rng.choice(words.ATTRIBUTES)}", "string", words.token_like),
    lambda rng: _whole(rng.choice(("level", "number", "amount", "limit", "hours", "port")), 0, 500),
)


def strange_name(rng: Random) -> str:
    """An invented name of an argument."""
    kind = rng.randrange(4)
    if kind == 0:
        return words.invent(rng)
    if kind == 1:
        return f"{words.common_word(rng)}_{rng.choice(NOUNS)}"
    return rng.choice(NOUNS) if kind == 2 else words.common_word(rng)


def made_up(rng: Random, strange: float = 0.0) -> Tool:
    """A tool named `verb_noun`, whose requests use these words."""
    verb = words.invent(rng) if rng.random() < 0.15 else rng.choice(VERBS)
    noun = words.invent(rng) if rng.random() < 0.2 else rng.choice(NOUNS)
    first, second = rng.choice(KINDS)(rng), rng.choice(KINDS)(rng)
    if strange and rng.random() < strange:
        first, second = (
            replace(first, name=strange_name(rng)),
            replace(second, name=strange_name(rng)),
        )
        if strange > 0.6 and rng.random() < 0.5:
            noun = f"{words.common_word(rng)} {noun}"
    name = (
        f"{verb}_{noun.replace(' ', '_')}"
        if rng.random() < 0.85
        else f"{verb}{noun.title().replace(' ', '')}"
    )
    start = rng.choice(
        (
            f"{verb.capitalize()} the {noun}",
            f"Please {verb} the {noun}",
            f"Can you {verb} the {noun}",
            f"{verb.capitalize()} a {noun}",
        )
    )
    end = "?" if start.startswith("Can") else "."
    one = (
        f"{start} for {{{first.name}}}{end}",
        f"{start} of {{{first.name}}}{end}",
        f"{start} with {first.name} {{{first.name}}}{end}",
        f"{start} {{{first.name}}}{end}",
        f"{start} in {{{first.name}}}{end}",
    )
    description = rng.choice(
        (
            f"{verb.capitalize()} the {noun}",
            f"{verb.capitalize()} a {noun} by {first.name}",
            f"{verb.capitalize()} {noun} of a {first.name}",
            f"{verb.capitalize()}s the {noun}.",
        )
    )
    if rng.random() < 0.5 or first.name == second.name:
        return Tool(name, description, (first,), one)
    two = tuple(
        f"{request[:-1]} {joint} {second.name} {{{second.name}}}{end}"
        for request in one
        for joint in ("and", "with", "for")
    )
    return Tool(name, description, (first, second), two)
