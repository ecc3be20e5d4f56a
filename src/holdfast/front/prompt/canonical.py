"""Conversations in one form: what says the same comes out the same, so that a later turn goes on
from an earlier one.

Some things make a prompt differ that nobody meant to change: the order of keys in the definitions
of tools and in the arguments of past calls (some languages shuffle it with every request), text in
one string or in parts, content that is null, empty or missing, and headers for accounting in the
system prompt.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec

from holdfast.front.prompt.known_answers import canonical_arguments
from holdfast.front.prompt.tool_definitions import KeptTool, exact_key
from holdfast.wire.requests import ChatPrompt

# As models have seen them in training; the order of what is not named here stays.
_TOOL_KEYS = ("type", "function")
_FUNCTION_KEYS = ("name", "description", "parameters")
_SERVER_ONLY_KEYS = (
    "strict",
    "cache_control",
    "defer_loading",
    "eager_input_streaming",
    "allowed_callers",
)
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
_SCHEMAS_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
_SCHEMAS = frozenset(
    {"items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"}
)
_LISTS_OF_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
# Claude Code writes one that changes with every request in front of its system prompt.
_ACCOUNTING_NAME = "x-anthropic-billing-header:"
_ACCOUNTING = re.compile(rf"^{_ACCOUNTING_NAME}[^\n]*(?:\n+|\Z)", re.MULTILINE)
# with which clients join the parts of a system prompt; the first is ours
_SEPARATORS = ("\n", "\n\n", "", " ")
_ENTRY_BYTES = 256  # that each entry takes, however short
_FORMS_OF_TOOL = 3  # as it came, without control tokens, as JSON
_REFERENCE = "tool_reference"
_TEXT_KINDS = frozenset({"text", "input_text", "output_text"})
_SYSTEM = frozenset({"system", "developer"})


class FirstForms:
    """Parts of conversations in the form in which each was first sent; the longest unused are
    forgotten. Any thread may call it.

    A definition of a tool that is sent again with its keys in another order is the same one, a
    system prompt that was sent in parts and comes as one text too, and so are the arguments of a
    call whose id comes back.
    """

    def __init__(self, *, most_bytes: int = 16_000_000) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._first: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def tool(self, tool: Mapping[str, Any], *, tenant: str = "") -> dict[str, Any]:
        """A definition with its keys in their first order."""
        exact = exact_key(tool, tenant=tenant)
        if exact is not None and (known := self._known_as(exact)) is not None:
            return cast(KeptTool, known)
        try:
            ordered = copy.deepcopy(in_usual_order(tool))  # the caller may change its own
            content = json.dumps(ordered, sort_keys=True)
        except (TypeError, ValueError, RecursionError):  # nothing that JSON could have brought
            return dict(tool)
        key = _key(tenant, "tool", content)
        first = self._first_of(key, KeptTool(ordered), _FORMS_OF_TOOL * len(content))
        if exact is not None:
            self._first_of(exact, key, 0)
        return cast(KeptTool, first)

    def arguments(self, arguments: str, *, call_id: str, tenant: str = "") -> str:
        """The arguments of a call, JSON text, as they were first seen; changed ones are others."""
        exact = _key(tenant, "call as it came", call_id, arguments)
        if (known := self._known_as(exact)) is not None:
            return cast(str, known)
        key = _key(tenant, "call", call_id, canonical_arguments(arguments))
        first = self._first_of(key, arguments, len(arguments))
        self._first_of(exact, key, 0)
        return cast(str, first)

    def system_text(self, parts: Sequence[str], *, tenant: str = "") -> str:
        """A system prompt of several parts, or of one, as text.

        Clients that join parts do so in various ways.
        """
        ways = (
            [separator.join(parts) for separator in _SEPARATORS] if len(parts) > 1 else list(parts)
        )
        keys = [_key(tenant, "system", way) for way in ways]
        with self._lock:
            text = next(
                (self._first[key][0] for key in keys if key in self._first), "".join(ways[:1])
            )
        for key in keys:
            self._first_of(key, text, len(text))
        return cast(str, text)

    def _known_as(self, exact: bytes) -> Any:
        """The first form of what was sent exactly so before; None if it is not known any more."""
        with self._lock:
            key: bytes = self._first[exact][0] if exact in self._first else b""
            if key not in self._first:
                return None
            self._first.move_to_end(exact)
            self._first.move_to_end(key)
            return self._first[key][0]

    def _first_of(self, key: bytes, form: Any, size: int) -> Any:
        with self._lock:
            if key not in self._first:
                self._first[key] = form, size + _ENTRY_BYTES
                self._bytes += size + _ENTRY_BYTES
            first = self._first[key][0]
            self._first.move_to_end(key)
            while self._bytes > self._most_bytes:
                self._bytes -= self._first.popitem(last=False)[1][1]
        return first


def canonical(prompt: ChatPrompt, forms: FirstForms, *, tenant: str = "") -> ChatPrompt:
    """The conversation in the form in which it is rendered and remembered, found tools defined
    where they were found.
    """
    tools = tuple(
        forms.tool(tool, tenant=tenant) if isinstance(tool, Mapping) else tool
        for tool in prompt.tools
    )
    undefined = (
        {tool["function"]["name"]: tool["function"] for tool in tools} if prompt.found_tools else {}
    )
    undefined = {
        name: function for name, function in undefined.items() if name in prompt.found_tools
    }
    messages = [_with_definitions(message, undefined) for message in prompt.messages]
    return msgspec.structs.replace(
        prompt,
        messages=tuple(_message(message, forms, tenant) for message in messages),
        tools=tools,
    )


def _with_definitions(message: Any, undefined: dict[str, Any]) -> Any:
    """The message with text in place of its references to tools.

    The first reference to a tool takes it out of `undefined`.
    """
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or not any(map(_is_reference, content)):
        return message
    parts = [
        _definition(part["tool_name"], undefined) if _is_reference(part) else part
        for part in content
    ]
    return {**message, "content": parts}


def _is_reference(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.get("type") == _REFERENCE
        and isinstance(part.get("tool_name"), str)
    )


def _definition(name: str, undefined: dict[str, Any]) -> dict[str, str]:
    text = f"The tool {name} can be called from now on."
    if name in undefined:
        text += f" This is its definition:\n{json.dumps(undefined.pop(name), ensure_ascii=False)}"
    return {"type": "text", "text": text}


def in_usual_order(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's definition as the model is shown it: its keys in their usual order, without what is
    asked of the server.

    Names of parameters stay in their order: it may matter.
    """
    ready = _without_wishes(_ordered(tool, _TOOL_KEYS))
    if isinstance(function := ready.get("function"), dict):
        ready["function"] = _function(function)
        return ready
    return _function(ready)


def _function(function: Mapping[str, Any]) -> dict[str, Any]:
    ready = _without_wishes(_ordered(function, ("type", *_FUNCTION_KEYS)))
    if "parameters" in ready:
        ready["parameters"] = _schema(ready["parameters"])
    return ready


def _without_wishes(node: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key not in _SERVER_ONLY_KEYS}


def _schema(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    ready = _ordered(schema, _SCHEMA_KEYS)
    for key, value in ready.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            ready[key] = {name: _schema(each) for name, each in value.items()}
        elif key in _SCHEMAS:
            ready[key] = (
                [_schema(each) for each in value] if isinstance(value, list) else _schema(value)
            )
        elif key in _LISTS_OF_SCHEMAS and isinstance(value, list):
            ready[key] = [_schema(each) for each in value]
    return ready


def _ordered(node: Mapping[str, Any], usual: Iterable[str]) -> dict[str, Any]:
    return {**{key: node[key] for key in usual if key in node}, **node}


def _message(message: Any, forms: FirstForms, tenant: str) -> Any:
    """The message with its text as one string; what no template could use stays, for an error that
    names it.
    """
    if not isinstance(message, dict):
        return message
    ready = dict(message)
    parts = _texts(message.get("content"))
    if parts is not None and message.get("role") in _SYSTEM:
        rests = [
            (part, _ACCOUNTING.sub("", part) if _ACCOUNTING_NAME in part else part)
            for part in parts
        ]
        parts = [rest for part, rest in rests if rest == part or rest.strip()]
        ready["content"] = forms.system_text(parts, tenant=tenant) or None
    elif parts is not None:
        ready["content"] = "\n".join(parts) or None
    if isinstance(calls := message.get("tool_calls"), list | tuple):
        ready["tool_calls"] = [_call(call, forms, tenant) for call in calls]
    return ready


def _texts(content: Any) -> list[str] | None:
    """The texts of a content that is text throughout."""
    texts: list[str] = []
    for part in (
        content if isinstance(content, list | tuple) else () if content is None else (content,)
    ):
        is_part = (
            isinstance(content, list | tuple)
            and isinstance(part, dict)
            and part.get("type", "text") in _TEXT_KINDS
        )
        text = part.get("text") if is_part else part
        if not isinstance(text, str):
            return None
        texts.append(text)
    return texts


def _call(call: Any, forms: FirstForms, tenant: str) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(arguments, str)
        or not isinstance(call_id := call.get("id"), str)
    ):
        return call
    first = forms.arguments(arguments, call_id=call_id, tenant=tenant) if call_id else arguments
    return call if first == arguments else {**call, "function": {**function, "arguments": first}}


def _key(*parts: str) -> bytes:
    return hashlib.blake2b(
        "\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=16
    ).digest()
