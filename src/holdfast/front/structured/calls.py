"""Grammars of tool calls, built from the layout that a family declares.

An expression is a piece of a grammar, as text (`Rules`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from holdfast.errors import InvalidRequest
from holdfast.front.request import ChatPrompt, ToolChoice
from holdfast.front.structured.grammar_check import checked_schema
from holdfast.front.structured.lark import (
    ANY,
    LEVELS_AROUND_ARGUMENTS,
    Rules,
    escaped,
    json_value,
    literal,
    one_of,
    pattern,
    white_space,
)
from holdfast.front.structured.schema import CleanSchema, Schema, SchemaBounds, SchemaFault
from holdfast.front.structured.values import CallableTool, arguments_of
from holdfast.front.toolcalls.call_format import (
    BareKeys,
    CallFormat,
    CallLayout,
    ChannelMarkup,
    IdForm,
    JsonObject,
    TaggedValues,
    Values,
    id_pattern,
    named,
)
from holdfast.front.toolcalls.literals import json_text

_ANY_ARGUMENTS: Final = CleanSchema(schema={"type": "object"})
_NO_ARGUMENTS: Final[Schema] = {"type": "object", "properties": {}, "additionalProperties": False}
_ID_OR_NUMBER: Final = re.compile(r"(\{id\}|\{number\})")
_HEAD_FIELD: Final = re.compile(r"(\{name\}|\{quoted\}|\{id\}|\{number\})")


class CallGrammar(NamedTuple):
    """The grammar of one call.

    prefix_text: the text up to the head's first {id} or {number}, with the tool's name filled in; it
    is used to tell unmarked calls from text that begins in the same way. prefix: that text as an
    expression. rest: the rest of the call as an expression.
    """

    prefix_text: str
    prefix: str
    rest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBlock:
    """The grammar of all calls of an answer, in one layout of a family.

    call_starts: how calls may begin, in any layout. calls: one for each tool and each head that may
    precede its arguments (`CallLayout`). unenforced: schema keywords that the layout cannot
    enforce, by tool name.
    """

    layout: CallLayout
    call_starts: Sequence[str]
    channels: ChannelMarkup | None
    calls: Sequence[CallGrammar]
    unenforced: Mapping[str, Sequence[str]]

    @property
    def is_bare_json(self) -> bool:
        """Whether the calls begin like a JSON document."""
        beginnings = self.layout.opening + self.layout.heads[0]
        return beginnings.startswith(('{"', '[{"', "{{quoted}"))


def is_strict(tool: Mapping[str, Any]) -> bool:
    """Whether the client requires that the arguments of every call match the schema."""
    return tool.get("function", tool).get("strict") is True


def callable_tools(
    prompt: ChatPrompt, choice: ToolChoice, *, bounds: SchemaBounds, enforce_all: bool
) -> tuple[CallableTool, ...]:
    """Return the tools of the prompt that may be called, with checked schemas.

    enforce_all: also enforce, as far as possible, the schemas of tools that are not strict. If
    False, this is done only for the tools in the choice's `enforced_names`.

    Raises InvalidRequest for a strict tool whose schema cannot be enforced.
    """
    checked_tools = []
    for number, tool in enumerate(prompt.tools):
        function = tool.get("function", tool)
        name, strict = function["name"], is_strict(tool)
        if choice.names and name not in choice.names:
            continue
        place = f"tools.{number}.function.parameters"
        if prompt.tool_fields:
            place = prompt.tool_fields[number]
        cleaned = _ANY_ARGUMENTS
        if strict or enforce_all or name in choice.enforced_names:
            cleaned = _checked_arguments(
                function.get("parameters"), bounds=bounds, strict=strict, place=place
            )
        checked_tools.append(
            CallableTool(
                name=name,
                arguments=cleaned.schema
                if isinstance(cleaned.schema, dict)
                else {"type": "object"},
                place=place,
                strict=strict,
                unenforced=_paths_in_tool(name, cleaned.unenforced),
            )
        )
    return tuple(checked_tools)


def _checked_arguments(
    parameters: Any, *, bounds: SchemaBounds, strict: bool, place: str
) -> CleanSchema:
    """The schema of a tool's arguments, checked. Without a schema, there are no arguments."""
    if not parameters:
        return CleanSchema(schema=_NO_ARGUMENTS)
    if isinstance(parameters, dict) and "type" not in parameters:
        parameters = {"type": "object", **parameters}
    try:
        return checked_schema(parameters, bounds=bounds, strict=strict)
    except SchemaFault as fault:
        raise InvalidRequest(f"`{place}`: {fault.reason}", field=place, shown=fault.where) from None


def call_blocks(
    rules: Rules, family: CallFormat, tools: Sequence[CallableTool]
) -> tuple[CallBlock, ...]:
    """Build the grammars of all calls of an answer, one for each layout of a family, which must
    have `grammar_layouts`.

    Raises InvalidRequest for a strict tool whose schema the layout cannot enforce.
    """
    blocks = _build_blocks(rules, family, family.grammar_layouts, tools)
    for tool in tools:
        if tool.strict and blocks[0].unenforced[tool.name]:
            reason = "the model's syntax for calls cannot enforce a keyword of this schema"
            shown = f": {blocks[0].unenforced[tool.name][0]}"
            raise InvalidRequest(f"`{tool.place}`: {reason}", field=tool.place, shown=shown)
    return blocks


def lenient_call_blocks(
    rules: Rules, family: CallFormat, tools: Sequence[CallableTool], *, is_own: bool
) -> tuple[CallBlock, ...]:
    """Build the grammars of `call_blocks` for all layouts that the reader accepts, even those that
    it repairs.

    Leaves out tools whose schemas the family cannot enforce.

    is_own: whether this is the family that the model is trained on.
    """
    repaired_layouts = (*family.incomplete_layouts, *(() if is_own else family.grammar_layouts))
    own_layouts = family.grammar_layouts if is_own else ()
    layouts = (
        *own_layouts,
        *(replace(each, values=_with_loose_space(each.values)) for each in repaired_layouts),
    )
    blocks = _build_blocks(rules, family, layouts, tools)
    enforceable = [
        tool
        for tool in tools
        if not (tool.strict and any(block.unenforced[tool.name] for block in blocks))
    ]
    if len(enforceable) == len(tools):
        return blocks
    return _build_blocks(rules, family, layouts, enforceable) if enforceable else ()


def _with_loose_space(values: Values) -> Values:
    """Allow any white space around tagged values, which models not trained on the tags need."""
    return replace(values, is_loose=True) if isinstance(values, TaggedValues) else values


def _build_blocks(
    rules: Rules, family: CallFormat, layouts: Sequence[CallLayout], tools: Sequence[CallableTool]
) -> tuple[CallBlock, ...]:
    """The grammars of calls of these tools, one for each layout."""
    return tuple(_build_block(rules, family, layout, tools) for layout in layouts)


def _build_block(
    rules: Rules, family: CallFormat, layout: CallLayout, tools: Sequence[CallableTool]
) -> CallBlock:
    """The grammar of calls of these tools in one layout."""
    id_form = family.id_form
    calls: list[CallGrammar] = []
    unenforced: dict[str, Sequence[str]] = {}
    for tool in tools:
        arguments, unenforced[tool.name] = arguments_of(rules, tool, layout.values)
        if isinstance(layout.values, JsonObject):
            arguments = rules.rule(arguments)  # written once for all layouts
        id_after_arguments = _head_expression(rules, layout.optional_id, id_form, tool.name)
        for head in layout.heads:
            after_prefix = arguments
            if id_after_arguments and "{id}" not in head:
                after_prefix += f" ({id_after_arguments})?"
            if layout.tail:
                after_prefix += f" {_end_of_call(rules, layout.tail)}"
            prefix, *head_rest = _ID_OR_NUMBER.split(head, maxsplit=1)
            rest = _head_expression(rules, "".join(head_rest), id_form, tool.name)
            calls.append(
                CallGrammar(
                    prefix_text=named(prefix, tool.name),
                    prefix=_head_expression(rules, prefix, id_form, tool.name),
                    rest=f"{rest} {after_prefix}".strip(),
                )
            )
    return CallBlock(
        layout=layout,
        call_starts=family.call_starts,
        channels=family.channels,
        calls=calls,
        unenforced=unenforced,
    )


def _end_of_call(rules: Rules, tail: str) -> str:
    """An expression for the text after the arguments, which may be indented."""
    gap = f"{rules.optional_space()} " if tail.startswith("}") else ""
    return gap + rules.markup(tail)


def _head_expression(rules: Rules, text: str, id_form: IdForm, name: str) -> str:
    """Convert a text that contains fields (`CallLayout`) to an expression. name: the tool's."""
    expressions = []
    for part in filter(None, _HEAD_FIELD.split(text)):
        match part:
            case "{name}" | "{quoted}":
                expressions.append(rules.literal(named(part, name)))
            case "{id}":
                expressions.append(pattern(id_pattern(id_form, name)))
            case "{number}":
                expressions.append(pattern("[1-9][0-9]?"))
            case _:
                expressions.append(rules.markup(part))
    return " ".join(expressions)


def unenforced(tools: Sequence[CallableTool], block: CallBlock) -> tuple[str, ...]:
    """Return the paths of keywords that are not enforced, each beginning with its tool's name."""
    return tuple(
        place
        for tool in tools
        for place in (*tool.unenforced, *_paths_in_tool(tool.name, block.unenforced[tool.name]))
    )


def _paths_in_tool(name: str, places: Sequence[str]) -> tuple[str, ...]:
    """JSON pointers into a tool's schema, with the tool's name in place of `#`."""
    return tuple(f"{name}/{place.removeprefix('#').removeprefix('/')}" for place in places)


def only_calls(rules: Rules, blocks: Sequence[CallBlock], *, parallel: bool) -> str:
    """An expression for an answer that consists only of calls, all in one of these layouts.

    The end of a message, or an empty text channel, may precede the calls.
    """
    space = rules.optional_space()
    if end := rules.message_end():
        space = f"({space} {end})? {space}"
    alternatives = []
    for block in blocks:
        empty_channel = "" if block.channels is None else block.channels.empty_text_channel
        before_calls = f"({rules.literal(empty_channel)})? {space}" if empty_channel else space
        opening = _opening_expression(rules, block)
        calls = _calls_expression(rules, block, parallel=parallel)
        alternatives.append(f"{before_calls} {opening} {calls}")
    return one_of(alternatives)


def _opening_expression(rules: Rules, block: CallBlock) -> str:
    """An expression for the text before the first call.

    The string by which a reader recognizes calls (`call_starts`) must match exactly, because with
    other white space inside, it would be text. The markup after it may be spaced differently.
    """
    opening = block.layout.opening.lstrip()
    marker = max(
        (marker for marker in block.call_starts if opening.startswith(marker)), key=len, default=""
    )
    rest = rules.markup(opening.removeprefix(marker))
    return f"{rules.literal(marker)} {rest}" if marker else rest


def bare_calls(
    rules: Rules, keys: BareKeys, tools: Sequence[CallableTool], *, parallel: bool
) -> str:
    """An expression for calls that are bare JSON objects, or for one array of such objects.

    Uses the same lexemes as JSON, so that calls and a document may begin alike.
    """
    json_space = rules.terminal(f"/{white_space()}/")
    gap = rules.optional_space()
    call = rules.rule(one_of(_bare_call(rules, keys, tool, json_space) for tool in tools))
    if keys.closings:  # some models leave out only the opening marker
        call = rules.rule(f"{call} ({gap} {one_of(map(rules.literal, keys.closings))})?")
    more_calls, more_items = "", ""
    if parallel:
        more_calls = f'({gap} ";"? {gap} {call})*'
        more_items = f'({json_space} "," {json_space} {call})*'
    return (
        f'{gap} ({call} {more_calls} | "[" {json_space} {call} {more_items} {json_space} "]") {gap}'
    )


def _bare_call(rules: Rules, keys: BareKeys, tool: CallableTool, json_space: str) -> str:
    """An expression for one call as a JSON object. json_space: the lexeme for white space."""
    colon, comma = f'{json_space} ":" {json_space}', f'{json_space} "," {json_space}'
    name = literal(json_text(tool.name))
    value = rules.rule(json_value(tool.arguments, levels_around=LEVELS_AROUND_ARGUMENTS))
    if not keys.names:
        return f'"{{" {json_space} {name} {colon} {value} {json_space} "}}"'
    name_member = f"{_any_key(keys.names)} {colon} {name}"
    arguments_member = rules.rule(f"{_any_key(keys.arguments)} {colon} {value}")
    type_member = f'({_any_key(("type",))} {colon} "\\"function\\"" {comma})?'
    members = (
        f"({name_member} {comma} {arguments_member} | {arguments_member} {comma} {name_member})"
    )
    return f'"{{" {json_space} {type_member} {members} {json_space} "}}"'


def _any_key(keys: Sequence[str]) -> str:
    """An expression for any of these keys, in quotes."""
    return one_of(literal(json_text(key)) for key in keys)


def text_or_calls(
    rules: Rules, family: CallFormat, blocks: Sequence[CallBlock], *, parallel: bool
) -> str:
    """An expression for free text, optionally followed by calls, which end the answer.

    The text ends where a marker of calls begins, so it may not contain such a marker.
    """
    if family.channels is not None:
        text = free_text(rules, family.channels, family.markers)
        calls = only_calls(rules, blocks, parallel=parallel)
        is_single = blocks[0].layout.is_single
        text_only = with_end(rules, text, family.channels)
        return f"({text_only} | {calls})" if is_single else f"({text_only} | ({text})? {calls})"
    start_markers = [marker for marker in family.call_starts if marker in family.markers]
    calls_by_marker: dict[str, list[str]] = {}
    for block in blocks:
        opening = block.layout.opening.lstrip()
        marker = max(
            (marker for marker in start_markers if opening.startswith(marker)), key=len, default=""
        )
        if marker:
            rest = rules.markup(opening.removeprefix(marker))
            calls_by_marker.setdefault(marker, []).append(
                f"{rest} {_calls_expression(rules, block, parallel=parallel)}"
            )
        elif block is blocks[0]:  # the family's own calls begin with ordinary text
            return _text_or_unmarked_calls(rules, block, parallel=parallel)
    text = rules.text_without(start_markers)
    alternatives = [with_end(rules, text)]
    if end := rules.message_end():
        alternatives.append(f"{text} {end} {only_calls(rules, blocks, parallel=parallel)}")
    for marker, openings_and_calls in calls_by_marker.items():
        # the text before this marker may not contain the others
        other_markers = [
            escaped(other)
            for other in start_markers
            if other != marker and not rules.split_at_token(other)[1] and other not in marker
        ]
        alternatives.append(
            f"{rules.text_before(marker, never=other_markers)} {one_of(openings_and_calls)}"
        )
    return one_of(alternatives)


def with_end(rules: Rules, text: str, channels: ChannelMarkup | None = None) -> str:
    """The expression, optionally followed by the end of a message."""
    end = rules.message_end()
    if channels is not None and channels.end:
        end = rules.literal(channels.end)
    return f"{text} ({end})?" if end else text


def _text_or_unmarked_calls(rules: Rules, block: CallBlock, *, parallel: bool) -> str:
    """An expression for text or for calls that begin with no marker.

    The beginning of a call and its tool's name are one lexeme, to tell a call from text that begins
    alike.
    """
    opening = block.layout.opening.lstrip()
    beginnings = [(_loosely_spaced(opening + call.prefix_text), call.rest) for call in block.calls]
    first_call = one_of(f"{rules.terminal(f'/{begin}/')} {rest}" for begin, rest in beginnings)
    any_beginning = "|".join(begin for begin, _ in beginnings)
    text = rules.terminal(f"/{ANY}/ & ~/({ANY}\\n)?\\s*({any_beginning}){ANY}/")
    space = rules.optional_space()
    after_call = _after_call(rules, block, parallel=parallel)
    return f"({text} | {space} {rules.rule(first_call)} {after_call})"


def _loosely_spaced(text: str) -> str:
    """A regular expression for a text, in which spaces become optional white space."""
    return escaped(text).replace(" ", r"\s*")


def text_without_calls(rules: Rules, family: CallFormat) -> str:
    """An expression for free text in which no call can begin."""
    if family.channels is not None:
        return free_text(rules, family.channels, family.markers)
    return rules.text_without([marker for marker in family.call_starts if marker in family.markers])


def call_start_tokens(rules: Rules, family: CallFormat) -> tuple[tuple[int, ...], bool]:
    """Return the ids of the tokens that calls begin with, and whether some begin with text."""
    if family.channels is not None:
        return (), True  # text begins with the same tokens
    tokens = [
        rules.split_at_token(marker)[1] for marker in family.call_starts if marker in family.markers
    ]
    return tuple({rules.marker_ids[token]: None for token in tokens if token}), not all(tokens)


def free_text(rules: Rules, channels: ChannelMarkup, markers: Sequence[str]) -> str:
    """An expression for any visible text, in the channel for text."""
    opening, end = channels.text
    text = rules.text_before(end) if end else rules.text_without(markers)
    return f"{rules.literal(opening)} {text}"


def in_channel(rules: Rules, channels: ChannelMarkup, body: str) -> str:
    """An expression for visible text in the channel for text.

    body: the expression that the text must match.
    """
    opening, end = channels.text
    return f"{rules.literal(opening)} {body} {rules.literal(end) if end else ''}"


def thought_channel(rules: Rules, channels: ChannelMarkup) -> str:
    """An expression for an optional thought at the beginning of the answer.

    Empty if thoughts have no channel.
    """
    opening, end = channels.thought
    return f"({rules.literal(opening)} {rules.text_before(end)})?" if opening else ""


def _calls_expression(rules: Rules, block: CallBlock, *, parallel: bool) -> str:
    """An expression for one or more calls, without the layout's opening before them."""
    return f"{_any_call(rules, block)} {_after_call(rules, block, parallel=parallel)}"


def _after_call(rules: Rules, block: CallBlock, *, parallel: bool) -> str:
    """An expression for what follows a call: further calls, the layout's closing, and the end.

    Any white space may surround the markup, because templates of one family differ in it. Models
    also write the separator between two calls after the last call, where only the end of the answer
    should follow.
    """
    layout = block.layout
    gap = rules.optional_space()
    closing = rules.before_end(layout.closing.strip())
    tail = f"{gap} {rules.markup(closing)} {gap}" if closing else gap
    tail = with_end(rules, tail, block.channels)
    if layout.is_single or not parallel:
        return tail
    again = rules.markup(layout.again.lstrip())
    return f"({gap} {again} {_any_call(rules, block)})* {tail}"


def _any_call(rules: Rules, block: CallBlock) -> str:
    """A rule for one call of any tool, with any head of the layout."""
    return rules.rule(one_of(f"{call.prefix} {call.rest}" for call in block.calls))
