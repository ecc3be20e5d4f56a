"""JSON Schema's keywords (drafts 7 to 2020-12, and OpenAPI's): which ones a grammar enforces, and
how much they may cost. The cost is known before a grammar is built, so that a grammar that would
explode is refused immediately.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Any, Final

MAPS: Final = ("properties", "patternProperties")  # their values map names to schemas
LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")  # their values are lists of schemas
SINGLES: Final = ("items", "additionalItems", "additionalProperties")  # their values are schemas
_COUNTS: Final = tuple("minProperties maxProperties minItems maxItems minLength maxLength".split())
_NUMBERS: Final = tuple("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split())
# keywords that hold no schemas
PLAIN: Final = ("type", "enum", "const", "required", *_COUNTS, "pattern", "format", *_NUMBERS)
UNSUPPORTED: Final = tuple(
    "not if uniqueItems contains minContains maxContains propertyNames dependentRequired "
    "dependentSchemas dependencies unevaluatedItems unevaluatedProperties $dynamicRef "
    "$recursiveRef".split()
)
"""Keywords that restrict a value but that no grammar of llguidance enforces.

Keywords that are in none of these lists restrict nothing.
"""
OF_OBJECTS: Final = (*MAPS, "additionalProperties", "required", "minProperties", "maxProperties")
OPENING: Final = (
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "propertyNames",
    "minProperties",
)
"""Keywords that determine what an object may contain besides its declared properties."""
FORMATS: Final = frozenset(
    "date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split()
)
UNKNOWN_FORMATS: Final = frozenset(
    "idn-email idn-hostname uri-reference iri iri-reference uri-template json-pointer "
    "relative-json-pointer regex".split()
)
"""Formats of JSON Schema that no grammar enforces. Others, like `password`, restrict nothing."""
LONGEST_OF_FORMAT: Final = {"email": 254, "hostname": 253, "uri": 2048}
"""Maximum lengths, in characters, for formats whose patterns have no limit. They are the limits of
SMTP, of DNS, and of most web software.
"""
# Maximum number of characters in one pattern, with counted repetitions written out. A pattern of
# this size delays the first token by 10 ms.
MOST_REPETITIONS: Final = 20_000
# Maximum number of alternatives in one place of a schema. Those of several `anyOf` and `oneOf`
# multiply under `allOf`.
MOST_ALTERNATIVES: Final = 256
_LONGEST_PATTERN: Final = 2_000
# Maximum length, in characters, of a name or a listed value. All of its tokens are forced, one after
# the other.
LONGEST_LITERAL: Final = 4_000
_LEAST_NUMBER: Final = 1024 - 2**63  # 64 bits, minus the rounding error of a float
MOST_NUMBER: Final = -_LEAST_NUMBER
_TOO_SMALL: Final = re.compile(r"-\d{19}|-\d[\d.]*[eE]")
_NAMED_ESCAPE: Final = re.compile(r"\\[pPxu]\{")
_COUNT: Final = re.compile(r"\{(\d*)(,?)(\d*)\}")


def is_well_typed(keyword: str, value: Any) -> bool:
    """Whether the value of a keyword in `PLAIN` has a type that JSON Schema allows there."""
    is_boolean = isinstance(value, bool)
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
        case _ if keyword in _NUMBERS:
            return isinstance(value, int | float) and not is_boolean
        case _:  # a count; 2.0 is also allowed
            is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            return is_whole and not is_boolean


def says_nothing(keyword: str, value: Any, node: dict[str, Any]) -> bool:
    """Whether an unsupported keyword restricts nothing, because every value satisfies it."""
    match keyword:
        case "uniqueItems" | "not":
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


def enforced_value(keyword: str, value: Any) -> Any:
    """Convert a well-typed value for llguidance: counts to integers, bounds to the 64-bit range."""
    match keyword:
        case "minimum" | "exclusiveMinimum":
            return max(value, _LEAST_NUMBER)
        case "maximum" | "exclusiveMaximum":
            return min(value, MOST_NUMBER)
        case _:
            return int(value) if keyword in _COUNTS else value


def pattern_fault(pattern: str) -> str:
    """Return why a pattern is too expensive to enforce; empty if it is not.

    Does not check the pattern's syntax.
    """
    if len(pattern) > _LONGEST_PATTERN:
        return f"is longer than {_LONGEST_PATTERN:,} characters"
    return "" if repetitions(pattern) <= MOST_REPETITIONS else "repeats too often"


def alternatives(node: Any) -> int:
    """Count the ways in which a value can match a schema, not counting references and members."""
    if not isinstance(node, dict):
        return 1
    count = 1
    for keyword in ("anyOf", "oneOf", "allOf"):
        counts = [alternatives(member) for member in node.get(keyword, ())]
        if keyword == "allOf":
            count *= prod(counts)
        elif counts:
            count *= sum(counts)
    return count


def is_too_small(value: Any) -> bool:
    """Whether a value contains a number below the 64-bit range: such an integer overflows
    llguidance's stack.
    """
    if isinstance(value, dict):
        return any(map(is_too_small, value.values()))
    if isinstance(value, list | tuple):
        return any(map(is_too_small, value))
    return isinstance(value, int | float) and value < _LEAST_NUMBER


def has_too_small(grammar: str) -> bool:
    """As `is_too_small`, for the text of a grammar that contains a schema. Also true if the number
    is only in a string.
    """
    return "%json" in grammar and _TOO_SMALL.search(grammar) is not None


def size_of_literal(value: Any) -> int:
    """Return the number of characters of a listed value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(name) + size_of_literal(inner) for name, inner in value.items()) + 1
    return sum(map(size_of_literal, value)) + 1 if isinstance(value, list | tuple) else 1


def repetitions(pattern: str) -> int:
    """Count the characters of a pattern, with counted repetitions such as `{2,9}` written out.

    What `*` or `+` repeats counts once. For a grammar, which may contain several patterns, the
    number is an estimate.
    """
    totals = [0]  # characters in each open group, the outermost first
    last = 1  # characters of the last atom or group
    counted_end = 0  # where the last repetition count ends
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
    """Iterate over the escapes, character classes and characters of a regex, each with its index."""
    place = 0
    while place < len(regex):
        end = _atom_end(regex, place)
        yield place, regex[place:end]
        place = end


def _atom_end(regex: str, place: int) -> int:
    """Where the atom ends that begins at a place of a regular expression: an escape, a class or one
    character.
    """
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
