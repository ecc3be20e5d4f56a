"""Grammars of calls as nested tags, each behind a mark: MiniMax M3."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from holdfast.front.structured.lark import Rules, json_value, members, one_of
from holdfast.front.structured.raw_text import content_of
from holdfast.front.structured.schema import Schema
from holdfast.front.structured.tools import CallableTool, CallBlock
from holdfast.front.toolcalls.nested_tags import NestedTags

_DEEPEST = 4  # levels of references that are followed; below them anything may stand


def nested_tags(rules: Rules, form: NestedTags, tools: Sequence[CallableTool]) -> CallBlock:
    """`<invoke name="NAME"><KEY>VALUE</KEY></invoke>`, each tag behind the family's mark."""
    opening = f'{form.mark}<{form.call} name="'
    calls, left_out = list[tuple[str, str]](), dict[str, tuple[str, ...]]()
    for tool in tools:
        values = _NestedValues(rules, tool, form)
        arguments = values.inside(tool.arguments, depth=0)
        calls.append(
            (
                f'{tool.name}">',
                f"{arguments} {rules.literal(f'{form.mark}</{form.call}>' + chr(10))}",
            )
        )
        left_out[tool.name] = tuple(values.left_out)
    return CallBlock(
        opening=f"{form.mark}<{form.section}>\n{opening}",
        calls=calls,
        again=opening,
        closing=f"{form.mark}</{form.section}>",
        left_out=left_out,
    )


class _NestedValues:
    """Makes expressions for values between tags.

    Nothing stands for null: such members are left out.
    """

    def __init__(self, rules: Rules, tool: CallableTool, form: NestedTags) -> None:
        self.left_out: list[str] = []
        self._rules, self._tool, self._form = rules, tool, form

    def inside(self, node: Schema, *, depth: int) -> str:
        """The members of an object, each in its tag."""
        found = self._tool.members(node)
        self.left_out += found.left_out
        given = {
            name: self._tagged(name, value, depth=depth) for name, value in found.properties.items()
        }
        return members(self._rules, given, required=found.required, separator="")

    def _tagged(self, name: str, node: Any, *, depth: int) -> str:
        mark, end = self._form.mark, self._rules.literal(f"{self._form.mark}</{name}>")
        values = [
            self._value(branch, name, end, depth=depth)
            for branch in self._branches(node, depth=depth)
        ]
        return self._rules.rule(
            f"{self._rules.literal(f'{mark}<{name}>')} {one_of(filter(None, values))}"
        )

    def _value(self, node: Schema, name: str, end: str, *, depth: int) -> str:
        """A value and the tag that closes it; empty where there is no way to write it."""
        kind = node.get("type")
        if kind == "null":
            return ""
        if "enum" in node or "const" in node:
            listed = [
                value
                for value in node.get("enum", [node.get("const")])
                if isinstance(value, str | int | float)
            ]
            written = (value if isinstance(value, str) else json.dumps(value) for value in listed)
            return f"{one_of(map(self._rules.literal, written))} {end}" if listed else ""
        if kind == "object" and depth < _DEEPEST:
            return f"{self.inside(node, depth=depth + 1)} {end}"
        if (
            kind == "array"
            and isinstance(node.get("items", {}), dict)
            and "prefixItems" not in node
            and depth < _DEEPEST
        ):
            item = self._tagged(self._form.item, node.get("items", {}), depth=depth + 1)
            least, most = node.get("minItems", 0), node.get("maxItems", "")
            return end if most == 0 else f"{item}{{{least},{most}}} {end}"
        if kind in ("integer", "number", "boolean"):
            return f"{json_value(node)} {end}"
        content, left_out = content_of(node)
        if left_out or kind not in (None, "string"):
            self.left_out.append(left_out or str(kind))
        return self._rules.text_before(f"{self._form.mark}</{name}>", content=content)

    def _branches(self, node: Any, *, depth: int) -> Sequence[Schema]:
        if not isinstance(node, dict):
            return ({},)
        if "$ref" in node and depth < _DEEPEST:
            return self._branches(self._tool.definition(node["$ref"]), depth=depth + 1)
        for keyword in ("anyOf", "oneOf"):
            if keyword in node:
                return [
                    branch
                    for member in node[keyword]
                    for branch in self._branches(member, depth=depth + 1)
                ]
        kinds = node.get("type")
        if isinstance(kinds, list | tuple):
            return [{**node, "type": kind} for kind in kinds]
        return (node,)
