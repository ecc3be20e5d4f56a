"""JSON answers: requested in a few words, by a schema or with given values, or forced by a grammar.

A server that constrains an answer does not tell the model the schema. The model sees "Write JSON."
and its own `{"` with a key that the grammar chose, and must continue with a short value and close
it, whatever the key is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import beyond
import facts
import first_words
import odd_tools
import tool_tasks
import words
from conversation import Conversation
from spelling import typed
from wide_words import english, noun, wide_phrase, wide_value, wide_word
from words import lists_of

Member = tuple[str, dict[str, Any], Any]
"""A key, the schema of its value, the value."""

_USUAL = 0.65
"""How often a key has its one usual value: greedy answers need one way on that is far likelier than
all others.
"""

_STRINGS: dict[str, tuple[str, list[str]]] = {
    "Ada": (
        "name first_name author owner user person customer sender recipient contact assignee host guest".split(),
        words.NAMES,
    ),
    "Paris": ("city place location town destination origin capital address".split(), words.CITIES),
    "lamp": ("item thing object product title subject label tool key".split(), words.THINGS),
    "red": ("colour color theme".split(), words.COLOURS),
    "baker": ("job role profession occupation position".split(), words.JOBS),
    "kitchen": ("room area department section site".split(), words.PLACES),
    "bread": ("food meal dish drink order".split(), words.FOODS),
    "cat": ("animal pet kind species".split(), words.ANIMALS),
    "chess": ("hobby activity sport game interest".split(), words.HOBBIES),
    "Monday": ("day weekday".split(), words.DAYS),
    "May": ("month".split(), words.MONTHS),
    "English": ("language locale".split(), words.LANGUAGES),
    "meeting": ("event task topic category project plan".split(), words.EVENTS),
    "ok": (
        "status state result answer response output".split(),
        ["ok", "done", "open", "new", "ready", "closed"],
    ),
    "The lamp is red.": (
        "text message note summary description comment content reason explanation body sentence reply thought".split(),
        [
            "All is well.",
            "A short note.",
            "The lesson is on Friday.",
            "Good.",
            "There is a lamp in the kitchen.",
            "Hello.",
        ],
    ),
    "2024-01-15": (
        "date birthday deadline start end created due".split(),
        ["2023-05-01", "2025-12-24", "2024-03-08", "2026-07-30"],
    ),
    "10:30": ("time hour".split(), ["08:00", "12:15", "18:45", "09:30"]),
    "ada@example.com": ("email mail".split(), ["tom@example.com", "mia@example.org"]),
    "https://example.com": (
        "url link website homepage".split(),
        ["https://example.org/a", "https://example.com/notes"],
    ),
    "A1": (
        "id code number_plate sku reference version".split(),
        ["B2", "C3", "X-12", "1.0", "4711"],
    ),
}
"""The usual value, the keys that it is usual for, and what else these hold."""
_INTEGERS: dict[int, list[str]] = {
    20: "degrees temperature celsius humidity".split(),
    30: "age years minutes weight height length width".split(),
    3: "count amount quantity number size rooms items pages children floor level rank".split(),
    5: "rating score stars points priority grade".split(),
    100: "price cost total percent value population".split(),
    2024: "year".split(),
}
_FLAGS = "active done open is_open enabled valid ok success available paid urgent is_new found ready public confirmed".split()
_LISTS = "tags items names words colours cities keywords topics tasks steps hobbies foods options notes values".split()
_OBJECTS = (
    "person address owner user details position data meta settings author place contact".split()
)
_RARE_STRING, _RARE_NUMBER = "none", 1
"""The usual values of keys that say nothing."""

_LISTED = lists_of("json_answers")
_BARE = tuple(_LISTED["_BARE"])
_ABOUT = tuple(_LISTED["_ABOUT"])
_SYSTEM = tuple(_LISTED["_SYSTEM"])
_BY_SCHEMA = (
    "Answer with a JSON object of this schema:\n{s}",
    "Write JSON that fits this schema:\n{s}",
    "The answer must be JSON by this schema: {s}",
    "Use this JSON schema for your answer:\n```json\n{s}\n```",
    "Your output has to follow this JSON schema.\n\n{s}\n\nGive only the object.",
    "Schema:\n{s}\nWrite an object.",
)
_ON_TEXT = (
    "",
    "Read this: ",
    "What does this say?\n",
    "Take the values from here: ",
    "Text: ",
    "Sum this up. ",
    "Find the names: ",
)
_TOLD = tuple(_LISTED["_TOLD"])


def _name(rng: Random) -> str:
    """An unfamiliar key in a usual style, sometimes cut off, since any position may be its last
    one.
    """
    parts = [
        noun(rng) if rng.random() < 0.6 else wide_word(rng)
        for _ in range(rng.choice((1, 1, 2, 2, 3)))
    ]
    parts = [part[: rng.randint(1, 5)] if rng.random() < 0.25 else part for part in parts]
    return odd_tools.cased_name(rng, parts, rng.choice((0, 0, 0, 1, 1, 3)) if len(parts) > 1 else 0)


def _string(rng: Random) -> Member:
    if rng.random() < 0.45:
        value = (
            _RARE_STRING if rng.random() < 0.85 else rng.choice((words.common_word, english))(rng)
        )
        return _name(rng), {"type": "string"}, value
    usual, (keys, others) = rng.choice(list(_STRINGS.items()))
    return (
        rng.choice(keys),
        {"type": "string"},
        usual if rng.random() < _USUAL else rng.choice(others),
    )


def _number(rng: Random) -> Member:
    if rng.random() < 0.4:
        name, value = _name(rng), _RARE_NUMBER if rng.random() < _USUAL else rng.randint(0, 99)
    else:
        value, keys = rng.choice(list(_INTEGERS.items()))
        name, value = rng.choice(keys), value if rng.random() < _USUAL else rng.randint(0, 999)
    if rng.random() < 0.25:
        return name, {"type": "number"}, value + 0.5
    return name, {"type": "integer"}, value


def _flag(rng: Random) -> Member:
    name = rng.choice(_FLAGS) if rng.random() < 0.7 else f"is_{_name(rng)}"
    return name, {"type": "boolean"}, rng.random() < 0.75


def _choice(rng: Random) -> Member:
    """An enum. Only a schema lists its values, so the first one is the usual one."""
    choices = list(
        dict.fromkeys(
            rng.choice((words.common_word, wide_word))(rng) for _ in range(rng.randint(2, 4))
        )
    )
    name = (
        _name(rng)
        if rng.random() < 0.5
        else rng.choice(("kind", "status", "level", "mode", "unit", "type", "category"))
    )
    return (
        name,
        {"type": "string", "enum": choices},
        choices[0] if rng.random() < _USUAL else rng.choice(choices),
    )


def _list(rng: Random) -> Member:
    name = rng.choice(_LISTS) if rng.random() < 0.7 else f"{_name(rng)}s"
    if rng.random() < 0.25:
        return (
            name,
            {"type": "array", "items": {"type": "integer"}},
            list(range(1, rng.choice((2, 3, 3, 4)) + 1)),
        )
    if rng.random() < 0.25:
        members = members_of(rng, rng.randint(1, 2), depth=1)
        return name, {"type": "array", "items": schema_of(members)}, [values_of(members)]
    pool = rng.choice((words.THINGS, words.NAMES, words.COLOURS, words.FOODS, words.CITIES))
    values = (
        [_RARE_STRING]
        if rng.random() < 0.6
        else [rng.choice(pool) for _ in range(rng.choice((1, 2, 2, 3)))]
    )
    return name, {"type": "array", "items": {"type": "string"}}, values


def _nothing(rng: Random) -> Member:
    return _name(rng), {"type": ["string", "null"]}, None


def _object(rng: Random) -> Member:
    members = members_of(rng, rng.randint(1, 3), depth=1)
    return (
        rng.choice(_OBJECTS) if rng.random() < 0.7 else _name(rng),
        schema_of(members),
        values_of(members),
    )


_MAKERS: tuple[tuple[Callable[[Random], Member], int], ...] = (
    (_string, 50),
    (_number, 22),
    (_flag, 8),
    (_choice, 7),
    (_nothing, 2),
    (_list, 13),
    (_object, 7),
)


def members_of(rng: Random, count: int, depth: int = 0) -> list[Member]:
    """Members of an object with unique keys; objects and lists are nested only at depth 0."""
    kinds = _MAKERS[:-2] if depth else _MAKERS
    found: dict[str, Member] = {}
    while len(found) < count:
        member = rng.choices([maker for maker, _ in kinds], [share for _, share in kinds])[0](rng)
        found.setdefault(member[0], member)
    return list(found.values())


def values_of(members: list[Member]) -> dict[str, Any]:
    """The object."""
    return {key: value for key, _, value in members}


def schema_of(members: list[Member]) -> dict[str, Any]:
    """The schema of the object, with keys in the same order."""
    return {
        "type": "object",
        "properties": {key: schema for key, schema, _ in members},
        "required": [key for key, *_ in members],
    }


def written(rng: Random, value: Any) -> str:
    """JSON with a space after `:` and `,`, or sometimes compact or on several lines."""
    kind = rng.random()
    if kind < 0.94:
        return json.dumps(value)
    return json.dumps(value, separators=(",", ":")) if kind < 0.97 else json.dumps(value, indent=2)


def _object_alone(rng: Random) -> dict[str, Any]:
    """The usual value of a member, for requests that give none."""
    if rng.random() < 0.5:
        return {"name": "Ada", "city": "Paris"}
    return values_of(members_of(rng, rng.choice((1, 2, 2, 2, 3, 3, 4, 5))))


def bare_exchange(rng: Random) -> tuple[str, str]:
    """A request for JSON without details."""
    if rng.random() < 0.75:
        request = typed(rng, rng.choice(_BARE), 0.04) if rng.random() < 0.5 else rng.choice(_BARE)
    else:
        request = rng.choice(_ABOUT).format(
            t=rng.choice((*_OBJECTS, *words.THINGS, *words.EVENTS, "report", "form", "list"))
        )
    return request, written(rng, _object_alone(rng))


def schema_talk(rng: Random, conversation: Conversation) -> None:
    """A request with a schema in the system message or the user's message."""
    members = members_of(rng, rng.choice((1, 2, 2, 3, 3, 4, 5)))
    schema = schema_of(members)
    if rng.random() < 0.4:
        schema |= {"additionalProperties": False}
    if rng.random() < 0.3:
        schema = {"title": rng.choice(("Report", "Answer", "Record", "Item")), **schema}
    told = rng.choice(_BY_SCHEMA).format(s=json.dumps(schema, indent=rng.choice((None, None, 2))))
    if rng.random() < 0.5 and not conversation.messages:
        conversation.say("system", told)
        conversation.exchange(rng.choice(_BARE), written(rng, values_of(members)))
    else:
        conversation.exchange(told, written(rng, values_of(members)))


def _told_value(rng: Random, usual: Any) -> str | int | float:
    """A random value of this type."""
    if isinstance(usual, float):
        return round(rng.uniform(0, 999), rng.choice((1, 2)))
    value = wide_value(rng) if isinstance(usual, str) else words.digits(rng)
    return int(value) if value.isdigit() else value


def told_exchange(rng: Random) -> tuple[str, str]:
    """A request with values, which the object contains, sometimes in another order."""
    members = [
        one
        for one in members_of(rng, rng.choice((1, 2, 2, 3, 4)), depth=1)
        if isinstance(one[2], str | int | float)
    ]
    members = [one for one in members if not isinstance(one[2], bool)] or [
        ("name", {"type": "string"}, rng.choice(words.NAMES))
    ]
    values = {
        key: _told_value(rng, value) if rng.random() < 0.6 else value for key, _, value in members
    }
    order = list(values)
    if rng.random() < 0.4:
        rng.shuffle(order)
    said = ", ".join(f"{key} {values[key]}" for key in order)
    return rng.choice(_TOLD).format(l=said), written(rng, values)


def _any_request(rng: Random) -> str:
    """Any message: small talk, unanswerable questions, notes, words, requests for JSON."""
    kind = rng.random()
    if kind < 0.35:
        return first_words.small_talk(rng)[0]
    if kind < 0.6:
        return beyond.beyond(rng)[0]
    if kind < 0.75:
        told = " ".join(fact.note for fact in facts.draw_many(rng, rng.randint(1, 3)))
        return f"{rng.choice(_ON_TEXT)}{told}"
    return wide_phrase(rng, 6) if kind < 0.85 else rng.choice(_BARE)


def forced_talk(rng: Random, called: float = 0.2) -> Conversation:
    """Any request and an answer that a grammar forces into JSON or a call, whose beginning is
    given. called: the share of calls.
    """
    conversation = Conversation(enable_thinking=rng.choice((None, None, False)))
    if rng.random() < called:
        return _forced_call(rng, conversation)
    conversation.exchange(
        _any_request(rng), json.dumps(values_of(members_of(rng, rng.choice((1, 2, 2, 3, 4)))))
    )
    conversation.given = '{"'
    return conversation


def _forced_call(rng: Random, conversation: Conversation) -> Conversation:
    """A forced call of an invented tool or of a class with fields, which clients send as a tool."""
    tool, arguments = _form_tool(rng) if rng.random() < 0.6 else _odd_tool(rng)
    others = [
        (_form_tool(rng) if rng.random() < 0.3 else _odd_tool(rng))[0]
        for _ in range(rng.choice((0, 0, 0, 0, 1, 2)))
    ]
    conversation.tools = [
        tool,
        *(other for other in others if other["function"]["name"] != tool["function"]["name"]),
    ]
    rng.shuffle(conversation.tools)
    if rng.random() < 0.2:
        conversation.say("system", rng.choice(_SYSTEM))
    conversation.say("user", rng.choice(_BARE) if rng.random() < 0.4 else _any_request(rng))
    call = {"name": tool["function"]["name"], "arguments": arguments}
    conversation.messages.append(tool_tasks.call_message([call]))
    conversation.given = (
        f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {{"'
        if arguments
        else "<tool_call>\n"
    )
    return conversation


def _odd_tool(rng: Random) -> tuple[dict[str, Any], dict[str, Any]]:
    tool = odd_tools.family(rng, 1)[0]
    return tool.schema(rng, odd_tools.SchemaStyle.draw(rng)), _idle_call(tool)["arguments"]


def _form_tool(rng: Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """A class with fields as a tool, with its usual values."""
    members = members_of(rng, rng.choice((1, 1, 2, 2, 3, 4)))
    name = odd_tools.cased_name(
        rng, [wide_word(rng), noun(rng)][: rng.choice((1, 2))], rng.choice((0, 1, 2, 2))
    )
    if rng.random() < 0.2:
        name = rng.choice(
            (
                "final_result",
                "final_answer",
                "json_tool_call",
                "output",
                "respond",
                "json",
                "extract",
                "record",
            )
        )
    schema = schema_of(members)
    if rng.random() < 0.5:
        titled = {
            key: {"title": key.replace("_", " ").title(), **one}
            for key, one in schema["properties"].items()
        }
        schema = (
            {**schema, "properties": titled, "title": name}
            if rng.random() < 0.5
            else {**schema, "properties": titled}
        )
    told = rng.choice(
        (
            "The final response which ends this conversation",
            f"Correctly extracted `{name}` with all the required parameters with correct types",
            f"A {rng.choice(_OBJECTS)}",
            f"Write the {noun(rng)}",
            name,
            "",
        )
    )
    function = {"name": name, "description": told, "parameters": schema}
    return {
        "type": "function",
        "function": function if told else {"name": name, "parameters": schema},
    }, values_of(members)


def _idle_call(tool: odd_tools.OddTool) -> dict[str, Any]:
    """A call with arguments that the request does not give."""
    arguments: dict[str, Any] = {}
    for one in tool.parameters:
        if not one.optional:
            idle = {
                "string": _RARE_STRING,
                "integer": _RARE_NUMBER,
                "number": 1.5,
                "boolean": True,
                "array": [_RARE_STRING],
            }
            arguments[one.name] = (
                one.schema["enum"][0] if "enum" in one.schema else idle[one.schema["type"]]
            )
    return {"name": tool.name, "arguments": arguments}


def json_talk(rng: Random, called: float = 0.2) -> Conversation:
    """One to three objects, requested in different ways."""
    if rng.random() < 0.45:
        return forced_talk(rng, called)
    conversation = Conversation(enable_thinking=rng.choice((None, None, None, True, False)))
    if rng.random() < 0.3:
        conversation.say("system", rng.choice(_SYSTEM))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind = rng.random()
        if kind < 0.55:
            conversation.exchange(*bare_exchange(rng))
        elif kind < 0.8:
            conversation.exchange(*told_exchange(rng))
        else:
            schema_talk(rng, conversation)
    return conversation
