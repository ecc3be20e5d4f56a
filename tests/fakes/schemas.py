"""JSON schemas for constrained answers: shapes of agents' tools without texts, and others with
every feature.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

AGENTS: Final[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "agents_schemas.json").read_text()
)
"""Agents' parameters of tools and output formats."""


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*required],
        "additionalProperties": False,
    }


def _list(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def _short(most: int = 12, **more: Any) -> dict[str, Any]:
    return {"type": "string", "maxLength": most, **more}


_INTEGER: Final = {"type": "integer"}
_TREE: Final = _object("name", name=_short(), parts=_list({"$ref": "#/$defs/tree"}, maxItems=1))
_LINK: Final = _object("head", head=_INTEGER, rest={"anyOf": [{"$ref": "#"}, {"type": "null"}]})

OWN: Final[dict[str, Any]] = {
    # roots that are not objects
    "integer": _INTEGER,
    "boolean or null": {"type": ["boolean", "null"]},
    "text": _short(20),
    "numbers": _list({"type": "number"}, minItems=1, maxItems=5),
    "choice": {"enum": ["red", "green", 3, None, {"deep": [1, 2]}]},
    "constant": {"const": {"a": [True, None, "x"]}},
    # numbers
    "percent": {"type": "number", "minimum": 0, "maximum": 100},
    "open interval": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "negative": {"type": "integer", "minimum": -50, "maximum": -3},
    "port": _object("port", port={"type": "integer", "minimum": 1, "maximum": 65535}),
    "tens": {"type": "integer", "multipleOf": 10, "minimum": 0, "maximum": 1000},
    # strings
    "lengths": _short(10, minLength=3),
    "letters": {"type": "string", "pattern": "^[a-z]{2,8}$"},
    "somewhere": _object(
        "code", code={"type": "string", "pattern": "^(A-)?[0-9]{3}(-[A-Z]{2})*$", "maxLength": 12}
    ),
    "unicode": _object(
        "größe",
        größe={"enum": ["klein", "groß", "日本", "🎈", 'mit "Zeichen"\n']},
        naïve={"type": "boolean"},
    ),
    "pattern of unicode": {"type": "string", "pattern": "^[äöüß]{1,6}$"},
    "date": _object("day", day={"type": "string", "format": "date"}),
    "date and time": {"type": "string", "format": "date-time"},
    "uuid": _object("id", id={"type": "string", "format": "uuid"}),
    "addresses": _list(
        {"anyOf": [{"type": "string", "format": "ipv4"}, {"type": "string", "format": "ipv6"}]},
        maxItems=3,
    ),
    "email": _object("to", to={"type": "string", "format": "email", "maxLength": 40}),
    # objects
    "optional": _object(a=_INTEGER, b={"type": "boolean"}, c={"type": "null"}),
    "nothing": _object(),
    "nested": _object("a", a=_object("b", b=_object("c", c=_object("d", d=_INTEGER)))),
    "map": {"type": "object", "additionalProperties": _INTEGER, "maxProperties": 3},
    "named by pattern": {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,3}$": _INTEGER},
        "additionalProperties": False,
    },
    "not declared": {
        "type": "object",
        "properties": {"a": _INTEGER},
        "required": ["a", "b"],
        "additionalProperties": _INTEGER,
    },
    "odd names": _object(
        "$id", **{"$id": _INTEGER, "a/b~c": _INTEGER, 'q"': _INTEGER, "": {"type": "null"}}
    ),
    # arrays
    "pair": {"type": "array", "prefixItems": [_INTEGER, _short()], "items": False, "minItems": 2},
    "rows": _list(_list(_INTEGER, minItems=2, maxItems=2), minItems=2, maxItems=4),
    "old tuple": {
        "type": "array",
        "items": [_INTEGER, {"type": "boolean"}],
        "additionalItems": {"type": "null"},
        "maxItems": 4,
    },
    # unions and references
    "any of": _object(
        "v",
        v={"anyOf": [_INTEGER, _short(), _list({"type": "boolean"}, maxItems=2), {"type": "null"}]},
    ),
    "one of kinds": {
        "oneOf": [
            _object("kind", "side", kind={"const": "square"}, side=_INTEGER),
            _object(
                "kind", "radius", kind={"const": "circle"}, radius={"type": "number", "minimum": 0}
            ),
        ]
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": _INTEGER}, "required": ["a"]},
            {"properties": {"b": _INTEGER}},
        ]
    },
    "tree": {"$ref": "#/$defs/tree", "$defs": {"tree": _TREE}},
    "linked list": _LINK,
    "anchor": {
        "$ref": "#point",
        "definitions": {"p": {"$anchor": "point", **_object("x", "y", x=_INTEGER, y=_INTEGER)}},
    },
    "reference into properties": _object(
        "a", "b", a=_object("n", n=_INTEGER), b={"$ref": "#/properties/a"}
    ),
    "order": _object(
        "customer",
        "items",
        customer=_object("name", name=_short(), vip={"type": "boolean"}),
        items=_list(
            _object(
                "sku",
                "count",
                sku={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
                count=_INTEGER,
            ),
            maxItems=3,
        ),
        note={"type": ["string", "null"], "maxLength": 30},
    ),
    "reply": _object(
        "answer",
        "confidence",
        answer=_short(60),
        confidence={"type": "number", "minimum": 0, "maximum": 1},
        sources=_list(_short(30), maxItems=2),
    ),
}
"""Drafts 7 and 2020-12: roots of all types, bounds, patterns, formats, unicode, unions, references.
"""
