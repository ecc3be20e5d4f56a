"""Values written as plain text get the type of the tool's schema; those that fit no type stay text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.toolcalls.argument_types import JSON_TYPES, ParameterTypes, convert_to_type
from holdfast.front.toolcalls.literals import complete_value, unescaped
from tests.fakes.json_values import FLOATS, json_values

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "int"},
        "share": {"type": "float"},
        "flag": {"type": "bool"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["string", "integer"]},
        "mode": {"enum": ["1", "fast"]},
        "level": {"enum": [1, 2]},
        "point": {"$ref": "#/$defs/Point"},
        "points": {"items": {"$ref": "#/$defs/Point"}},
        "loop": {"$ref": "#/$defs/Loop"},
        "any": {},
    },
    "$defs": {
        "Point": {"properties": {"x": {"type": "number"}}},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]},
    },
}


@pytest.mark.parametrize(
    ("key", "raw", "value"),
    [
        ("text", "5", "5"),
        ("text", "null", "null"),
        ("text", "  indented\n", "  indented\n"),
        ("text", '{"a": 1}', '{"a": 1}'),
        ("count", "3", 3),
        ("count", " 3\n", 3),
        ("count", "3 apples", "3 apples"),
        ("count", "null", "null"),
        ("share", "1e3", 1000.0),
        ("share", "NaN", "NaN"),
        ("flag", "True", True),
        ("flag", "yes", "yes"),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
        ("either", "5", 5),
        ("either", "five", "five"),
        ("mode", "1", "1"),
        ("level", "1", 1),
        ("point", '{"x": 1.0}', {"x": 1.0}),
        ("point", "{'x': None, 'y': True}", {"x": None, "y": True}),
        ("point", '"{\\"x\\": 1}"', {"x": 1}),
        ("points", '[{"x": 1}, {"x": 2}]', [{"x": 1}, {"x": 2}]),
        ("points", "[1, 2", "[1, 2"),
        ("loop", "text", "text"),
        ("any", "[1]", [1]),
        ("any", "1", "1"),
        ("unknown", '{"a": 1}', {"a": 1}),
        ("unknown", "true", "true"),
    ],
)
def test_a_value_gets_the_type_of_its_schema(key: str, raw: str, value: object) -> None:
    assert json.loads(convert_to_type(raw, ParameterTypes(SCHEMA).of_parameter(key)).json) == value


@pytest.mark.parametrize("raw", ["1.0", "1e3", '{"a":1}', '{ "a": [1,2] }'])
def test_numbers_and_json_keep_the_spelling_of_the_model(raw: str) -> None:
    assert convert_to_type(raw, frozenset({"number", "object"})).json == raw


@pytest.mark.parametrize(
    "schema", [None, [], {"properties": 3}, {"properties": {"text": [], "count": {"type": 3}}}]
)
def test_a_malformed_schema_allows_any_type(schema: Any) -> None:
    assert ParameterTypes(schema).of_parameter("text") == frozenset()


def test_a_union_that_contains_itself_has_each_branch_once() -> None:
    loop = {"$ref": "#/$defs/loop"}
    union = {"anyOf": [loop, loop, {"type": "string"}, loop, {"type": "null"}]}
    types = ParameterTypes({"$defs": {"loop": union}})
    assert [*types.branches(loop)] == [loop, union, {"type": "string"}, {"type": "null"}]


@pytest.mark.parametrize(
    ("reference", "allowed"),
    [
        ("#/$defs/a~1b", {"boolean"}),
        ("#/$defs/one%20two", {"integer"}),
        ("#spot", {"number"}),
        ("https://x.org/tool#/$defs/a~1b", {"boolean"}),
        ("#/prefixItems/1", {"null"}),
        ("#/$defs/a%2Fb", {"boolean"}),
        ("#/$defs/A%2FB", {"array"}),
        ("#/$defs/100%", {"object"}),
        ("#$defs/c", {"number"}),
        ("#/$defs/c/", {"number"}),
        ("#/prefixItems/2", set()),
        ("#/prefixItems/" + 5000 * "1", set()),
        ("https://other.org/tool#/$defs/a~1b", set()),
        ("#/$defs/missing", set()),
        ("#nowhere", set()),
        (7, set()),
    ],
)
def test_references_into_the_schema_are_followed(reference: Any, allowed: set[str]) -> None:
    schema = {
        "$id": "https://x.org/tool",
        "$defs": {
            "a/b": {"type": "boolean"},
            "one two": {"type": "integer"},
            "A%2FB": {"type": "array"},
            "100%": {"type": "object"},
            "c": {"$anchor": "spot", "type": "number"},
        },
        "prefixItems": [{}, {"type": "null"}],
        "properties": {"key": {"$ref": reference}},
    }
    assert ParameterTypes(schema).of_parameter("key") == allowed


@given(
    raw=st.text(alphabet="{}[]()\"'\\,: \nnulltrue0123-.", max_size=40),
    types=st.sets(st.sampled_from(sorted(JSON_TYPES | {"string"}))),
)
def test_every_text_becomes_valid_json(raw: str, types: set[str]) -> None:
    given = convert_to_type(raw, frozenset(types)).json
    json.loads(given, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert given.encode() == given.encode("utf-8", "surrogatepass"), (
        "half of a surrogate pair is no text"
    )


@given(value=json_values(FLOATS, longest_text=8, most=8))
def test_a_value_written_as_python_or_json_is_read_back(value: object) -> None:
    for text in (repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False)):
        read = complete_value(text)
        assert read is not None, text
        assert json.loads(read) == value


def test_json_and_python_escapes_are_replaced_and_others_kept() -> None:
    assert unescaped(r"a\n\t\"\/\\ \ud83d\ude42 \x41 \U0001F642 \d") == 'a\n\t"/\\ 🙂 A 🙂 \\d'
