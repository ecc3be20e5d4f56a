"""Writes grammars in the Lark syntax of llguidance, and patterns for strings.

An expression is a piece of such a grammar, as text. A rule is a named expression; a lexeme (or
terminal) is a named combination of regular expressions, which the lexer matches as one unit. A gap
is optional white space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from holdfast.front.structured.keywords import LISTS, MAPS, SINGLES, atoms
from holdfast.front.toolcalls.json_schema import definition_name, listed_values, named_types

_YEAR: Final = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DAY: Final = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_LEAP: Final = "(0[48]|[2468][048]|[13579][26])"  # two-digit multiples of four, except 00
DATE: Final = f"({_YEAR}-{_DAY}|([0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
# Leap seconds are left out: they are valid on few days only, and most clients refuse them.
TIME: Final = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
)

_BYTE: Final = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
IPV4: Final = rf"({_BYTE}\.){{3}}{_BYTE}"
_GROUP: Final = "[0-9a-fA-F]{1,4}"
_LAST_TWO_GROUPS: Final = f"({_GROUP}:{_GROUP}|{IPV4})"
# As in RFC 3986: eight groups, of which the last two may be written as an IPv4 address; `::`
# replaces one or more groups.
_SHORTENED_IPV6: Final = (
    f"::({_GROUP}:){{5}}{_LAST_TWO_GROUPS}",
    *(
        f"({_GROUP}(:{_GROUP}){{0,{before}}})?::({_GROUP}:){{{4 - before}}}{_LAST_TWO_GROUPS}"
        for before in range(5)
    ),
    f"({_GROUP}(:{_GROUP}){{0,5}})?::{_GROUP}",
    f"({_GROUP}(:{_GROUP}){{0,6}})?::",
)
IPV6: Final = f"(({_GROUP}:){{6}}{_LAST_TWO_GROUPS}|{'|'.join(_SHORTENED_IPV6)})"

_LABEL_END: Final = "[A-Za-z0-9]"
_LABEL_INNER: Final = r"[A-Za-z0-9\-]"
# A label has at most 63 characters. Its third and fourth characters may both be hyphens only after
# `xn` (RFC 5890).
_LABEL: Final = (
    rf"({_LABEL_END}({_LABEL_END}|{_LABEL_INNER}{_LABEL_END}|{_LABEL_INNER}{{2}}{_LABEL_END}|{_LABEL_INNER}({_LABEL_END}{_LABEL_INNER}|\-{_LABEL_END}){_LABEL_INNER}{{0,58}}{_LABEL_END})?"
    rf"|[Xx][Nn]\-\-{_LABEL_END}({_LABEL_INNER}{{0,57}}{_LABEL_END})?)"
)
HOSTNAME: Final = rf"{_LABEL}(\.{_LABEL})*"

EXACT: Final = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "hostname": HOSTNAME,
    "ipv6": IPV6,
}
"""Patterns for formats that llguidance enforces only loosely."""
# highest `maxLength` that is enforced; each character becomes a state of the lexer
_MOST_COUNTED_CHARACTERS: Final = 10_000
_RAW_FORMATS: Final = {
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
"""Patterns of formats for strings outside of JSON. They are simpler and allow only valid values."""

# Indentation of JSON: at most four spaces or one tab per level
_SPACES_PER_LEVEL: Final = 4
# A value may be nested in others that are not part of its schema: the arguments of a call are nested
# in the call, which may be in a list of calls.
_LEVELS_AROUND: Final = 1
LEVELS_AROUND_ARGUMENTS: Final = 3
_MOST_LEVELS: Final = 6  # for values that may be nested without limit
# Regular expressions. In a grammar, a marker that is a token has no text, so they never match it.
ANY: Final = r"(.|\n)*"
GAP: Final = r"/[ \t\n]{0,4}/"
# White space next to the markup of calls: a space, or line breaks with indentation
MARKUP_GAP: Final = r"( |\n{1,2}[ \t]{0,12})?"
# In markup: white space that does not separate two words, and positions where templates add some
_PLACES_OF_GAPS: Final = re.compile(
    r"(?<=[>\]}\[{,:])\s+|\s+(?=[<\[{}\]])|\s*\n\s*|^\s+|\s+$|(?<=\[)$"
    r"|(?<=[\[{])(?=[\[{\"])|(?<=[}\]])(?=[}\]])"
)
_JSON_OPTIONS: Final = {"coerce_one_of": True, "lenient": False}
# Allows `\u` and four digits for any character of a string without `pattern`, `format` or listed
# values; a surrogate pair counts as one character.
_UNICODE_ESCAPES: Final = {"json_allow_general_unicode_escapes": True}
# for schemas in which an escaped name could pass as one that they do not name
_NO_UNICODE_ESCAPES: Final = {"json_allowed_escapes": 'nrbtf\\"'}


def members(
    rules: Rules,
    expressions: Mapping[str, str],
    *,
    required: frozenset[str],
    separator: str,
    others: str = "",
) -> str:
    """An expression for the members of an object: all that are required, and any of the others, in
    the given order.

    expressions: one for each member, by name. others: an expression for further members, of
    which any number may come last; empty if there are none.
    """
    between = f"{separator} " if separator else ""
    # what follows a member, and what an object without earlier members begins with; both are built
    # from the last member to the first
    tail = f"({between}{others})*" if others else ""
    head = f"({others} {tail})?" if others else ""
    for name, member in reversed([*expressions.items()]):
        if name in required:
            tail, head = f"{between}{member} {tail}", f"{member} {tail}"
        else:
            tail_rule = rules.rule(tail or literal(""))
            head_rule = rules.rule(head or literal(""))
            tail, head = (
                f"({between}{member})? {tail_rule}",
                f"({member} {tail_rule} | {head_rule})",
            )
    return head


class Rules:
    """The rules of one grammar. Equal rules are written only once."""

    def __init__(
        self,
        marker_ids: Mapping[str, int],
        *,
        message_ends: Sequence[str] = (),
        turn_ends: Sequence[str] = (),
    ) -> None:
        """marker_ids: token ids of the markers that are single tokens of the model, by text.

        message_ends, turn_ends: markers that end an answer sometimes, and always (`ModelDialect`).
        """
        self.marker_ids = marker_ids
        self._message_ends = message_ends
        self._turn_ends = turn_ends
        self._names: dict[str, str] = {}  # of rules and lexemes, by their spelling and body
        self._lines: list[str] = []
        self._token_splitter = re.compile(
            "(" + "|".join(map(re.escape, sorted(marker_ids, key=len, reverse=True))) + ")"
        )

    def rule(self, body: str, *, is_lazy: bool = False) -> str:
        """Add a rule, and return the rule's name.

        is_lazy: whether the rule is one lexeme that ends as soon as possible.
        """
        return self._add_named(body, "r{}[lazy]" if is_lazy else "r{}")

    def terminal(self, body: str) -> str:
        """Add a lexeme of regular expressions combined with `&` and `~`, and return its name."""
        return self._add_named(body, "T{}")

    def open_rule(self) -> str:
        """Return a name for a rule that refers to itself; its body is added by `close_rule`."""
        name = f"o{len(self._names)}"
        self._names[name] = name
        return name

    def close_rule(self, name: str, body: str) -> None:
        """Add the body of a rule that was opened with `open_rule`."""
        self._lines.append(f"{name}: {body}")

    def literal(self, text: str) -> str:
        """A grammar expression that matches exactly this text.

        Markers in the text match as special tokens, the rest as characters.
        """
        if not self.marker_ids or not text:
            return literal(text)
        pieces = (piece for piece in self._token_splitter.split(text) if piece)
        return " ".join(
            self.token(piece) if piece in self.marker_ids else literal(piece) for piece in pieces
        )

    def markup(self, text: str) -> str:
        """Like `literal`, but allows any white space where the text has some next to its markers.

        Templates of one family, and their models, differ in it.
        """
        gap = self.terminal(f"/{MARKUP_GAP}/")
        pieces = (self.literal(piece) if piece else "" for piece in _PLACES_OF_GAPS.split(text))
        return f" {gap} ".join(pieces).strip()

    def optional_space(self) -> str:
        """An expression for the white space that may be next to markup, or none."""
        return self.markup(" ")

    def before_end(self, closing: str) -> str:
        """The closing markup of an answer, up to its end marker if it contains one.

        A matcher treats an end marker as the end of the answer, never as part of the text.
        """
        for end in self._turn_ends:
            closing = closing.partition(end)[0]
        return closing.rstrip()

    def message_end(self) -> str:
        """An expression for the end of a message; empty if it always ends the answer."""
        return one_of(map(self.token, self._message_ends)) if self._message_ends else ""

    def token(self, marker: str) -> str:
        """An expression for a marker that is a single token."""
        return f"<[{self.marker_ids[marker]}]>"

    def split_at_token(self, text: str) -> tuple[str, str, str]:
        """Cut a text at the first marker that is a single token.

        Returns the text before the marker, the marker, and the text after it. Without a
        marker, returns the whole text and two empty strings.
        """
        if not self.marker_ids:
            return text, "", ""
        before, *rest = self._token_splitter.split(text, maxsplit=1)
        return (before, rest[0], rest[1]) if rest else (text, "", "")

    def text_before(
        self, end: str, *, content: Sequence[str] = (ANY,), never: Iterable[str] = ()
    ) -> str:
        """An expression for free text up to and including the first occurrence of this end.

        content: regular expressions that the text must all match. never: regular expressions that
        must not match any part of the free text.
        """
        before, token, after = self.split_at_token(end)
        body = " & ".join(f"/{each}{escaped(before)}/" for each in content)
        unwanted = "|".join(never)
        if unwanted:
            body += f" & ~/{ANY}({unwanted}){ANY}/"
        if not token:
            return self.rule(body, is_lazy=True)
        tail = f" {self.literal(after)}" if after else ""
        return f"{self.terminal(body)} {self.token(token)}{tail}"

    def text_without(self, markers: Iterable[str]) -> str:
        """An expression for free text without any of these markers, up to the answer's end."""
        # markers that contain a token cannot occur in text
        unwanted = "|".join(
            escaped(marker) for marker in markers if not self.split_at_token(marker)[1]
        )
        return self.terminal(f"/{ANY}/" + (f" & ~/{ANY}({unwanted}){ANY}/" if unwanted else ""))

    def lark(self, start: str) -> str:
        """Return the text of the grammar that begins with this expression."""
        return "\n".join((f"start: {start}", *self._lines)) + "\n"

    def _add_named(self, body: str, spelling: str) -> str:
        """Add a line to the grammar, unless it is there, and return its name.

        spelling: the name, with braces for a number.
        """
        key = spelling + body
        if key not in self._names:
            self._names[key] = spelling.format(len(self._names))
            self._lines.append(f"{self._names[key]}: {body}")
        return self._names[key].removesuffix("[lazy]")


def literal(text: str) -> str:
    """An expression for exactly this text."""
    return json.dumps(text)


def one_of(expressions: Iterable[str]) -> str:
    """An expression for any one of these expressions."""
    return "(" + " | ".join(dict.fromkeys(expressions)) + ")"


def pattern(regex: str) -> str:
    """An expression for a text that matches a regular expression as a whole."""
    from llguidance import regex_to_lark  # imported here because the import takes 0.1 s

    return f"/{regex_to_lark(regex, use_ascii='')}/"


def json_value(schema: Any, *, levels_around: int = _LEVELS_AROUND) -> str:
    """An expression for a value of a clean schema, as JSON text. levels_around: how deep the value
    itself may be indented.
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    definitions = schema.get("$defs", {})
    levels = (
        _nesting_levels(schema, _MOST_LEVELS, definitions=definitions, levels_by_node={})
        + levels_around
    )
    schema = _with_exact_formats(_with_plain_names(schema))
    escapes = _NO_UNICODE_ESCAPES if _may_disguise_a_name(schema) else _UNICODE_ESCAPES
    options = {"whitespace_pattern": white_space(levels), **_JSON_OPTIONS, **escapes}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def white_space(levels: int = _MOST_LEVELS) -> str:
    """A regular expression for the white space between two tokens of JSON: one space, or a new line
    and its indentation, as models write it.

    Without a limit, a small model would write white space forever. levels: the deepest nesting of
    values.
    """
    levels = min(levels, _MOST_LEVELS)
    return rf"( |\n( {{0,{levels * _SPACES_PER_LEVEL}}}|\t{{0,{levels}}}))?"


def _nesting_levels(
    node: Any,
    max_levels: int,
    *,
    definitions: Mapping[str, Any],
    levels_by_node: dict[tuple[int, int], int],
) -> int:
    """The nesting depth of objects and lists in a value of a schema, up to `max_levels`. Undeclared
    members do not count: they may be deeper, but are then indented less.

    definitions: the schema's `$defs`. levels_by_node: a cache of results, because definitions are
    referenced often.
    """
    if not isinstance(node, Mapping) or max_levels <= 0:
        return 0
    if (key := (id(node), max_levels)) in levels_by_node:
        return levels_by_node[key]
    levels_by_node[key] = 0  # for a definition that only refers to itself

    def levels_of(inner: Any, max_levels: int) -> int:
        return _nesting_levels(
            inner, max_levels, definitions=definitions, levels_by_node=levels_by_node
        )

    member_schemas = [inner for keyword in MAPS for inner in node.get(keyword, {}).values()]
    member_schemas += [*node.get("prefixItems", ()), *(node.get(keyword) for keyword in SINGLES)]
    levels = [
        1 + levels_of(inner, max_levels - 1)
        for inner in member_schemas
        if isinstance(inner, Mapping)
    ]
    for keyword in ("anyOf", "oneOf", "allOf"):
        levels += [levels_of(inner, max_levels) for inner in node.get(keyword, ())]
    if "$ref" in node:
        levels.append(levels_of(definitions.get(definition_name(node["$ref"])), max_levels))
    if not levels and not {"enum", "const"} & node.keys():
        is_nested = bool({"object", "array"} & {*(named_types(node) or ("object",))})
        levels.append(max_levels if is_nested else 0)  # any object or list
    levels_by_node[key] = min(max_levels, max(levels, default=0))
    return levels_by_node[key]


def _may_disguise_a_name(schema: Mapping[str, Any]) -> bool:
    """Whether a declared name, written with escapes, could pass as an undeclared one, for which
    another schema applies.

    llguidance compares names by their spelling: `"\\u0061"` is not `"a"`. Declared names and names
    that match a pattern are never written with `\\u`.
    """
    is_named = bool(
        schema.get("properties") or schema.get("required") or schema.get("patternProperties")
    )
    if is_named and schema.get("additionalProperties", True) is not False:
        return True
    return any(
        isinstance(inner, dict) and _may_disguise_a_name(inner) for inner in _subschemas(schema)
    )


def _with_plain_names(schema: Any) -> Any:
    """Give undeclared names a pattern if other names are declared, so that they are written without
    `\\u`.
    """
    if not isinstance(schema, dict):
        return schema
    changed = _with_each_subschema(schema, _with_plain_names)
    is_named = bool(changed.get("properties") or changed.get("required"))
    is_open = changed.get("additionalProperties", True) in (True, {})
    if is_named and is_open and not changed.get("patternProperties"):
        changed |= {"patternProperties": {"": True}, "additionalProperties": False}
    return changed


def _with_exact_formats(schema: Any) -> Any:
    """Give each format that llguidance enforces only loosely an exact pattern instead."""
    if not isinstance(schema, dict):
        return schema
    changed = _with_each_subschema(schema, _with_exact_formats)
    regex = EXACT.get(changed.get("format", ""))
    if regex is not None:
        del changed["format"]
        exact = {"pattern": f"^({regex})$"}
        changed |= {"allOf": [*changed.get("allOf", ()), exact]} if "pattern" in changed else exact
    return changed


def _with_each_subschema(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A copy of a schema with each of its direct subschemas changed."""
    changed = dict(schema)
    for keyword in (*MAPS, "$defs"):
        if keyword in changed:
            changed[keyword] = {name: change(inner) for name, inner in changed[keyword].items()}
    for keyword in (*LISTS, *SINGLES):
        inner = changed.get(keyword)
        if inner is not None:
            changed[keyword] = (
                [*map(change, inner)] if isinstance(inner, list | tuple) else change(inner)
            )
    return changed


def _subschemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the direct subschemas of a schema, and its definitions."""
    for keyword in (*MAPS, "$defs"):
        yield from schema.get(keyword, {}).values()
    for keyword in (*LISTS, *SINGLES):
        inner = schema.get(keyword)
        if isinstance(inner, list | tuple):
            yield from inner
        else:
            yield inner


def escaped(text: str) -> str:
    """Escape a text for use in a regular expression between slashes."""
    safe = re.sub(r"[]\\.+*?()|[{}^$#&~/-]", lambda found: "\\" + found[0], text)
    return safe.replace("\n", "\\n")


def grammar_text(lark: str, **grammars: str) -> str:
    """Build a grammar for the worker. The text refers to the other grammars as `@name`."""
    texts = {"answer": lark, **grammars}
    return json.dumps(
        {"grammars": [{"name": name, "lark_grammar": text} for name, text in texts.items()]}
    )


def content_of(node: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    """Return regular expressions that every string of a schema matches, for strings outside of
    JSON.

    Also returns the first keyword that the expressions do not express; empty if there is none.
    """
    if (values := listed_values(node)) is not None:
        listed = "|".join(escaped(value) for value in values if isinstance(value, str))
        return (f"({listed})",), ""
    regexes = []
    least, most = node.get("minLength", 0), node.get("maxLength")
    if most is not None and most > _MOST_COUNTED_CHARACTERS:
        return (ANY,), "maxLength"
    if least or most is not None:
        regexes.append(rf"(.|\n){{{least},{'' if most is None else most}}}")
    for keyword, regex_for in (("format", _format_regex), ("pattern", _whole_string_regex)):
        if keyword in node:
            regex = regex_for(node[keyword])
            if regex is None:
                return (*regexes,) or (ANY,), keyword
            regexes.append(regex)
    return (*regexes,) or (ANY,), ""


def _format_regex(name: Any) -> str | None:
    """The pattern of a format for strings outside of JSON; None if it cannot be enforced."""
    return _RAW_FORMATS.get(name, ANY if name == "unknown" else None)


def _whole_string_regex(regex: str) -> str | None:
    """Convert a pattern of JSON Schema, which matches anywhere, to one that matches whole strings.

    Returns None if the pattern has anchors anywhere but at the ends of its alternatives.
    """
    alternatives = []
    for alternative in _regex_alternatives(regex):
        before, after = ANY, ANY
        if alternative.startswith("^"):
            alternative, before = alternative[1:], ""
        if alternative.endswith("$") and not alternative.endswith(r"\$"):
            alternative, after = alternative[:-1], ""
        if any(atom in ("^", "$") for _, atom in atoms(alternative)):
            return None
        alternatives.append(f"{before}({alternative}){after}")
    from llguidance import regex_to_lark

    return "(" + "|".join(regex_to_lark(each, use_ascii="dw") for each in alternatives) + ")"


def _regex_alternatives(regex: str) -> Iterator[str]:
    """Iterate over the alternatives of a regular expression, ignoring `|` inside groups."""
    start = depth = 0
    for place, atom in atoms(regex):
        depth += (atom == "(") - (atom == ")")
        if atom == "|" and not depth:
            yield regex[start:place]
            start = place + 1
    yield regex[start:]
