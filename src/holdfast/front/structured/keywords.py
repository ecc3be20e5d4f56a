"""JSON Schema's keywords (drafts 7 to 2020-12, and OpenAPI's): which a grammar enforces, and what they may
cost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

MAPS: Final = ("properties", "patternProperties")  # name → schema
LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLES: Final = ("items", "additionalItems", "additionalProperties")
PLAIN: Final = (
    *(
        "type",
        "enum",
        "const",
        "required",
        "minProperties",
        "maxProperties",
        "minItems",
        "maxItems",
    ),
    *(
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
    ),
)
UNSUPPORTED: Final = (
    *("not", "if", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames"),
    *(
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedItems",
        "unevaluatedProperties",
    ),
    *("$dynamicRef", "$recursiveRef"),
)
"""Keywords that say something of a value and that no grammar of llguidance enforces.

All that is in no list here says nothing.
"""

OF_OBJECTS: Final = (
    "properties",
    "patternProperties",
    "additionalProperties",
    "required",
    "minProperties",
    "maxProperties",
)
OPENING: Final = (
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "propertyNames",
    "minProperties",
)
"""Keywords whose presence says what an object may have beside its declared properties."""

FORMATS: Final = frozenset(
    (
        "date-time",
        "time",
        "date",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uuid",
        "uri",
        "unknown",
    ),
)
UNKNOWN_FORMATS: Final = frozenset(
    (
        "idn-email",
        "idn-hostname",
        "uri-reference",
        "iri",
        "iri-reference",
        "uri-template",
        "json-pointer",
    ),
) | {"relative-json-pointer", "regex"}
"""Formats of JSON Schema that no grammar enforces.

All that are in neither list are notes, such as `password` and `path`.
"""
LONGEST: Final = {"email": 254, "hostname": 253, "uri": 2048}
"""Characters of formats that know an end, though their patterns know none: SMTP's, DNS', and what
most of the web takes.
"""
# of single characters in one pattern, nested ones multiplied: 10 ms for the first token
MOST_REPETITIONS: Final = 20_000
# in one place: branches of `anyOf` and `oneOf` multiply under `allOf`
MOST_ALTERNATIVES: Final = 256
LONGEST_PATTERN: Final = 2_000
# characters of a name or of a listed value: each token of it is forced, one after the other
LONGEST_LITERAL: Final = 4_000
LEAST: Final = 1024 - 2**63  # 64 bits, less what a float's rounding takes
MOST: Final = -LEAST
_SMALLER = re.compile(r"-\d{19}|-\d[\d.]*[eE]")
_NAMED_ESCAPE = re.compile(r"\\[pPxu]\{")
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")


def is_well_typed(keyword: str, value: Any) -> bool:
    """Whether the value of a plain keyword is of a type that it may have."""
    match keyword:
        case "const":
            return True
        case "enum":
            return isinstance(value, list | tuple)
        case "type" if isinstance(value, str):
            return True
        case "type" | "required":
            return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
        case "pattern" | "format":
            return isinstance(value, str)
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case _:  # the counts, of which 2.0 is one
            is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            return is_whole and not isinstance(value, bool)


def says_nothing(keyword: str, value: Any, node: dict[str, Any]) -> bool:
    """Whether an unsupported keyword, with this value, holds of every value there is."""
    match keyword:
        case "uniqueItems":
            return value is False
        case "not":
            return value is False
        case "if":
            return "then" not in node and "else" not in node
        case "minContains" | "maxContains":
            return "contains" not in node
        case "propertyNames":
            return value is True or (isinstance(value, dict) and value in ({}, {"type": "string"}))
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return bool(value == {})
        case "unevaluatedProperties" | "unevaluatedItems":
            return bool(value is True or value == {})
        case _:
            return False


def pattern_fault(pattern: str) -> str:
    """What keeps a pattern from being enforced; empty: nothing does.

    Whether it is one at all is not looked at.
    """
    if len(pattern) > LONGEST_PATTERN:
        return f"is longer than {LONGEST_PATTERN:,} characters"
    return "" if repetitions(pattern) <= MOST_REPETITIONS else "repeats too often"


def alternatives(node: Any) -> int:
    """In how many ways a value can fit a schema, references and members not followed."""
    if not isinstance(node, dict):
        return 1
    found = 1
    for keyword in LISTS:
        members = node.get(keyword, ())
        if keyword == "allOf":
            for member in members:
                found *= alternatives(member)
        elif keyword != "prefixItems" and members:
            found *= sum(map(alternatives, members))
    return found


def enforced_value(keyword: str, value: Any) -> Any:
    """A well-typed value as llguidance takes it: counts are integers, and bounds too far off are
    the last of 64 bits.
    """
    match keyword:
        case "minimum" | "exclusiveMinimum":
            return max(value, LEAST)
        case "maximum" | "exclusiveMaximum":
            return min(value, MOST)
        case (
            "minProperties" | "maxProperties" | "minItems" | "maxItems" | "minLength" | "maxLength"
        ):
            return int(value)
        case _:
            return value


def is_too_small(value: Any) -> bool:
    """Whether a number in a value is below 64 bits.

    An integer of which llguidance is told just that overflows its stack.
    """
    if isinstance(value, dict):
        return any(map(is_too_small, value.values()))
    if isinstance(value, list | tuple):
        return any(map(is_too_small, value))
    return isinstance(value, int | float) and value < LEAST


def names_too_small(grammar: str) -> bool:
    """The same of the schemas in a grammar, as far as its text tells."""
    return "%json" in grammar and _SMALLER.search(grammar) is not None


def size_of_literal(value: Any) -> int:
    """Characters of a listed value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(name) + size_of_literal(inner) for name, inner in value.items()) + 1
    return sum(map(size_of_literal, value)) + 1 if isinstance(value, list | tuple) else 1


def repetitions(pattern: str) -> int:
    """The most characters that a pattern matches in counted repetitions; `*` and `+` count once.

    For a grammar, which may contain several patterns, it is an estimate.
    """
    totals = [0]
    last = 1
    counted_end = 0
    for place, atom in atoms(pattern):
        if place < counted_end:
            continue
        if atom == "(":
            totals.append(0)
        elif atom == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        elif atom == "{" and (count := _COUNT.match(pattern, place)):
            times = max(int((count[3] or count[1] or "1")[:9]), 1)
            totals[-1] += last * (times - 1)
            last *= times
            counted_end = count.end()
        elif atom not in ("*", "+", "?", "|", "^", "$"):
            last = 1
            totals[-1] += 1
    return sum(totals)


def atoms(regex: str) -> Iterator[tuple[int, str]]:
    """The places and texts of a regular expression's escapes, character classes and characters."""
    place = 0
    while place < len(regex):
        end = _atom_end(regex, place)
        yield place, regex[place:end]
        place = end


def _atom_end(regex: str, place: int) -> int:
    if regex[place] == "\\":
        if _NAMED_ESCAPE.match(regex, place):
            end = regex.find("}", place) + 1
            return end or len(regex)
        return place + 2
    if regex[place] == "[":
        place += 2 if regex.startswith("^", place + 1) else 1
        place += regex.startswith("]", place)
        while place < len(regex) and regex[place] != "]":
            place += 2 if regex[place] == "\\" else 1
    return place + 1
