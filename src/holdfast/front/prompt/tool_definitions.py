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
    derived = make()
    if len(part._derived) < _MAX_DERIVED:
        part._derived[name] = derived
    return derived


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
        packed = marshal.dumps((tenant, part), MARSHAL_VERSION)
    except ValueError:  # not JSON, or nested too deeply
        return None
    return hashlib.blake2b(packed, digest_size=16, person=b"exact").digest()


def in_usual_order(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A definition as the model sees it: keys in their usual order, without options that only
    concern the server.

    Parameters keep their order, because it may matter.
    """
    ordered = {
        key: value
        for key, value in _ordered(tool, _TOOL_KEYS).items()
        if key not in _SERVER_ONLY_KEYS
    }
    if isinstance(ordered.get("function"), dict):
        ordered["function"] = in_usual_order(ordered["function"])
    elif "parameters" in ordered:
        ordered["parameters"] = _ordered_schema(ordered["parameters"])
    return ordered


def _ordered_schema(schema: Any) -> Any:
    """A schema with its keys and those of its subschemas in their usual order."""
    if not isinstance(schema, dict):
        return schema
    ordered = _ordered(schema, _SCHEMA_KEYS)
    for key, value in ordered.items():
        if isinstance(value, dict) and key in _SCHEMAS_BY_NAME:
            ordered[key] = {name: _ordered_schema(each) for name, each in value.items()}
        elif isinstance(value, dict) and key in _SCHEMAS:
            ordered[key] = _ordered_schema(value)
        elif isinstance(value, list) and (key in _SCHEMAS or key in _LISTS_OF_SCHEMAS):
            ordered[key] = [_ordered_schema(each) for each in value]
    return ordered


def _ordered(mapping: Mapping[str, Any], first_keys: Iterable[str]) -> dict[str, Any]:
    return {**{key: mapping[key] for key in first_keys if key in mapping}, **mapping}


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
    keywords = schema if isinstance(schema, Mapping) and depth < _MAX_LEVELS else {}
    type_name = _first_type(keywords) or fallback
    complete: dict[str, Any] = {"description": "", **keywords, "type": type_name}
    if type_name == "array":
        complete["items"] = _complete_schema(keywords.get("items"), "string", depth + 1)
    if type_name == "object":
        properties = keywords.get("properties")
        property_schemas = properties if isinstance(properties, Mapping) else {}
        complete["properties"] = {
            name: _complete_schema(each, "string", depth + 1)
            for name, each in property_schemas.items()
        }
        complete.setdefault("required", [])
        if not isinstance(keywords.get("additionalProperties"), Mapping):
            complete["additionalProperties"] = {"type": "string", "description": ""}
    return complete


def _first_type(schema: Mapping[str, Any]) -> str:
    """The type that a schema names; empty if it names none.

    If the schema names several types, this is the first that is not null.
    """
    types = [
        type_name
        for branch in ParameterTypes(schema).branches(schema)
        for type_name in types_of(branch)
    ]
    return next((type_name for type_name in types if type_name != "null"), "")
