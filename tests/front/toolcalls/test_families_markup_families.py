"""Each family reads exactly its own calls, from any pieces."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.front.answers.reader import AnswerReader
from holdfast.front.output import ToolArgumentsDelta, ToolCallFinished
from holdfast.front.toolcalls.call_format import Call
from holdfast.front.toolcalls.declared import DeclaredTools
from holdfast.front.toolcalls.dialect import ModelDialect, ReasoningFormat
from holdfast.front.toolcalls.families import FAMILIES as RECORDS
from holdfast.front.toolcalls.json_calls import JsonCalls, NamedJson
from holdfast.front.toolcalls.nested_tags import NestedTags
from tests.fakes.mistaken_answers import MISTAKES
from tests.fakes.recorded_answers import RECORDED, rome
from tests.fakes.recorded_answers import TOOLS as WEATHER
from tests.fakes.told_answers import told

MARKUP_FAMILIES = {
    name: family.calls
    for name, family in RECORDS.items()
    if not isinstance(family.calls, (JsonCalls, NamedJson))
}
FAMILIES = list(MARKUP_FAMILIES)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "days": {"type": "integer"},
                    "share": {"type": "number"},
                    "deep": {"type": "boolean"},
                    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "point": {
                        "type": "object",
                        "properties": {"x": {"type": "integer"}, "note": {"type": "string"}},
                    },
                    "list": {"type": "array", "items": {"type": "number"}},
                },
            },
        },
    }
    for name in ("edit_file", "ns.get-time")
]
AMBIGUOUS = re.compile(r"</(arg_value|parameter)>\s*</tool_call>")
FRAGMENTS = [
    "</parameter>",
    "</arg_value>",
    "</tool_call>",
    "<",
    ">",
    "\n",
    '"',
    "'",
    "\\",
    "{",
    "}",
    "a",
    " ",
    "é",
    "🙂",
    "null",
    "]",
    ")",
    ", ",
]
# Such a string ends the value and the call: no reader can tell it from the markup.
strings = (
    st.lists(st.sampled_from(FRAGMENTS), max_size=8)
    .map("".join)
    .filter(lambda text: not AMBIGUOUS.search(text))
)
numbers = st.integers(-(10**20), 10**20)
floats = st.floats(allow_nan=False, allow_infinity=False)
values = {
    "path": strings,
    "days": numbers,
    "share": floats,
    "deep": st.booleans(),
    "maybe": strings.filter(lambda text: text.strip() != "null"),
    "point": st.fixed_dictionaries({}, optional={"x": numbers, "note": strings}),
    "list": st.lists(floats, max_size=3),
}
calls = st.lists(
    st.builds(
        Call,
        st.sampled_from(["edit_file", "ns.get-time"]),
        st.fixed_dictionaries({}, optional=values),
        st.just(""),
    ),
    min_size=1,
    max_size=3,
)


def dialect_of(name: str, *, as_tokens: bool) -> ModelDialect:
    """A model of the family, with markers as tokens or as text."""
    family = MARKUP_FAMILIES[name]
    single = [
        mark
        for mark in family.markers
        if not any(other in mark for other in family.markers if other != mark)
    ]
    # no vocabulary contains half a tag
    single = [mark for mark in single if not mark.endswith(("=", '="'))]
    return ModelDialect(
        family=name,
        calls=family,
        marker_ids={mark: place for place, mark in enumerate(single)} if as_tokens else {},
    )


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=12)
@given(calls=calls, places=st.lists(st.integers(0, 1000), max_size=6), as_tokens=st.booleans())
def test_a_family_reads_its_own_calls_from_any_pieces(
    name: str, calls: list[Call], places: list[int], as_tokens: bool
) -> None:
    text = MARKUP_FAMILIES[name].write(calls)
    said = told(dialect_of(name, as_tokens=as_tokens), TOOLS, text, at=places)
    assert said == [(call.name, dict(call.arguments), ()) for call in calls]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=12)
@given(data=st.data(), places=st.lists(st.integers(0, 1000), max_size=6), as_tokens=st.booleans())
def test_any_text_is_read_equally_from_any_pieces_without_loss(
    name: str, data: st.DataObject, places: list[int], as_tokens: bool
) -> None:
    family = MARKUP_FAMILIES[name]
    words = [
        *family.markers,
        *FRAGMENTS,
        "edit_file",
        "path",
        "=",
        '="path"',
        "(",
        "[",
        "text ",
        "call:",
        ":",
        ",",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=14)))
    dialect = dialect_of(name, as_tokens=as_tokens)
    said = told(dialect, TOOLS, text, at=places)
    assert said == told(dialect, TOOLS, text)
    if not family.channel_starts and all(isinstance(part, str) for part in said):
        assert "".join(said) == text


@pytest.mark.parametrize(("name", "text", "expected"), [*RECORDED, *MISTAKES])
def test_recorded_answers_and_mistakes_are_read_as_expected(
    name: str, text: str, expected: list[Any]
) -> None:
    for as_tokens in (False, True):
        for places in (
            [],
            [*range(len(text))],
            [*range(0, len(text), 3)],
            [*range(0, len(text), 7)],
        ):
            assert told(dialect_of(name, as_tokens=as_tokens), WEATHER, text, at=places) == expected


LIST: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
OBJECT: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}}
HAS_ITEM: dict[str, Any] = {"type": "object", "properties": {"item": {"type": "string"}}}


@pytest.mark.parametrize(
    ("schema", "tags", "value"),
    [
        ({"anyOf": [LIST, OBJECT]}, [("item", "alpha"), ("item", "beta")], ["alpha", "beta"]),
        ({"anyOf": [OBJECT, LIST]}, [("item", "12"), ("item", "beta")], ["12", "beta"]),
        (
            {"anyOf": [OBJECT, {"type": "array", "items": {"type": "integer"}}]},
            [("item", "12")],
            [12],
        ),
        ({"type": ["array", "object"]}, [("item", "alpha")], ["alpha"]),
        ({"oneOf": [LIST, OBJECT]}, [("x", "1")], {"x": 1}),
        ({"oneOf": [LIST, OBJECT]}, [], []),
        ({"anyOf": [LIST, HAS_ITEM]}, [("item", "alpha")], {"item": "alpha"}),
        ({"anyOf": [LIST, HAS_ITEM]}, [("item", "alpha"), ("item", "beta")], ["alpha", "beta"]),
        ({"anyOf": [LIST, {"allOf": [OBJECT, HAS_ITEM]}]}, [("item", "alpha")], {"item": "alpha"}),
        ({"type": "object"}, [("item", "alpha")], {"item": "alpha"}),
        ({"type": "object"}, [("item", "alpha"), ("item", "beta")], ["alpha", "beta"]),
    ],
)
def test_item_tags_become_an_array_if_the_schema_requires_it(
    schema: dict[str, Any], tags: list[tuple[str, str]], value: Any
) -> None:
    mark = NestedTags().marker
    inner = "".join(f"{mark}<{name}>{text}{mark}</{name}>" for name, text in tags)
    call = f'{mark}<invoke name="f">{mark}<list>{inner}{mark}</list>{mark}</invoke>'
    tool = {
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"list": schema}}}
    }
    said = told(
        dialect_of("minimax_m3", as_tokens=True),
        [tool],
        f"{mark}<tool_call>\n{call}\n{mark}</tool_call>",
    )
    assert said == [("f", {"list": value}, ())]


def test_every_family_has_a_recorded_answer() -> None:
    assert {name for name, *_ in RECORDED} == set(MARKUP_FAMILIES)


STREAMED = [name for name in FAMILIES if name not in ("lfm2", "gemma4")]
"""Families whose strings stream; the values of the others arrive as a whole."""


def begun_arguments(
    dialect: ModelDialect, encoded: str, *, ends: bool = False, cut: bool = False
) -> tuple[str, bool]:
    """The first call's arguments after this part of an answer, and whether the call has ended."""
    reader = AnswerReader(dialect, tools=DeclaredTools(WEATHER))
    parts = [*reader.push(encoded), *(reader.flush(was_cut_off=cut) if ends else ())]
    return "".join(part.text for part in parts if isinstance(part, ToolArgumentsDelta)), any(
        isinstance(p, ToolCallFinished) for p in parts
    )


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("name", STREAMED)
def test_strings_stream(name: str, as_tokens: bool) -> None:
    city = 'A "long" name\nof a city, which takes some time to write. ' * 4
    text = MARKUP_FAMILIES[name].write([Call("get_weather", {"city": city})])
    so_far = text[: text.index("takes some", len(text) // 2)]
    dialect = dialect_of(name, as_tokens=as_tokens)
    arguments, ended = begun_arguments(dialect, dialect.markers.encode(so_far))
    assert not ended
    given = json.loads(arguments + '"}')["city"]
    assert city.startswith(given)
    assert len(given) > so_far.count("A ") * 40 - 45


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cut_call_does_not_end_and_keeps_its_arguments(name: str) -> None:
    text = MARKUP_FAMILIES[name].write(
        [Call("get_weather", {"city": "Rome < </p", "days": 3, "opt": {"a": [1]}})]
    )
    dialect = dialect_of(name, as_tokens=True)
    encoded = dialect.markers.encode(text)
    whole, _ = begun_arguments(dialect, encoded, ends=True)
    for end in range(1, len(encoded)):
        arguments, ended = begun_arguments(dialect, encoded[:end], ends=True, cut=True)
        assert whole.startswith(arguments), encoded[:end]
        assert not ended or json.loads(arguments) == {
            "city": "Rome < </p",
            "days": 3,
            "opt": {"a": [1]},
        }


@pytest.mark.parametrize(("name", "text", "expected"), RECORDED)
def test_calls_are_text_if_no_calls_are_read(name: str, text: str, expected: list[Any]) -> None:
    said = told(dialect_of(name, as_tokens=True), WEATHER, text, reads_calls=False)
    assert all(isinstance(part, str) or part[0] == "thought" for part in said)
    assert [part for part in said if not isinstance(part, str)] == [
        part for part in expected if part[0] == "thought"
    ]
    if not MARKUP_FAMILIES[name].channel_starts:
        assert said == [text]


THINKING = ReasoningFormat(start="<think>", end="</think>")
CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("thought", "said"),
    [
        ("Hm.\n</think>\n\n" + CALL, [("thought", "Hm."), rome()]),
        ("Hm.\n" + CALL, [("thought", "Hm."), rome()]),  # a call ends the thought
        (
            "I write <tool_call> and then\n</think>\n\nYes.",
            [("thought", "I write <tool_call> and then"), "Yes."],
        ),
        ("As in\n<tool_call>\n<function=NAME>\n</function>\n</tool_call>\n</think>\nNo.", None),
    ],
)
@pytest.mark.parametrize(
    "marker_ids", [{}, {"<tool_call>": 1, "</tool_call>": 2, "<think>": 3, "</think>": 4}]
)
def test_a_thought_may_mention_calls_and_end_with_one(
    thought: str, said: list[Any] | None, marker_ids: dict[str, int]
) -> None:
    dialect = ModelDialect(
        calls=MARKUP_FAMILIES["qwen3_coder"], reasoning=THINKING, marker_ids=marker_ids
    )
    whole = told(dialect, WEATHER, thought, in_reasoning=True)
    assert whole == told(dialect, WEATHER, thought, in_reasoning=True, at=range(len(thought)))
    assert whole == said or said is None
    assert said is not None or whole == [("thought", thought.split("\n</think>")[0]), "No."]


@pytest.mark.parametrize("filler", ["[", "{", '{"a":', "<item>", "]<]minimax[>[<item>", "("])
@pytest.mark.parametrize("name", FAMILIES)
def test_endless_brackets_become_parseable_arguments(name: str, filler: str) -> None:
    text = (
        MARKUP_FAMILIES[name]
        .write([Call("get_weather", {"opt": {"a": ["XX"]}})])
        .replace('"XX"', "XX")
    )
    begin, _, end = text.partition("XX")
    for answer in (begin + filler * 1100, begin + filler * 1100 + end):
        for call in told(dialect_of(name, as_tokens=False), WEATHER, answer):
            assert isinstance(call, str) or isinstance(call[1], dict)
