"""Items in the form in which they are kept: each with an id, and thoughts with their text, however
they are shown.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.front.responses.shapes import OutputItem
from holdfast.store.responses import Item

_THOUGHT = "holdfast_thought"  # key of what is kept beside a thought's item, and never shown
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "compaction": "cmp",
}
_CALLS = ("function_call", "custom_tool_call")


def kept_input(items: Iterable[Mapping[str, Any]]) -> list[Item]:
    """Items of an input as they were given, with ids and what may be left out.

    A compaction trigger says what to do with the others and is not kept.
    """
    stem = uuid.uuid4().hex
    kept = [item for item in items if item.get("type") != "compaction_trigger"]
    return [_whole(item, f"{stem}{number:02x}") for number, item in enumerate(kept)]


def kept_output(items: Sequence[OutputItem], thoughts: Mapping[str, str]) -> list[Item]:
    """Items of an output. thoughts: by the item's id; kept beside those that do not show theirs."""
    kept: list[Item] = msgspec.to_builtins(items)
    hidden = {item["id"] for item in kept if item["id"] in thoughts and not item.get("content")}
    return [
        {**item, _THOUGHT: thoughts[item["id"]]} if item["id"] in hidden else item for item in kept
    ]


def shown_item(item: Item) -> Item:
    """A kept item as a client may see it."""
    return (
        {key: value for key, value in item.items() if key != _THOUGHT} if _THOUGHT in item else item
    )


def with_sealed_thought(item: Item, seal: Callable[[str], str]) -> Item:
    """An item as a client may see it that wants thoughts to bring back."""
    thought = item.get(_THOUGHT) or "".join(
        part["text"] for part in item.get("content") or () if item["type"] == "reasoning"
    )
    return shown_item({"encrypted_content": seal(thought), **item} if thought else item)


def continued(items: Iterable[Item]) -> list[Any]:
    """Kept items as the beginning of another input: thoughts to be read, without calls that were
    cut off.
    """
    found = []
    for item in items:
        if item.get("type") in _CALLS and item.get("status") == "incomplete":
            continue
        if _THOUGHT in item:
            thought = [{"type": "reasoning_text", "text": item[_THOUGHT]}]
            item = {"type": "reasoning", "id": item["id"], "summary": [], "content": thought}
        found.append(item)
    return found


def _whole(item: Mapping[str, Any], name: str) -> Item:
    kind = item.get("type") or "message"
    whole = {**item, "type": kind, "id": item.get("id") or f"{_PREFIXES.get(kind, 'item')}_{name}"}
    if kind == "message":
        if isinstance(whole.get("content"), str):
            part = (
                {"type": "output_text", "annotations": []}
                if whole.get("role") == "assistant"
                else {"type": "input_text"}
            )
            whole["content"] = [{**part, "text": whole["content"]}]
        whole.setdefault("status", "completed")
    elif kind not in ("reasoning", "compaction"):
        whole.setdefault("status", "completed")
    return whole
