"""Faulty JSON: any values, schemas that look right, and values with an injected fault."""

from __future__ import annotations

import json
import random
from typing import Any

_SCHEMA_WORDS = (
    "type properties required items anyOf oneOf allOf not enum const pattern format minimum "
    "maximum minLength maxLength minItems "
    "maxItems additionalProperties $ref $defs definitions default title description if then else "
    "patternProperties propertyNames "
    "uniqueItems multipleOf prefixItems dependentRequired contains exclusiveMinimum"
).split()
STRINGS = [
    "",
    "x",
    "Hello",
    "<think>",
    "</tool_call>",
    "\ud83d",
    "\x00\x1b[31m",
    "☃" * 40,
    "null",
    "{",
    "a" * 300,
    "${x}",
]
NUMBERS = [0, -1, 1, 2, 7, 2**31, 2**63, 10**40, 0.5, -0.0, 1e308, -1e308]


class JsonFuzzer:
    """Draws values, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def written(self, value: Any) -> bytes:
        """A value as a body, sometimes not JSON at all."""
        dice = self.dice
        raw = json.dumps(value, ensure_ascii=dice.random() < 0.8).encode("utf-8", "surrogatepass")
        if dice.random() < 0.03:
            at = dice.randrange(len(raw) + 1)
            raw = (
                raw[:at]
                + dice.choice((b"", b"\xff", b"NaN", b"}", b"[" * 500, b'"\\ud83d"'))
                + raw[at + dice.randrange(3) :]
            )
        return raw

    def schema(self, levels: int = 3) -> Any:
        """A JSON schema, or something similar."""
        dice = self.dice
        if dice.random() < 0.05:
            return self.anything(2)
        plain = [{"type": kind} for kind in ("string", "integer", "number", "boolean", "null")]
        odd: list[dict[str, Any]] = [
            {"enum": ["a", 1, None]},
            {"const": {"x": 1}},
            {"type": "string", "pattern": dice.choice(("^[a-z]+$", "(", "(?=x)y", "a{3}"))},
            {"type": "string", "format": dice.choice(("date-time", "uuid", "email", "martian"))},
            {"type": ["string", "null"]},
            {"type": "integer", "minimum": dice.choice(NUMBERS), "maximum": dice.choice(NUMBERS)},
            {
                "$ref": dice.choice(
                    ("#", "#/$defs/a", "#/nowhere", "http://example.org/x", "file:///etc/passwd")
                )
            },
            {dice.choice(_SCHEMA_WORDS): self.anything(1)},
            {"type": "martian"},
            {},
        ]
        if levels == 0 or dice.random() < 0.3:
            return dice.choice(plain * 3 + odd)
        inner = [self.schema(levels - 1) for _ in range(dice.randint(1, 3))]
        properties = {dice.choice(("city", "x", "y", "ü", "")): each for each in inner}
        return dice.choice(
            (
                {
                    "type": "object",
                    "properties": properties,
                    "required": dice.sample([*properties], 1),
                },
                {"type": "object", "properties": properties, "additionalProperties": False},
                {"type": "array", "items": inner[0], "minItems": dice.choice((0, 1, 3, 10**9))},
                {dice.choice(("anyOf", "oneOf", "allOf")): inner},
                {
                    "$defs": {"a": inner[0]},
                    "type": "object",
                    "properties": {"x": {"$ref": "#/$defs/a"}},
                },
            )
        )

    def anything(self, levels: int) -> Any:
        """Any value up to this depth."""
        dice = self.dice
        leaf = dice.choice((*STRINGS, *NUMBERS, True, False, None))
        if levels == 0:
            return leaf
        return dice.choice(
            (
                leaf,
                [self.anything(levels - 1)] * dice.randint(0, 3),
                {dice.choice(STRINGS): self.anything(levels - 1)},
            )
        )

    def mutated(self, value: Any) -> Any:
        """The value with a part replaced, left out, wrapped or deeply nested."""
        dice = self.dice
        if isinstance(value, dict) and value and dice.random() < 0.85:
            key = dice.choice([*value])
            if dice.random() < 0.1:
                return {name: each for name, each in value.items() if name != key}
            return {**value, key: self.mutated(value[key])}
        if isinstance(value, list) and value and dice.random() < 0.85:
            at = dice.randrange(len(value))
            return [*value[:at], self.mutated(value[at]), *value[at + 1 :]]
        wrapped: Any = value
        for _ in range(dice.choice((1, 1, 1, 70, 250))):
            wrapped = [wrapped] if dice.random() < 0.5 else {"items": wrapped}
        return dice.choice((self.anything(1), self.anything(1), None, wrapped))
