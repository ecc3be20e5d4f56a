"""Grammars of tool calls, built from the layout that a family declares."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.errors import InvalidRequest
from holdfast.front.structured.checked import checked_schema
from holdfast.front.structured.lark import ANY, GAP, Rules, escaped, one_of, pattern
from holdfast.front.structured.schema import CleanSchema, Schema, SchemaBounds, SchemaFault
from holdfast.front.structured.values import CallableTool, arguments_of
from holdfast.front.toolcalls.call_format import (
    CallFormat,
    CallLayout,
    ChannelMarkup,
    IdForm,
    id_pattern,
    named,
)
from holdfast.wire.requests import ChatPrompt, ToolChoice

_ANY_ARGUMENTS: Final = CleanSchema(schema={"type": "object"})
_NO_ARGUMENTS: Final[Schema] = {"type": "object", "properties": {}, "additionalProperties": False}
_FIELD: Final = re.compile(r"(\{id\}|\{number\})")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBlock:
    """The grammar of all calls of an answer, in the layout of a family.

    calls: for each tool and each head that may precede its arguments (`CallLayout`), the text up to
    the head's first field, and the rest of the call as an expression. left_out: keywords that the
    layout cannot enforce, by tool name.
    """

    layout: CallLayout
    calls: Sequence[tuple[str, str]]
    left_out: Mapping[str, Sequence[str]]


def is_strict(tool: Mapping[str, Any]) -> bool:
    """Whether the client requires that the arguments of every call match the schema."""
    return tool.get("function", tool).get("strict") is True


def callable_tools(
    prompt: ChatPrompt, choice: ToolChoice, *, bounds: SchemaBounds, enforce_all: bool
) -> tuple[CallableTool, ...]:
    """Return the tools of the prompt that may be called, with checked schemas.

    enforce_all: also enforce, as far as possible, the schemas of tools that are not strict. If
    False, this is done only for the tools that the choice names in `held`.

    Raises InvalidRequest for a strict tool whose schema cannot be enforced.
    """
    found = []
    for number, tool in enumerate(prompt.tools):
        function = tool.get("function", tool)
        name, strict = function["name"], is_strict(tool)
        if choice.names and name not in choice.names:
            continue
        place = f"tools.{number}.function.parameters"
        if prompt.tool_fields:
            place = prompt.tool_fields[number]
        checked = _ANY_ARGUMENTS
        if strict or enforce_all or name in choice.held:
            checked = _arguments(
                function.get("parameters"), bounds=bounds, strict=strict, place=place
            )
        found.append(
            CallableTool(
                name=name,
                arguments=checked.schema
                if isinstance(checked.schema, dict)
                else {"type": "object"},
                place=place,
                strict=strict,
                unenforced=_in_tool(name, checked.unenforced),
            )
        )
    return tuple(found)


def _arguments(parameters: Any, *, bounds: SchemaBounds, strict: bool, place: str) -> CleanSchema:
    if not parameters:
        return CleanSchema(schema=_NO_ARGUMENTS)
    if isinstance(parameters, dict) and "type" not in parameters:
        parameters = {"type": "object", **parameters}
    try:
        return checked_schema(parameters, bounds=bounds, strict=strict)
    except SchemaFault as fault:
        raise InvalidRequest(f"`{place}`: {fault.reason}", field=place, shown=fault.where) from None


def call_block(rules: Rules, form: CallFormat, tools: Sequence[CallableTool]) -> CallBlock:
    """Build the grammar of all calls of an answer. The form must have a `drawn_layout`.

    Raises InvalidRequest for a strict tool whose schema the layout cannot enforce.
    """
    layout = form.drawn_layout
    assert layout is not None
    calls: list[tuple[str, str]] = []
    left_out: dict[str, Sequence[str]] = {}
    for tool in tools:
        arguments, left_out[tool.name] = arguments_of(rules, tool, layout.values)
        if tool.strict and left_out[tool.name]:
            reason = "the model's syntax for calls cannot enforce a keyword of this schema"
            shown = f": {left_out[tool.name][0]}"
            raise InvalidRequest(f"`{tool.place}`: {reason}", field=tool.place, shown=shown)
        call_id = " ".join(_filled(rules, layout.optional_id, form.id_form, tool.name))
        rest = f"{arguments} ({call_id})?" if call_id else arguments
        if layout.tail:
            rest += f" {rules.literal(layout.tail)}"
        for head in layout.heads:
            lead, *fields = _FIELD.split(named(head, tool.name))
            filled = _filled(rules, "".join(fields), form.id_form, tool.name)
            calls.append((lead, " ".join((*filled, rest))))
    return CallBlock(layout=layout, calls=calls, left_out=left_out)


def _filled(rules: Rules, text: str, id_form: IdForm, name: str) -> list[str]:
    """Convert a text that contains fields to expressions."""
    fields = {"{id}": id_pattern(id_form, name), "{number}": "[1-9][0-9]?"}
    parts = filter(None, _FIELD.split(text))
    return [pattern(fields[part]) if part in fields else rules.literal(part) for part in parts]


def unenforced(tools: Sequence[CallableTool], block: CallBlock) -> tuple[str, ...]:
    """Return the paths of keywords that are not enforced, each beginning with its tool's name."""
    return tuple(
        place
        for tool in tools
        for place in (*tool.unenforced, *_in_tool(tool.name, block.left_out[tool.name]))
    )


def _in_tool(name: str, places: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{name}/{place.removeprefix('#').removeprefix('/')}" for place in places)


def only_calls(rules: Rules, block: CallBlock, *, parallel: bool) -> str:
    """An expression for an answer that consists only of calls."""
    opening = block.layout.opening.lstrip()
    lead = f"{rules.terminal(GAP)} {rules.literal(opening)}"
    return f"{lead} {_calls(rules, block, parallel=parallel)}"


def text_or_calls(rules: Rules, form: CallFormat, block: CallBlock, *, parallel: bool) -> str:
    """An expression for free text, optionally followed by calls, which end the answer."""
    if form.channels is not None:
        text = free_text(rules, form.channels, form.marks)
        calls = only_calls(rules, block, parallel=parallel)
        return f"({text} | {calls})" if block.layout.is_single else f"({text} | ({text})? {calls})"
    opening = block.layout.opening.lstrip()
    marked = [mark for mark in form.openers if mark in form.marks]
    mark = max((mark for mark in marked if opening.startswith(mark)), key=len, default="")
    if not mark:
        # The beginning of a call and its tool's name are one lexeme, to distinguish a call from
        # text that begins in the same way.
        first = one_of(f"{rules.literal(opening + head)} {rest}" for head, rest in block.calls)
        text = rules.terminal(f"/{ANY}/ & ~/({ANY}\\n)?\\s*{_beginning(block)}{ANY}/")
        return f"({text} | {rules.rule(first)} {_more_calls(rules, block, parallel=parallel)})"
    rest = opening.removeprefix(mark)
    after = f"{rules.literal(rest) if rest else ''} {_calls(rules, block, parallel=parallel)}"
    text = rules.text_without(marked)
    never = [
        escaped(other)
        for other in marked
        if other != mark and not rules.parted(other)[1] and other not in mark
    ]
    return f"({text} | {rules.text_before(mark, never=never)} {after})"


def text_without_calls(rules: Rules, form: CallFormat) -> str:
    """An expression for free text in which no call can begin."""
    if form.channels is not None:
        return free_text(rules, form.channels, form.marks)
    return rules.text_without([mark for mark in form.openers if mark in form.marks])


def tokens_of_openers(rules: Rules, form: CallFormat) -> tuple[tuple[int, ...], bool]:
    """Return the tokens that calls begin with, and whether some calls begin with text instead."""
    if form.channels is not None:
        return (), True  # text begins with the same tokens
    parted = [rules.parted(mark)[1] for mark in form.openers if mark in form.marks]
    return tuple({rules.marker_ids[token]: None for token in parted if token}), not all(parted)


def free_text(rules: Rules, channels: ChannelMarkup, marks: Sequence[str]) -> str:
    """An expression for any visible text, in the channel for text."""
    opening, end = channels.text
    text = rules.text_before(end) if end else rules.text_without(marks)
    return f"{rules.literal(opening)} {text}"


def in_channel(rules: Rules, channels: ChannelMarkup, form: str) -> str:
    """An expression for visible text in the channel for text.

    form: the expression that the text must match.
    """
    opening, end = channels.text
    return f"{rules.literal(opening)} {form} {rules.literal(end) if end else ''}"


def thought_channel(rules: Rules, channels: ChannelMarkup) -> str:
    """An expression for an optional thought at the beginning of the answer.

    Empty if thoughts have no channel.
    """
    opening, end = channels.thought
    return f"({rules.literal(opening)} {rules.text_before(end)})?" if opening else ""


def _calls(rules: Rules, block: CallBlock, *, parallel: bool) -> str:
    """An expression for one or more calls, without the layout's opening before them."""
    return f"{_any_call(rules, block)} {_more_calls(rules, block, parallel=parallel)}"


def _more_calls(rules: Rules, block: CallBlock, *, parallel: bool) -> str:
    """An expression for what follows a call: further calls, the layout's closing, and the end.

    Any white space may surround the markup, because templates of one family differ in it. What a
    template writes between two calls, a model also writes after the last one, where only the end
    of the answer should follow.
    """
    layout = block.layout
    gap = rules.terminal(GAP)
    closing = layout.closing.strip()
    tail = f"{gap} {rules.literal(closing)} {gap}" if closing else gap
    if layout.is_single or not parallel:
        return tail
    again = rules.literal(layout.again.lstrip())
    return f"({gap} {again} {_any_call(rules, block)})* {tail}"


def _any_call(rules: Rules, block: CallBlock) -> str:
    return rules.rule(one_of(f"{rules.literal(head)} {rest}" for head, rest in block.calls))


def _beginning(block: CallBlock) -> str:
    """A regular expression for the beginning of any call, up to the first field of its head.

    Used if calls begin with no marker. Spaces become optional white space.
    """
    opening = block.layout.opening.lstrip()
    heads = "|".join(escaped(opening + head) for head, _ in block.calls)
    return "(" + heads.replace(" ", r"\s*") + ")"
