"""Messages as clients send them → messages as chat templates expect them.

Where a message can be read in one way only, it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from holdfast.errors import InvalidRequest
from holdfast.wire.output import ToolCall

_ROLES = {"developer": "system"}  # OpenAI's newer name for the same thing
# Names under which clients send, and templates read, past reasoning.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleHabits:
    """Which orders of messages a chat template takes."""

    system: bool = True  # a system message; else it goes into the first one of the user
    system_anywhere: bool = (
        # several of them, and behind others; else those at the beginning are one, and later ones
        # the user's
        True
    )
    # messages of the user without an answer between; else they are joined, and an answer comes
    # second
    same_in_a_row: bool = True


def with_roles(messages: list[dict[str, Any]], habits: RoleHabits) -> list[dict[str, Any]]:
    """The messages, which are the caller's own copies, in an order that the template takes."""
    if habits == RoleHabits():
        return messages
    ready: list[dict[str, Any]] = []
    for message in messages:
        before = ready[-1]["role"] if ready else ""
        if message["role"] == "system" and not (
            habits.system and (habits.system_anywhere or before in ("", "system"))
        ):
            message = {**message, "role": "user"}
        is_first = before in ("", "system")
        if message["role"] == before and (
            before == "system" or (before == "user" and habits != _ALL_BUT_LATER_SYSTEM)
        ):
            ready[-1] = {**message, "content": _joined(ready[-1]["content"], message["content"])}
        elif message["role"] == "assistant" and is_first and not habits.same_in_a_row:
            ready += [{"role": "user", "content": message["content"][:0]}, message]
        else:
            ready.append(message)
    return ready


_ALL_BUT_LATER_SYSTEM = RoleHabits(system_anywhere=False)


def answer_message(
    text: str, *, reasoning: str = "", calls: Iterable[ToolCall] = ()
) -> dict[str, Any]:
    """An answer as a message of the conversation that goes on behind it; calls that were cut are
    left out.
    """
    made = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
        if call.is_complete
    ]
    return {
        "role": "assistant",
        "content": text,
        **({REASONING_FIELDS[0]: reasoning} if reasoning else {}),
        **({"tool_calls": made} if made else {}),
    }


def _joined(first: Any, second: Any) -> Any:
    return [*first, *second] if isinstance(first, list) else f"{first}\n\n{second}"


def template_messages(
    messages: Iterable[dict[str, Any]],
    *,
    keep_parts: bool,
    arguments_as_text: bool,
    field: str = "messages",
) -> list[dict[str, Any]]:
    """Messages for a template, as fresh copies.

    Raises InvalidRequest naming the part that no template could use.

    keep_parts: the template goes through lists of content parts itself; else the text of the parts
        is joined, one per line.
    arguments_as_text: the template writes the arguments of tool calls as they are; else it expects
        objects.
    """
    ready = [
        _message(
            message,
            keep_parts=keep_parts,
            arguments_as_text=arguments_as_text,
            field=f"{field}.{place}",
        )
        for place, message in enumerate(messages)
    ]
    if not ready:
        raise InvalidRequest("there must be at least one message", field=field)
    return ready


def _message(
    message: dict[str, Any], *, keep_parts: bool, arguments_as_text: bool, field: str
) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest("a message must be an object", field=field)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest("a message must have a role", field=f"{field}.role")
    # Templates ask whether a key is there: one that is null is left out.
    ready = {key: value for key, value in message.items() if value is not None}
    ready["role"] = _ROLES.get(role, role)
    ready["content"] = _content(
        message.get("content"), keep_parts=keep_parts, field=f"{field}.content"
    )
    if calls := ready.pop("tool_calls", None):
        ready["tool_calls"] = _tool_calls(
            calls, arguments_as_text=arguments_as_text, field=f"{field}.tool_calls"
        )
    if reasoning := next(
        (ready[name] for name in REASONING_FIELDS if isinstance(ready.get(name), str)), ""
    ):
        ready |= dict.fromkeys(REASONING_FIELDS, reasoning)
    return ready


def _content(content: Any, *, keep_parts: bool, field: str) -> str | list[dict[str, Any]]:
    if content is None:
        parts = []
    elif isinstance(content, str):
        parts = [content]
    elif isinstance(content, list | tuple):
        parts = [_part(part, field=f"{field}.{place}") for place, part in enumerate(content)]
    else:
        raise InvalidRequest("content must be a string or a list of parts", field=field)
    return [{"type": "text", "text": part} for part in parts] if keep_parts else "\n".join(parts)


def _part(part: Any, *, field: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequest("a content part must be an object", field=field)
    kind = part.get("type", "text")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise InvalidRequest(
            f"content parts of type {kind!r} are not supported by this model: it reads text only",
            field=f"{field}.type",
        )
    if not isinstance(text, str):
        raise InvalidRequest("the text of a content part must be a string", field=f"{field}.text")
    return text


def _tool_calls(calls: Any, *, arguments_as_text: bool, field: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise InvalidRequest("tool_calls must be a list", field=field)
    return [
        _tool_call(call, arguments_as_text=arguments_as_text, field=f"{field}.{place}")
        for place, call in enumerate(calls)
    ]


def _tool_call(call: Any, *, arguments_as_text: bool, field: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(
            "a tool call must have a function with a name", field=f"{field}.function"
        )
    arguments = function.get("arguments")
    ready = arguments_text(arguments) if arguments_as_text else arguments_object(arguments)
    return {**call, "function": {**function, "arguments": ready}}


def arguments_object(arguments: Any) -> dict[str, Any]:
    """Arguments as an object.

    A model may have written another value, or no JSON at all, and the conversation must be able to
    go on: templates that go through arguments get it under a name.
    """
    if arguments is None or arguments == "":
        return {}
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"raw": arguments}


def arguments_text(arguments: Any) -> str:
    """Arguments as JSON text."""
    if arguments is None or arguments == "":
        return "{}"
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
