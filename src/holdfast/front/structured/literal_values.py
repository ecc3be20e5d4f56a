"""Arguments in a family's own syntax of values: Python's literals, Gemma's braces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.front.structured.lark import Rules, json_value, literal, members, one_of
from holdfast.front.structured.raw_text import content_of
from holdfast.front.structured.schema import Schema
from holdfast.front.structured.tools import CallableTool

_OF_STRINGS = ("minLength", "maxLength", "pattern", "format")
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ALL = ("string", "number", "boolean", "null", "array", "object")
_JSON_WORDS = {True: "true", False: "false", None: "null"}
_FREE_KEY = r"[A-Za-z_][A-Za-z0-9_]{0,63}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSyntax:
    """How values are written. quote: at either side of a string that has no escapes; empty: strings
    are JSON's.
    """

    words: tuple[str, str, str] = ("true", "false", "null")
    quote: str = ""
    quoted_keys: bool = True
    colon: str = ": "
    comma: str = ", "

    def word(self, value: bool | None) -> str:
        """A boolean or null."""
        return self.words[2 if value is None else int(not value)]


class LiteralValues:
    """Makes expressions for the values of one tool's schema.

    `left_out` collects the keywords that they do not enforce.
    """

    def __init__(self, rules: Rules, tool: CallableTool, syntax: ValueSyntax) -> None:
        self.left_out: list[str] = []
        self._rules, self._tool, self._syntax = rules, tool, syntax
        self._definitions: dict[str, str] = {}
        self._anything = ""

    def arguments(self, node: Schema, *, assign: str = "") -> str:
        """The members of an object without its braces. assign: stands between name and value where
        that is a call's own.
        """
        found = self._tool.members(node)
        self.left_out += found.left_out
        given = {
            name: self._member(name, value, assign=assign)
            for name, value in found.properties.items()
        }
        others = ""
        if found.others is not False:
            others = (
                f"{self._free_key([*given], bare=bool(assign))} "
                f"{self._value_behind(assign, found.others)}"
            )
        separator = literal(self._syntax.comma)
        return members(
            self._rules, given, required=found.required, separator=separator, others=others
        )

    def value(self, node: Any) -> str:
        """Any value of a schema."""
        if not isinstance(node, dict) or not node:
            return self._any_value()
        if "$ref" in node:
            return self._definition(node["$ref"].rsplit("/", 1)[-1])
        if "enum" in node or "const" in node:
            return one_of(self._written(value) for value in node.get("enum", [node.get("const")]))
        for keyword in ("anyOf", "oneOf"):
            if keyword in node:
                rest = {name: value for name, value in node.items() if name != keyword}
                branches = [member for member in node[keyword] if member is not False]
                return one_of(
                    self.value({**rest, **member} if isinstance(member, dict) else rest)
                    for member in branches
                )
        kinds = node.get("type", _kinds_of(node))
        return one_of(
            self._of_type(kind, node) for kind in ([kinds] if isinstance(kinds, str) else kinds)
        )

    def _of_type(self, kind: str, node: Schema) -> str:
        match kind:
            case "string":
                return self._string(
                    {keyword: node[keyword] for keyword in _OF_STRINGS if keyword in node}
                )
            case "number" | "integer":
                return json_value(
                    {
                        "type": kind,
                        **{keyword: node[keyword] for keyword in _OF_NUMBERS if keyword in node},
                    }
                )
            case "boolean":
                return one_of(literal(self._syntax.word(value)) for value in (True, False))
            case "null":
                return literal(self._syntax.word(None))
            case "array":
                return self._array(node)
            case _:
                return f"{literal('{')} {self.arguments(node)} {literal('}')}"

    def _string(self, node: Schema) -> str:
        if not self._syntax.quote:
            return json_value({"type": "string", **node})
        content, left_out = content_of(node)
        if left_out:
            self.left_out.append(left_out)
        return (
            f"{self._rules.literal(self._syntax.quote)} "
            f"{self._rules.text_before(self._syntax.quote, content=content)}"
        )

    def _array(self, node: Schema) -> str:
        first, others = node.get("prefixItems", []), node.get("items", True)
        if isinstance(others, list):
            first, others = others, node.get("additionalItems", True)
        least, most = node.get("minItems", 0), node.get("maxItems")
        comma = literal(self._syntax.comma)
        tail = ""
        if others is not False and (most is None or most > len(first)):
            more = self._rules.rule(self.value(others))
            rest = (max(least - len(first), 0), None if most is None else most - len(first))
            tail = (
                _times(f"({comma} {more})", *rest) if first else _repeated(more, comma, least, most)
            )
        for place in reversed(range(min(len(first), len(first) if most is None else most))):
            item = self._rules.rule(self.value(first[place]))
            inner = f"{comma} {item} {tail}" if place else f"{item} {tail}"
            tail = inner if place < least else f"({inner})?"
        return f"{literal('[')} {tail} {literal(']')}"

    def _member(self, name: str, node: Any, *, assign: str) -> str:
        key = (
            literal(name)
            if assign or not self._syntax.quoted_keys
            else literal(json.dumps(name, ensure_ascii=False))
        )
        return self._rules.rule(f"{key} {self._value_behind(assign, node)}")

    def _value_behind(self, assign: str, node: Any) -> str:
        return f"{literal(assign or self._syntax.colon)} {self.value(node)}"

    def _free_key(self, declared: list[str], *, bare: bool) -> str:
        quote = "" if bare or not self._syntax.quoted_keys else '"'
        taken = "|".join(name for name in declared if name.isidentifier()) or "-"
        return self._rules.terminal(f"/{quote}{_FREE_KEY}{quote}/ & ~/{quote}({taken}){quote}/")

    def _definition(self, name: str) -> str:
        if name not in self._definitions:
            self._definitions[name] = self._rules.open_rule()
            self._rules.close_rule(self._definitions[name], self.value(self._tool.definition(name)))
        return self._definitions[name]

    def _any_value(self) -> str:
        if not self._anything:
            self._anything = self._rules.open_rule()
            self._rules.close_rule(self._anything, one_of(self._of_type(kind, {}) for kind in _ALL))
        return self._anything

    def _written(self, value: Any) -> str:
        """A value of an enumeration."""
        if isinstance(value, str) and self._syntax.quote:
            quote = self._syntax.quote
            return self._rules.literal(f"{quote}{value}{quote}")
        if isinstance(value, list):
            return (
                f"{literal('[')} "
                f"{literal(self._syntax.comma).join(f' {self._written(item)} ' for item in value)} "
                f"{literal(']')}"
            )
        if isinstance(value, Mapping):
            pairs = (f"{self._key(name)} {self._written(inner)}" for name, inner in value.items())
            return f"{literal('{')} {f' {literal(self._syntax.comma)} '.join(pairs)} {literal('}')}"
        if value is None or isinstance(value, bool):
            return literal(self._syntax.word(value))
        return literal(json.dumps(value, ensure_ascii=False))

    def _key(self, name: str) -> str:
        return literal(
            (json.dumps(name, ensure_ascii=False) if self._syntax.quoted_keys else name)
            + self._syntax.colon
        )


def _repeated(item: str, comma: str, least: int, most: int | None) -> str:
    if most == 0:
        return ""
    again = _times(f"({comma} {item})", max(least - 1, 0), None if most is None else most - 1)
    return f"{item} {again}" if least else f"({item} {again})?"


def _times(expression: str, least: int, most: int | None) -> str:
    return "" if most == 0 else f"{expression}{{{least},{'' if most is None else most}}}"


def _kinds_of(node: Schema) -> tuple[str, ...]:
    if "properties" in node or "required" in node or "allOf" in node:
        return ("object",)
    if "items" in node or "prefixItems" in node:
        return ("array",)
    return ("number",) if any(keyword in node for keyword in _OF_NUMBERS) else _ALL
