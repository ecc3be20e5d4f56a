"""A `response_template` is read as far as it is safe, and what it describes is read back."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.front.toolcalls.call_format import Call
from holdfast.front.toolcalls.dialect import ModelDialect
from holdfast.front.toolcalls.response_template import (
    TemplateSays,
    match_at,
    pieces,
    read_response_template,
    written,
)
from tests.fakes.recorded_answers import TOOLS
from tests.fakes.told_answers import told

AS_FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
FIELDS: dict[str, dict[str, Any]] = {
    "json": {
        "open_pattern": r"\s*<call>",
        "close": "</call>",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    },
    "tags": {
        "open_pattern": r"\s*<call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
        },
        "transform": AS_FUNCTION,
    },
    "braces": {
        "open_pattern": r"<call>call:(?P<name>[\w.-]+)",
        "close": "<call>",
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [["<q>", "<q>"]]},
        "transform": AS_FUNCTION,
    },
    "list": {
        "open": ["<calls>", "<CALLS>"],
        "close": "</calls>",
        "content": "json",
        "transform": {"name": "{tool}", "arguments": "{args}"},
        "transform_each": True,
    },
}
TEXTS = {
    "json": 'Hi. <call>{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}</call>',
    "tags": "Hi.\n<call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</call>",
    "braces": "Hi. <call>call:get_weather{city:<q>Rome<q>,days:3}<call>",
    "list": 'Hi. <calls>[{"tool": "get_weather", "args": {"city": "Rome", "days": 3}}]</calls>',
}


def says(**fields: Any) -> TemplateSays:
    return read_response_template({"version": 1, "start_anchor": "<assistant>", "fields": fields})


@pytest.mark.parametrize("name", list(FIELDS))
def test_calls_are_read_as_the_template_says(name: str) -> None:
    calls = says(tool_calls=FIELDS[name]).calls
    assert calls is not None
    text = TEXTS[name]
    for places in ([], [*range(len(text))], [*range(0, len(text), 5)]):
        assert told(ModelDialect(calls=calls), TOOLS, text, at=places) == [
            "Hi.",
            ("get_weather", {"city": "Rome", "days": 3}, ()),
        ]


@pytest.mark.parametrize("name", ["json", "tags"])
@settings(max_examples=25)
@given(
    city=st.text(alphabet="ab<>/\n\"'{}\\ ü", max_size=12),
    places=st.lists(st.integers(0, 200), max_size=4),
)
def test_what_is_written_by_a_template_is_read_back(
    name: str, city: str, places: list[int]
) -> None:
    calls = says(tool_calls=FIELDS[name]).calls
    assert calls is not None
    text = calls.write([Call("get_weather", {"city": city, "days": 3})])
    assert told(ModelDialect(calls=calls), TOOLS, text, at=places) == [
        ("get_weather", {"city": city, "days": 3}, ())
    ]


def test_a_thought_is_what_stands_between_its_marks() -> None:
    assert says(thinking={"open": "<think>\n", "close": "</think>"}).reasoning == (
        "<think>",
        "</think>",
    )
    assert says(content={"close": "<end>"}) == TemplateSays(None, None)


@pytest.mark.parametrize(
    "text",
    [
        "<call>",
        "<call>{}</call>",
        "<call>no</call> more",
        '<call>{"name": 3}</call>',
        "<call>[1</call>",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    calls = says(tool_calls=FIELDS["json"]).calls
    assert calls is not None
    assert told(ModelDialect(calls=calls), TOOLS, text, at=range(len(text))) == [text]


@pytest.mark.parametrize(
    "pattern",
    [
        r"<a>(x+)+<b>",
        r"(a|b)",
        r"<a>(?=x)",
        r"(?P<x>.*)(?P<y>.*)",
        r"\s*",
        r"a{3}",
        r"<a>x*",
        r"\1",
        "a" * 501,
        r"(?P<x>a|b)",
        r"\w+<a>",
        "[",
    ],
)
def test_a_pattern_that_could_take_its_time_is_refused(pattern: str) -> None:
    assert pieces(pattern) is None
    assert (
        says(tool_calls={"open_pattern": pattern, "close": "</a>", "content": "json"}).calls is None
    )


@pytest.mark.parametrize(
    "pattern",
    [
        r"\s*<a>\s*<b=(?P<k>[^>\n]+)>",
        r"<p (?P<k>\w+)>\n?(?P<v>.*?)\n?</p>",
        r"\[x\]\n*(?P<k>.+?)\|",
    ],
)
@given(word=st.text(alphabet="ab>|=\n<", min_size=1, max_size=6))
def test_a_pattern_that_is_read_matches_what_the_expression_matches(
    pattern: str, word: str
) -> None:
    parts = pieces(pattern)
    assert parts is not None
    text = written(parts, {"k": word, "v": word})
    ours, theirs = match_at(parts, text, 0), re.compile(pattern, re.DOTALL).match(text)
    if ours is not None and theirs is not None:
        assert dict(ours.words) == theirs.groupdict()


@pytest.mark.parametrize(
    "template",
    [None, 3, {}, {"fields": 3}, {"version": 2, "fields": {}}, {"fields": {"tool_calls": []}}],
)
def test_no_template_at_all_breaks_the_load(template: Any) -> None:
    assert read_response_template(template) == TemplateSays(None, None)
