"""JSON calls are read from any pieces, and repaired where models err."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.front.answers.reader import AnswerReader
from holdfast.front.toolcalls.call_format import Call
from holdfast.front.toolcalls.declared import DeclaredTools
from holdfast.front.toolcalls.dialect import ModelDialect
from holdfast.front.toolcalls.families import FAMILIES as RECORDS
from holdfast.front.toolcalls.json_calls import JsonCalls, NamedJson
from tests.fakes import mistaken_json
from tests.fakes.json_values import json_values
from tests.fakes.mistaken_json import MISTAKEN_ARGUMENTS, MISTAKEN_CALLS, OTHER_FORMS, ROM
from tests.fakes.whole_answers import WholeAnswer, read_answer, whole_answer

TOOLS = DeclaredTools(mistaken_json.TOOLS)
FAMILIES = {name: family.calls for name, family in RECORDS.items()}
NAMES = sorted(name for name, form in FAMILIES.items() if isinstance(form, (JsonCalls, NamedJson)))
CALLS = (
    Call(
        "get_weather",
        {"city": 'R"om\n<é🙂', "days": 3, "at": {"a": [1.5, None, True, {}], "b": {}}},
        "functions.get_weather:0",
    ),
    Call("write_file", {}, "functions.write_file:1"),
)

values = json_values(st.sampled_from(["</tool_call>", "{", '"', "\\"]), longest_text=8, most=6)
arguments = st.dictionaries(st.text(max_size=6), values, max_size=3)
cuts = st.lists(st.integers(0, 2000), max_size=10)


def dialect(name: str, *, tokens: bool) -> ModelDialect:
    form = FAMILIES[name]
    return ModelDialect(
        family=name,
        calls=form,
        marker_ids={mark: place for place, mark in enumerate(form.markers)} if tokens else {},
    )


def read(text: str, name: str = "hermes", *, tokens: bool = True) -> WholeAnswer:
    return read_answer(text, dialect(name, tokens=tokens), tools=TOOLS)


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", NAMES)
def test_written_calls_are_read_back(name: str, tokens: bool) -> None:
    found = read("\n" + FAMILIES[name].write(CALLS), name, tokens=tokens)
    assert [(call.name, call.arguments) for call in found.calls] == [
        (call.name, call.arguments) for call in CALLS
    ]
    assert found.text == "" and found.repairs == ()


@settings(max_examples=30)
@given(name=st.sampled_from(NAMES), given=arguments, at=cuts)
def test_any_arguments_are_read_back_from_any_pieces(
    name: str, given: dict[str, object], at: list[int]
) -> None:
    model = dialect(name, tokens=True)
    text = model.markers.encode(
        f"Now:\n\n{FAMILIES[name].write([Call('write_file', given, 'functions.write_file:0')])}"
    )
    reader = AnswerReader(model, tools=TOOLS)
    edges = [0, *sorted(place % (len(text) + 1) for place in at), len(text)]
    parts = [part for start, end in pairwise(edges) for part in reader.push(text[start:end])]
    found = whole_answer([*parts, *reader.flush()])
    assert [(call.name, call.arguments) for call in found.calls] == [("write_file", given)]
    assert (found.text, found.repairs) == ("Now:", ())


@pytest.mark.parametrize(("text", "repairs"), MISTAKEN_CALLS)
@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
def test_a_malformed_call_is_repaired_and_the_repair_is_named(
    text: str, repairs: tuple[str, ...], tokens: bool
) -> None:
    found = read(text, tokens=tokens)
    assert [(call.name, call.arguments) for call in found.calls] == [("get_weather", ROM)]
    assert (found.text, found.repairs) == ("", repairs)


@pytest.mark.parametrize(("written", "arguments", "repairs"), MISTAKEN_ARGUMENTS)
def test_malformed_arguments_are_repaired_while_they_stream(
    written: str, arguments: dict[str, object], repairs: tuple[str, ...]
) -> None:
    found = read(f'<tool_call>{{"name": "write_file", "arguments": {written}}}</tool_call>')
    assert [call.arguments for call in found.calls] == [arguments]
    assert found.repairs == repairs


def test_several_objects_between_one_pair_of_markers_are_several_calls() -> None:
    one = '{"name": "get_weather", "arguments": {"city": "Rom"}}'
    assert len(read(f"<tool_call>{one}\n{one}, {one}</tool_call>").calls) == 3


def test_a_marker_inside_a_string_belongs_to_the_string() -> None:
    text = (
        '<tool_call>{"name": "write_file", "arguments": {"text": "a </tool_call> b"}}</tool_call>'
    )
    assert [call.arguments for call in read(text).calls] == [{"text": "a </tool_call> b"}]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "unknown", "arguments": {}}',
        '{"name": "get_weather"}',
        '{"city": "Rom"}',
        'such as {"name": "get_weather", "arguments": {}}',
        "```python\nprint(1)\n```",
        "{",
        '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>',
    ],
)
def test_text_that_is_not_a_call_stays_text(text: str) -> None:
    found = read(text)
    assert found.text == text and found.calls == ()


@pytest.mark.parametrize("name", ["mistral_v3", "mistral_v11", "mistral_v13"])
def test_a_word_before_other_markup_is_a_call_only_if_declared(name: str) -> None:
    text = '[TOOL_CALLS] junk [{"name": "get_weather", "arguments": {"city": "Rom"}}]'
    assert read(text, name).text == text
    assert [call.name for call in read('[TOOL_CALLS]junk[ARGS]{"city": "Rom"}', name).calls] == [
        "junk"
    ]


@pytest.mark.parametrize(("name", "text", "repairs"), OTHER_FORMS)
def test_other_forms_of_a_family_are_read(name: str, text: str, repairs: tuple[str, ...]) -> None:
    found = read(text, name)
    assert [(call.name, call.arguments) for call in found.calls] == [("get_weather", ROM)]
    assert (found.text, found.repairs) == ("", repairs)


def test_long_arguments_do_not_hold_back_more_text() -> None:
    steps = {}
    for length in (2_000, 20_000):
        reader = AnswerReader(dialect("hermes", tokens=True), tools=TOOLS)
        body = json.dumps({"name": "write_file", "arguments": {"text": "a line\n" * (length // 8)}})
        text = dialect("hermes", tokens=True).markers.encode(f"<tool_call>\n{body}\n</tool_call>")
        longest = 0
        for start in range(0, len(text), 5):
            reader.push(text[start : start + 5])
            longest = max(longest, reader.held_back_characters)
        steps[length] = longest
        assert reader.flush() is not None
    assert steps[20_000] == steps[2_000] < 100
