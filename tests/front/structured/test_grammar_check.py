"""Schemas are checked before they become grammars: refused keywords with their position, ignored
ones, and those that would explode.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import re
from datetime import date
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.config import LimitsSettings
from holdfast.front.structured.grammar_check import checked_schema
from holdfast.front.structured.keywords import PLAIN
from holdfast.front.structured.lark import DATE, IPV6, grammar_text, json_value
from holdfast.front.structured.schema import CleanSchema, SchemaBounds, SchemaFault
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
    return accepts(
        grammar_text(f"start: {json_value(_checked(schema, strict=strict).schema)}"),
        json.dumps(value),
    )


def _inside(node: Any) -> dict[str, Any]:
    inner = {"type": "object", "properties": {"b": node}, "required": ["b"]}
    return {"type": "object", "properties": {"a": inner}, "required": ["a"]}


@pytest.mark.parametrize("schema", [*AGENTS.values(), *OWN.values()], ids=[*AGENTS, *OWN])
def test_the_schemas_of_agents_and_others_are_fully_enforced(schema: Any) -> None:
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
def test_an_unenforceable_keyword_is_refused_by_position_or_left_out(
    node: Any, keyword: str
) -> None:
    fault = _fault(_inside(node))
    assert fault.place == f"#/properties/a/properties/b/{keyword}"
    assert keyword in fault.reason
    left_out = _checked(_inside(node), strict=False)
    assert left_out.unenforced == (f"#/properties/a/properties/b/{keyword}",)
    assert not _takes(_inside(node), {"a": 1}, strict=False)


def test_faults_in_definitions_have_their_original_position() -> None:
    schema = {
        "$ref": "#/definitions/x",
        "definitions": {"x": _inside({"type": "string", "minLength": 3, "maxLength": 2})},
    }
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
        *(
            {"type": "string", "format": name}
            for name in ("path", "password", "byte", "binary", "ipv4network", "no such one")
        ),
        {"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 1},
        {"type": "object", "properties": {"a": {}}, "maxProperties": 1},
        {
            "description": "x",
            "title": "x",
            "default": 1,
            "examples": [1],
            "x-anything": {},
            "$comment": "x",
            "deprecated": True,
        },
    ],
)
def test_unsupported_keywords_without_effect_are_accepted(node: Any) -> None:
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


def test_objects_have_only_their_declared_properties_by_default() -> None:
    closed = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert not _takes(closed, {"b": 1})
    assert _takes({**closed, "additionalProperties": True}, {"b": 1})
    assert _takes({"type": "object"}, {"b": 1})
    both = {"allOf": [closed, {"properties": {"b": {"type": "integer"}}}]}
    assert _takes(both, {"a": 1, "b": 1})


def test_overlapping_branches_of_one_of_count_as_any_of() -> None:
    assert _takes({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}, "abc")


def test_a_client_cannot_set_options_of_the_grammar() -> None:
    schema = {
        "type": "object",
        "x-guidance": {"whitespace_pattern": " *"},
        "properties": {"a": {"type": "integer"}},
    }
    assert not accepts(
        grammar_text(f"start: {json_value(_checked(schema).schema)}"), '{     "a": 1}'
    )


_MANY = 100_000
_EXPLOSIVE: dict[str, Any] = {
    "many values": {"enum": [f"x{number}" for number in range(20_000)]},
    "many properties": {
        "type": "object",
        "properties": {f"a{number}": {"type": "string"} for number in range(20_000)},
    },
    "branches that multiply": {
        "allOf": [
            {"anyOf": [{"properties": {f"{name}{number}": {}}} for name in "ab"]}
            for number in range(12)
        ]
    },
    "nested repetitions": {
        "type": "string",
        "pattern": "((((a{0,100}){0,100}){0,100}){0,100}){0,100}",
    },
    "a long pattern": {
        "type": "string",
        "pattern": "|".join(f"(.*{number}.*)" for number in range(3000)),
    },
    "a long value": {"const": "x" * _MANY},
    "a long name": {"type": "object", "properties": {"x" * _MANY: {}}},
    "a costly remainder": {
        "type": "integer",
        "multipleOf": 1_000_003,
        "minimum": 7,
        "maximum": 10**15,
    },
    "references that double": {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}
        | {"d60": {}},
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
    unenforced = _checked(
        {"type": "object", "properties": {"a": _EXPLOSIVE[name]}}, strict=False
    ).unenforced
    assert unenforced


def test_a_value_that_is_not_a_schema_is_refused() -> None:
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
        {"type": "integer", "exclusiveMinimum": -(2**64), "exclusiveMaximum": 1 - 2**63},
        {"items": {"type": "integer"}, "const": [-1e30]},
    ],
)
def test_integers_that_overflow_llguidances_stack_never_reach_it(schema: Any) -> None:
    assert "below the 64-bit range" in _fault(schema).reason
    assert _checked(_inside(schema), strict=False).unenforced


@pytest.mark.parametrize("keyword", PLAIN)
def test_any_value_of_a_keyword_causes_no_internal_error(keyword: str) -> None:
    besides = itertools.cycle(
        (
            {},
            {"type": "object", "properties": {"a": {}}},
            {"type": "array", "items": {"type": "null"}},
        )
    )
    values = (None, True, 5, 1.5, "a", [5], [[]], {})
    for value, beside in zip(values * 2, besides, strict=False):
        with contextlib.suppress(SchemaFault):
            _checked(beside | {keyword: value})
        _checked(_inside(beside | {keyword: value}), strict=False)


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_beyond_64_bits_become_the_last_exact_ones(kind: str) -> None:
    schema = {"type": kind, "minimum": -(2**63), "maximum": 18446744073709551615}
    for value in (-(10**18), -1, 0, 5, 10**18):
        assert _takes(schema, value)
    assert not _takes(schema, 10**20)
    assert not _takes(schema, -(10**20))
    assert _takes({"type": kind, "exclusiveMinimum": -(2**64), "exclusiveMaximum": 2**64}, 7)
    assert "above the 64-bit range" in _fault({"type": kind, "minimum": 2**64}).reason
    assert "too large to enforce" in _fault({"type": kind, "minimum": 10**18}).reason


@pytest.mark.parametrize(
    ("schema", "fits", "fails"),
    [
        ({"type": "string", "minLength": 2.0, "maxLength": 3.0}, "ab", "a"),
        (
            {"type": "array", "items": {"type": "null"}, "minItems": 1.0, "maxItems": 2.0},
            [None],
            [],
        ),
        ({"type": "object", "minProperties": 1.0}, {"a": 1}, {}),
        ({"type": "object", "maxProperties": 1.0}, {"a": 1}, {"a": 1, "b": 2}),
    ],
)
def test_a_count_may_be_written_with_a_zero_fraction(schema: Any, fits: Any, fails: Any) -> None:
    assert _takes(schema, fits)
    assert not _takes(schema, fails)
    assert "wrong type" in _fault({"type": "string", "minLength": 2.5}).reason


_HOST = "a" * 63
_OF_FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "date": (
        ("2024-02-29", "2000-02-29", "0004-02-29", "2021-12-31", "0001-01-01"),
        (
            "2021-02-29",
            "1900-02-29",
            "2021-04-31",
            "2021-13-01",
            "2021-00-10",
            "2021-01-00",
            "0000-01-01",
            "21-01-01",
        ),
    ),
    "time": (
        ("00:00:00Z", "23:59:59.25+23:59"),
        ("23:59:60Z", "12:00:60Z", "12:00:00", "24:00:00Z", "12:00:00+24:00"),
    ),
    "date-time": (
        ("2024-02-29T12:00:00Z",),
        (
            "2023-02-29T12:00:00Z",
            "1998-12-31T23:59:60Z",
            "2024-02-29 12:00:00Z",
            "2024-02-29T12:00:00",
        ),
    ),
    "hostname": (
        ("a", "a1", "a-b", "a--b", "a.b-c.d", "xn--nxasmq6b", _HOST + ".com", "1.2.3.4"),
        (
            "",
            "-a",
            "a-",
            "a.-b",
            "ab--cd",
            "a_b",
            "a..b",
            "a.",
            ".a",
            _HOST + "a.com",
            ".".join([_HOST] * 4),
        ),
    ),
    "ipv4": (
        ("1.2.3.4", "255.255.255.255", "0.0.0.0"),
        ("256.1.1.1", "01.2.3.4", "1.2.3", "1.2.3.4.5"),
    ),
    "ipv6": (
        (
            "::",
            "::1",
            "1::",
            "1:2:3:4:5:6:7:8",
            "::ffff:192.168.0.1",
            "1:2:3:4:5:6:1.2.3.4",
            "64:ff9b::192.0.2.33",
        ),
        (
            "1",
            ":::",
            "1::2::3",
            "12345::",
            "1:2:3:4:5:6:7:8:9",
            "1:2:3:4:5:6:7:1.2.3.4",
            "::1.2.3",
            "::256.1.1.1",
            "::1%eth0",
        ),
    ),
}


@pytest.mark.parametrize("name", _OF_FORMATS)
def test_a_string_format_accepts_valid_values_only(name: str) -> None:
    grammar = grammar_text(
        f"start: {json_value(_checked({'type': 'string', 'format': name}).schema)}"
    )
    right, wrong = _OF_FORMATS[name]
    assert [text for text in right if not accepts(grammar, json.dumps(text))] == []
    assert [text for text in wrong if accepts(grammar, json.dumps(text))] == []


def test_a_format_and_a_pattern_both_hold() -> None:
    schema = {"type": "string", "format": "date", "pattern": "^20"}
    assert _takes(schema, "2024-02-29")
    assert not _takes(schema, "1996-02-29")
    assert not _takes(schema, "2023-02-29")


@given(st.integers(1, 9999), st.integers(0, 13), st.integers(0, 32))
def test_a_date_exists_in_the_calendar(year: int, month: int, day: int) -> None:
    text = f"{year:04}-{month:02}-{day:02}"
    try:
        date.fromisoformat(text)
    except ValueError:
        assert not re.fullmatch(DATE, text)
    else:
        assert re.fullmatch(DATE, text)


@given(
    st.lists(
        st.sampled_from(["0", "1", "12", "fff", "ffff", "12345", ":", "::", "1.2.3.4", "01.2.3.4"]),
        max_size=16,
    )
)
def test_an_ip_address_is_one_that_python_parses(pieces: list[str]) -> None:
    for text in ("".join(pieces), ":".join(pieces)):
        try:
            ipaddress.IPv6Address(text)
        except ValueError:
            assert not re.fullmatch(IPV6, text)
        else:
            assert re.fullmatch(IPV6, text)


@st.composite
def _written(draw: st.DrawFn) -> tuple[str, str]:
    """A text and its JSON with any characters escaped."""
    text = draw(st.text(st.sampled_from('aZü/"\\\n\x01\x7f東🙂'), max_size=6))
    written = ""
    for character in text:
        plain = json.dumps(character, ensure_ascii=False)[1:-1]
        escaped = "".join(
            f"\\u{unit:04x}" for unit in memoryview(character.encode("utf-16-le")).cast("H")
        )
        as_escape = character == "\x7f" or draw(st.booleans())
        written += (
            draw(st.sampled_from([escaped, escaped.upper().replace("U", "u")]))
            if as_escape
            else plain
        )
    return text, f'"{written}"'


@settings(max_examples=60)
@given(_written(), st.integers(0, 4), st.integers(0, 4))
def test_any_character_may_be_escaped_and_counts_once(
    said: tuple[str, str], least: int, more: int
) -> None:
    text, written = said
    schema = {"type": "string", "minLength": least, "maxLength": least + more}
    grammar = grammar_text(f"start: {json_value(_checked(schema).schema)}")
    assert accepts(grammar, written) == (least <= len(text) <= least + more)


@pytest.mark.parametrize("half", ["\\ud83d", "\\ude00", "\\ud83dx", "\\ude00\\ud83d"])
def test_half_of_a_surrogate_pair_is_not_a_character(half: str) -> None:
    assert not accepts(grammar_text(f"start: {json_value({'type': 'string'})}"), f'"{half}"')


_NAMES = {
    "declared": {
        "properties": {"a": {"type": "integer"}, "é": {"type": "integer"}},
        "additionalProperties": True,
    },
    "required": {"required": ["a"], "additionalProperties": {"type": "string"}},
    "patterns": {"patternProperties": {"^é": {"type": "integer"}}, "additionalProperties": True},
    "both": {
        "properties": {"a": {"type": "integer"}},
        "patternProperties": {"^(a.|é)": {"type": "string"}},
    },
    "both and no others": {
        "properties": {"a": {"type": "integer"}},
        "patternProperties": {"^(a.|é)": {"type": "string"}},
        "additionalProperties": False,
    },
    "closed": {"properties": {"a": {"type": "integer"}}, "additionalProperties": False},
    "any": {},
    "put together": {
        "allOf": [
            {"properties": {"a": {"type": "integer"}}},
            {"properties": {"é": {"type": "integer"}}, "required": ["b"]},
        ]
    },
    "of free ones that are held": {
        "properties": {"a": {"type": "integer"}},
        "allOf": [{"additionalProperties": {"type": "integer"}}],
    },
}


_SPELLINGS = (
    '"a"',
    '"\\u0061"',
    '"é"',
    '"\\u00e9"',
    '"\\u00E9"',
    '"a\\n"',
    '"a\\u000a"',
    '"b"',
    '"\\u0062"',
)


@pytest.mark.parametrize("kind", _NAMES)
def test_an_object_with_escaped_names_matches_or_is_refused(kind: str) -> None:
    schema = {"type": "object", **_NAMES[kind]}
    grammar = grammar_text(f"start: {json_value(_checked(schema).schema)}")
    firsts = itertools.product(_SPELLINGS[::4], ("1", '"x"'))
    for first, second, value in itertools.product(firsts, _SPELLINGS, ("1", '"x"')):
        text = f"{{{first[0]}: {first[1]}, {second}: {value}}}"
        if accepts(grammar, text):
            jsonschema.validate(json.loads(text), schema)


def test_strings_keep_their_escapes_if_names_are_unambiguous() -> None:
    closed = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    grammar = grammar_text(f"start: {json_value(_checked(closed).schema)}")
    assert accepts(grammar, '{"city": "Z\\u00fcrich"}')
    mixed = {**closed, "additionalProperties": True}
    grammar = grammar_text(f"start: {json_value(_checked(mixed).schema)}")
    assert accepts(grammar, '{"city": "Z\\u00fcrich", "other\\n\\"ü": {"any": "Z\\u00fcrich"}}')
    assert not accepts(grammar, '{"city": "Zürich", "\\u0063ity": 1}')
