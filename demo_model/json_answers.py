"""JSON answers: requested in a few words, by a schema or with given values, or forced by a grammar.

A server that constrains an answer does not tell the model the schema. The model sees "Write JSON."
and its own `{"` with a key that the grammar chose, and must continue with a short value and close
it, for any key.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import facts
import odd_tools
from conversation import Conversation
from rules import draw, picked, some, texts
from talk import beyond, small_talk, typed
from toolbox import defined
from words import digits, wide_phrase, wide_word

Member = tuple[str, dict[str, Any], Any]
"""A key, the schema of its value, the value."""

_USUAL = 0.65
"""How often a key has its usual value: greedy answers need one continuation that is far likelier
than all others.
"""
_STRINGS = [line.split(" = ") for line in texts("json_strings")]
_INTEGERS = [line.split(" = ") for line in texts("json_integers")]
_RARE_STRING, _RARE_NUMBER = "none", 1
"""The usual values of keys that say nothing."""


def _name(rng: Random) -> str:
    """An unfamiliar key in a usual style, sometimes cut off, since any position may be its last
    one.
    """
    parts = [draw(rng, "json_name_part") for _ in some(rng, (1, 1, 2, 2, 3))]
    parts = [part[: rng.randint(1, 5)] if rng.random() < 0.25 else part for part in parts]
    return odd_tools.cased_name(parts, rng.choice((0, 0, 0, 1, 1, 3)) if len(parts) > 1 else 0)


def _string(rng: Random) -> Member:
    if rng.random() < 0.45:
        value = _RARE_STRING if rng.random() < 0.85 else draw(rng, "common_or_english")
        return _name(rng), {"type": "string"}, value
    keys, values = rng.choice(_STRINGS)
    usual, *others = values.split("|")
    key = rng.choice(keys.split())
    return key, {"type": "string"}, usual if rng.random() < _USUAL else rng.choice(others)


def _number(rng: Random) -> Member:
    if rng.random() < 0.4:
        name, value = _name(rng), _RARE_NUMBER if rng.random() < _USUAL else rng.randint(0, 99)
    else:
        keys, usual = rng.choice(_INTEGERS)
        name = rng.choice(keys.split())
        value = int(usual) if rng.random() < _USUAL else rng.randint(0, 999)
    if rng.random() < 0.25:
        return name, {"type": "number"}, value + 0.5
    return name, {"type": "integer"}, value


def _flag(rng: Random) -> Member:
    name = draw(rng, "json_flags") if rng.random() < 0.7 else f"is_{_name(rng)}"
    return name, {"type": "boolean"}, rng.random() < 0.75


def _choice(rng: Random) -> Member:
    """An enum. Only a schema lists its values, so the first one is the usual one."""
    found = [draw(rng, "common_or_wide") for _ in range(rng.randint(2, 4))]
    choices = list(dict.fromkeys(found))
    name = _name(rng) if rng.random() < 0.5 else draw(rng, "enum_names")
    value = choices[0] if rng.random() < _USUAL else rng.choice(choices)
    return name, {"type": "string", "enum": choices}, value


def _nothing(rng: Random) -> Member:
    return _name(rng), {"type": ["string", "null"]}, None


def _list(rng: Random) -> Member:
    name = draw(rng, "json_lists") if rng.random() < 0.7 else f"{_name(rng)}s"
    if rng.random() < 0.25:
        numbers = list(range(1, rng.choice((2, 3, 3, 4)) + 1))
        return name, {"type": "array", "items": {"type": "integer"}}, numbers
    if rng.random() < 0.25:
        members = members_of(rng, rng.randint(1, 2), depth=1)
        return name, {"type": "array", "items": schema_of(members)}, [values_of(members)]
    pool = texts(rng.choice(("things", "names", "colours", "foods", "cities")))
    values = [_RARE_STRING]
    if rng.random() >= 0.6:
        values = [rng.choice(pool) for _ in some(rng, (1, 2, 2, 3))]
    return name, {"type": "array", "items": {"type": "string"}}, values


def _object(rng: Random) -> Member:
    members = members_of(rng, rng.randint(1, 3), depth=1)
    name = draw(rng, "json_objects") if rng.random() < 0.7 else _name(rng)
    return name, schema_of(members), values_of(members)


_MAKERS: dict[Callable[[Random], Member], int] = {
    _string: 50,
    _number: 22,
    _flag: 8,
    _choice: 7,
    _nothing: 2,
    _list: 13,
    _object: 7,
}


def members_of(rng: Random, count: int, depth: int = 0) -> list[Member]:
    """Members of an object with unique keys; objects and lists are nested only at depth 0."""
    most = len(_MAKERS) - (2 if depth else 0)
    kinds, shares = list(_MAKERS)[:most], list(_MAKERS.values())[:most]
    found: dict[str, Member] = {}
    while len(found) < count:
        member = rng.choices(kinds, shares)[0](rng)
        found.setdefault(member[0], member)
    return list(found.values())


def values_of(members: list[Member]) -> dict[str, Any]:
    """The object."""
    return {key: value for key, _, value in members}


def schema_of(members: list[Member]) -> dict[str, Any]:
    """The schema of the object, with keys in the same order."""
    properties = {key: schema for key, schema, _ in members}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _written(rng: Random, value: Any) -> str:
    """JSON with a space after `:` and `,`, or sometimes compact or on several lines."""
    kind = rng.random()
    if kind < 0.94:
        return json.dumps(value)
    return json.dumps(value, separators=(",", ":")) if kind < 0.97 else json.dumps(value, indent=2)


def bare_exchange(rng: Random) -> tuple[str, str]:
    """A request for JSON without details."""
    if rng.random() < 0.75:
        is_typed = rng.random() < 0.5
        request = draw(rng, "json_bare")
        request = typed(rng, request, 0.04) if is_typed else request
    else:
        request = picked(rng, "json_about").format(t=draw(rng, "described_things"))
    value: dict[str, Any] = {"name": "Ada", "city": "Paris"}
    if rng.random() >= 0.5:
        value = values_of(members_of(rng, rng.choice((1, 2, 2, 2, 3, 3, 4, 5))))
    return request, _written(rng, value)


def schema_turn(rng: Random, talk: Conversation) -> None:
    """A request with a schema in the system message or the user's message."""
    members = members_of(rng, rng.choice((1, 2, 2, 3, 3, 4, 5)))
    schema = schema_of(members)
    if rng.random() < 0.4:
        schema |= {"additionalProperties": False}
    if rng.random() < 0.3:
        schema = {"title": draw(rng, "schema_titles"), **schema}
    form = picked(rng, "json_by_schema")
    told = form.format(s=json.dumps(schema, indent=rng.choice((None, None, 2))))
    if rng.random() < 0.5 and not talk.messages:
        talk.say("system", told)
        told = draw(rng, "json_bare")
    talk.exchange(told, _written(rng, values_of(members)))


def _told_value(rng: Random, usual: Any) -> str | int | float:
    """A random value of this type."""
    if isinstance(usual, float):
        return round(rng.uniform(0, 999), rng.choice((1, 2)))
    value = draw(rng, "wide_value") if isinstance(usual, str) else digits(rng)
    return int(value) if value.isdigit() else value


def told_exchange(rng: Random) -> tuple[str, str]:
    """A request with values, which the object contains, sometimes in another order."""
    drawn = members_of(rng, rng.choice((1, 2, 2, 3, 4)), depth=1)
    members = {
        key: value
        for key, _, value in drawn
        if isinstance(value, str | int | float) and not isinstance(value, bool)
    } or {"name": draw(rng, "names")}
    values = {
        key: _told_value(rng, value) if rng.random() < 0.6 else value
        for key, value in members.items()
    }
    order = list(values)
    if rng.random() < 0.4:
        rng.shuffle(order)
    said = ", ".join(f"{key} {values[key]}" for key in order)
    return picked(rng, "json_told").format(l=said), _written(rng, values)


def _any_request(rng: Random) -> str:
    """Any message: small talk, unanswerable questions, notes, words, requests for JSON."""
    kind = rng.random()
    if kind < 0.6:
        return (small_talk if kind < 0.35 else beyond)(rng)[0]
    if kind < 0.75:
        told = " ".join(fact.note for fact in facts.draw_many(rng, rng.randint(1, 3)))
        return f"{draw(rng, 'json_on_text')}{told}"
    return wide_phrase(rng, 6) if kind < 0.85 else draw(rng, "json_bare")


def forced_talk(rng: Random, called: float = 0.2) -> Conversation:
    """Any request and an answer that a grammar forces into JSON or a call, whose beginning is
    given. called: the share of calls.
    """
    talk = Conversation(enable_thinking=rng.choice((None, None, False)))
    if rng.random() < called:
        _force_call(rng, talk)
        return talk
    request = _any_request(rng)
    talk.exchange(request, json.dumps(values_of(members_of(rng, rng.choice((1, 2, 2, 3, 4))))))
    talk.given = '{"'
    return talk


def _force_call(rng: Random, talk: Conversation) -> None:
    """A forced call of an invented tool or of a class with fields, which clients send as a tool."""
    tool, arguments = _form_tool(rng) if rng.random() < 0.6 else _odd_tool(rng)
    others = [
        (_form_tool(rng) if rng.random() < 0.3 else _odd_tool(rng))[0]
        for _ in some(rng, (0, 0, 0, 0, 1, 2))
    ]
    name = tool["function"]["name"]
    talk.tools = [tool, *(other for other in others if other["function"]["name"] != name)]
    rng.shuffle(talk.tools)
    if rng.random() < 0.2:
        talk.say("system", draw(rng, "json_system"))
    talk.say("user", draw(rng, "json_bare") if rng.random() < 0.4 else _any_request(rng))
    talk.call([{"name": name, "arguments": arguments}], [])
    start = f'{{"name": "{name}", "arguments": {{"' if arguments else ""
    talk.given = f"<tool_call>\n{start}"


def _odd_tool(rng: Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """An invented tool, and arguments that no request gives."""
    tool = odd_tools.family(rng, 1)[0]
    usual = {"string": _RARE_STRING, "integer": _RARE_NUMBER, "number": 1.5, "boolean": True}
    arguments = {
        one.name: one.schema.get("enum", [usual.get(one.schema["type"], [_RARE_STRING])])[0]
        for one in tool.parameters
        if not one.optional
    }
    return tool.schema(rng, odd_tools.SchemaStyle.draw(rng)), arguments


def _form_tool(rng: Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """A class with fields as a tool, with its usual values."""
    members = members_of(rng, rng.choice((1, 1, 2, 2, 3, 4)))
    words = [wide_word(rng), draw(rng, "wide_noun")][: rng.choice((1, 2))]
    name = odd_tools.cased_name(words, rng.choice((0, 1, 2, 2)))
    if rng.random() < 0.2:
        name = draw(rng, "final_tools")
    schema = schema_of(members)
    if rng.random() < 0.5:
        schema["properties"] = {
            key: {"title": key.replace("_", " ").title(), **one}
            for key, one in schema["properties"].items()
        }
        if rng.random() < 0.5:
            schema["title"] = name
    about = draw(rng, "form_about", name=name)
    tool = defined(name, about, schema)
    if not about:
        del tool["function"]["description"]
    return tool, values_of(members)


def json_talk(rng: Random) -> Conversation:
    """One to three objects, requested in different ways."""
    if rng.random() < 0.45:
        return forced_talk(rng)
    talk = Conversation(enable_thinking=rng.choice((None, None, None, True, False)))
    if rng.random() < 0.3:
        talk.say("system", draw(rng, "json_system"))
    for _ in some(rng, (1, 1, 1, 2, 3)):
        kind = rng.random()
        if kind < 0.8:
            talk.exchange(*(bare_exchange if kind < 0.55 else told_exchange)(rng))
        else:
            schema_turn(rng, talk)
    return talk
