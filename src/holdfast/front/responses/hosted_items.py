"""Items of OpenAI's own tools, in conversations that began on another server.

This server offers none of these tools, but the conversation can continue here. Calls that the
client ran (shell, patch, computer) are shown to the model as function calls with results. Calls
that OpenAI's servers ran are left out, because the answers repeat their important parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

_CALLS: Final[Mapping[str, tuple[str, str]]] = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "computer_call": ("computer", "action"),
}
"""Calls that clients run: type of the item → name of the tool, and field with its arguments."""
_OUTPUT: Final = "_output"
_CLIENT_ITEMS: Final = frozenset(each for kind in _CALLS for each in (kind, kind + _OUTPUT))
_LEFT_OUT_TYPES: Final = frozenset(
    "mcp_list_tools mcp_approval_request mcp_approval_response tool_search_output "
    "additional_tools program program_output".split()
)
_LEFT_OUT_ENDINGS: Final = ("_call", "_call_output")  # such as web_search_call
TOOL_ITEMS: Final = ("additional_tools", "tool_search_output")
"""Items that add tools for the rest of the conversation."""
UPDATE: Final = "configuration_update"  # type of an item that changes effort or format
_SERVED_TYPES: Final = frozenset(
    ("function_call", "custom_tool_call", "function_call_output", "custom_tool_call_output")
)


def is_client_item(kind: str) -> bool:
    """Whether an item of this type is a call that clients run, or its output."""
    return kind in _CLIENT_ITEMS


def is_left_out(kind: str) -> bool:
    """Whether items of this type are left out of the prompt."""
    if kind in _CLIENT_ITEMS or kind in _SERVED_TYPES:
        return False
    return kind in _LEFT_OUT_TYPES or kind == UPDATE or kind.endswith(_LEFT_OUT_ENDINGS)


def answered_calls(items: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The client's calls that have an output: each id that an output may refer to → the call's id.

    Calls without an output were interrupted, and are left out.
    """
    items = list(items)
    ids_in_outputs = {
        _text(item.get(key))
        for item in items
        if _text(item.get("type")).endswith(_OUTPUT)
        for key in ("call_id", "id")
    }
    answered: dict[str, str] = {}
    for item in items:
        if item.get("type") in _CALLS:
            # clients refer to a call by either of its ids
            ids = [each for key in ("call_id", "id") if (each := _text(item.get(key)))]
            if not ids_in_outputs.isdisjoint(ids):
                answered.update(dict.fromkeys(ids, ids[0]))
    return answered


def call_of(item: Mapping[str, Any], answered: Mapping[str, str]) -> dict[str, Any] | None:
    """The call in OpenAI's chat format; None if it was interrupted.

    answered: the result of `answered_calls`.
    """
    call_id = _answered_id(item, answered)
    if call_id is None:
        return None
    name, key = _CALLS[item["type"]]
    arguments = item.get(key)
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments if isinstance(arguments, dict) else {}},
    }


def output_of(
    item: Mapping[str, Any], answered: Mapping[str, str]
) -> tuple[str, str | list[dict[str, Any]]] | None:
    """The id of the call and its output, as text or parts; None if the call is not in the input.

    answered: the result of `answered_calls`.
    """
    call_id = _answered_id(item, answered)
    if call_id is None:
        return None
    output = item.get("output")
    if isinstance(output, Mapping) and isinstance(output.get("image_url"), str):
        return call_id, [{"type": "input_image", "image_url": output["image_url"]}]
    if isinstance(output, list):
        return call_id, "\n".join(filter(None, map(_output_text, output)))
    return call_id, _text(output) or _text(item.get("status"))


def _answered_id(item: Mapping[str, Any], answered: Mapping[str, str]) -> str | None:
    """The id of the call that an item is or belongs to; None if it is not an answered call."""
    ids = (_text(item.get(key)) for key in ("call_id", "id"))
    return next((answered[each] for each in ids if each in answered), None)


def _output_text(part: Any) -> str:
    """A part of a call's output as text: of a shell command also how the command ended."""
    if not isinstance(part, Mapping):
        return _text(part)
    texts = [_text(part.get(key)) for key in ("text", "stdout", "stderr")]
    outcome = part.get("outcome")
    if isinstance(outcome, Mapping) and outcome.get("exit_code") != 0:
        texts.append(json.dumps(outcome, ensure_ascii=False))
    return "\n".join(filter(None, texts))


def _text(value: Any) -> str:
    """The value if it is a text, because the fields of these items are not validated."""
    return value if isinstance(value, str) else ""
