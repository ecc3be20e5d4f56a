"""Puts tool definitions into the usual order, completes them for templates that need it, and caches
them with derived values, because agents send the same definitions (and calls) with every turn.
"""

from __future__ import annotations

import functools
import hashlib
import marshal
import pickle
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Final, TypeVar, cast

from holdfast.front.toolcalls.argument_types import ParameterTypes
from holdfast.front.toolcalls.json_schema import types_of

T = TypeVar("T")

# The order in which models saw the keys in training. Other keys follow in the order in which they
# were sent.
_TOOL_KEYS: Final = ("type", "function", "name", "description", "parameters")
_SCHEMA_KEYS: Final = (
    "type",
    "title",
    "description",
    "anyOf",
    "properties",
    "required",
    "items",
    "enum",
    "default",
    "additionalProperties",
)
_SERVER_ONLY_KEYS: Final = frozenset(
    {"strict", "cache_control", "defer_loading", "eager_input_streaming", "allowed_callers"}
)
_SCHEMAS_BY_NAME: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
_SCHEMAS: Final = frozenset(
    {"items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"}
)
_LISTS_OF_SCHEMAS: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_MAX_DERIVED = 6  # maximum of values cached per part, such as its JSON and packed form
_MAX_UNPACKED = 128
_MAX_LEVELS: Final = 16
MARSHAL_VERSION = 2  # without references: equal content always gives equal bytes


class KeptPart(dict[str, Any]):
    """A part of a conversation, such as a tool definition or a call in OpenAI's format, together
    with values derived from it (`made_once`).

    It must not be changed. Copies are plain dictionaries.
    """

    __slots__ = ("_derived",)

    def __init__(self, part: Mapping[str, Any]) -> None:
        super().__init__(part)
        self._derived: dict[Hashable, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def made_once(part: Mapping[str, Any], name: Hashable, make: Callable[[], T]) -> T:
    """The value that `make` derives from a part, computed once per `name` if the part is kept.
    Thread-safe.
    """
    if not isinstance(part, KeptPart):
        return make()
    if name in part._derived:
        return cast(T, part._derived[name])
    made = make()
    if len(part._derived) < _MAX_DERIVED:
        part._derived[name] = made
    return made


def packed_tool(tool: KeptPart) -> bytes:
    """Pack a tool definition into bytes that `unpacked_tool` reads in another process.
    Thread-safe.
    """
    return made_once(tool, "packed", lambda: pickle.dumps(dict(tool), pickle.HIGHEST_PROTOCOL))


@functools.lru_cache(maxsize=_MAX_UNPACKED)
def unpacked_tool(packed: bytes) -> KeptPart:
    """Return the tool definition that `packed_tool` has packed into these bytes.

    Results are cached: equal bytes usually return the same object, so that values derived from the
    definition are computed only once in this process too.
    """
    return KeptPart(pickle.loads(packed))


def exact_key(part: Any, *, tenant: str) -> bytes | None:
    """A hash of a part in its sent form, including key order and value types.

    Returns None if the part cannot be hashed. The hash is of `marshal`'s output, which takes
    a fifth of the time of sorted JSON.
    """
    try:
        written = marshal.dumps((tenant, part), MARSHAL_VERSION)
    except ValueError:  # not JSON, or nested too deeply
        return None
    return hashlib.blake2b(written, digest_size=16, person=b"exact").digest()


def in_usual_order(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A definition as the model sees it: keys in their usual order, without options that only
    concern the server.

    Parameters keep their order, because it may matter.
    """
    ready = {
        key: value
        for key, value in _ordered(tool, _TOOL_KEYS).items()
        if key not in _SERVER_ONLY_KEYS
    }
    if isinstance(ready.get("function"), dict):
        ready["function"] = in_usual_order(ready["function"])
    elif "parameters" in ready:
        ready["parameters"] = _ordered_schema(ready["parameters"])
    return ready


def _ordered_schema(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    ready = _ordered(schema, _SCHEMA_KEYS)
    for key, value in ready.items():
        if isinstance(value, dict) and key in _SCHEMAS_BY_NAME:
            ready[key] = {name: _ordered_schema(each) for name, each in value.items()}
        elif isinstance(value, dict) and key in _SCHEMAS:
            ready[key] = _ordered_schema(value)
        elif isinstance(value, list) and (key in _SCHEMAS or key in _LISTS_OF_SCHEMAS):
            ready[key] = [_ordered_schema(each) for each in value]
    return ready


def _ordered(node: Mapping[str, Any], usual: Iterable[str]) -> dict[str, Any]:
    return {**{key: node[key] for key in usual if key in node}, **node}


def complete_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The definition with a description, parameters, and exactly one type for each parameter.

    Some chat templates require these, although JSON Schema makes them optional.
    """
    function = tool.get("function")
    if isinstance(function, Mapping):
        return {"type": "function", **tool, "function": complete_tool(function)}
    parameters = tool.get("parameters")
    if not isinstance(parameters, Mapping):
        parameters = {}
    return {"description": "", **tool, "parameters": _complete_schema(parameters, "object", 0)}


def _complete_schema(schema: Any, fallback: str, depth: int) -> dict[str, Any]:
    """A schema with the type, description and members that some templates expect. fallback: the
    type of a schema that names none.
    """
    given = schema if isinstance(schema, Mapping) and depth < _MAX_LEVELS else {}
    kind = _type(given) or fallback
    ready: dict[str, Any] = {"description": "", **given, "type": kind}
    if kind == "array":
        ready["items"] = _complete_schema(given.get("items"), "string", depth + 1)
    if kind == "object":
        properties = given.get("properties")
        named = properties if isinstance(properties, Mapping) else {}
        ready["properties"] = {
            name: _complete_schema(each, "string", depth + 1) for name, each in named.items()
        }
        ready.setdefault("required", [])
        if not isinstance(given.get("additionalProperties"), Mapping):
            ready["additionalProperties"] = {"type": "string", "description": ""}
    return ready


def _type(schema: Mapping[str, Any]) -> str:
    """The type that a schema names; empty if it names none.

    If the schema names several types, this is the first that is not null.
    """
    kinds = [
        kind for branch in ParameterTypes(schema).branches(schema) for kind in types_of(branch)
    ]
    return next((kind for kind in kinds if kind != "null"), "")
