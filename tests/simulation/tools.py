"""Tools that agents declare, and their calls as each protocol sends them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.simulation.actions import Turn
from tests.simulation.formats import SCHEMAS, fits

# in the order in which the model reads their keys
_FUNCTIONS: Sequence[Mapping[str, Any]] = [
    {"name": "look", "description": "Looks at a point.", "parameters": SCHEMAS["point"]},
    {"name": "find", "description": "Finds words.", "parameters": SCHEMAS["words"]},
]
DEFINITIONS = [{"type": "function", "function": each} for each in _FUNCTIONS]
_NAMED = "find"
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_HEAD = re.compile(r'\{\s*"name"\s*:\s*"(\w+)"\s*,\s*"arguments"\s*:\s*')


@dataclass
class ToolCall:
    """A call. arguments: JSON text."""

    id: str
    name: str
    arguments: str = ""

    @property
    def value(self) -> Any:
        """The arguments; their text, if it is not JSON."""
        try:
            return json.loads(self.arguments)
        except ValueError:
            return self.arguments


def has_tools(turn: Turn) -> bool:
    """Whether the request declares tools."""
    return turn.tools and turn.protocol != "completions"


def reads_calls(turn: Turn) -> bool:
    """Whether the server looks for calls in the answer."""
    return has_tools(turn) and turn.tool_choice != "none"


def has_grammar(turn: Turn) -> bool:
    """Whether the answer has a grammar. In the Responses API, tools are strict by default."""
    if not has_tools(turn):
        return bool(turn.format)
    if turn.tool_choice == "auto":
        return turn.protocol == "responses"
    return turn.tool_choice != "none"


def tool_fields(turn: Turn) -> dict[str, Any]:
    """The fields of a request that declare tools and say whether they may be called."""
    if not has_tools(turn):
        return {}
    strict = {"strict": True} if turn.tool_choice == "strict" else {}
    functions = [{**each, **strict} for each in _FUNCTIONS]
    mode = {"strict": "auto", "single": "required"}.get(turn.tool_choice, turn.tool_choice)
    is_single = turn.tool_choice == "single"
    if turn.protocol == "messages":
        tools = [_with_key(each, "parameters", "input_schema") for each in functions]
        choice = {"type": {"required": "any", "named": "tool"}.get(mode, mode)}
        choice |= {"name": _NAMED} if mode == "named" else {}
        single = {"disable_parallel_tool_use": True} if is_single else {}
        return {"tools": tools, "tool_choice": {**choice, **single}}
    single = {"parallel_tool_calls": False} if is_single else {}
    if turn.protocol == "responses":
        named = {"type": "function", "name": _NAMED}
        tools = [{"type": "function", **each} for each in functions]
    else:
        named = {"type": "function", "function": {"name": _NAMED}}
        tools = [{"type": "function", "function": each} for each in functions]
    return {"tools": tools, "tool_choice": named if mode == "named" else mode, **single}


def _with_key(mapping: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if key == old else key: value for key, value in mapping.items()}


# -- calls and results in a conversation


def chat_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without parts, in OpenAI's form."""
    sent = {"role": message["role"], "content": message["content"]}
    if message["role"] == "tool":
        sent["tool_call_id"] = message["call_id"]
    if calls := message.get("calls"):
        sent["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    return sent


def messages_of_anthropic(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in Anthropic's form, without parts of the user's texts."""
    sent: list[dict[str, Any]] = []
    for each in messages:
        content = each["content"]
        if each["role"] == "tool":
            result = {"type": "tool_result", "tool_use_id": each["call_id"], "content": content}
            if sent and sent[-1]["role"] == "user":  # the results of one answer
                sent[-1]["content"].append(result)
            else:
                sent.append({"role": "user", "content": [result]})
            continue
        if calls := each.get("calls"):
            content = [{"type": "text", "text": content}] if content else []
            content += [
                {"type": "tool_use", "id": call.id, "name": call.name, "input": call.value}
                for call in calls
            ]
        sent.append({"role": each["role"], "content": content})
    return sent


def items_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A message as items of the Responses API."""
    if message["role"] == "tool":
        output = {"call_id": message["call_id"], "output": message["content"]}
        return [{"type": "function_call_output", **output}]
    calls: Sequence[ToolCall] = message.get("calls", ())
    items = [{"role": message["role"], "content": message["content"]}]
    if calls and not message["content"]:
        items = []
    return items + [
        {
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        for call in calls
    ]


def as_template_reads(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as the chat template gets it."""
    read = {"role": message["role"], "content": message["content"]}
    if calls := message.get("calls"):
        read["tool_calls"] = [{"name": call.name, "arguments": call.value} for call in calls]
    return read


def with_plain_calls(text: str) -> str:
    """A text of calls whose white space does not depend on whether the model or the template has
    written them.
    """

    def plain(match: re.Match[str]) -> str:
        try:
            return f"<tool_call>{json.dumps(json.loads(match[1]))}</tool_call>"
        except ValueError:
            return match[0]  # text of a user

    return re.sub(r"\s*(<tool_call>\{.*?\}</tool_call>)", r"\1", _CALL.sub(plain, text))


# -- calls in an answer


def is_as_chosen(turn: Turn, calls: Sequence[ToolCall], *, is_ended: bool) -> bool:
    """Whether the calls of an answer are those that the request allows. is_ended: it is whole."""
    if turn.tool_choice in ("named", "single") and len(calls) > 1:
        return False
    if turn.tool_choice == "named" and any(each.name != _NAMED for each in calls):
        return False
    if not is_ended:
        return True
    if turn.tool_choice in ("required", "named", "single") and not calls:
        return False
    schemas = {each["name"]: each["parameters"] for each in _FUNCTIONS}
    is_held = has_grammar(turn)
    return all(not is_held or fits(each.value, schemas[each.name]) for each in calls)


@dataclass(frozen=True)
class Parsed:
    """The parts of an answer's text. cut: the text from the start of the call that was not complete;
    empty if there is none.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    cut: str = ""


def parsed(text: str) -> Parsed:
    """Divide the text of an answer that may have calls at its end."""
    before, marker, _ = text.partition("<tool_call>")
    if not marker:
        return Parsed(text)
    calls = [_call(each.removesuffix("}")) for each in _CALL.findall(text)]
    cut = _CALL.sub("", text.removeprefix(before)).strip()
    return Parsed(before.rstrip(), tuple(filter(None, calls)), cut)


def cut_call(cut: str) -> ToolCall | None:
    """The call that an answer breaks off in; None if its arguments have not begun."""
    return _call(cut.removeprefix("<tool_call>").lstrip())


def _call(text: str) -> ToolCall | None:
    """A call from the text of its object, up to the end of its arguments; None if they have not begun."""
    head = _HEAD.match(text)
    arguments = text[head.end() :] if head else ""
    return ToolCall("", head[1], arguments.strip()) if head and arguments else None


def first_call_end(text: str) -> int | None:
    """The place after the first complete call; None if there is none."""
    match = _CALL.search(text)
    return match.end() if match else None
