"""The turns of a conversation as Anthropic's clients send them, in blocks → messages as a prompt
has them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import Discriminator, Field, Tag, with_config
from typing_extensions import TypedDict

from holdfast.front.server.fields import (
    MANY,
    ONE,
    STRICT,
    TAG_MARK,
    is_media,
    one_or_many,
    refused_media,
    without_media,
)
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.sealing import Seal
from holdfast.wire.output import separator
from holdfast.wire.requests import CacheBreakpoint

_OTHER = TAG_MARK + "other"
_TAGS = {
    kind: TAG_MARK + kind
    for kind in ("text", "thinking", "tool_use", "tool_result", "tool_reference")
}
# Of Anthropic's own tools, and thoughts of another server: nothing in them is of use to a model
# here.
_LEFT_OUT = frozenset(
    {
        "redacted_thinking",
        "server_tool_use",
        "mcp_tool_use",
        "mcp_tool_listing",
        "compaction",
        "fallback",
    }
)
_LEFT_OUT_ENDING = "_tool_result"  # of web_search_tool_result and its like
_FAILED = "The call failed."
_SECONDS = {"5m": 300.0, "1h": 3600.0}


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return _TAGS.get(kind, _OTHER) if isinstance(kind, str) else _OTHER


@with_config(STRICT)
class CacheControl(TypedDict):
    """Keep what stands up to here: five minutes long, or an hour, since it was used last."""

    type: Literal["ephemeral"]
    ttl: NotRequired[Literal["5m", "1h"] | None]


@with_config(STRICT)
class TextBlock(TypedDict):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: NotRequired[CacheControl | None]


@with_config(STRICT)
class ThinkingBlock(TypedDict):
    """An earlier thought, with the signature that came with it."""

    type: Literal["thinking"]
    thinking: str
    signature: str


@with_config(STRICT)
class ToolUseBlock(TypedDict):
    """An earlier call of a tool."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: str
    input: dict[str, Any]


@with_config(STRICT)
class ToolReferenceBlock(TypedDict):
    """A tool that a search for tools has found: from here on it may be called."""

    type: Literal["tool_reference"]
    tool_name: str


@with_config(STRICT)
class OtherBlock(TypedDict):
    """A block of another type."""

    type: str


_Any = Discriminator(_kind)
ResultBlock = Annotated[
    Annotated[TextBlock, Tag(_TAGS["text"])]
    | Annotated[ToolReferenceBlock, Tag(_TAGS["tool_reference"])]
    | Annotated[OtherBlock, Tag(_OTHER)],
    Discriminator(
        lambda value: (
            kind if (kind := _kind(value)) in (_TAGS["text"], _TAGS["tool_reference"]) else _OTHER
        )
    ),
]


@with_config(STRICT)
class ToolResultBlock(TypedDict):
    """What a call has given."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: NotRequired[
        Annotated[
            Annotated[str, Tag(ONE)]
            | Annotated[list[ResultBlock], Field(fail_fast=True), Tag(MANY)],
            Discriminator(one_or_many),
        ]
        | None
    ]
    is_error: NotRequired[bool | None]
    cache_control: NotRequired[CacheControl | None]


Block = Annotated[
    Annotated[TextBlock, Tag(_TAGS["text"])]
    | Annotated[ThinkingBlock, Tag(_TAGS["thinking"])]
    | Annotated[ToolUseBlock, Tag(_TAGS["tool_use"])]
    | Annotated[ToolResultBlock, Tag(_TAGS["tool_result"])]
    | Annotated[ToolReferenceBlock, Tag(_TAGS["tool_reference"])]
    | Annotated[OtherBlock, Tag(_OTHER)],
    _Any,
]
SystemPrompt = Annotated[
    Annotated[str, Tag(ONE)] | Annotated[list[TextBlock], Field(fail_fast=True), Tag(MANY)],
    Discriminator(one_or_many),
]


@with_config(STRICT)
class Turn(TypedDict):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag(ONE)] | Annotated[list[Block], Field(fail_fast=True), Tag(MANY)],
        Discriminator(one_or_many),
        Field(description="Text, or blocks. The results of calls stand in turns of the user."),
    ]


Message: TypeAlias = dict[str, Any]


class Conversation:
    """A conversation as a prompt has it, and the places up to which its client wants it kept."""

    def __init__(self, *, seal: Seal) -> None:
        """seal: tells the thoughts that are ours; others are left out."""
        self.messages: list[Message] = []
        self.breakpoints: list[CacheBreakpoint] = []
        self._seal = seal

    def mark(self, block: Mapping[str, Any], *, messages: int, parts: int = 0) -> None:
        """Note whether a block, behind which so much stands, ends what is to be kept."""
        if control := block.get("cache_control"):
            seconds = _SECONDS[control.get("ttl") or "5m"]
            self.breakpoints.append(
                CacheBreakpoint(messages=messages, parts=parts, seconds=seconds)
            )

    def add_system(self, system: str | Sequence[TextBlock]) -> None:
        """Add what goes before the conversation."""
        blocks: Sequence[TextBlock] = (
            [{"type": "text", "text": system}] if isinstance(system, str) else system
        )
        for place, block in enumerate(blocks):
            self.mark(block, messages=0, parts=place + 1)
        if blocks:
            self.messages.append({"role": "system", "content": [_part(block) for block in blocks]})

    def add(self, turn: Turn, field: str) -> None:
        """Add a turn. Raises RequestRefused naming the first block in it that cannot be read by the
        model.
        """
        content = turn["content"]
        if isinstance(content, str):
            self.messages.append({"role": turn["role"], "content": content})
        elif turn["role"] == "assistant":
            self.messages.append(_answer(content, field, self._seal))
            for block in content:
                self.mark(block, messages=len(self.messages))
        else:
            self._add_said(turn["role"], content, field)

    def _add_said(self, role: str, blocks: Sequence[Mapping[str, Any]], field: str) -> None:
        """Add the messages that a turn of the user or the system is: results of calls are messages
        of their own.
        """
        parts: list[Message] = []
        for place, block in enumerate(blocks):
            if block["type"] == "tool_result":
                if parts:
                    self.messages.append({"role": role, "content": parts})
                    parts = []
                self.messages.append(_result(block, f"{field}.{place}"))
                self.mark(block, messages=len(self.messages))
            elif (part := _read(block)) is not None:
                parts.append(part)
                self.mark(block, messages=len(self.messages), parts=len(parts))
            elif block["type"] == "tool_reference":
                parts.append(_reference(block))
            else:
                _refuse_unless_left_out(block["type"], f"{field}.{place}")
        if parts or not blocks:
            self.messages.append({"role": role, "content": parts or ""})


def referenced_tools(turns: Sequence[Turn]) -> Iterator[str]:
    """The names of the tools that searches have found, in the order of the conversation."""
    for turn in turns:
        for block in turn["content"] if isinstance(turn["content"], list) else ():
            inner = block.get("content") if block["type"] == "tool_result" else [block]
            for part in inner if isinstance(inner, list) else ():
                if part["type"] == "tool_reference":
                    yield part["tool_name"]


def _answer(blocks: Sequence[Mapping[str, Any]], field: str, seal: Seal) -> Message:
    """A turn of the assistant: its thoughts, texts and calls, each together."""
    text = ""
    follows_text = False
    thoughts: list[str] = []
    calls: list[Message] = []
    for place, block in enumerate(blocks):
        match block["type"]:
            case "text":
                text += ("" if follows_text else separator(text, block["text"])) + block["text"]
            case "thinking":
                thoughts.append(_thought(block, seal))
            case "tool_use":
                function = {
                    "name": block["name"],
                    "arguments": json.dumps(block["input"], ensure_ascii=False),
                }
                calls.append({"id": block["id"], "type": "function", "function": function})
            case _:
                _refuse_unless_left_out(block["type"], f"{field}.{place}")
        follows_text = block["type"] == "text"
    thought = "".join(thoughts)
    return {
        "role": "assistant",
        "content": text,
        **({"reasoning_content": thought} if thought else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _thought(block: Mapping[str, Any], seal: Seal) -> str:
    """A thought of ours, or nothing: what another model has thought is not what this one would go
    on from.
    """
    thinking, signature = block["thinking"], block["signature"]
    if not thinking:
        return seal.open(signature) or ""
    return thinking if seal.is_signed(thinking, signature) else ""


def _result(block: Mapping[str, Any], field: str) -> Message:
    content = block.get("content") or ""
    if not isinstance(content, str):
        parts = []
        for place, part in enumerate(content):
            if (read := _read(part)) is not None:
                parts.append(read)
            elif part["type"] == "tool_reference":
                parts.append(_reference(part))
            elif not _is_left_out(part["type"]):
                if not is_media(part["type"]):
                    raise _refused_type(part["type"], f"{field}.content.{place}")
                parts += without_media([part])
        content = parts
    if block.get("is_error"):  # no template has a place for it
        content = _failed(content)
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}


def _failed(content: str | list[Message]) -> str | list[Message]:
    if not content:
        return _FAILED
    return (
        f"{_FAILED}\n{content}"
        if isinstance(content, str)
        else [{"type": "text", "text": _FAILED}, *content]
    )


def _read(block: Mapping[str, Any]) -> Message | None:
    """A block of text, or a document or search result that consists of text, as a part of a
    message; None for another one.
    """
    if block["type"] == "text":
        return _part(block)
    source = block.get("source")
    if block["type"] == "search_result":
        given = block.get("content")
    elif (
        block["type"] == "document"
        and isinstance(source, dict)
        and source.get("type") in ("text", "content")
    ):
        given = source.get("data" if source["type"] == "text" else "content")
    else:
        return None
    inner = (
        [{"text": given}]
        if isinstance(given, str)
        else given
        if isinstance(given, list)
        else [None]
    )
    texts = [part.get("text") if isinstance(part, dict) else None for part in inner]
    if not all(isinstance(text, str) for text in texts):
        return None
    heading = [text for name in ("title", "context") if isinstance(text := block.get(name), str)]
    return {"type": "text", "text": "\n".join([*heading, *map(str, texts)])}


def _part(block: Mapping[str, Any]) -> Message:
    return {"type": "text", "text": block["text"]}


def _reference(block: Mapping[str, Any]) -> Message:
    return {"type": "tool_reference", "tool_name": block["tool_name"]}


def _refuse_unless_left_out(kind: str, field: str) -> None:
    if not _is_left_out(kind):
        raise refused_media(kind, field=field) if is_media(kind) else _refused_type(kind, field)


def _is_left_out(kind: str) -> bool:
    return kind in _LEFT_OUT or kind.endswith(_LEFT_OUT_ENDING)


def _refused_type(kind: str, field: str) -> RequestRefused:
    field = f"{field}.type"
    return RequestRefused(
        f"`{field}`: no block of this type may stand here", field=field, shown=f": {kind[:40]!r}"
    )
