"""Grammars of calls whose arguments are JSON: an object with name and arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence

from holdfast.intake.grammars.lark import Rules, json_value, literal, pattern
from holdfast.intake.grammars.tools import CallableTool, CallBlock
from holdfast.parsing.dialect import IdForm
from holdfast.parsing.formats.json_calls import JsonCalls

_IDS: dict[IdForm, str] = {"alnum9": "[a-zA-Z0-9]{9}", "number": "[0-9]{1,3}"}
_ANY_ID = "[a-zA-Z0-9_.:-]{1,64}"


def json_calls(rules: Rules, form: JsonCalls, tools: Sequence[CallableTool]) -> CallBlock:
    """`{"name": NAME, "arguments": {...}}`, as the family's templates space it."""
    calls = []
    for tool in tools:
        name = json.dumps(tool.name, ensure_ascii=False)
        head = f"{{{name}: " if form.name_is_key else f'{{"{form.name_key}": {name}, "{form.arguments_key}": '
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
