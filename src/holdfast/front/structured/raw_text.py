"""Strings that stand raw between marks, without quotes and escapes: what of a JSON schema can be
said of them as a pattern.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from holdfast.front.structured.lark import ANY, DATE, IPV4, IPV6, TIME, escaped
from holdfast.front.structured.schema import Schema

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
    for keyword, known in (("format", _format), ("pattern", _pattern)):
        if keyword in node:
            regex = known(node[keyword])
            if regex is None:
                return (*found,) or (ANY,), keyword
            found.append(regex)
    return (*found,) or (ANY,), ""


def _format(name: Any) -> str | None:
    return FORMATS.get(name, ANY if name == "unknown" else None)


def _pattern(regex: str) -> str | None:
    """JSON Schema's patterns match anywhere; a grammar's match the whole.

    None: its anchors stand where that is not simple.
    """
    branches = [*_branches(regex)]
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


def _branches(regex: str) -> Iterator[str]:
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
