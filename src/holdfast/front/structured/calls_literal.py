"""Grammars of calls whose arguments are literals of the family's own: Python lists, Gemma's braces."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.front.structured.lark import Rules, literal
from holdfast.front.structured.literal_values import LiteralValues, ValueSyntax
from holdfast.front.structured.tools import CallableTool, CallBlock
from holdfast.front.toolcalls.braced_calls import BracedCalls
from holdfast.front.toolcalls.python_calls import PythonCalls

_PYTHON = ValueSyntax(words=("True", "False", "None"))


def python_calls(rules: Rules, form: PythonCalls, tools: Sequence[CallableTool]) -> CallBlock:
    """`[NAME(KEY=VALUE, ...), ...]`."""
    opening, closing = form.wrapper[0] + form.brackets[0], form.brackets[1] + form.wrapper[1]
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
