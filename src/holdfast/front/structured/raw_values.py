"""Arguments that stand raw between tags: strings as they are, all else as JSON, typed by the schema
when they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.front.structured.lark import ANY, Rules, escaped, json_value, members, one_of
from holdfast.front.structured.raw_text import content_of
from holdfast.front.structured.schema import Schema
from holdfast.front.structured.tools import CallableTool

_BOUNDS = (
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "enum",
    "const",
)
_OF_TEXTS = ("pattern", "minLength", "maxLength", "format")
_DEEPEST = 16
_FREE_KEY = r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}"
_CDATA = ("<![CDATA[", "]]>")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentTags:
    """How a family writes an argument: `before`, its key, `text` or `json`, a string or any other
    value, `end`, `behind`.

    A string ends where `end` comes first. That it has nothing else which a reader takes for the end
    of a call is left to the
    model: the lexemes for it would cost a hundred times as much. cdata: it may stand in a CDATA
        section.
    """

    before: str
    text: str
    json: tuple[str, ...]  # any of them
    end: str
    behind: str = ""
    cdata: bool = False


class RawArguments:
    """Makes the expression of one tool's arguments.

    `left_out` collects the keywords that it does not enforce.
    """

    def __init__(self, rules: Rules, tool: CallableTool, tags: ArgumentTags) -> None:
        self.left_out: list[str] = []
        self._rules, self._tool, self._tags = rules, tool, tags

    def expression(self) -> str:
        """All arguments, in the order of the schema."""
        found = self._tool.members(self._tool.arguments)
        self.left_out += [f"#/{keyword}" for keyword in found.left_out]
        given = {
            name: self._argument(self._rules.literal(name), node, place=f"#/properties/{name}")
            for name, node in found.properties.items()
        }
        others = ""
        if found.others is not False:
            declared = "|".join(map(escaped, given)) or "-"
            key = self._rules.terminal(f"/{_FREE_KEY}/ & ~/{declared}/")
            others = self._argument(key, found.others, place="#/additionalProperties")
        return members(self._rules, given, required=found.required, separator="", others=others)

    def _argument(self, key: str, node: Any, *, place: str) -> str:
        return self._rules.rule(
            f"{self._rules.literal(self._tags.before)} {key} {self._value(node, place=place)}"
        )

    def _value(self, node: Any, *, place: str) -> str:
        """A value from behind its key."""
        branches = [*self._branches(node, depth=0)]
        texts = [branch for branch in branches if branch.get("type") == "string"]
        others = [branch for branch in branches if branch.get("type") != "string"]
        taken = "" if (self._tags.text,) != self._tags.json else _first_characters(others)
        found = [self._text(text, taken, place=place) for text in texts]
        end = self._rules.literal(self._tags.end + self._tags.behind)
        lead = one_of(map(self._rules.literal, self._tags.json))
        found += [f"{lead} {self._json(other)} {end}" for other in others]
        return one_of(found)

    def _text(self, node: Schema, taken: str, *, place: str) -> str:
        content, left_out = content_of(node)
        if left_out:
            self.left_out.append(f"{place}/{left_out}")
        if taken:  # a text that begins so would be read as one of the other branches
            content = (*content, rf"\s*([^\s{taken}]{ANY})?")
        lead, behind = self._rules.literal(self._tags.text), self._tags.behind
        tail = self._rules.literal(behind) if behind else ""
        if not self._tags.cdata:
            return f"{lead} {self._rules.text_before(self._tags.end, content=content)} {tail}"
        section = (
            f"{self._rules.literal(_CDATA[0])} "
            f"{self._rules.text_before(_CDATA[1], content=content)}"
        )
        # what begins otherwise is in a section
        plain = tuple(rf"([^<]{ANY})?" if each == ANY else each for each in content)
        found = f"{lead} {self._rules.text_before(self._tags.end, content=plain)} {tail}"
        return f"({found} | {lead} {section} {self._rules.literal(self._tags.end)} {tail})"

    def _json(self, node: Schema) -> str:
        definitions = self._tool.arguments.get("$defs")
        return json_value({**node, "$defs": definitions} if definitions else node)

    def _branches(self, node: Any, *, depth: int) -> Iterator[Schema]:
        """Schemas, each of strings alone or of none, of which a value has to fit one."""
        if not isinstance(node, dict) or depth > _DEEPEST:
            node = {}
        if "$ref" in node:
            target = self._tool.definition(node["$ref"])
            inner = {**target, **_without(node, "$ref")} if isinstance(target, dict) else {}
            found = [*self._branches(inner, depth=depth + 1)]
            yield from found if any(branch.get("type") == "string" for branch in found) else (node,)
            return
        for keyword in ("anyOf", "oneOf"):
            if keyword in node:
                rest = _without(node, keyword)
                for member in node[keyword]:
                    if member is not False:
                        yield from self._branches(
                            {**rest, **member} if isinstance(member, dict) else rest,
                            depth=depth + 1,
                        )
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
            yield {
                **_without(node, "const"),
                "enum": [value for value in values if not isinstance(value, str)],
            }
        return
    if not kinds and set(node) - {*_OF_TEXTS}:
        yield node  # it has members, items or bounds
        return
    if not kinds or "string" in kinds:
        yield {
            "type": "string",
            **{keyword: node[keyword] for keyword in _OF_TEXTS if keyword in node},
        }
    rest = [kind for kind in kinds if kind != "string"]
    if rest:
        yield {**node, "type": rest if len(rest) > 1 else rest[0]}


def _first_characters(others: Iterable[Schema]) -> str:
    """What the JSON of the other branches may begin with, where reading it would be checked against
    more than its type.
    """
    found = ""
    for other in others:
        kinds = other.get("type", ())
        kinds = {kinds} if isinstance(kinds, str) else {*kinds}
        if not kinds or kinds & {"object", "array"}:
            found += r"\[{"
        if "integer" in kinds or (
            kinds & {"number"} and any(keyword in other for keyword in _BOUNDS)
        ):
            found += r"\-0-9"
    return found


def _without(node: Schema, keyword: str) -> Schema:
    return {name: value for name, value in node.items() if name != keyword}
