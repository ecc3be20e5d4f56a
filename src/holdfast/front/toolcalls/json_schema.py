"""Reads JSON schemas as clients write them: the values that a schema allows, and its references."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final
from urllib.parse import unquote

_MOST_DIGITS: Final = 9  # of an item's index in a reference


def strings(value: Any) -> tuple[str, ...]:
    """The strings in a list, such as the value of `required`; empty if it is no list."""
    if not isinstance(value, list | tuple):
        return ()
    return tuple(each for each in value if isinstance(each, str))


def named_types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The types that the keyword `type` names."""
    types = schema.get("type")
    return (types,) if isinstance(types, str) else strings(types)


def listed_values(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    """The only values that a schema allows (`enum`, `const`); None if it lists none."""
    if isinstance(listed := schema.get("enum"), list | tuple):
        return listed
    return [schema["const"]] if "const" in schema else None


def items_of(schema: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
    """The schemas of an array's first items, one each, and the schema of all others."""
    first_items, other_items = schema.get("prefixItems", []), schema.get("items", True)
    if isinstance(other_items, list):  # as in draft 7
        return other_items, schema.get("additionalItems", True)
    return first_items, other_items


def definition_name(reference: str) -> str:
    """The name of the definition in `$defs` that a reference points to."""
    return reference.rpartition("/")[2]


def types_of(schema: Mapping[str, Any]) -> Iterator[str]:
    """Iterate over the types that a schema allows directly; none if it does not say."""
    if schema.get("type"):
        yield from named_types(schema)
    elif (values := listed_values(schema)) is not None:
        yield from map(type_of, values)
    elif "properties" in schema or "required" in schema:
        yield "object"
    elif "items" in schema or "prefixItems" in schema:
        yield "array"


class References:
    """Resolves the references of one JSON schema. Other documents are not loaded."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def target(self, reference: str) -> Any:
        """Return what a `$ref` points to. Raises LookupError if it does not point into the schema."""
        base, _, fragment = reference.partition("#")
        if base and not (isinstance(self._root, dict) and base == self._root.get("$id")):
            raise LookupError(reference)
        if fragment and not fragment.startswith("/") and fragment in self._anchors:
            return self._anchors[fragment]
        target = self._root
        for step in fragment.removeprefix("/").split("/") if fragment else ():
            target = _member(target, step)
        return target

    @cached_property
    def _anchors(self) -> dict[str, Any]:
        """The subschemas that have a name (`$anchor`), by that name."""
        anchors: dict[str, Any] = {}
        pending = [self._root]
        while pending:
            node = pending.pop()
            if isinstance(node, Mapping):
                if isinstance(node.get("$anchor"), str):
                    anchors[node["$anchor"]] = node
                pending.extend(node.values())
            elif isinstance(node, list | tuple):
                pending.extend(node)
        return anchors


def _member(node: Any, step: str) -> Any:
    """What one step of a JSON pointer leads to. Raises LookupError.

    As clients write them, names may lack the escapes of URLs, and empty steps lead nowhere.
    """
    if isinstance(node, list) and step.isdecimal() and len(step) <= _MOST_DIGITS:
        return node[int(step)]
    if isinstance(node, Mapping):
        for name in (step, unquote(step)):
            name = name.replace("~1", "/").replace("~0", "~")
            if name in node:
                return node[name]
        if not step:
            return node
    raise LookupError(step)


_TYPES: Final = {
    bool: "boolean",  # before int, because a bool is also an int
    str: "string",
    int: "integer",
    float: "number",
    Mapping: "object",
    list: "array",
}


def type_of(value: Any) -> str:
    """Return the JSON type of a value."""
    return next(
        (name for python_type, name in _TYPES.items() if isinstance(value, python_type)), "null"
    )
