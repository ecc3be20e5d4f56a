"""Grammars of a tool's arguments, for each syntax in which families write values.

An expression is a piece of a grammar, as text (`Rules`). A node is a JSON schema in the tool's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.front.structured.lark import (
    ANY,
    LEVELS_AROUND_ARGUMENTS,
    Rules,
    content_of,
    escaped,
    json_value,
    literal,
    members,
    one_of,
)
from holdfast.front.structured.schema import Schema
from holdfast.front.toolcalls.call_format import (
    CDATA,
    JsonObject,
    LiteralValues,
    NestedValues,
    TaggedValues,
    Values,
)
from holdfast.front.toolcalls.json_schema import (
    References,
    items_of,
    listed_values,
    named_types,
    types_of,
)

_STRING_KEYWORDS: Final = ("pattern", "minLength", "maxLength", "format")
_NUMBER_KEYWORDS: Final = (
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
)
_ALL_TYPES: Final = ("string", "number", "boolean", "null", "array", "object")
_TAG_TYPES: Final = ("number", "boolean", "null", "array", "object")
_MOST_LEVELS: Final = 16  # maximum depth to which references and unions are followed
_MOST_REFERENCES: Final = 256  # maximum number of references that are followed in one union
_MOST_TAG_LEVELS: Final = 4  # maximum depth of nested tags; anything is allowed below
_UNDECLARED_KEY: Final = r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}"
_SINGLE_QUOTED: Final = r"/'([^'\\\n]|\\[nrt'\"\\])*'/"
_UNDECLARED_NAME: Final = r"[A-Za-z_][A-Za-z0-9_]{0,63}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The members that an object may have.

    properties: schemas by name, in order. others: the schema of further members, or False if no
    further members are allowed. unenforced: keywords of the object that the other fields do not
    express.
    """

    properties: Mapping[str, Any]
    required: frozenset[str]
    others: Any
    unenforced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableTool:
    """A tool that the model may call.

    place: the path of the tool's schema in the request.
    strict: whether a keyword that cannot be enforced is an error.
    unenforced: paths of keywords that were left out of `arguments`.
    """

    name: str
    arguments: Schema
    place: str = ""
    strict: bool = False
    unenforced: tuple[str, ...] = ()

    def target(self, reference: str) -> Any:
        """Resolve a `$ref` of the tool's clean schema."""
        return References(self.arguments).target(reference)

    def alternatives(self, node: Any, *, depth: int = 0) -> Sequence[Schema]:
        """Split a schema into alternatives without references and unions at the top.

        depth: the number of values around the schema.
        """
        return [*self._alternatives(node, depth, [])] or [{}]

    def _alternatives(
        self, node: Any, depth: int, followed_references: list[Schema]
    ) -> Iterator[Schema]:
        """Yield the alternatives of a schema, but not those behind references that were followed."""
        if (
            not isinstance(node, dict)
            or depth > _MOST_LEVELS
            or len(followed_references) > _MOST_REFERENCES
        ):
            yield {}
            return
        if "$ref" in node:
            if node not in followed_references:
                followed_references.append(node)
                target = self.target(node["$ref"])
                node = (
                    {**target, **_without_keyword(node, "$ref")} if isinstance(target, dict) else {}
                )
                yield from self._alternatives(node, depth + 1, followed_references)
            return
        for keyword in ("anyOf", "oneOf"):
            if keyword in node:
                for member in _union_members(node, keyword):
                    yield from self._alternatives(member, depth + 1, followed_references)
                return
        yield node

    def members(self, node: Schema) -> Members:
        """Return the members of an object, including those declared in `allOf` and behind `$ref`.

        node: an object's schema, within the tool's schema.
        """
        not_expressed = ("anyOf", "oneOf", "patternProperties", "minProperties", "maxProperties")
        unenforced: list[str] = []
        properties: dict[str, Any] = {}
        required: set[str] = set()
        others: Any = True
        for part in self._parts_in_force(node):
            unenforced += [word for word in not_expressed if word in part]
            properties.update(part.get("properties", {}))
            required.update(part.get("required", ()))
            additional = part.get("additionalProperties", True)
            others = others if additional is True else additional
        declared = {name: schema for name, schema in properties.items() if schema is not False}
        declared.update(dict.fromkeys(sorted(required - declared.keys()), others))
        return Members(
            properties=declared,
            required=frozenset(required),
            others=others,
            unenforced=tuple(unenforced),
        )

    def _parts_in_force(self, node: Schema) -> Iterator[Schema]:
        """Iterate over a schema and those that must hold with it, each once."""
        pending: list[Any] = [node]
        visited_ids: set[int] = set()
        while pending:
            part = pending.pop()
            if not isinstance(part, dict) or id(part) in visited_ids:
                continue
            visited_ids.add(id(part))
            yield part
            if "$ref" in part:
                pending.append(self.target(part["$ref"]))
            pending += reversed(part.get("allOf", ()))


def arguments_of(rules: Rules, tool: CallableTool, values: Values) -> tuple[str, tuple[str, ...]]:
    """Return a grammar expression for a tool's arguments, and the JSON Schema keywords that the
    expression does not enforce.
    """
    match values:
        case JsonObject():
            return json_value(tool.arguments, levels_around=LEVELS_AROUND_ARGUMENTS), ()
        case TaggedValues():
            tags = _TagGrammar(rules, tool, values)
            return tags.arguments(), tuple(tags.unenforced)
        case NestedValues():
            nested = _NestedTagGrammar(rules, tool, values)
            return nested.members(tool.arguments, depth=0), tuple(nested.unenforced)
        case LiteralValues():
            literals = _LiteralGrammar(rules, tool, values)
            written = literals.members(tool.arguments, assign=values.assign)
            return written, tuple(literals.unenforced)


class _TagGrammar:
    """Raw values between tags: strings are written unchanged, any other value as JSON.

    A string ends at the first closing tag. The grammar does not stop the model from writing other
    text in a string that a reader takes for the end of a call: lexemes that forbid such text would
    cost a hundred times as much.
    """

    def __init__(self, rules: Rules, tool: CallableTool, tags: TaggedValues) -> None:
        self.unenforced: list[str] = []
        self._rules = rules
        self._tool = tool
        self._tags = tags
        # in a loose syntax without its leading white space: a string contains that, and other values
        # may have any before the end
        self._end = tags.end.lstrip() if tags.is_loose else tags.end
        kinds = _TAG_TYPES if "{type}" in tags.json else ("",)
        # what may precede a value that is not a string
        self._json_leads = [tags.json.replace("{type}", kind) for kind in kinds]

    def arguments(self) -> str:
        """An expression for all arguments of a call."""
        tool_members = self._tool.members(self._tool.arguments)
        self.unenforced += [f"#/{keyword}" for keyword in tool_members.unenforced]
        argument_rules = {
            name: self._argument(self._rules.literal(name), node, place=f"#/properties/{name}")
            for name, node in tool_members.properties.items()
        }
        others = ""
        if tool_members.others is not False:
            declared = "|".join(map(escaped, argument_rules)) or "-"
            key = self._rules.terminal(f"/{_UNDECLARED_KEY}/ & ~/{declared}/")
            others = self._argument(key, tool_members.others, place="#/additionalProperties")
        return members(
            self._rules, argument_rules, required=tool_members.required, separator="", others=others
        )

    def _argument(self, key: str, node: Any, *, place: str) -> str:
        """A rule for one argument. key: an expression. place: the path of its schema."""
        before = self._rules.literal(self._tags.before)
        return self._rules.rule(f"{before} {key} {self._value(node, place=place)}")

    def _value(self, node: Any, *, place: str) -> str:
        """An expression for a value, with the markup between the key and the value, and after it."""
        branches = [
            branch for each in self._tool.alternatives(node) for branch in _split_off_strings(each)
        ]
        strings = [branch for branch in branches if branch.get("type") == "string"]
        others = [branch for branch in branches if branch.get("type") != "string"]
        # if strings have the markup of other values, one that begins like JSON would be read as one
        reserved = _first_characters_of(others) if self._json_leads == [self._tags.text] else ""
        expressions = [self._string_value(string, reserved, place=place) for string in strings]
        lead = one_of(map(self._rules.literal, self._json_leads))
        end = f"{self._rules.literal(self._end)} {self._rules.markup(self._tags.gap)}"
        if self._tags.is_loose:
            space = self._rules.optional_space()
            lead, end = f"{lead} {space}", f"{space} {end}"
        for other in others:
            expressions.append(f"{lead} {self._json_value(other)} {end}")
            if self._tags.cdata:
                opening, closing = map(self._rules.literal, CDATA)
                expressions.append(f"{lead} {opening} {self._json_value(other)} {closing} {end}")
        return one_of(expressions)

    def _string_value(self, node: Schema, reserved: str, *, place: str) -> str:
        """An expression for a string, with its markup.

        reserved: first characters that are reserved for values of other types.
        """
        content, unenforced = content_of(node)
        if unenforced:
            self.unenforced.append(f"{place}/{unenforced}")
        if reserved:
            content = (*content, rf"\s*([^\s{reserved}]{ANY})?")
        tags = self._tags
        lead = self._rules.literal(tags.text)
        tail = self._rules.markup(tags.gap)
        if not tags.cdata:
            return f"{lead} {self._rules.text_before(self._end, content=content)} {tail}"
        inner = self._rules.text_before(CDATA[1], content=content)
        section = f"{self._rules.literal(CDATA[0])} {inner} {self._rules.literal(self._end)}"
        # a string that begins with `<` is written in a CDATA section
        plain_content = tuple(rf"([^<]{ANY})?" if each == ANY else each for each in content)
        plain = self._rules.text_before(self._end, content=plain_content)
        return f"({lead} {plain} {tail} | {lead} {section} {tail})"

    def _json_value(self, node: Schema) -> str:
        """An expression for a value as JSON. The schema may refer to the tool's definitions."""
        definitions = self._tool.arguments.get("$defs")
        return json_value({**node, "$defs": definitions} if definitions else node)


def _split_off_strings(node: Schema) -> Iterator[Schema]:
    """Split a schema into one for strings and one for all other values."""
    types = named_types(node)
    if (values := listed_values(node)) is not None:
        texts = [value for value in values if isinstance(value, str)]
        if texts:
            yield {"type": "string", "enum": texts}
        others = [value for value in values if not isinstance(value, str)]
        if others:
            yield {**_without_keyword(node, "const"), "enum": others}
        return
    if not types and set(node) - {*_STRING_KEYWORDS}:
        yield node  # the schema has members, items or bounds
        return
    if not types or "string" in types:
        yield {"type": "string", **_only_keywords(node, _STRING_KEYWORDS)}
    other_types = [each for each in types if each != "string"]
    if other_types:
        yield {**node, "type": other_types if len(other_types) > 1 else other_types[0]}


def _first_characters_of(others: Iterable[Schema]) -> str:
    """Return the first characters of these schemas' values in JSON, for use in a character class.

    A string that begins with such a character could be read as one of these values. Characters of
    numbers are included only if a number that is read this way could violate its schema. Those of
    true, false and null are never included.
    """
    characters = ""
    for other in others:
        types = {*named_types(other)}
        if not types or types & {"object", "array"}:
            characters += r"\[{"
        is_bound = any(keyword in other for keyword in (*_NUMBER_KEYWORDS, "enum", "const"))
        if "integer" in types or ("number" in types and is_bound):
            characters += r"\-0-9"
    return characters


class _NestedTagGrammar:
    """Values between nested tags. A null member is left out."""

    def __init__(self, rules: Rules, tool: CallableTool, tags: NestedValues) -> None:
        self.unenforced: list[str] = []
        self._rules = rules
        self._tool = tool
        self._tags = tags
        self._tagged_rules: dict[tuple[str, str, int], str] = {}

    def members(self, node: Schema, *, depth: int) -> str:
        """A grammar expression for the members of an object, each enclosed in the tags of its name."""
        object_members = self._tool.members(node)
        self.unenforced += object_members.unenforced
        member_rules = {
            name: self._tagged_value(name, value, depth=depth)
            for name, value in object_members.properties.items()
        }
        return members(self._rules, member_rules, required=object_members.required, separator="")

    def _tagged_value(self, name: str, node: Any, *, depth: int) -> str:
        """A rule for a value between the tags of this name, written once for equal schemas."""
        key = name, json.dumps(node), depth
        if key not in self._tagged_rules:
            end = f"{self._tags.marker}</{name}>"
            values = [
                self._value(branch, end, depth=depth)
                for each in self._tool.alternatives(node, depth=depth)
                for branch in _split_by_type(each)
            ]
            lead = self._rules.literal(f"{self._tags.marker}<{name}>")
            self._tagged_rules[key] = self._rules.rule(f"{lead} {one_of(filter(None, values))}")
        return self._tagged_rules[key]

    def _value(self, node: Schema, end_tag: str, *, depth: int) -> str:
        """An expression for a value and the tag that closes it.

        Empty if the value cannot be written.
        """
        end = self._rules.literal(end_tag)
        json_type = node.get("type")
        if json_type == "null":
            return ""
        if (values := listed_values(node)) is not None:
            listed = [value for value in values if isinstance(value, str | int | float)]
            written = (value if isinstance(value, str) else json.dumps(value) for value in listed)
            return f"{one_of(map(self._rules.literal, written))} {end}" if listed else ""
        if json_type == "object" and depth < _MOST_TAG_LEVELS:
            return f"{self.members(node, depth=depth + 1)} {end}"
        items = node.get("items", {})
        is_list = json_type == "array" and isinstance(items, dict) and "prefixItems" not in node
        if is_list and depth < _MOST_TAG_LEVELS:
            item = self._tagged_value(self._tags.item, items, depth=depth + 1)
            least, most = node.get("minItems", 0), node.get("maxItems")
            return f"{_repeated(item, least, most)} {end}"
        if json_type in ("integer", "number", "boolean"):
            return f"{json_value(node)} {end}"
        content, unenforced = content_of(node)
        if unenforced or json_type not in (None, "string"):
            self.unenforced.append(unenforced or str(json_type))
        return self._rules.text_before(end_tag, content=content)


class _LiteralGrammar:
    """Values in a family's own literal syntax (`LiteralValues`)."""

    def __init__(self, rules: Rules, tool: CallableTool, syntax: LiteralValues) -> None:
        self.unenforced: list[str] = []
        self._rules = rules
        self._tool = tool
        self._syntax = syntax
        self._definitions: dict[str, str] = {}  # names of rules, by reference
        self._any_value_name = ""  # of the rule; empty until it is needed

    def members(self, node: Schema, *, assign: str = "") -> str:
        """An expression for the members of an object, without braces. assign: see `LiteralValues`."""
        object_members = self._tool.members(node)
        self.unenforced += object_members.unenforced
        member_rules = {
            name: self._member(name, value, assign=assign)
            for name, value in object_members.properties.items()
        }
        others = ""
        if object_members.others is not False:
            key = self._undeclared_key(
                member_rules, is_quoted=self._syntax.quoted_keys and not assign
            )
            others = f"{key} {self._sign_and_value(assign, object_members.others)}"
        orders = [member_rules]
        if self._syntax.sorted_keys and [*member_rules] != sorted(member_rules):
            orders.append({name: member_rules[name] for name in sorted(member_rules)})
        separator = literal(self._syntax.comma)
        return one_of(
            members(
                self._rules,
                each,
                required=object_members.required,
                separator=separator,
                others=others,
            )
            for each in orders
        )

    def _member(self, name: str, node: Any, *, assign: str) -> str:
        """A rule for a declared member, with its key."""
        key = literal(name if assign else self._syntax.key(name))
        return self._rules.rule(f"{key} {self._sign_and_value(assign, node)}")

    def _sign_and_value(self, assign: str, node: Any) -> str:
        """An expression for what follows a key: `assign` or else a colon, and the value."""
        return f"{literal(assign or self._syntax.colon)} {self._value(node)}"

    def _undeclared_key(self, declared: Iterable[str], *, is_quoted: bool) -> str:
        """A lexeme for any name but the declared ones."""
        quote = '"' if is_quoted else ""
        reserved = "|".join(name for name in declared if name.isidentifier()) or "-"
        return self._rules.terminal(
            f"/{quote}{_UNDECLARED_NAME}{quote}/ & ~/{quote}({reserved}){quote}/"
        )

    def _value(self, node: Any) -> str:
        """An expression for a value of a schema."""
        if not isinstance(node, dict) or not node:
            return self._any_value_rule()
        if "$ref" in node:
            return self._definition(node["$ref"])
        if (values := listed_values(node)) is not None:
            write = self._rules.literal if self._syntax.quote else literal
            return one_of(write(self._syntax.value(value)) for value in values)
        for keyword in ("anyOf", "oneOf"):
            if keyword in node:
                return one_of(map(self._value, _union_members(node, keyword)))
        return one_of(self._of_type(kind, node) for kind in _possible_types(node))

    def _of_type(self, json_type: str, node: Schema) -> str:
        """An expression for a value of this type, with the other keywords of its schema."""
        match json_type:
            case "string":
                return self._string(_only_keywords(node, _STRING_KEYWORDS))
            case "number" | "integer":
                return json_value({"type": json_type, **_only_keywords(node, _NUMBER_KEYWORDS)})
            case "boolean":
                return one_of(literal(self._syntax.word(value)) for value in (True, False))
            case "null":
                return literal(self._syntax.word(None))
            case "array":
                return self._array(node)
            case _:
                return f"{literal('{')} {self.members(node)} {literal('}')}"

    def _string(self, node: Schema) -> str:
        """An expression for a string with its quotes. node: only the keywords of strings."""
        quote = self._syntax.quote
        if not quote:
            json_string = json_value({"type": "string", **node})
            # escapes would break length and pattern constraints of such a string
            allows_single_quotes = self._syntax.single_quotes and not node
            return f"({json_string} | {_SINGLE_QUOTED})" if allows_single_quotes else json_string
        content, unenforced = content_of(node)
        if unenforced:
            self.unenforced.append(unenforced)
        return f"{self._rules.literal(quote)} {self._rules.text_before(quote, content=content)}"

    def _array(self, node: Schema) -> str:
        """An expression for an array, built from its last item to its first."""
        first_items, other_items = items_of(node)
        least, most = node.get("minItems", 0), node.get("maxItems")
        comma = literal(self._syntax.comma)
        tail = ""
        if other_items is not False and (most is None or most > len(first_items)):
            other_item = self._rules.rule(self._value(other_items))
            items_before = max(len(first_items), 1)
            most_others = None if most is None else most - items_before
            tail = _repeated(f"({comma} {other_item})", max(least - items_before, 0), most_others)
            if not first_items:
                tail = f"{other_item} {tail}" if least else f"({other_item} {tail})?"
        for place in reversed(
            range(min(len(first_items), len(first_items) if most is None else most))
        ):
            item = self._rules.rule(self._value(first_items[place]))
            inner = f"{comma} {item} {tail}" if place else f"{item} {tail}"
            tail = inner if place < least else f"({inner})?"
        return f"{literal('[')} {tail} {literal(']')}"

    def _definition(self, reference: str) -> str:
        """The rule for what a `$ref` points to, which may refer to itself."""
        if reference not in self._definitions:
            self._definitions[reference] = self._rules.open_rule()
            body = self._value(self._tool.target(reference))
            self._rules.close_rule(self._definitions[reference], body)
        return self._definitions[reference]

    def _any_value_rule(self) -> str:
        """The rule for a value of any type, which is made when it is first needed."""
        if not self._any_value_name:
            self._any_value_name = self._rules.open_rule()
            body = one_of(self._of_type(kind, {}) for kind in _ALL_TYPES)
            self._rules.close_rule(self._any_value_name, body)
        return self._any_value_name


def _union_members(node: Schema, keyword: str) -> Iterator[Schema]:
    """Iterate over the alternatives of a union, each merged with the rest of the schema."""
    other_keywords = _without_keyword(node, keyword)
    for member in node[keyword]:
        if member is not False:
            yield {**other_keywords, **member} if isinstance(member, dict) else other_keywords


def _repeated(expression: str, least: int, most: int | None) -> str:
    """The expression repeated `least` to `most` times. most: None for no limit."""
    if most == 0:
        return ""
    return f"{expression}{{{least},{'' if most is None else most}}}"


def _possible_types(node: Schema) -> tuple[str, ...]:
    """The JSON types that a schema allows, as far as its `type`, listed values and parts tell."""
    if types := tuple(types_of(node)):
        return types
    if "allOf" in node:
        return ("object",)
    return ("number",) if any(keyword in node for keyword in _NUMBER_KEYWORDS) else _ALL_TYPES


def _split_by_type(node: Schema) -> Iterator[Schema]:
    """Split a schema that allows several types into one for each type."""
    types = named_types(node)
    yield from ({**node, "type": each} for each in types) if types else (node,)


def _without_keyword(node: Schema, keyword: str) -> Schema:
    return {name: value for name, value in node.items() if name != keyword}


def _only_keywords(node: Schema, keywords: Sequence[str]) -> Schema:
    return {keyword: node[keyword] for keyword in keywords if keyword in node}
