"""A conversation as Ollama's clients send it, and as a prompt has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, with_config
from typing_extensions import TypedDict

from holdfast.config import LimitsSettings
from holdfast.front.server.fields import STRICT, refuse_too_many
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.tools import FunctionName, checked_definitions
from holdfast.front.server.unsupported import refused_media, without_media

_FUNCTION = "function"


@with_config(STRICT)
class PastFunction(TypedDict):
    """What was called, and with what."""

    name: str
    arguments: NotRequired[dict[str, Any] | None]
    index: NotRequired[int | None]


@with_config(STRICT)
class PastCall(TypedDict):
    """A call of an earlier answer. Many clients do not keep its id."""

    id: NotRequired[str | None]
    function: PastFunction


@with_config(STRICT)
class OllamaMessage(TypedDict):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: NotRequired[str | None]
    thinking: NotRequired[
        Annotated[str | None, Field(description="What the assistant thought before it answered.")]
    ]
    images: NotRequired[
        Annotated[
            list[Any] | None,
            Field(
                description="Not supported by this version yet; in results of tools they are left out."
            ),
        ]
    ]
    tool_calls: NotRequired[Annotated[list[PastCall], Field(fail_fast=True)] | None]
    tool_name: NotRequired[
        Annotated[str | None, Field(description="Of a result: the tool that was called.")]
    ]
    tool_call_id: NotRequired[
        Annotated[str | None, Field(description="Of a result: the id of the call.")]
    ]


@with_config(STRICT)
class OllamaFunction(TypedDict):
    """A function that the model may call."""

    name: FunctionName
    description: NotRequired[str | None]
    parameters: NotRequired[
        Annotated[dict[str, Any] | None, Field(description="JSON schema of its arguments.")]
    ]


@with_config(STRICT)
class OllamaTool(TypedDict):
    """A tool. Only functions are served."""

    type: NotRequired[str | None]
    function: OllamaFunction


OllamaMessages = Annotated[list[OllamaMessage], Field(fail_fast=True)]
OllamaTools = Annotated[list[OllamaTool], Field(fail_fast=True)]


def definitions(
    tools: Sequence[OllamaTool], *, limits: LimitsSettings
) -> tuple[dict[str, Any], ...]:
    """The tools as a prompt has them, without nulls.

    Raises RequestRefused naming what cannot be served.
    """
    refuse_too_many(tools, limits.max_tools, field="tools")
    for place, tool in enumerate(tools):
        if (kind := tool.get("type") or _FUNCTION) != _FUNCTION:
            field, shown = f"tools.{place}.type", f", not {kind[:40]!r}"
            raise RequestRefused(
                f"`{field}`: only functions are supported", field=field, shown=shown
            )
    functions = [
        {name: value for name, value in tool["function"].items() if value is not None}
        for tool in tools
    ]
    ready = [{"type": _FUNCTION, "function": function} for function in functions]
    return checked_definitions(ready, field="tools.{}.function", most_parts=limits.max_tool_parts)


def conversation(messages: Sequence[OllamaMessage]) -> tuple[dict[str, Any], ...]:
    """The messages as a prompt has them.

    Raises RequestRefused for images of the user's; results have notes in their place.

    A result belongs to the call whose id it has; without one to the first of that name which has
    none yet, else to the first.
    """
    ready: list[dict[str, Any]] = []
    open_calls: dict[str, str] = {}  # id → name, of the latest calls without a result
    for place, message in enumerate(messages):
        turn: dict[str, Any] = {"role": message["role"], "content": message.get("content") or ""}
        if images := message.get("images"):
            if message["role"] != "tool":
                raise refused_media("image", field=f"messages.{place}.images")
            notes = without_media([{"type": "image"}] * len(images))
            turn["content"] = "\n".join(
                [*filter(None, [turn["content"]]), *[note["text"] for note in notes]]
            )
        if thought := message.get("thinking"):
            turn["reasoning_content"] = thought
        if calls := message.get("tool_calls"):
            turn["tool_calls"] = _calls(calls, place)
            open_calls = {call["id"]: call["function"]["name"] for call in turn["tool_calls"]}
        if message["role"] == "tool":
            name = message.get("tool_name") or ""
            answered = _answered(message.get("tool_call_id") or "", name, open_calls)
            turn |= {"tool_call_id": answered, **({"name": name} if name else {})}
            open_calls.pop(answered, None)
        ready.append(turn)
    return tuple(ready)


def _calls(calls: Sequence[PastCall], place: int) -> list[dict[str, Any]]:
    return [
        {
            "id": call.get("id") or f"call_{place}_{number}",
            "type": _FUNCTION,
            "function": {
                "name": call["function"]["name"],
                "arguments": call["function"].get("arguments") or {},
            },
        }
        for number, call in enumerate(calls)
    ]


def _answered(given_id: str, name: str, open_calls: dict[str, str]) -> str:
    """The id of the call that a result is of."""
    if given_id in open_calls:
        return given_id
    of_that_name = (call for call, called in open_calls.items() if called == name)
    return next(of_that_name, next(iter(open_calls), given_id or f"call_{name}"))
