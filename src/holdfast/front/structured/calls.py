"""Calls of tools as a part of an answer's grammar: which mechanism writes them, and where in the
answer they may stand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from holdfast.errors import InvalidRequest
from holdfast.front.structured.calls_json import json_calls, named_json
from holdfast.front.structured.calls_literal import braced_calls, python_calls
from holdfast.front.structured.calls_nested import nested_tags
from holdfast.front.structured.calls_tagged import key_value_tags, tagged_parameters
from holdfast.front.structured.channel_frame import channel_texts, harmony_calls, kimi_k3_calls
from holdfast.front.structured.lark import ANY, Rules, escaped, one_of
from holdfast.front.structured.tools import CallableTool, CallBlock, in_tool
from holdfast.front.toolcalls.braced_calls import BracedCalls
from holdfast.front.toolcalls.channels import Channels
from holdfast.front.toolcalls.dialect import CallFormat
from holdfast.front.toolcalls.json_calls import JsonCalls
from holdfast.front.toolcalls.key_value_tags import KeyValueTags
from holdfast.front.toolcalls.kimi_k3 import KimiK3
from holdfast.front.toolcalls.named_json import NamedJson
from holdfast.front.toolcalls.nested_tags import NestedTags
from holdfast.front.toolcalls.python_calls import PythonCalls
from holdfast.front.toolcalls.tagged_parameters import TaggedParameters

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
