"""Definitions of tools: kept with what is derived from them, because agents send the same ones with
every turn, and completed, because some chat templates take for granted what JSON Schema leaves
open.
"""

from __future__ import annotations

import functools
import hashlib
import marshal
import pickle
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, TypeVar, cast

T = TypeVar("T")
_MOST_MADE = 6  # derived values kept per definition, such as its JSON and its packed form
_MOST_UNPACKED = 128
# a version of marshal's in which the same content is always written the same
_WITHOUT_REFERENCES = 2
_MOST_LEVELS: Final = 16
_BY_VALUE: Final = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


class KeptTool(dict[str, Any]):
    """A definition, OpenAI-shaped, that nobody changes. A copy of it is a plain dictionary."""

    __slots__ = ("_made",)

    def __init__(self, definition: Mapping[str, Any]) -> None:
        super().__init__(definition)
        self._made: dict[Hashable, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def made_once(tool: KeptTool, kind: Hashable, make: Callable[[], T]) -> T:
    """What `make` makes of a definition, which is the same each time; `kind` says what that is.

    Any thread may call it.
    """
    if kind in tool._made:
        return cast(T, tool._made[kind])
    made = make()
    if len(tool._made) < _MOST_MADE:
        tool._made[kind] = made
    return made


def packed_tool(tool: KeptTool) -> bytes:
    """The definition as bytes, for `unpacked_tool` in another process. Any thread may call it."""
    return made_once(tool, "packed", lambda: pickle.dumps(dict(tool), pickle.HIGHEST_PROTOCOL))


@functools.lru_cache(maxsize=_MOST_UNPACKED)
def unpacked_tool(packed: bytes) -> KeptTool:
    """The definition again, and the same object for the same bytes, so that what is made of it is
    made once here too.
    """
    return KeptTool(pickle.loads(packed))


def exact_key(definition: Any, *, tenant: str) -> bytes | None:
    """A hash of a definition as it came, its order and the types of its values included.

    None: it has none.

    Written by `marshal`, which takes a fifth of the time that sorted JSON does.
    """
    try:
        written = marshal.dumps((tenant, definition), _WITHOUT_REFERENCES)
    except ValueError:  # not what JSON brings, or nested too deeply
        return None
    return hashlib.blake2b(written, digest_size=16, person=b"exact").digest()


def complete_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The definition with a description, parameters, and one type for each of them."""
    function = tool.get("function")
    if isinstance(function, Mapping):
        return {"type": "function", **tool, "function": _function(function)}
    return _function(tool)


def _function(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters")
    return {
        "description": "",
        **function,
        "parameters": _schema(parameters if isinstance(parameters, Mapping) else {}, "object", 0),
    }


def _schema(schema: Any, fallback: str, level: int) -> dict[str, Any]:
    given = schema if isinstance(schema, Mapping) and level < _MOST_LEVELS else {}
    kind = _type(given, fallback)
    ready: dict[str, Any] = {"description": "", **given, "type": kind}
    if kind == "array":
        ready["items"] = _schema(given.get("items"), "string", level + 1)
    if kind == "object":
        properties = given.get("properties")
        named = properties if isinstance(properties, Mapping) else {}
        ready["properties"] = {
            name: _schema(each, "string", level + 1) for name, each in named.items()
        }
        ready.setdefault("required", [])
        if not isinstance(given.get("additionalProperties"), Mapping):
            ready["additionalProperties"] = {"type": "string", "description": ""}
    return ready


def _type(schema: Mapping[str, Any], fallback: str) -> str:
    """The type that is given, or of several the first that is not null."""
    given = schema.get("type")
    for kind in given if isinstance(given, list) else (given,):
        if isinstance(kind, str) and kind != "null":
            return kind
    for word in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(word)
        for choice in choices if isinstance(choices, list) else ():
            if (
                isinstance(choice, Mapping)
                and isinstance(choice.get("type"), str)
                and choice["type"] != "null"
            ):
                return str(choice["type"])
    values = schema.get("enum")
    if isinstance(values, list) and values:
        return _BY_VALUE.get(type(values[0]), "string")
    return "object" if "properties" in schema else fallback
