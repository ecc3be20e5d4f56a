"""Input items of the Responses API: their types, their conversion to chat messages, their stored
form, and compaction.

Compaction: if an input ends with a `compaction_trigger`, the model summarizes the conversation.
The summary is ordinary text that the model writes on request. The `encrypted_content` of a
`compaction` item contains the encrypted summary. In a later prompt, the summary replaces the item.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NotRequired

import msgspec
from pydantic import Field, with_config
from typing_extensions import TypedDict

from holdfast.front.images.sources import left_out_note, unreadable_part, with_notes
from holdfast.front.output import separator
from holdfast.front.records.responses import Item
from holdfast.front.request import Thinking, ToolChoice
from holdfast.front.responses.hosted_items import (
    answered_calls,
    call_of,
    is_client_item,
    is_left_out,
    output_of,
)
from holdfast.front.server.access import Seal
from holdfast.front.server.fields import STRICT, TextOrMany, log_once, non_text_part
from holdfast.front.server.problem import RequestRefused, invalid_field, missing_field

TRIGGER = "compaction_trigger"
_SUMMARY_TOKENS = 2048  # default limits of a summary, and of the thinking before it
_THOUGHT_TOKENS = 1024
SUMMARY_TURN = {
    "role": "user",
    "content": (
        "The conversation above is about to be removed from your context. Write a summary that "
        "lets you continue without it: what the user wants, decisions and constraints, facts, "
        "names, paths and values that are still needed, what has been done, and what remains to "
        "be done. Do not call tools and do not continue the task. Reply with the summary only."
    ),
}
_SEPARATOR = "__"  # between the name of a namespace and the name of a tool in it
_THOUGHT = "holdfast_thought"  # key of a thought that is stored in an item but not shown
# type of a part → key of the text in it
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_ROLES = ("user", "system", "developer", "assistant")
_CALLS = ("function_call", "custom_tool_call")
_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "compaction": "cmp",
}
_LONGEST_SHOWN = 40  # characters of a type or role that a message quotes
_SUMMARY_INTRODUCTION = (
    "The conversation before this point was replaced by the following summary, which you wrote. "
    "Continue from it.\n\n"
)

Unseal = Callable[[str], str | None]
"""Decrypts an `encrypted_content`. Returns None if this server did not create it."""


@with_config(STRICT)
class ItemPart(TypedDict):
    """A part of an item's content."""

    type: str
    text: NotRequired[str | None]
    refusal: NotRequired[str | None]
    image_url: NotRequired[Annotated[Any, Field(description="An image, as a data URL.")]]


ItemText = TextOrMany[ItemPart]


@with_config(STRICT)
class InputItem(TypedDict):
    """An item of the conversation. Its type (default: `message`) decides which fields it needs."""

    type: NotRequired[
        Annotated[
            str | None,
            Field(description="message, function_call, function_call_output, reasoning, …"),
        ]
    ]
    id: NotRequired[str | None]
    role: NotRequired[
        Annotated[str, Field(description="For a message: user, system, developer or assistant.")]
    ]
    content: NotRequired[ItemText | None]
    name: NotRequired[Annotated[str | None, Field(description="For a call: the tool's name.")]]
    namespace: NotRequired[str | None]
    call_id: NotRequired[str | None]
    arguments: NotRequired[Annotated[str, Field(description="For a function_call: JSON text.")]]
    input: NotRequired[Annotated[str, Field(description="For a custom_tool_call: the text.")]]
    output: NotRequired[Annotated[ItemText, Field(description="For a call output: the result.")]]
    summary: NotRequired[Annotated[list[ItemPart], Field(fail_fast=True)]]
    encrypted_content: NotRequired[str | None]


def items_of(input_field: str | Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]]:
    """Return an input as items: a text becomes a user message."""
    if isinstance(input_field, str):
        return [{"type": "message", "role": "user", "content": input_field}]
    return list(input_field or ())


def model_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a tool."""
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


def kind_of(item: Mapping[str, Any]) -> str:
    """Return the type of an item."""
    return item.get("type") or "message"


def asks_for_compaction(items: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the input ends with a compaction trigger."""
    return bool(items) and items[-1].get("type") == TRIGGER


def conversation(
    items: Sequence[Mapping[str, Any]],
    *,
    instructions: str | None = None,
    unseal: Unseal = lambda _: None,
    open_summary: Unseal = lambda _: "",
    earlier_count: int = 0,
    field: str = "input",
) -> tuple[tuple[dict[str, Any], ...], bool]:
    """Return instructions and items as OpenAI chat messages, and whether they have images.

    The last compaction item replaces all earlier items except for messages that are not the
    assistant's.

    Raises RequestRefused for an item that cannot be used; the error names the item.

    unseal: decrypts thoughts.
    open_summary: decrypts the summaries in compaction items.
    earlier_count: number of leading items that come from the store, not from the request.
    field: the request field that contains the other items; errors name it.
    """
    compactions = [number for number, item in enumerate(items) if item.get("type") == "compaction"]
    last_compaction = compactions[-1] if compactions else 0
    messages = _Messages(unseal, open_summary, answered=answered_calls(items))
    if instructions:
        messages.add_message("system", instructions)
    for number, item in enumerate(items):
        is_kept = kind_of(item) == "message" and item.get("role") != "assistant"
        if number >= last_compaction or is_kept:
            messages.add_item(item, f"{field}.{number - earlier_count}")
    return with_notes(messages.messages)


class _Messages:
    """Combines items into messages.

    The assistant's thoughts, text and calls of one turn become one message.
    """

    def __init__(
        self, unseal: Unseal, open_summary: Unseal, *, answered: Mapping[str, str]
    ) -> None:
        """unseal: decrypts thoughts. open_summary: decrypts the summaries in compaction items.
        answered: the calls of hosted tools that have an output, as `answered_calls` returns them.
        """
        self.messages: list[dict[str, Any]] = []
        self._answered = answered
        self._unseal = unseal
        self._open_summary = open_summary
        self._open_turn: dict[str, Any] | None = None  # the assistant's message that is being built

    def add_message(self, role: str, content: Any, **fields: Any) -> None:
        """Add a message that is not the assistant's."""
        self._open_turn = None
        self.messages.append({"role": role, **fields, "content": content})

    def add_item(self, item: Mapping[str, Any], item_field: str) -> None:
        """Add an item. item_field: the request field that has it, such as input.3."""
        match kind_of(item):
            case "message":
                self._add_message_item(item, item_field)
            case "reasoning":
                self._add_reasoning(item)
            case "function_call":
                self._add_call(item, item_field, _required(item, "arguments", item_field))
            case "custom_tool_call":
                # to the model, a custom tool is a function with one text argument
                self._add_call(item, item_field, {"input": _required(item, "input", item_field)})
            case "function_call_output" | "custom_tool_call_output":
                self._add_call_output(item, item_field)
            case "compaction":
                self._add_compaction(item, item_field)
            case kind if is_client_item(kind):
                self._add_client_item(item, item_field)
            case kind if is_left_out(kind):
                log_once("items of type %r are left out, because no model here reads them", kind)
            case kind if kind in (TRIGGER, "item_reference"):
                raise _refusal(item, item_field)
            case kind:
                note = left_out_note(kind[:_LONGEST_SHOWN])
                self.add_message("user", [unreadable_part(note, _refusal(item, item_field))])

    def _add_message_item(self, item: Mapping[str, Any], item_field: str) -> None:
        """Add a message: the assistant's becomes part of its turn."""
        role = _required(item, "role", item_field)
        if role not in _ROLES:
            shown = f", got {role[:_LONGEST_SHOWN]!r}"
            raise invalid_field(f"{item_field}.role", f"must be {' or '.join(_ROLES)}", shown=shown)
        content = _content(_required(item, "content", item_field), role, f"{item_field}.content")
        if role != "assistant":
            self.add_message(role, content)
            return
        # a second text after the first begins a new turn; one after calls is part of their turn
        if self._open_turn and self._open_turn["content"] and not self._open_turn.get("tool_calls"):
            self._open_turn = None
        turn = self._assistant_turn()
        if not isinstance(content, str):
            content = "".join(part["text"] for part in content)
        turn["content"] += separator(turn["content"], content) + content

    def _add_reasoning(self, item: Mapping[str, Any]) -> None:
        """Add a thought. A thought that another server encrypted cannot be read and is left out."""
        sealed = item.get("encrypted_content")
        thought = self._unseal(sealed) if sealed else None
        if thought is None:
            thought = _thought_in(item)
        if not thought:
            return
        # a thought comes before text and calls, so after them it begins a new turn
        if self._open_turn and (self._open_turn["content"] or self._open_turn.get("tool_calls")):
            self._open_turn = None
        turn = self._assistant_turn()
        turn["reasoning_content"] = turn.get("reasoning_content", "") + thought

    def _add_call(
        self, item: Mapping[str, Any], item_field: str, arguments: str | dict[str, Any]
    ) -> None:
        """Add a call to the assistant's turn. arguments: JSON text, or an object."""
        name = model_name(_required(item, "name", item_field), item.get("namespace"))
        call = {
            "id": _required(item, "call_id", item_field),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        self._assistant_turn().setdefault("tool_calls", []).append(call)

    def _add_call_output(self, item: Mapping[str, Any], item_field: str) -> None:
        output = _content(_required(item, "output", item_field), "tool", f"{item_field}.output")
        self.add_message("tool", output, tool_call_id=_required(item, "call_id", item_field))

    def _add_client_item(self, item: Mapping[str, Any], item_field: str) -> None:
        """Add a call of one of OpenAI's tools that the client ran, or its output."""
        if not kind_of(item).endswith("_output"):
            if (call := call_of(item, self._answered)) is not None:
                self._assistant_turn().setdefault("tool_calls", []).append(call)
        elif (id_and_output := output_of(item, self._answered)) is not None:
            call_id, output = id_and_output
            output = _content(output, "tool", f"{item_field}.output")
            self.add_message("tool", output, tool_call_id=call_id)

    def _add_compaction(self, item: Mapping[str, Any], item_field: str) -> None:
        """Add the summary of an earlier conversation, as a message of the user."""
        summary = self._open_summary(_required(item, "encrypted_content", item_field))
        if summary is None:
            reason = (
                "it is damaged, or was not made by this server with this model for this tenant; "
                "send the conversation itself, or compact it again"
            )
            raise invalid_field(
                f"{item_field}.encrypted_content", reason, code="invalid_compaction"
            )
        self.add_message("user", _SUMMARY_INTRODUCTION + summary)

    def _assistant_turn(self) -> dict[str, Any]:
        """The assistant's message that is being built; begins one if there is none."""
        if self._open_turn is None:
            self._open_turn = {"role": "assistant", "content": ""}
            self.messages.append(self._open_turn)
        return self._open_turn


def _refusal(item: Mapping[str, Any], item_field: str) -> RequestRefused:
    """The error for an item that this server cannot use. item_field: the request field of it."""
    kind = kind_of(item)
    if kind == "item_reference":  # references to stored items were already resolved
        field = f"{item_field}.id"
        reason = f"`{field}`: there is no such item"
        return RequestRefused(reason, status=404, code="item_not_found", field=field)
    field = f"{item_field}.type"
    if kind == TRIGGER:
        return invalid_field(field, f"a {TRIGGER} must be the last item of an input")
    reason = (
        "this server accepts messages, reasoning, tool calls, their outputs, and compaction items"
    )
    shown = f", not {kind[:_LONGEST_SHOWN]!r}"
    return invalid_field(field, reason, code="unsupported_parameter", shown=shown)


def _required(item: Mapping[str, Any], key: str, item_field: str) -> Any:
    if item.get(key) is None:
        raise missing_field(f"{item_field}.{key}")
    return item[key]


def _content(
    content: str | Sequence[Mapping[str, Any]], role: str, field: str
) -> str | list[dict[str, Any]]:
    """The content of an item as that of a chat message. role: of the message."""
    if isinstance(content, str):
        return content
    return [_part(part, role, f"{field}.{number}") for number, part in enumerate(content)]


def _part(part: Mapping[str, Any], role: str, field: str) -> dict[str, Any]:
    if (key := _TEXT_PARTS.get(part["type"])) is None:
        return non_text_part(part, role=role, field=field)
    return {"type": "text", "text": _required(part, key, field)}


def _thought_in(item: Mapping[str, Any]) -> str:
    """The readable thought in the content of a reasoning item; empty if there is none."""
    parts = item.get("content")
    if not isinstance(parts, list):
        return ""
    return "".join(part.get("text") or "" for part in parts if part["type"] == "reasoning_text")


def summary_seal(seal: Seal, model: str) -> Seal:
    """Return the seal that encrypts the summaries of a model.

    seal: the seal of the tenant; other tenants cannot decrypt the summaries.
    """
    return seal.for_tenant(f"summary by {model}")


def summary_options(*, max_tokens: int | None, thinking: Thinking) -> dict[str, Any]:
    """Return the fields of the GenerationRequest that makes the model summarize a conversation.

    The conversation, followed by SUMMARY_TURN, is the prompt. It includes the tools, so most is in
    the prefix cache. Raises RequestRefused if no token may be generated.
    """
    if max_tokens == 0:
        reason = "a summary needs at least 1 token"
        raise invalid_field("max_output_tokens", reason, shown=", got 0")
    if thinking.effort != "off" and thinking.budget_tokens is None:
        thinking = Thinking(effort=thinking.effort, budget_tokens=_THOUGHT_TOKENS)
    return {
        "max_tokens": max_tokens or _SUMMARY_TOKENS + _THOUGHT_TOKENS,
        "tool_choice": ToolChoice(mode="none"),
        "thinking": thinking,
    }


def stored_input(items: Iterable[Mapping[str, Any]]) -> list[Item]:
    """Return input items in stored form: with ids and defaults, without compaction triggers."""
    id_stem = uuid.uuid4().hex
    stored = [item for item in items if item.get("type") != TRIGGER]
    return [_with_defaults(item, f"{id_stem}{number:02x}") for number, item in enumerate(stored)]


def stored_output(items: Sequence[Any], hidden_thoughts: Mapping[str, str]) -> list[Item]:
    """Return output items in their stored form.

    hidden_thoughts: item id → thought, for thoughts that the item does not show.
    """
    stored: list[Item] = msgspec.to_builtins(items)
    return [
        {**item, _THOUGHT: hidden_thoughts[item["id"]]} if item["id"] in hidden_thoughts else item
        for item in stored
    ]


def shown_item(item: Item) -> Item:
    """Return a stored item as a client sees it."""
    return {key: value for key, value in item.items() if key != _THOUGHT}


def with_sealed_thought(item: Item, seal: Callable[[str], str]) -> Item:
    """Return a stored item in the form for a client that asked for encrypted thoughts."""
    client_item = shown_item(item)
    thought = ""
    if item["type"] == "reasoning":
        thought = item.get(_THOUGHT) or _thought_in(item)
    return {"encrypted_content": seal(thought), **client_item} if thought else client_item


def as_input(items: Iterable[Item]) -> list[Any]:
    """Return stored items as the first items of an input: with readable thoughts, without calls
    that were cut off.
    """
    input_items = []
    for item in items:
        if item.get("type") in _CALLS and item.get("status") == "incomplete":
            continue
        if _THOUGHT in item:
            thought = [{"type": "reasoning_text", "text": item[_THOUGHT]}]
            item = {"type": "reasoning", "id": item["id"], "summary": [], "content": thought}
        input_items.append(item)
    return input_items


def _with_defaults(item: Mapping[str, Any], id_suffix: str) -> Item:
    """The item with the fields that stored items must have: id, type, status, content as parts.

    id_suffix: of the id if the item has none.
    """
    kind = kind_of(item)
    whole = {**item, "type": kind}
    if not item.get("id"):
        whole["id"] = f"{_ID_PREFIXES.get(kind, 'item')}_{id_suffix}"
    if kind == "message" and isinstance(whole.get("content"), str):
        if whole.get("role") == "assistant":
            part = {"type": "output_text", "annotations": [], "text": whole["content"]}
        else:
            part = {"type": "input_text", "text": whole["content"]}
        whole["content"] = [part]
    if kind not in ("reasoning", "compaction"):
        whole.setdefault("status", "completed")
    return whole
