"""Arguments that are not JSON: strings as they are between marks, and literals."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from holdfast.front.structured.lark import (
    ANY,
    DATE,
    IPV4,
    IPV6,
    TIME,
    Rules,
    escaped,
    json_value,
    literal,
    members,
    one_of,
)
from holdfast.front.structured.schema import Schema
from holdfast.front.structured.tools import CallableTool

_LONGEST: Final = 10_000  # characters that are counted: each is a state of the lexer
FORMATS: Final = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "ipv4": IPV4,
    "ipv6": IPV6,
    "email": r"[A-Za-z0-9_+\-]+(\.[A-Za-z0-9_+\-]+)*@[A-Za-z0-9]+(-[A-Za-z0-9]+)*(\.[A-Za-z0-9]+(-[A-Za-z0-9]+)*)+",
    "hostname": r"[A-Za-z0-9]+(-[A-Za-z0-9]+)*(\.[A-Za-z0-9]+(-[A-Za-z0-9]+)*)*",
    "uri": r"[a-z][a-z0-9+.\-]*:\/\/[A-Za-z0-9\-._~:\/?#\[\]@!$&'()*+,;=%]+",
}
"""Of the formats that a grammar enforces in JSON: simple patterns of values that are right."""
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
_DEEPEST_BRANCH = 16
_FREE_KEY = r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}"
_CDATA = ("<![CDATA[", "]]>")
_OF_STRINGS = ("minLength", "maxLength", "pattern", "format")
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ALL = ("string", "number", "boolean", "null", "array", "object")
_JSON_WORDS = {True: "true", False: "false", None: "null"}
_FREE_NAME = r"[A-Za-z_][A-Za-z0-9_]{0,63}"


def content_of(node: Schema) -> tuple[tuple[str, ...], str]:
    """Regular expressions that a string of the schema all matches, and the keyword that they leave
    out (empty: none).
    """
    values = node.get("enum", [node["const"]] if "const" in node else None)
    if values is not None:
        return (
            "(" + "|".join(escaped(value) for value in values if isinstance(value, str)) + ")",
        ), ""
    found = []
    least, most = node.get("minLength", 0), node.get("maxLength")
    if most is not None and most > _LONGEST:
        return (ANY,), "maxLength"
    if least or most is not None:
        found.append(rf"(.|\n){{{least},{'' if most is None else most}}}")
    for keyword, known in (("format", _format), ("pattern", _whole_pattern)):
        if keyword in node:
            regex = known(node[keyword])
            if regex is None:
                return (*found,) or (ANY,), keyword
            found.append(regex)
    return (*found,) or (ANY,), ""


def _format(name: Any) -> str | None:
    return FORMATS.get(name, ANY if name == "unknown" else None)


def _whole_pattern(regex: str) -> str | None:
    """JSON Schema's patterns match anywhere; a grammar's match the whole.

    None: its anchors stand where that is not simple.
    """
    branches = [*_alternatives(regex)]
    found = []
    for branch in branches:
        inner, lead, trail = branch, ANY, ANY
        if inner.startswith("^"):
            inner, lead = inner[1:], ""
        if inner.endswith("$") and not inner.endswith(r"\$"):
            inner, trail = inner[:-1], ""
        if _has_anchor(inner):
            return None
        found.append(f"{lead}({inner}){trail}")
    from llguidance import regex_to_lark

    return "(" + "|".join(regex_to_lark(each, use_ascii="dw") for each in found) + ")"


def _alternatives(regex: str) -> Iterator[str]:
    """The alternatives at the top of a regular expression."""
    start = 0
    for place, character, depth in _characters(regex):
        if character == "|" and not depth:
            yield regex[start:place]
            start = place + 1
    yield regex[start:]


def _has_anchor(regex: str) -> bool:
    return any(character in "^$" for _, character, _ in _characters(regex))


def _characters(regex: str) -> Iterator[tuple[int, str, int]]:
    """Place, character and depth in groups of all that stands outside of character classes and
    escapes.
    """
    place = depth = 0
    while place < len(regex):
        character = regex[place]
        if character == "\\":
            place += 2
            continue
        if character == "[":
            place = _class_end(regex, place)
            continue
        depth += (character == "(") - (character == ")")
        yield place, character, depth
        place += 1


def _class_end(regex: str, place: int) -> int:
    place += 2 if regex[place + 1 : place + 2] == "^" else 1
    place += regex[place : place + 1] == "]"
    while place < len(regex) and regex[place] != "]":
        place += 2 if regex[place] == "\\" else 1
    return place + 1


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
        if not isinstance(node, dict) or depth > _DEEPEST_BRANCH:
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
        return self._rules.terminal(f"/{quote}{_FREE_NAME}{quote}/ & ~/{quote}({taken}){quote}/")

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
