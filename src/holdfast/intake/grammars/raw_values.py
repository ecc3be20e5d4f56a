"""Arguments that stand raw between tags: strings as they are, all else as JSON, typed by the schema when they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from holdfast.intake.grammars.lark import ANY, Rules, json_value, one_of
from holdfast.intake.grammars.raw_text import content_of
from holdfast.intake.grammars.schema import Schema
from holdfast.intake.grammars.tools import CallableTool

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const")
_MOST_BRANCHES = 16


class RawValues:
    """Makes expressions for the values of one tool's parameters. `left_out` collects the keywords that they do not enforce."""

    def __init__(self, rules: Rules, tool: CallableTool) -> None:
        self.left_out: list[str] = []
        self._rules, self._tool = rules, tool

    def value(self, node: Any, end: str, *, never: Sequence[str] = (), place: str = "") -> str:
        """A value and the end behind it. never: regular expressions of what would be taken for more than text."""
        texts: list[Schema] = []
        others: list[Schema | bool] = []
        for branch in self._branches(node, depth=0):
            (texts if branch.get("type") == "string" else others).append(branch)
        found = [self._text(text, others, end, never=never, place=place) for text in texts]
        if not any(set(text) <= {"type"} for text in texts) or _are_structures(others):
            found += [f"{self._json(other)} {self._rules.literal(end)}" for other in others]
        return one_of(found) if len(found) != 1 else found[0]

    def free(self, end: str, *, never: Sequence[str] = ()) -> str:
        """Any text and the end behind it."""
        return self._rules.text_before(end, never=never)

    def _text(self, node: Schema, others: Iterable[Schema | bool], end: str, *, never: Sequence[str], place: str) -> str:
        content, left_out = content_of(node)
        if left_out:
            self.left_out.append(f"{place}/{left_out}")
        taken = _first_characters(others)
        if taken:  # such a text would be read as one of the others
            content = (*content, rf"\s*([^\s{taken}]{ANY})?")
        return self._rules.text_before(end, content=content, never=never)

    def _json(self, node: Schema | bool) -> str:
        definitions = self._tool.arguments.get("$defs")
        return json_value({**node, "$defs": definitions} if definitions and isinstance(node, dict) else node)

    def _branches(self, node: Any, *, depth: int) -> Iterator[Schema]:
        """The schemas, each of strings alone or of none, of which a value has to fit one."""
        if not isinstance(node, dict) or depth > _MOST_BRANCHES:
            node = {}
        if "$ref" in node:
            target = {**self._tool.definition(node["$ref"]), **_without(node, "$ref")}
            found = [*self._branches(target, depth=depth + 1)]
            yield from found if any(branch.get("type") == "string" for branch in found) else (node,)
            return
        for keyword in ("anyOf", "oneOf"):
            if keyword in node:
                rest = _without(node, keyword)
                for member in node[keyword]:
                    yield from self._branches({**rest, **member} if isinstance(member, dict) else rest, depth=depth + 1)
                return
        yield from _by_type(node)


def _by_type(node: Schema) -> Iterator[Schema]:
    kinds = node.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else [*kinds]
    if "enum" in node or "const" in node:
        values = node.get("enum", [node.get("const")])
        texts = [value for value in values if isinstance(value, str)]
        if texts:
            yield {"type": "string", "enum": texts}
        if len(texts) < len(values):
            yield {**_without(node, "const"), "enum": [value for value in values if not isinstance(value, str)]}
    elif not kinds:
        if any(keyword in node for keyword in ("properties", "items", "required", "allOf", "minimum", "maximum")):
            yield node
        else:
            yield {"type": "string", **{keyword: node[keyword] for keyword in ("pattern", "minLength", "maxLength") if keyword in node}}
    else:
        if "string" in kinds:
            yield {**node, "type": "string"}
        rest = [kind for kind in kinds if kind != "string"]
        if rest:
            yield {**node, "type": rest if len(rest) > 1 else rest[0]}


def _first_characters(others: Iterable[Schema | bool]) -> str:
    """What the JSON of the other branches may begin with, where reading it would be checked against more than its type."""
    found = ""
    for other in others:
        if isinstance(other, dict):
            kinds = other.get("type", ())
            kinds = {kinds} if isinstance(kinds, str) else {*kinds}
            if not kinds or kinds & {"object", "array"}:
                found += r"\[{"
            if kinds & {"integer", "number"} and any(keyword in other for keyword in _BOUNDS):
                found += r"\-0-9"
    return found


def _are_structures(others: Sequence[Schema | bool]) -> bool:
    return bool(_first_characters(others))


def _without(node: Schema, keyword: str) -> Schema:
    return {name: value for name, value in node.items() if name != keyword}

