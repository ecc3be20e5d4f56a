"""The input of a Responses request: which items are accepted, and the conversation that they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NotRequired

from pydantic import Discriminator, Field, Tag, with_config
from typing_extensions import TypedDict

from holdfast.front.responses.tools import model_name
from holdfast.front.server.fields import (
    MANY,
    ONE,
    STRICT,
    is_media,
    one_or_many,
    refused_media,
    without_media,
)
from holdfast.front.server.problem import RequestRefused
from holdfast.wire.output import separator

# type → key of its text
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_ROLES = ("user", "system", "developer", "assistant")
_LONGEST_SHOWN = 40

Unseal = Callable[[str], str | None]
"""The thought or summary in an `encrypted_content`; None where it was not made by this server."""
_SUMMARY_INTRODUCTION = (
    "The conversation before this point was replaced by the following summary, which you wrote. "
    "Continue from it.\n\n"
)


@with_config(STRICT)
class ItemPart(TypedDict):
    """A part of an item's content."""

    type: str
    text: NotRequired[str | None]
    refusal: NotRequired[str | None]


ItemText = Annotated[
    Annotated[str, Tag(ONE)] | Annotated[list[ItemPart], Field(fail_fast=True), Tag(MANY)],
    Discriminator(one_or_many),
]


@with_config(STRICT)
class InputItem(TypedDict):
    """An item of the conversation; what it has to have depends on its type, which is `message`
    where there is none.
    """

    type: NotRequired[
        Annotated[
            str | None,
            Field(description="message, function_call, function_call_output, reasoning, …"),
        ]
    ]
    id: NotRequired[str | None]
    role: NotRequired[
        Annotated[str, Field(description="Of a message: user, system, developer or assistant.")]
    ]
    content: NotRequired[ItemText | None]
    name: NotRequired[Annotated[str | None, Field(description="Of a call: whom.")]]
    namespace: NotRequired[str | None]
    call_id: NotRequired[str | None]
    arguments: NotRequired[Annotated[str, Field(description="Of a function_call: JSON text.")]]
    input: NotRequired[Annotated[str, Field(description="Of a custom_tool_call.")]]
    output: NotRequired[Annotated[ItemText, Field(description="Of a call: what came of it.")]]
    summary: NotRequired[Annotated[list[ItemPart], Field(fail_fast=True)]]
    encrypted_content: NotRequired[str | None]


Input = Annotated[
    Annotated[str, Tag(ONE)] | Annotated[list[InputItem], Field(fail_fast=True), Tag(MANY)],
    Discriminator(one_or_many),
]


def items_of(given: str | Sequence[InputItem] | None) -> list[InputItem]:
    """An input as items: a text is a message of the user's."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return list(given or ())


def conversation(
    items: Iterable[Mapping[str, Any]],
    *,
    instructions: str | None = None,
    unseal: Unseal = lambda _: None,
    open_summary: Unseal = lambda _: "",
    earlier: int = 0,
    field: str = "input",
) -> tuple[dict[str, Any], ...]:
    """The messages, OpenAI-shaped, that instructions and items are.

    Raises RequestRefused naming the item it cannot take.

    earlier: so many of the items at the beginning are not the request's own.
    open_summary: of compaction items; the last one stands for what the assistant did before it.
    """
    items = list(items)
    compacted = _last_compaction(items)
    reader = _Conversation(unseal, open_summary)
    if instructions:
        reader.messages.append({"role": "system", "content": instructions})
    for number, item in enumerate(items, start=-earlier):
        place = f"{field}.{number}"
        kind = item.get("type") or "message"
        read = _KINDS.get(kind)
        if read is None:
            name, shown = f"{place}.type", f", not {kind[:_LONGEST_SHOWN]!r}"
            reason = (
                "this server takes messages, reasoning, calls of functions and custom tools, their "
                "outputs, and compaction items"
            )
            raise RequestRefused(
                f"`{name}`: {reason}", code="unsupported_parameter", field=name, shown=shown
            )
        if number + earlier >= compacted or _is_said_to_assistant(item):
            read(reader, item, place)
    return tuple(reader.messages)


def _last_compaction(items: Sequence[Mapping[str, Any]]) -> int:
    """The place of the last compaction item; 0 when there is none."""
    places = [place for place, item in enumerate(items) if item.get("type") == "compaction"]
    return places[-1] if places else 0


def _is_said_to_assistant(item: Mapping[str, Any]) -> bool:
    return (item.get("type") or "message") == "message" and item.get("role") != "assistant"


class _Conversation:
    """Folds items into messages: what the assistant thought, said and called in one turn is one
    message.
    """

    def __init__(self, unseal: Unseal, open_summary: Unseal) -> None:
        self.messages: list[dict[str, Any]] = []
        self._unseal = unseal
        self._open_summary = open_summary
        # the assistant's, which further items may belong to
        self._turn: dict[str, Any] | None = None

    def message(self, item: Mapping[str, Any], place: str) -> None:
        """What somebody said."""
        role = _required(item, "role", place)
        if role not in _ROLES:
            reason, shown = f"one of {', '.join(_ROLES)}", f", got {role[:_LONGEST_SHOWN]!r}"
            raise RequestRefused(f"`{place}.role`: {reason}", field=f"{place}.role", shown=shown)
        content = _content(_required(item, "content", place), f"{place}.content")
        if role != "assistant":
            self._turn = None
            self.messages.append({"role": role, "content": content})
            return
        turn = self._assistant(
            is_new=lambda turn: bool(turn["content"]) and not turn.get("tool_calls")
        )
        text = _joined(content)
        turn["content"] += separator(turn["content"], text) + text

    def reasoning(self, item: Mapping[str, Any], place: str) -> None:
        """What the assistant thought; of others' making it is left out, as nobody can read it."""
        sealed = item.get("encrypted_content")
        parts = item.get("content") if isinstance(item.get("content"), list) else ()
        thought = self._unseal(sealed) if sealed else None
        if thought is None:
            thought = "".join(
                part.get("text") or "" for part in parts or () if part["type"] == "reasoning_text"
            )
        if thought:
            turn = self._assistant(
                is_new=lambda turn: bool(turn["content"] or turn.get("tool_calls"))
            )
            turn["reasoning_content"] = turn.get("reasoning_content", "") + thought

    def function_call(self, item: Mapping[str, Any], place: str) -> None:
        """A call of a function."""
        self._call(item, place, _required(item, "arguments", place))

    def custom_tool_call(self, item: Mapping[str, Any], place: str) -> None:
        """A call of a custom tool, which the model knows as a function with one text."""
        self._call(item, place, {"input": _required(item, "input", place)})

    def call_output(self, item: Mapping[str, Any], place: str) -> None:
        """What came of a call."""
        self._turn = None
        output = _required(item, "output", place)
        content = (
            output
            if isinstance(output, str)
            else _content(without_media(output), f"{place}.output")
        )
        self.messages.append(
            {"role": "tool", "tool_call_id": _required(item, "call_id", place), "content": content}
        )

    def compaction(self, item: Mapping[str, Any], place: str) -> None:
        """The summary of what came before."""
        self._turn = None
        field = f"{place}.encrypted_content"
        summary = self._open_summary(_required(item, "encrypted_content", place))
        if summary is None:
            reason = (
                "it is damaged, or was not made by this server with this model for this tenant; "
                "send the conversation itself, or compact it again"
            )
            raise RequestRefused(f"`{field}`: {reason}", code="invalid_compaction", field=field)
        self.messages.append({"role": "user", "content": _SUMMARY_INTRODUCTION + summary})

    def trigger(self, item: Mapping[str, Any], place: str) -> None:
        """A trigger that is not the last item, where it would have been taken away before."""
        reason = "a compaction_trigger has to be the last item of an input"
        raise RequestRefused(f"`{place}.type`: {reason}", field=f"{place}.type")

    def reference(self, item: Mapping[str, Any], place: str) -> None:
        """An item that is kept elsewhere; those that are kept here have been put in their places
        before.
        """
        raise RequestRefused(
            f"`{place}.id`: there is no such item",
            status=404,
            code="item_not_found",
            field=f"{place}.id",
        )

    def _call(self, item: Mapping[str, Any], place: str, arguments: str | dict[str, Any]) -> None:
        function = {
            "name": model_name(_required(item, "name", place), item.get("namespace")),
            "arguments": arguments,
        }
        call = {"id": _required(item, "call_id", place), "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _assistant(
        self, *, is_new: Callable[[dict[str, Any]], bool] = lambda _: False
    ) -> dict[str, Any]:
        if self._turn is None or is_new(self._turn):
            self._turn = {"role": "assistant", "content": ""}
            self.messages.append(self._turn)
        return self._turn


_KINDS: Mapping[str, Callable[[_Conversation, Mapping[str, Any], str], None]] = {
    "message": _Conversation.message,
    "reasoning": _Conversation.reasoning,
    "function_call": _Conversation.function_call,
    "function_call_output": _Conversation.call_output,
    "custom_tool_call": _Conversation.custom_tool_call,
    "custom_tool_call_output": _Conversation.call_output,
    "compaction": _Conversation.compaction,
    "compaction_trigger": _Conversation.trigger,
    "item_reference": _Conversation.reference,
}


def _required(item: Mapping[str, Any], key: str, place: str) -> Any:
    if item.get(key) is None:
        raise RequestRefused(
            f"`{place}.{key}` is required",
            code="missing_required_parameter",
            field=f"{place}.{key}",
        )
    return item[key]


def _content(given: str | Sequence[Mapping[str, Any]], field: str) -> str | list[dict[str, Any]]:
    """Text, or its parts. Raises RequestRefused for one that is something else."""
    if isinstance(given, str):
        return given
    return [
        {"type": "text", "text": _text(part, f"{field}.{number}")}
        for number, part in enumerate(given)
    ]


def _text(part: Mapping[str, Any], field: str) -> str:
    kind = part["type"]
    if (key := _TEXT_PARTS.get(kind)) is None:
        if is_media(kind):
            raise refused_media(kind, field=field)
        raise RequestRefused(
            f"`{field}.type`: unknown part type",
            field=f"{field}.type",
            shown=f" {kind[:_LONGEST_SHOWN]!r}",
        )
    text: str = _required(part, key, field)
    return text


def _joined(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
