"""Conversations in one form: what says the same comes out the same, so that a later turn goes on from an earlier one.

Three things make a prompt differ that nobody meant to change: the order of keys in the definitions of tools (some languages
shuffle it with every request), text in one string or in parts, and headers for accounting in the system prompt.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from holdfast.messages.requests import ChatPrompt

# As models have seen them in training; the order of what is not named here stays.
_TOOL_KEYS = ("type", "function")
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")
_SCHEMA_KEYS = (
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
_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_SCHEMAS = frozenset({"items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"})
_LISTS_OF_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
# Claude Code writes one that changes with every request in front of its system prompt.
_ACCOUNTING = re.compile(r"^x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.MULTILINE)
_SYSTEM = frozenset({"system", "developer"})


class ToolOrders:
    """Definitions of tools in the order of keys in which each was first sent; the longest unused are forgotten.

    Any thread may call it. A definition that is sent again with its keys in another order is the same one.
    """

    def __init__(self, *, most_bytes: int = 8_000_000) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._first: OrderedDict[bytes, tuple[dict[str, Any], int]] = OrderedDict()
        self._lock = threading.Lock()

    def ordered_as_first(self, tool: Mapping[str, Any], *, tenant: str = "") -> dict[str, Any]:
        """The definition in its order."""
        try:
            ordered = in_usual_order(tool)
            content = json.dumps(ordered, sort_keys=True).encode()
        except (TypeError, ValueError, RecursionError):  # nothing that JSON could have brought
            return dict(tool)
        key = hashlib.blake2b(tenant.encode("utf-8", "surrogatepass") + b"\0" + content, digest_size=16).digest()
        with self._lock:
            known = self._first.setdefault(key, (ordered, len(content)))
            self._first.move_to_end(key)
            if known[0] is ordered:
                self._bytes += known[1]
                while self._bytes > self._most_bytes:
                    self._bytes -= self._first.popitem(last=False)[1][1]
        return known[0]


def canonical(prompt: ChatPrompt, orders: ToolOrders, *, tenant: str = "") -> ChatPrompt:
    """The conversation in the form in which it is rendered and remembered."""
    return msgspec.structs.replace(
        prompt,
        messages=tuple(_message(message) for message in prompt.messages),
        tools=tuple(orders.ordered_as_first(tool, tenant=tenant) if isinstance(tool, Mapping) else tool for tool in prompt.tools),
    )


def in_usual_order(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's definition with the keys that have a usual order in it. Names of parameters stay in theirs: it may matter."""
    ready = _ordered(tool, _TOOL_KEYS)
    if isinstance(function := ready.get("function"), dict):
        ready["function"] = _function(function)
        return ready
    return _function(ready)


def _function(function: Mapping[str, Any]) -> dict[str, Any]:
    ready = _ordered(function, ("type", *_FUNCTION_KEYS))
    if "parameters" in ready:
        ready["parameters"] = _schema(ready["parameters"])
    return ready


def _schema(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    ready = _ordered(schema, _SCHEMA_KEYS)
    for key, value in ready.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            ready[key] = {name: _schema(each) for name, each in value.items()}
        elif key in _SCHEMAS:
            ready[key] = [_schema(each) for each in value] if isinstance(value, list) else _schema(value)
        elif key in _LISTS_OF_SCHEMAS and isinstance(value, list):
            ready[key] = [_schema(each) for each in value]
    return ready


def _ordered(node: Mapping[str, Any], usual: Iterable[str]) -> dict[str, Any]:
    return {**{key: node[key] for key in usual if key in node}, **node}


def _message(message: Any) -> Any:
    if not isinstance(message, dict) or message.get("role") not in _SYSTEM:
        return message
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": _ACCOUNTING.sub("", content)}
    if isinstance(content, list | tuple):
        parts = [_without_accounting(part) for part in content]
        return {**message, "content": [part for part in parts if part is not None]}
    return message


def _without_accounting(part: Any) -> Any:
    """The part without such lines; None when it had nothing else."""
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str) or not _ACCOUNTING.search(text):
        return part
    rest = _ACCOUNTING.sub("", text)
    if not rest.strip():
        return None
    return {**part, "text": rest} if isinstance(part, dict) else rest
