"""JSON Schema's keywords: which a grammar enforces, and which are beyond it.

Drafts 7 to 2020-12, and OpenAPI's.
"""

from __future__ import annotations

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
