"""Schemas that no finite value fits, since each value needs another one of its kind inside."""

from __future__ import annotations

from typing import Any

from holdfast.front.structured.schema import CleanSchema, Schema


def is_endless(clean: CleanSchema) -> bool:
    """Whether every value of the schema would have to contain a further value of itself: an answer
    would never end.
    """
    if isinstance(clean.schema, bool):
        return False
    definitions: dict[str, Any] = clean.schema.get("$defs", {})
    finite: set[str] = set()
    while True:  # the least fixed point: a definition is finite when what it needs is
        more = {
            name for name, node in definitions.items() if name not in finite and _ends(node, finite)
        }
        if not more:
            return not _ends(clean.schema, finite)
        finite |= more


def _ends(node: Schema | bool, finite: set[str]) -> bool:
    if isinstance(node, bool) or "enum" in node or "const" in node:
        return True
    if "$ref" in node and node["$ref"].rsplit("/", 1)[-1] not in finite:
        return False
    if not all(_ends(member, finite) for member in node.get("allOf", ())):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in node and not any(_ends(member, finite) for member in node[keyword]):
            return False
    kinds = node.get("type", ())
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    if not kinds or set(kinds) - {"object", "array"}:
        return True  # it may be something that contains nothing
    return ("object" in kinds and _object_ends(node, finite)) or (
        "array" in kinds and _array_ends(node, finite)
    )


def _object_ends(node: Schema, finite: set[str]) -> bool:
    properties, others = node.get("properties", {}), node.get("additionalProperties", True)
    return all(_ends(properties.get(name, others), finite) for name in node.get("required", ()))


def _array_ends(node: Schema, finite: set[str]) -> bool:
    least = node.get("minItems", 0)
    first, others = node.get("prefixItems", ()), node.get("items", True)
    if isinstance(others, list):  # draft 7
        first, others = others, node.get("additionalItems", True)
    return all(_ends(item, finite) for item in first[:least]) and (
        least <= len(first) or _ends(others, finite)
    )
