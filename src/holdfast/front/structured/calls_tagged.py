"""Grammars of calls whose arguments stand raw between tags: tagged parameters, and pairs of key and
value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast.front.structured.calls_json import id_pattern
from holdfast.front.structured.lark import Rules
from holdfast.front.structured.raw_values import ArgumentTags, RawArguments
from holdfast.front.structured.tools import CallableTool, CallBlock
from holdfast.front.toolcalls.key_value_tags import KeyValueTags
from holdfast.front.toolcalls.tagged_parameters import TaggedParameters


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
    before_id, has_id, behind_id = form.call[0].partition("{id}")
    head = form.wrapper[0] + before_id
    ends = (form.call[1], form.call[2] + form.wrapper[1])
    block = _block(
        rules,
        tools,
        tags,
        ends,
        texts=(form.section[0] + head, form.between + head, form.section[1]),
    )
    if not has_id:
        return block
    lead = f"{id_pattern(form.id_form)} {rules.literal(behind_id)}"
    return replace(
        block, calls=[("", f"{lead} {rules.literal(name)} {rest}") for name, rest in block.calls]
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
