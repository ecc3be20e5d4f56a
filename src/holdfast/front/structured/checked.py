"""Schemas that were checked and tried, kept: an agent sends the same ones with every turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import msgspec

from holdfast.front.structured.endless import is_endless
from holdfast.front.structured.keywords import PLAIN
from holdfast.front.structured.lark import grammar_text, json_value
from holdfast.front.structured.schema import (
    CleanSchema,
    Schema,
    SchemaBounds,
    SchemaFault,
    children,
    clean,
    join_place,
)
from holdfast.front.structured.trial import fault_of

_KEPT = 512
_MOST_TRIALS = 20  # to find the place of a fault, or what to leave out: about 20 ms
_MOST_LEFT_OUT = 4
_ANY_OBJECT: Final = CleanSchema(schema={"type": "object"}, unenforced=("#",))
_BEYOND = "its bounds are too large to enforce"
_TOO_MUCH = "it needs more work than a grammar may take"


def checked_schema(schema: Any, *, bounds: SchemaBounds, strict: bool) -> CleanSchema:
    """The schema as a grammar can enforce it. Costs a few milliseconds the first time; any thread.

    strict: raise SchemaFault, with the place, for what is no schema, too large, cannot be enforced
    or cannot be satisfied. Otherwise such parts are left out and told, in the worst case everything
    but that it is an object.
    """
    return _checked(msgspec.json.encode(schema), bounds, strict)


@lru_cache(maxsize=_KEPT)
def _checked(schema: bytes, bounds: SchemaBounds, strict: bool) -> CleanSchema:
    try:
        found = clean(msgspec.json.decode(schema), bounds=bounds, strict=strict)
    except SchemaFault:
        if strict:
            raise
        return _ANY_OBJECT
    for _ in range(_MOST_LEFT_OUT):
        fault = _fault(found, found.schema)
        if not fault:
            return found
        if fault == _TOO_MUCH and strict:
            raise SchemaFault(fault)
        if fault == _TOO_MUCH:
            break
        place, node = _innermost(found)
        keyword = _culprit(found, node)
        if strict:
            raise SchemaFault(
                _named(keyword, _fault(found, node)),
                place=join_place(place, keyword) if keyword else place,
            )
        found = _without_fault(found, place, node, keyword=keyword)
    return _ANY_OBJECT


def _fault(found: CleanSchema, node: Schema | bool) -> str:
    """What is wrong with a part of a schema, in words; empty: nothing."""
    definitions = found.schema.get("$defs") if isinstance(found.schema, dict) else None
    part = {**node, "$defs": definitions} if isinstance(node, dict) and definitions else node
    if is_endless(replace(found, schema=part)):
        return "no finite value fits it"
    fault = fault_of(grammar_text(f"start: {json_value(part)}"))
    _, is_of_schema, said = fault.partition("failed to compile JSON schema: ")
    if not fault:
        return ""
    if not is_of_schema or "too large" in said:
        return _TOO_MUCH
    return _BEYOND if said.startswith("Failed to generate regex for") else said.split("\n   1 |")[0]


def _innermost(found: CleanSchema) -> tuple[str, Schema | bool]:
    """The smallest part that is at fault by itself, and where it stands in the client's schema."""
    place, node, seen, trials = "#", found.schema, set[str](), 0
    while isinstance(node, dict):
        for inner_place, inner in _parts(found, node, place=place, seen=seen):
            trials += 1
            if trials > _MOST_TRIALS:
                return place, node
            if _fault(found, inner):
                place, node = inner_place, inner
                break
        else:
            return place, node
    return place, node


def _parts(
    found: CleanSchema, node: Schema, *, place: str, seen: set[str]
) -> Iterator[tuple[str, Schema | bool]]:
    for keyword, inner, key in children(node, place=place):
        if isinstance(inner, dict):  # that nothing fits `false` is no fault of its own
            yield join_place(place, keyword, *key), inner
    name = node.get("$ref", "").rsplit("/", 1)[-1]
    if name and name not in seen and isinstance(found.schema, dict):
        seen.add(name)
        yield found.origins[name], found.schema["$defs"][name]


def _culprit(found: CleanSchema, node: Schema | bool) -> str:
    """The keyword without which the part would not be at fault; empty: no single one."""
    if not isinstance(node, dict):
        return ""
    for keyword in (
        *PLAIN[1:],
        "oneOf",
        "anyOf",
        "allOf",
        "patternProperties",
        "additionalProperties",
        "properties",
        "type",
    ):
        if keyword in node and not _fault(
            found, {name: value for name, value in node.items() if name != keyword}
        ):
            return keyword
    return ""


def _named(keyword: str, fault: str) -> str:
    return fault if not keyword or keyword in fault else f"the keyword {keyword!r}: {fault}"


def _without_fault(
    found: CleanSchema, place: str, node: Schema | bool, *, keyword: str
) -> CleanSchema:
    """The schema with one keyword less in the part at fault, or with nothing said there at all if
    that is not enough.
    """
    if not isinstance(node, dict):
        return _ANY_OBJECT
    if keyword:
        del node[keyword]  # the walk made this schema, and nobody else has it yet
        return replace(found, unenforced=(*found.unenforced, join_place(place, keyword)))
    definitions = node.get("$defs")
    node.clear()
    if definitions:
        node["$defs"] = definitions
    return replace(found, unenforced=(*found.unenforced, place))
