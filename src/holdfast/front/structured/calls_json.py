"""Grammars of calls whose arguments are JSON: in an object with the name, or behind the name
between markers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from holdfast.front.structured.lark import Rules, json_value, literal, pattern
from holdfast.front.structured.tools import CallableTool, CallBlock
from holdfast.front.toolcalls.dialect import IdForm
from holdfast.front.toolcalls.json_calls import JsonCalls
from holdfast.front.toolcalls.named_json import NamedJson

_IDS: Final[dict[IdForm, str]] = {"alnum9": "[a-zA-Z0-9]{9}", "number": "[0-9]{1,3}"}
_ANY_ID: Final = "[a-zA-Z0-9_.:-]{0,64}"
_FIELD: Final = re.compile(r"(\{name\}|\{id\})")


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
