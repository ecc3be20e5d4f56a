"""The grammars of tool calls, by the way in which a family writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from holdfast.errors import InvalidRequest
from holdfast.front.structured.calls_nested import nested_tags
from holdfast.front.structured.channel_frame import channel_texts, harmony_calls, kimi_k3_calls
from holdfast.front.structured.lark import ANY, Rules, escaped, json_value, literal, one_of, pattern
from holdfast.front.structured.literal_values import LiteralValues, ValueSyntax
from holdfast.front.structured.raw_values import ArgumentTags, RawArguments
from holdfast.front.structured.tools import CallableTool, CallBlock, in_tool
from holdfast.front.toolcalls.braced_calls import BracedCalls
from holdfast.front.toolcalls.channels import Channels
from holdfast.front.toolcalls.dialect import CallFormat, IdForm
from holdfast.front.toolcalls.json_calls import JsonCalls
from holdfast.front.toolcalls.key_value_tags import KeyValueTags
from holdfast.front.toolcalls.kimi_k3 import KimiK3
from holdfast.front.toolcalls.named_json import NamedJson
from holdfast.front.toolcalls.nested_tags import NestedTags
from holdfast.front.toolcalls.python_calls import PythonCalls
from holdfast.front.toolcalls.tagged_parameters import TaggedParameters

_PYTHON = ValueSyntax(words=("True", "False", "None"))
_IDS: Final[dict[IdForm, str]] = {"alnum9": "[a-zA-Z0-9]{9}", "number": "[0-9]{1,3}"}
_ANY_ID: Final = "[a-zA-Z0-9_.:-]{0,64}"
_FIELD: Final = re.compile(r"(\{name\}|\{id\})")


def python_calls(rules: Rules, form: PythonCalls, tools: Sequence[CallableTool]) -> CallBlock:
    """`[NAME(KEY=VALUE, ...), ...]`."""
    opening, closing = form.wrapper[0] + "[", "]" + form.wrapper[1]
    calls, left_out = list[tuple[str, str]](), dict[str, tuple[str, ...]]()
    for tool in tools:
        values = LiteralValues(rules, tool, _PYTHON)
        calls.append(
            (f"{tool.name}(", f"{values.arguments(tool.arguments, assign='=')} {literal(')')}")
        )
        left_out[tool.name] = tuple(values.left_out)
    return CallBlock(
        opening=opening, calls=calls, again=form.between, closing=closing, left_out=left_out
    )


def braced_calls(rules: Rules, form: BracedCalls, tools: Sequence[CallableTool]) -> CallBlock:
    """`call:NAME{KEY:VALUE,...}` between two markers."""
    syntax = ValueSyntax(quote=form.quote, quoted_keys=False, colon=":", comma=",")
    opening, calls, left_out = (
        form.wrapper[0] + form.lead,
        list[tuple[str, str]](),
        dict[str, tuple[str, ...]](),
    )
    for tool in tools:
        values = LiteralValues(rules, tool, syntax)
        calls.append(
            (
                tool.name + "{",
                f"{values.arguments(tool.arguments)} {rules.literal('}' + form.wrapper[1])}",
            )
        )
        left_out[tool.name] = tuple(values.left_out)
    return CallBlock(opening=opening, calls=calls, again=opening, left_out=left_out)


def id_pattern(form: IdForm) -> str:
    """A call's id as the model writes it, as an expression."""
    return pattern(_IDS.get(form, _ANY_ID))


def json_calls(rules: Rules, form: JsonCalls, tools: Sequence[CallableTool]) -> CallBlock:
    """`{"name": NAME, "arguments": {...}}`, as the family's templates space it."""
    calls = []
    for tool in tools:
        name = json.dumps(tool.name, ensure_ascii=False)
        head = (
            f"{{{name}: "
            if form.name_is_key
            else f'{{"{form.name_key}": {name}, "{form.arguments_key}": '
        )
        call_id = ""
        if form.id_key and not form.name_is_key:
            value = pattern('"' + _IDS.get(form.id_form, _ANY_ID) + '"')
            call_id = f"({literal(f', {json.dumps(form.id_key)}: ')} {value})?"
        rest = f"{json_value(tool.arguments)} {call_id} {rules.literal('}' + form.wrapper[1])}"
        calls.append((head, rest))
    between = form.between or (", " if form.array else "")
    return CallBlock(
        opening=form.section[0] + ("[" if form.array else "") + form.wrapper[0],
        calls=calls,
        again=between + form.wrapper[0],
        closing=("]" if form.array else "") + form.section[1],
    )


def named_json(rules: Rules, form: NamedJson, tools: Sequence[CallableTool]) -> CallBlock:
    """`MARKER NAME MARKER {...}`, with or without an id in front."""
    lead, *fields = _FIELD.split(form.head)
    calls = []
    for tool in tools:
        head, behind = "", fields
        if fields[0] == "{name}":
            head, behind = tool.name + fields[1], fields[2:]
        end = rules.literal(form.close) if form.close else ""
        calls.append(
            (
                head,
                " ".join((*_head(rules, form, behind, tool.name), json_value(tool.arguments), end)),
            )
        )
    return CallBlock(
        opening=form.section[0] + lead,
        calls=calls,
        again=form.between + lead,
        closing=form.section[1],
    )


def _head(rules: Rules, form: NamedJson, fields: Sequence[str], name: str) -> list[str]:
    """What stands between a call's first marker and its arguments."""
    found = []
    for field in filter(None, fields):
        if field == "{name}":
            found.append(literal(name))
        elif field != "{id}":
            found.append(rules.literal(field))
        elif form.id_form == "function_number":
            found.append(f"{literal(f'functions.{name}:')} {pattern('[0-9]{1,4}')}")
        else:
            found.append(id_pattern(form.id_form))
    return found


def tagged_parameters(
    rules: Rules, form: TaggedParameters, tools: Sequence[CallableTool]
) -> CallBlock:
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>`, in the family's words."""
    close, padding = form.parameter[2], form.padding
    end, behind = padding + close.rstrip(), close[len(close.rstrip()) :]
    tags = ArgumentTags(
        before=form.parameter[0],
        text=form.types[0] + form.parameter[1] + padding,
        json=(form.types[1] + form.parameter[1] + padding,),
        end=end,
        behind=behind,
        cdata=form.cdata,
    )
    head = form.wrapper[0] + form.call[0]
    ends = (form.call[1], form.call[2] + form.wrapper[1])
    return _block(
        rules,
        tools,
        tags,
        ends,
        texts=(form.section[0] + head, form.between + head, form.section[1]),
    )


def key_value_tags(rules: Rules, form: KeyValueTags, tools: Sequence[CallableTool]) -> CallBlock:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, in the
    family's words.
    """
    close = form.value[1]
    tags = ArgumentTags(
        before=form.key[0],
        text=form.key[1] + form.value[0],
        json=(form.key[1] + form.value[0],),
        end=close.rstrip(),
        behind=close[len(close.rstrip()) :],
    )
    ends = (form.name_end, form.call[1])
    return _block(
        rules,
        tools,
        tags,
        ends,
        texts=(form.section[0] + form.call[0], form.between + form.call[0], form.section[1]),
    )


def _block(
    rules: Rules,
    tools: Sequence[CallableTool],
    tags: ArgumentTags,
    ends: tuple[str, str],
    *,
    texts: tuple[str, str, str],
) -> CallBlock:
    """Calls of which the name stands behind the opening. ends: of the name and of the call. texts:
    as `CallBlock` has them.
    """
    calls, left_out = [], {}
    for tool in tools:
        arguments = RawArguments(rules, tool, tags)
        calls.append((tool.name + ends[0], f"{arguments.expression()} {rules.literal(ends[1])}"))
        left_out[tool.name] = tuple(arguments.left_out)
    return CallBlock(
        opening=texts[0], calls=calls, again=texts[1], closing=texts[2], left_out=left_out
    )


_MECHANISMS: Final[dict[type, Callable[[Rules, Any, Sequence[CallableTool]], CallBlock]]] = {
    BracedCalls: braced_calls,
    Channels: harmony_calls,
    JsonCalls: json_calls,
    KeyValueTags: key_value_tags,
    KimiK3: kimi_k3_calls,
    NamedJson: named_json,
    NestedTags: nested_tags,
    PythonCalls: python_calls,
    TaggedParameters: tagged_parameters,
}


def can_constrain(form: CallFormat | None) -> bool:
    """Whether calls of this form can be held to a grammar."""
    return type(form) in _MECHANISMS and getattr(form, "calls", None) is None


def call_block(rules: Rules, form: CallFormat, tools: Sequence[CallableTool]) -> CallBlock:
    """All calls of an answer.

    Raises InvalidRequest for a strict tool that the family's syntax cannot hold to its schema.
    """
    block = _MECHANISMS[type(form)](rules, form, tools)
    for tool in tools:
        if tool.strict and block.left_out.get(tool.name):
            place = block.left_out[tool.name][0]
            reason = (
                "the model's own syntax of calls has no way to enforce a keyword of this schema"
            )
            raise InvalidRequest(f"`{tool.place}`: {reason}", field=tool.place, shown=f": {place}")
    return block


def unenforced(tools: Sequence[CallableTool], block: CallBlock) -> tuple[str, ...]:
    """Places, by the tools' names, of keywords that nothing enforces."""
    return tuple(
        place
        for tool in tools
        for place in (*tool.unenforced, *in_tool(tool.name, block.left_out.get(tool.name, ())))
    )


def only_calls(rules: Rules, block: CallBlock, *, parallel: bool) -> str:
    """Calls from the beginning on, and nothing else."""
    space = block.opening[: len(block.opening) - len(block.opening.lstrip())]
    lead = f"({rules.literal(space)})?" if space else ""
    return (
        f"{lead} {rules.literal(block.opening.lstrip())} "
        f"{_behind_opening(rules, block, parallel=parallel)}"
    )


def text_or_calls(rules: Rules, form: CallFormat, block: CallBlock, *, parallel: bool) -> str:
    """Free text, behind which calls may follow, and nothing behind these."""
    if channels := channel_texts(form):
        text = channels.free(rules, form)
        calls = only_calls(rules, block, parallel=parallel)
        return f"({text} | {calls})" if block.is_single else f"({text} | ({text})? {calls})"
    opening = block.opening.lstrip()
    mark = max(
        (mark for mark in form.openers if mark in form.marks and opening.startswith(mark)),
        key=len,
        default="",
    )
    # a call's beginning is one lexeme with the name: so it is told from a text that begins alike
    if not mark:
        first = one_of(f"{rules.literal(opening + head)} {rest}" for head, rest in block.calls)
        text = rules.terminal(f"/{ANY}/ & ~/({ANY}\\n)?\\s*{_beginning(block)}{ANY}/")
        return f"({text} | {rules.rule(first)} {_behind_call(rules, block, parallel=parallel)})"
    others = [other for other in form.openers if other in form.marks]
    rest = opening.removeprefix(mark)
    behind = (
        f"{rules.literal(rest) if rest else ''} {_behind_opening(rules, block, parallel=parallel)}"
    )
    text = rules.text_without(others)
    never = [
        escaped(other)
        for other in others
        if other != mark and not rules.parted(other)[1] and other not in mark
    ]
    return f"({text} | {rules.text_before(mark, never=never)} {behind})"


def text_without_calls(rules: Rules, form: CallFormat) -> str:
    """Free text in which no call can begin."""
    if channels := channel_texts(form):
        return channels.free(rules, form)
    return rules.text_without([mark for mark in form.openers if mark in form.marks])


def tokens_of_openers(rules: Rules, form: CallFormat) -> tuple[tuple[int, ...], bool]:
    """The tokens that calls begin with, and whether some begin with text instead."""
    if channel_texts(form):
        return (), True  # text is opened by the same tokens
    parted = [rules.parted(mark)[1] for mark in form.openers if mark in form.marks]
    return tuple({rules.marker_ids[token]: None for token in parted if token}), not all(parted)


def _behind_opening(rules: Rules, block: CallBlock, *, parallel: bool) -> str:
    call = rules.rule(one_of(f"{rules.literal(head)} {rest}" for head, rest in block.calls))
    return f"{call} {_behind_call(rules, block, parallel=parallel)}"


def _behind_call(rules: Rules, block: CallBlock, *, parallel: bool) -> str:
    closing = rules.literal(block.closing) if block.closing else ""
    if block.is_single or not parallel:
        return closing
    call = rules.rule(one_of(f"{rules.literal(head)} {rest}" for head, rest in block.calls))
    return f"({rules.literal(block.again)} {call})* {closing}"


def _beginning(block: CallBlock) -> str:
    """A regular expression of what a call without a marker begins with, white space in it as it may
    be.
    """
    heads = "|".join(escaped(block.opening.lstrip() + head) for head, _ in block.calls)
    return "(" + heads.replace(" ", r"\s*") + ")"
