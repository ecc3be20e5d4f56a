"""Tool results in the formats of clients, and answers that state them."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import odd_requests
import odd_tools
import open_notes
import open_words
import tool_tasks
import wide_words
from conversation import Conversation
from words import lists_of

_LISTED = lists_of("told_results")
_KEYS = _LISTED["_KEYS"]
_CONDITIONS = "sunny cloudy rainy clear windy foggy open closed active done pending ok".split()
_ERRORS = (
    *("not found", "no access", "out of order", "unknown name", "permission denied", "timeout"),
    *("no such file", "connection refused", "invalid argument", "quota exceeded", "not allowed"),
)
Told = tuple[str, str]
"""A result as the tool gives it, and as the answer tells it."""


def _key(rng: Random) -> str:
    first = rng.choice(_KEYS) if rng.random() < 0.5 else open_words.noun(rng)
    if rng.random() < 0.65:
        return first
    second = open_words.noun(rng)
    return rng.choice((f"{first}_{second}", f"{first}{second.capitalize()}", f"{first}-{second}"))


def _words(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.2:
        return rng.choice(_CONDITIONS)
    if kind < 0.4:
        return open_words.compound(rng)
    if kind < 0.55:
        return open_words.person(rng)
    if kind < 0.65:
        return open_words.city(rng)
    if kind < 0.72:
        return open_words.start_upper(open_words.compound(rng))
    if kind < 0.8:
        return f"{rng.randint(1990, 2030)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    if kind < 0.86:
        return f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    if kind < 0.92:
        return open_notes.draw(rng).note
    return open_words.value(rng)


def _number(rng: Random) -> int | float:
    if rng.random() < 0.3:
        return round(rng.uniform(-20, 200), rng.choice((1, 1, 2)))
    return rng.choice((rng.randint(-20, 100), rng.randint(0, 9999), rng.randint(0, 999_999)))


def _scalar(rng: Random) -> Any:
    kind = rng.random()
    if kind < 0.35:
        return _number(rng)
    if kind < 0.43:
        return rng.random() < 0.5
    return None if kind < 0.45 else _words(rng)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _leaves(value: Any, key: str = "") -> list[str]:
    """The values of an object in order, without names of groups."""
    if isinstance(value, dict):
        return [leaf for name, part in value.items() for leaf in _leaves(part, name)]
    if isinstance(value, list) and all(not isinstance(part, dict | list) for part in value):
        return [f"{key} {', '.join(map(_as_text, value)) or 'none'}".strip()]
    if isinstance(value, list):
        return ["; ".join(", ".join(_leaves(part, key)) for part in value)]
    return [f"{key} {_as_text(value)}".strip()]


def _record(rng: Random, most: int) -> dict[str, Any]:
    return {_key(rng): _scalar(rng) for _ in range(rng.randint(1, most))}


def _object(rng: Random) -> dict[str, Any]:
    """An object, sometimes with a nested object or list."""
    found = _record(rng, rng.choice((2, 3, 4, 6)))
    kind = rng.random()
    if kind < 0.15:
        found[_key(rng)] = _record(rng, 3)
    elif kind < 0.25:
        found[_key(rng)] = [_words(rng) for _ in range(rng.randint(1, 4))]
    elif kind < 0.32:
        found[_key(rng)] = _records(rng, 2, 3)
    return found


def _records(rng: Random, keys: int, most: int) -> list[dict[str, Any]]:
    names = list(_record(rng, keys))
    return [{name: _scalar(rng) for name in names} for _ in range(rng.randint(1, most))]


def _dumped(rng: Random, value: Any) -> str:
    if rng.random() < 0.25:
        return json.dumps(value, indent=2, ensure_ascii=False)
    if rng.random() < 0.2:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


def json_result(rng: Random) -> Told:
    """A JSON object."""
    value = {"error": rng.choice(_ERRORS)} if rng.random() < 0.06 else _object(rng)
    return _dumped(rng, value), ", ".join(_leaves(value))


def list_result(rng: Random) -> Told:
    """A list of strings or of objects: JSON, bullets, numbers, lines."""
    kind = rng.random()
    if kind < 0.35:
        records = _records(rng, 3, 3)
        return _dumped(rng, records), "; ".join(", ".join(_leaves(record)) for record in records)
    items = [_item(rng) for _ in range(rng.choice((1, 2, 3, 3, 4, 5)))]
    told = ", ".join(items)
    if kind < 0.6:
        return _dumped(rng, items), told
    if kind < 0.75:
        return "\n".join(f"- {item}" for item in items), told
    if kind < 0.83:
        return "\n".join(f"{place}. {item}" for place, item in enumerate(items, 1)), told
    return "\n".join(items), told


def _item(rng: Random) -> str:
    if rng.random() < 0.3:
        return f"{wide_words.wide_word(rng)}.{rng.choice(('txt', 'md', 'py', 'json', 'csv'))}"
    return _words(rng).rstrip(".")


def table_result(rng: Random) -> Told:
    """A table in Markdown, or separated by commas, tabs or bars."""
    names = list(dict.fromkeys(_key(rng) for _ in range(rng.choice((2, 2, 3, 4)))))
    count = rng.choice((1, 2, 2, 3))
    rows = [[_as_text(_scalar(rng)).replace(",", "") for _ in names] for _ in range(count)]
    told = "; ".join(
        ", ".join(f"{name} {cell}" for name, cell in zip(names, row, strict=True)) for row in rows
    )
    if rng.random() < 0.5:
        lines = [names, ["---"] * len(names), *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines), told
    mark = rng.choice((",", ",", ", ", "\t", " | ", ";"))
    return "\n".join(mark.join(line) for line in (names, *rows)), told


def text_result(rng: Random) -> Told:
    """One or two sentences, some words, or a value."""
    kind = rng.random()
    if kind < 0.5:
        notes = [open_notes.draw(rng).note for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))]
        text = " ".join(note if note.endswith(".") else f"{note}." for note in notes)
    elif kind < 0.7:
        text = f"{open_words.start_upper(open_words.compound(rng))}: {_words(rng)}"
    elif kind < 0.85:
        parts = [_words(rng).rstrip("."), f"{_number(rng)} {rng.choice(open_words.UNITS)}"]
        parts.append(open_words.compound(rng))
        text = ", ".join(rng.sample(parts, rng.randint(2, 3)))
    elif kind < 0.93:
        text = _as_text(_scalar(rng))
    else:
        text = f"Error: {rng.choice(_ERRORS)}"
    return text, text.rstrip(".")


def result(rng: Random) -> Told:
    """A result of any format."""
    makers = (json_result, list_result, table_result, text_result)
    return rng.choices(makers, (34, 22, 18, 26))[0](rng)


def conversation(rng: Random) -> Conversation:
    """Requests with calls, whose results are stated; often without the definitions of the tools."""
    tools = odd_tools.family(rng, rng.choice((1, 1, 2)))
    talk = tool_tasks.begin(rng, [])
    talk.tools = None
    if rng.random() < 0.35:
        style = odd_tools.SchemaStyle.draw(rng)
        talk.tools = [tool.schema(rng, style) for tool in tools]
    for _ in range(rng.choice((1, 2, 2, 3))):
        calls = []
        requests = []
        for _ in range(rng.choice((1, 1, 1, 1, 1, 2))):
            request, call = odd_requests.ask(rng, rng.choice(tools))
            requests.append(request if request[-1] in ".?!" else f"{request}.")
            calls.append(call)
        talk.say("user", " ".join(requests))
        talk.messages.append(tool_tasks.call_message(calls))
        results = [result(rng) for _ in calls]
        for text, _ in results:
            talk.say("tool", text)
        talk.say("assistant", tool_tasks.told_results([told for _, told in results]))
    return talk
