"""Schemas before a grammar is made of them: what is refused with its place, what is left out, what would explode."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from holdfast.config import LimitsSettings
from holdfast.intake.grammars.checked import checked_schema
from holdfast.intake.grammars.keywords import PLAIN
from holdfast.intake.grammars.lark import grammar_text, json_value
from holdfast.intake.grammars.schema import CleanSchema, SchemaBounds, SchemaFault
from tests.fakes.grammar_walker import accepts
from tests.fakes.schemas import AGENTS, OWN

_LIMITS = LimitsSettings()
_BOUNDS = SchemaBounds(parts=_LIMITS.max_schema_parts, depth=_LIMITS.max_schema_depth)


def _checked(schema: Any, *, strict: bool = True) -> CleanSchema:
    return checked_schema(schema, bounds=_BOUNDS, strict=strict)


def _fault(schema: Any) -> SchemaFault:
    with pytest.raises(SchemaFault) as caught:
        _checked(schema)
    return caught.value


def _takes(schema: Any, value: Any, *, strict: bool = True) -> bool:
    return accepts(grammar_text(f"start: {json_value(_checked(schema, strict=strict).schema)}"), json.dumps(value))


def _inside(node: Any) -> dict[str, Any]:
    inner = {"type": "object", "properties": {"b": node}, "required": ["b"]}
    return {"type": "object", "properties": {"a": inner}, "required": ["a"]}


@pytest.mark.parametrize("schema", [*AGENTS.values(), *OWN.values()], ids=[*AGENTS, *OWN])
def test_what_agents_and_others_send_is_enforced_in_full(schema: Any) -> None:
    assert _checked(schema).unenforced == ()


@pytest.mark.parametrize(
    ("node", "keyword"),
    [
        ({"not": {"type": "null"}}, "not"),
        ({"if": {"type": "null"}, "then": False}, "if"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"type": "null"}}, "contains"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"$dynamicRef": "#a"}, "$dynamicRef"),
        ({"type": "string", "format": "iri"}, "format"),
        ({"type": "string", "pattern": "(a{1000}){1000}"}, "pattern"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
        ({"type": "string", "pattern": "["}, "pattern"),
        ({"$ref": "https://example.com/a.json"}, "$ref"),
        ({"$ref": "#/$defs/missing"}, "$ref"),
        ({"$ref": "#missing"}, "$ref"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
        ({"enum": []}, "enum"),
        ({"type": "object", "required": ["c"], "additionalProperties": False}, "required"),
    ],
)
def test_what_no_grammar_enforces_is_named_with_its_place_or_left_out(node: Any, keyword: str) -> None:
    fault = _fault(_inside(node))
    assert fault.place == f"#/properties/a/properties/b/{keyword}"
    assert keyword in fault.reason
    left_out = _checked(_inside(node), strict=False)
    assert left_out.unenforced == (f"#/properties/a/properties/b/{keyword}",)
    assert not _takes(_inside(node), {"a": 1}, strict=False)


def test_the_place_of_a_fault_behind_a_reference_is_the_clients() -> None:
    schema = {"$ref": "#/definitions/x", "definitions": {"x": _inside({"type": "string", "minLength": 3, "maxLength": 2})}}
    assert _fault(schema).place == "#/definitions/x/properties/a/properties/b/minLength"


@pytest.mark.parametrize(
    "node",
    [
        {"not": False},
        {"type": "array", "uniqueItems": False},
        {"type": "object", "propertyNames": {"type": "string"}},
        {"type": "object", "unevaluatedProperties": True},
        {"if": {"type": "null"}},
        {"type": "integer", "format": "int64"},
        {"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 1},
        {"type": "object", "properties": {"a": {}}, "maxProperties": 1},
        {"description": "x", "title": "x", "default": 1, "examples": [1], "x-anything": {}, "$comment": "x", "deprecated": True},
    ],
)
def test_what_says_nothing_is_no_reason_to_refuse(node: Any) -> None:
    assert _checked(_inside(node)).unenforced == ()


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]},
    ],
)
def test_a_schema_that_no_finite_value_fits_is_refused(schema: Any) -> None:
    assert "no finite value" in _fault(schema).reason


def test_objects_have_the_properties_that_they_declare_unless_they_say_otherwise() -> None:
    closed = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert not _takes(closed, {"b": 1})
    assert _takes({**closed, "additionalProperties": True}, {"b": 1})
    assert _takes({"type": "object"}, {"b": 1})
    both = {"allOf": [closed, {"properties": {"b": {"type": "integer"}}}]}
    assert _takes(both, {"a": 1, "b": 1})


def test_overlapping_branches_of_one_of_are_taken_as_any_of() -> None:
    assert _takes({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}, "abc")


def test_a_clients_own_options_for_the_grammar_are_no_part_of_the_schema() -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_pattern": " *"}, "properties": {"a": {"type": "integer"}}}
    assert not accepts(grammar_text(f"start: {json_value(_checked(schema).schema)}"), '{     "a": 1}')


_MANY = 100_000
_EXPLOSIVE: dict[str, Any] = {
    "many values": {"enum": [f"x{number}" for number in range(20_000)]},
    "many properties": {"type": "object", "properties": {f"a{number}": {"type": "string"} for number in range(20_000)}},
    "branches that multiply": {
        "allOf": [{"anyOf": [{"properties": {f"{name}{number}": {}}} for name in "ab"]} for number in range(12)]
    },
    "nested repetitions": {"type": "string", "pattern": "((((a{0,100}){0,100}){0,100}){0,100}){0,100}"},
    "a long pattern": {"type": "string", "pattern": "|".join(f"(.*{number}.*)" for number in range(3000))},
    "a long value": {"const": "x" * _MANY},
    "a long name": {"type": "object", "properties": {"x" * _MANY: {}}},
    "a costly remainder": {"type": "integer", "multipleOf": 1_000_003, "minimum": 7, "maximum": 10**15},
    "references that double": {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)} | {"d60": {}},
    },
}
for _name, _word in (("deep objects", "properties"), ("deep arrays", "items")):
    _deep: Any = {}
    for _ in range(400):
        _deep = {_word: {"a": _deep}} if _word == "properties" else {_word: _deep}
    _EXPLOSIVE[_name] = _deep


@pytest.mark.parametrize("name", _EXPLOSIVE)
def test_a_schema_that_explodes_is_refused_or_left_unenforced(name: str) -> None:
    _fault(_EXPLOSIVE[name])
    unenforced = _checked({"type": "object", "properties": {"a": _EXPLOSIVE[name]}}, strict=False).unenforced
    assert unenforced


def test_what_is_no_schema_is_refused() -> None:
    assert _fault({"type": "object", "properties": []}).place == "#/properties"
    assert _fault({"type": "object", "properties": {"a": 1}}).place == "#/properties/a"
    assert _fault({"anyOf": {}}).place == "#/anyOf"
    assert _fault({"type": "text"}).reason


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "const": -1e19},
        {"type": "integer", "enum": [3, -(2**63)]},
        {"type": "integer", "minimum": -(10**19), "maximum": -(10**19)},
        {"type": "integer", "exclusiveMinimum": 1 - 2**63, "exclusiveMaximum": 1 - 2**63},
        {"items": {"type": "integer"}, "const": [-1e30]},
    ],
)
def test_the_least_integer_of_64_bits_which_overflows_the_stack_of_llguidance_never_gets_there(schema: Any) -> None:
    assert "below what 64 bits hold" in _fault(schema).reason
    assert _checked(_inside(schema), strict=False).unenforced


@pytest.mark.parametrize("keyword", PLAIN)
@pytest.mark.parametrize("value", [None, True, 5, 1.5, "a", [5], [[]], {}])
def test_a_keyword_with_a_value_of_any_type_is_no_error_of_ours(keyword: str, value: Any) -> None:
    for beside in ({}, {"type": "object", "properties": {"a": {}}}, {"type": "array", "items": {"type": "null"}}):
        with contextlib.suppress(SchemaFault):
            _checked(beside | {keyword: value})
        _checked(_inside(beside | {keyword: value}), strict=False)
