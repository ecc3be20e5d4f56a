"""Tool results in the formats of clients, and answers that state them."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import odd_tools
import open_notes
import toolbox
from conversation import Conversation
from rules import draw, function, some

Told = tuple[str, str]
"""A result as the tool gives it, and as the answer tells it."""


@function
def any_note(rng: Random) -> str:
    """A generated note."""
    return open_notes.draw_fact(rng).note


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
    return None if kind < 0.45 else draw(rng, "told_words")


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
    return {draw(rng, "told_key"): _scalar(rng) for _ in range(rng.randint(1, most))}


def _object(rng: Random) -> dict[str, Any]:
    """An object, sometimes with a nested object or list."""
    found = _record(rng, rng.choice((2, 3, 4, 6)))
    kind = rng.random()
    if kind < 0.32:
        if kind < 0.15:
            value: Any = _record(rng, 3)
        elif kind < 0.25:
            value = [draw(rng, "told_words") for _ in range(rng.randint(1, 4))]
        else:
            value = _records(rng, 2, 3)
        found[draw(rng, "told_key")] = value
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
    value = {"error": draw(rng, "errors")} if rng.random() < 0.06 else _object(rng)
    return _dumped(rng, value), ", ".join(_leaves(value))


def list_result(rng: Random) -> Told:
    """A list of strings or of objects: JSON, bullets, numbers, lines."""
    kind = rng.random()
    if kind < 0.35:
        records = _records(rng, 3, 3)
        return _dumped(rng, records), "; ".join(", ".join(_leaves(record)) for record in records)
    items = [draw(rng, "told_item").rstrip(".") for _ in some(rng, (1, 2, 3, 3, 4, 5))]
    told = ", ".join(items)
    if kind < 0.6:
        return _dumped(rng, items), told
    if kind < 0.75:
        items = [f"- {item}" for item in items]
    elif kind < 0.83:
        items = [f"{place}. {item}" for place, item in enumerate(items, 1)]
    return "\n".join(items), told


def table_result(rng: Random) -> Told:
    """A table in Markdown, or separated by commas, tabs or bars."""
    names = list(dict.fromkeys(draw(rng, "told_key") for _ in some(rng, (2, 2, 3, 4))))
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
        notes = [any_note(rng) for _ in some(rng, (1, 1, 1, 2, 2, 3))]
        text = " ".join(note if note.endswith(".") else f"{note}." for note in notes)
    elif kind < 0.7:
        text = f"{draw(rng, 'compound')}: {draw(rng, 'told_words')}"
        text = text[0].upper() + text[1:]
    elif kind < 0.85:
        parts = [draw(rng, "told_words").rstrip("."), f"{_number(rng)} {draw(rng, 'units')}"]
        parts.append(draw(rng, "compound"))
        text = ", ".join(rng.sample(parts, rng.randint(2, 3)))
    elif kind < 0.93:
        text = _as_text(_scalar(rng))
    else:
        text = f"Error: {draw(rng, 'errors')}"
    return text, text.rstrip(".")


def result(rng: Random) -> Told:
    """A result of any format."""
    makers = (json_result, list_result, table_result, text_result)
    return rng.choices(makers, (34, 22, 18, 26))[0](rng)


def conversation(rng: Random) -> Conversation:
    """Requests with calls, whose results are stated; often without the definitions of the tools."""
    offered = odd_tools.family(rng, rng.choice((1, 1, 2)))
    talk = toolbox.begin(rng, [])
    talk.tools = None
    if rng.random() < 0.35:
        style = odd_tools.SchemaStyle.draw(rng)
        talk.tools = [tool.schema(rng, style) for tool in offered]
    for _ in some(rng, (1, 2, 2, 3)):
        asked = [
            odd_tools.ask_sentence(rng, rng.choice(offered)) for _ in some(rng, (1, 1, 1, 1, 1, 2))
        ]
        results = [result(rng) for _ in asked]
        request = " ".join(text for text, _ in asked)
        toolbox.answer_with(talk, request, [([call for _, call in asked], results)])
    return talk
