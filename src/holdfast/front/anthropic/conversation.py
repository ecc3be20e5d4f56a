"""Converts conversations and tools from Anthropic's format to messages and tools of a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypeAlias

from pydantic import Discriminator, Field, Tag, with_config
from typing_extensions import TypedDict

from holdfast.config import LimitsSettings
from holdfast.front.images.sources import with_notes
from holdfast.front.output import separator
from holdfast.front.request import CacheBreakpoint, ChatPrompt, ToolChoice
from holdfast.front.server.access import Seal
from holdfast.front.server.fields import (
    STRICT,
    TAG_MARK,
    FunctionName,
    FunctionParameters,
    StrictArguments,
    TextOrMany,
    ToolMode,
    checked_definitions,
    checked_tool_choice,
    log_once,
    non_text_part,
    refuse_too_many,
)
from holdfast.front.server.problem import invalid_field, missing_field

# tags of the union of block types
_OTHER = TAG_MARK + "other"
_TAGS = {
    kind: TAG_MARK + kind
    for kind in ("text", "thinking", "tool_use", "tool_result", "tool_reference")
}
# types of blocks that a model here cannot use: those of Anthropic's own tools, and other servers'
# thoughts
_LEFT_OUT_TYPES = frozenset(
    {
        "redacted_thinking",
        "server_tool_use",
        "mcp_tool_use",
        "mcp_tool_listing",
        "compaction",  # without a summary: a failed compaction
        "fallback",
    }
)
_LEFT_OUT_ENDING = "_tool_result"  # such as web_search_tool_result
_FAILURE_NOTE = "The call failed."
_CACHE_SECONDS = {"5m": 300.0, "1h": 3600.0}
_SCHEMA_FIELD = "input_schema"
# type of a `tool_choice` → our mode
_MODES: Mapping[str, ToolMode] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}


def _block_tag(value: Any) -> str:
    """The discriminator of `Block`."""
    kind = value.get("type") if isinstance(value, dict) else None
    return _TAGS.get(kind, _OTHER) if isinstance(kind, str) else _OTHER


def _result_block_tag(value: Any) -> str:
    """The discriminator of `ResultBlock`."""
    tag = _block_tag(value)
    return tag if tag in (_TAGS["text"], _TAGS["tool_reference"]) else _OTHER


@with_config(STRICT)
class CacheControl(TypedDict):
    """Cache the prompt up to this block for five minutes or an hour after its last use."""

    type: Literal["ephemeral"]
    ttl: NotRequired[Literal["5m", "1h"] | None]


@with_config(STRICT)
class TextBlock(TypedDict):
    """A text block."""

    type: Literal["text"]
    text: str
    cache_control: NotRequired[CacheControl | None]


@with_config(STRICT)
class ThinkingBlock(TypedDict):
    """An earlier thought, with its signature."""

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
    """A tool that a tool search has found. The model may call it from this block on."""

    type: Literal["tool_reference"]
    tool_name: str


@with_config(STRICT)
class OtherBlock(TypedDict):
    """A block of any other type."""

    type: str


ResultBlock = Annotated[
    Annotated[TextBlock, Tag(_TAGS["text"])]
    | Annotated[ToolReferenceBlock, Tag(_TAGS["tool_reference"])]
    | Annotated[OtherBlock, Tag(_OTHER)],
    Discriminator(_result_block_tag),
]


@with_config(STRICT)
class ToolResultBlock(TypedDict):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: NotRequired[TextOrMany[ResultBlock] | None]
    is_error: NotRequired[bool | None]
    cache_control: NotRequired[CacheControl | None]


Block = Annotated[
    Annotated[TextBlock, Tag(_TAGS["text"])]
    | Annotated[ThinkingBlock, Tag(_TAGS["thinking"])]
    | Annotated[ToolUseBlock, Tag(_TAGS["tool_use"])]
    | Annotated[ToolResultBlock, Tag(_TAGS["tool_result"])]
    | Annotated[ToolReferenceBlock, Tag(_TAGS["tool_reference"])]
    | Annotated[OtherBlock, Tag(_OTHER)],
    Discriminator(_block_tag),
]
SystemPrompt = TextOrMany[TextBlock]


@with_config(STRICT)
class TurnConfig(TypedDict):
    """The thinking effort of one turn."""

    effort: NotRequired[Literal["low", "medium", "high", "xhigh", "max"] | None]


@with_config(STRICT)
class Turn(TypedDict):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: NotRequired[
        Annotated[
            TextOrMany[Block],
            Field(
                description="Text, or blocks. The user's turns also contain the results of calls."
            ),
        ]
    ]
    output_config: NotRequired[
        Annotated[TurnConfig | None, Field(description="For a system message.")]
    ]
    clear_at: NotRequired[
        Annotated[
            Literal["next_user_message", "never"] | None,
            Field(description="For a system message: how long it stays in the prompt."),
        ]
    ]


Message: TypeAlias = dict[str, Any]


class Conversation:
    """The messages of a prompt, in OpenAI's chat format, and its breakpoints: the places up to
    which the client wants the prompt cached.

    A message has parts where Anthropic's format has blocks.
    """

    def __init__(self, *, seal: Seal) -> None:
        """seal: recognizes thoughts of this server; thoughts of others are left out."""
        self.messages: list[Message] = []
        self.breakpoints: list[CacheBreakpoint] = []
        self._seal = seal

    def prompt(self, tools: ShownTools, *, continue_last: bool) -> ChatPrompt:
        """The prompt, with notes in place of what no model here reads. Raises RequestRefused."""
        messages, has_images = with_notes(self.messages)
        return ChatPrompt(
            messages=messages,
            has_images=has_images,
            tools=tools.definitions,
            tool_fields=tools.schema_fields,
            found_tools=tools.found,
            continue_last=continue_last,
            cache_breakpoints=tuple(self.breakpoints),
        )

    def mark_breakpoint(self, block: Mapping[str, Any], *, messages: int, parts: int = 0) -> None:
        """Add a breakpoint if the block has `cache_control`.

        messages: the number of whole messages before the end of the block.
        parts: the number of parts of the next message that are before the end of the block.
        """
        control = block.get("cache_control")
        # checked here, because pydantic does not check the field in blocks of unknown types
        if isinstance(control, Mapping):
            seconds = _CACHE_SECONDS["1h" if control.get("ttl") == "1h" else "5m"]
            self.breakpoints.append(
                CacheBreakpoint(messages=messages, parts=parts, seconds=seconds)
            )

    def add_system(self, system: str | Sequence[TextBlock]) -> None:
        """Add the system message."""
        blocks: Sequence[TextBlock] = (
            [{"type": "text", "text": system}] if isinstance(system, str) else system
        )
        for index, block in enumerate(blocks):
            self.mark_breakpoint(block, messages=0, parts=index + 1)
        if blocks:
            self.messages.append({"role": "system", "content": [_part(block) for block in blocks]})

    def add_turn(self, turn: Turn, field: str) -> None:
        """Add a turn. field: the request field of its content.

        Raises RequestRefused, which names the first block that the model cannot read.
        """
        content = turn["content"]
        if isinstance(content, str):
            self.messages.append({"role": turn["role"], "content": content})
        elif turn["role"] == "assistant":
            self.messages.append(_assistant_message(content, field, self._seal))
            for block in content:
                self.mark_breakpoint(block, messages=len(self.messages))
        else:
            self._add_blocks(turn["role"], content, field)

    def _add_blocks(self, role: str, blocks: Sequence[Mapping[str, Any]], field: str) -> None:
        """Add a turn of the user or the system. Each result of a call becomes its own message."""
        parts: list[Message] = []
        # The role to which blocks that are not text belong. Next to results, an agent puts what its
        # tools found, such as the pages of a PDF.
        source_role = "tool" if any(block["type"] == "tool_result" for block in blocks) else role
        for index, block in enumerate(blocks):
            if block["type"] == "tool_result":
                if parts:
                    self.messages.append({"role": role, "content": parts})
                    parts = []
                self.messages.append(_result_message(block, f"{field}.{index}"))
                self.mark_breakpoint(block, messages=len(self.messages))
            elif (part := _text_part(block)) is not None:
                parts.append(part)
                self.mark_breakpoint(block, messages=len(self.messages), parts=len(parts))
            elif block["type"] == "tool_reference":
                parts.append(_reference_part(block))
            elif not _is_left_out(block["type"]):
                parts.append(_other_part(block, source_role, f"{field}.{index}"))
                self.mark_breakpoint(block, messages=len(self.messages), parts=len(parts))
        if parts or not blocks:
            self.messages.append({"role": role, "content": parts or ""})


def referenced_tools(turns: Sequence[Turn]) -> Iterator[str]:
    """Iterate over the names of tools that tool searches have found, in conversation order."""
    for turn in turns:
        for block in turn["content"] if isinstance(turn["content"], list) else ():
            inner_blocks = block.get("content") if block["type"] == "tool_result" else [block]
            for part in inner_blocks if isinstance(inner_blocks, list) else ():
                if part["type"] == "tool_reference":
                    yield part["tool_name"]


def _assistant_message(blocks: Sequence[Mapping[str, Any]], field: str, seal: Seal) -> Message:
    """Return a turn of the assistant as one message: all thoughts, all texts, and all calls."""
    text = ""
    follows_text = False
    thoughts: list[str] = []
    calls: list[Message] = []
    for index, block in enumerate(blocks):
        match block["type"]:
            case "compaction" if (summary := _text_part(block)) is not None:
                text += separator(text, summary["text"]) + summary["text"]
            case "text":
                text += ("" if follows_text else separator(text, block["text"])) + block["text"]
            case "thinking":
                thoughts.append(_readable_thought(block, seal))
            case "tool_use":
                function = {
                    "name": block["name"],
                    "arguments": json.dumps(block["input"], ensure_ascii=False),
                }
                calls.append({"id": block["id"], "type": "function", "function": function})
            case kind if not _is_left_out(kind):
                note = _other_part(block, "assistant", f"{field}.{index}")["text"]
                text += separator(text, note) + note
        follows_text = block["type"] == "text"
    thought = "".join(thoughts)
    return {
        "role": "assistant",
        "content": text,
        **({"reasoning_content": thought} if thought else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _readable_thought(block: Mapping[str, Any], seal: Seal) -> str:
    """Return a thought of this server; empty for others: a model must not continue those."""
    thinking = block["thinking"]
    signature = block["signature"]
    if not thinking:
        return seal.decrypt(signature) or ""
    return thinking if seal.is_signed(thinking, signature) else ""


def _result_message(block: Mapping[str, Any], field: str) -> Message:
    """Return the result of a call as a message. field: the request field of the block."""
    content = block.get("content") or ""
    if not isinstance(content, str):
        parts = []
        for index, part in enumerate(content):
            if (text_part := _text_part(part)) is not None:
                parts.append(text_part)
            elif part["type"] == "tool_reference":
                parts.append(_reference_part(part))
            elif not _is_left_out(part["type"]):
                parts.append(_other_part(part, "tool", f"{field}.content.{index}"))
        content = parts
    if block.get("is_error"):  # chat templates have no field for errors
        content = _with_failure_note(content)
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}


def _with_failure_note(content: str | list[Message]) -> str | list[Message]:
    """The content of a failed call's result, which begins with a note that the call failed."""
    if not content:
        return _FAILURE_NOTE
    return (
        f"{_FAILURE_NOTE}\n{content}"
        if isinstance(content, str)
        else [{"type": "text", "text": _FAILURE_NOTE}, *content]
    )


def _text_part(block: Mapping[str, Any]) -> Message | None:
    """Return the message part for a text, a document or search result that consists of text, or a
    compaction summary. Returns None for other blocks.
    """
    if block["type"] == "text":
        return _part(block)
    if block["type"] == "compaction" and isinstance(summary := block.get("content"), str):
        return {"type": "text", "text": summary}
    source = block.get("source")
    if block["type"] == "search_result":
        text_source = block.get("content")
    elif (
        block["type"] == "document"
        and isinstance(source, dict)
        and source.get("type") in ("text", "content")
    ):
        text_source = source.get("data" if source["type"] == "text" else "content")
    else:
        return None
    if isinstance(text_source, str):
        text_source = [{"text": text_source}]
    if not isinstance(text_source, list):
        return None
    texts = [part.get("text") if isinstance(part, dict) else None for part in text_source]
    if not all(isinstance(text, str) for text in texts):
        return None
    headings = [text for name in ("title", "context") if isinstance(text := block.get(name), str)]
    return {"type": "text", "text": "\n".join([*headings, *map(str, texts)])}


def _part(block: Mapping[str, Any]) -> Message:
    return {"type": "text", "text": block["text"]}


def _reference_part(block: Mapping[str, Any]) -> Message:
    return {"type": "tool_reference", "tool_name": block["tool_name"]}


def _is_left_out(kind: str) -> bool:
    return kind in _LEFT_OUT_TYPES or kind.endswith(_LEFT_OUT_ENDING)


def _other_part(block: Mapping[str, Any], role: str, field: str) -> Message:
    """Return the message part for a block that is not text, as `non_text_part` does.

    Raises RequestRefused for a type that is not allowed at this place, such as a call by the user.
    """
    if (kind := block["type"]) in _TAGS:
        reason = "a block of this type is not allowed here"
        raise invalid_field(f"{field}.type", reason, shown=f": {kind!r}")
    return non_text_part(block, role=role, field=field)


def _object_schema(required: str, **properties: Any) -> dict[str, Any]:
    """A JSON schema of a tool's arguments. required: their names, separated by spaces."""
    return {"type": "object", "properties": properties, "required": required.split()}


_TEXT = {"type": "string"}
_NUMBER = {"type": "integer"}
_SWITCH = {"type": "boolean"}
_RANGE = {"type": "array", "items": _NUMBER}
_EDITS = {
    "path": _TEXT,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": _NUMBER,
    "view_range": _RANGE,
}


def _enum_schema(words: str) -> dict[str, Any]:
    """A JSON schema. words: the allowed values, separated by spaces."""
    return {"type": "string", "enum": words.split()}


# Tools that clients run and Anthropic's models know: type without date → description and schema.
_TOOLS_WITH_KNOWN_SCHEMA: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bash": (
        "Runs a command in a shell that stays open.",
        _object_schema("", command=_TEXT, restart=_SWITCH),
    ),
    "text_editor": (
        "Views, creates and edits files.",
        _object_schema(
            "command path",
            command=_enum_schema("view create str_replace insert undo_edit"),
            **_EDITS,
            insert_text=_TEXT,
        ),
    ),
    "memory": (
        "Views, creates and edits files of notes under /memories, which outlive the conversation.",
        _object_schema(
            "command",
            command=_enum_schema("view create str_replace insert delete rename"),
            **_EDITS,
            insert_text=_TEXT,
            old_path=_TEXT,
            new_path=_TEXT,
        ),
    ),
}


@with_config(STRICT)
class MessagesTool(TypedDict):
    """A tool: a function, or a tool that Anthropic defines (recognized by its type)."""

    type: NotRequired[str | None]
    name: NotRequired[FunctionName]
    description: NotRequired[str | None]
    input_schema: NotRequired[FunctionParameters]
    strict: NotRequired[StrictArguments]
    defer_loading: NotRequired[
        Annotated[
            bool | None,
            Field(description="Hide the tool from the model until a tool_reference names it."),
        ]
    ]
    cache_control: NotRequired[CacheControl | None]


@with_config(STRICT)
class MessagesToolChoice(TypedDict):
    """Whether the model may, must or must not call tools, or which tool the model must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: NotRequired[FunctionName | None]
    disable_parallel_tool_use: NotRequired[bool | None]


class ShownTools(NamedTuple):
    """The tools for a prompt (`definitions`), without fields that are null.

    schema_fields: for each tool, the request field that contains its schema.
    found: the names of the tools that tool searches have found; they come after all other tools.
        Empty if there are no other tools, because the found ones are then listed like those.
    """

    definitions: tuple[dict[str, Any], ...]
    schema_fields: tuple[str, ...]
    found: tuple[str, ...] = ()


def shown_tools(
    tools: Sequence[MessagesTool], *, referenced: Iterable[str], limits: LimitsSettings
) -> ShownTools:
    """Return the tools that are offered to the model. A deferred tool is one of them only if
    `referenced` contains its name.

    Raises RequestRefused, which names the field that is not supported.
    """
    refuse_too_many(tools, limits.max_tools, field="tools")
    # definition, and the field of the request that has it
    offered: list[tuple[dict[str, Any], str]] = []
    deferred: dict[str, tuple[dict[str, Any], str]] = {}
    for index, tool in enumerate(tools):
        field = f"tools.{index}"
        if (definition := _function(tool, field)) is not None and tool.get("defer_loading"):
            deferred[definition["function"]["name"]] = definition, field
        elif definition is not None:
            offered.append((definition, field))
    found = tuple(name for name in dict.fromkeys(referenced) if name in deferred)
    # The prompt introduces found tools where the tool search found them. But chat templates explain
    # calls only if they list tools. So if there are no other tools, the found ones are listed.
    found_later = found if offered else ()
    offered += [deferred[name] for name in found]
    definitions = [definition for definition, _ in offered]
    fields = tuple(field for _, field in offered)
    checked = checked_definitions(
        definitions, fields=fields, most_parts=limits.max_tool_parts, schema=_SCHEMA_FIELD
    )
    return ShownTools(checked, tuple(f"{field}.{_SCHEMA_FIELD}" for field in fields), found_later)


def choice_of(choice: MessagesToolChoice | None, *, tools: ShownTools) -> ToolChoice:
    """Interpret `tool_choice`. Raises RequestRefused for a tool that is not among `tools`."""
    if choice is None:
        return ToolChoice()
    kind = choice["type"]
    name = choice.get("name")
    if kind == "tool" and not name:
        raise missing_field("tool_choice.name")
    names = [name] if kind == "tool" and name else []
    field = "tool_choice.name" if names else "tool_choice"
    return checked_tool_choice(
        _MODES[kind],
        names,
        tools=tools.definitions,
        parallel=not choice.get("disable_parallel_tool_use"),
        field=field,
    )


def _function(tool: MessagesTool, field: str) -> dict[str, Any] | None:
    """Return a tool as a function, or None if only Anthropic's servers could run it."""
    kind = tool.get("type") or "custom"
    description = tool.get("description")
    schema = tool.get("input_schema")
    if kind != "custom" and schema is None:
        family, _, date = kind.rpartition("_")
        known_tool = _TOOLS_WITH_KNOWN_SCHEMA.get(family) if date.isdecimal() else None
        if known_tool is None:
            log_once("skipped tools of type %r, which only Anthropic's servers can run", kind)
            return None
        default_description, schema = known_tool
        description = default_description if description is None else description
    for name, value in (("name", tool.get("name")), ("input_schema", schema)):
        if value is None:
            raise missing_field(f"{field}.{name}")
    function = {
        "name": tool["name"],
        "description": description,
        "parameters": schema,
        "strict": tool.get("strict"),
    }
    return {
        "type": "function",
        "function": {key: value for key, value in function.items() if value is not None},
    }
