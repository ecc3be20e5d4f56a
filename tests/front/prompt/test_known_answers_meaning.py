"""The meaning of answers in any spelling."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.answers.reader import AnswerReader
from holdfast.front.prompt.known_answers import (
    AnswerMeaning,
    ReadTexts,
    canonical_arguments,
    meaning,
    meaning_of_message,
    meaning_of_text,
)
from holdfast.front.toolcalls.dialect import ModelDialect, ReasoningFormat
from holdfast.front.toolcalls.families import FAMILIES

HERMES = ModelDialect(
    family="hermes",
    calls=FAMILIES["hermes"].calls,
    reasoning=ReasoningFormat(start="<think>", end="</think>"),
)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(arguments=st.dictionaries(st.text(max_size=4), values, max_size=4))
def test_equal_arguments_have_one_spelling(arguments: dict[str, Any]) -> None:
    turned = dict(reversed(arguments.items()))
    spelled = {
        canonical_arguments(form)
        for form in (
            arguments,
            json.dumps(turned, indent=2),
            json.dumps(arguments, ensure_ascii=False, separators=(",", ":")),
        )
    }
    assert len(spelled) == 1
    assert json.loads(spelled.pop()) == arguments


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"n": 1}', '{"n": 1.0}'),
        ('{"n": 10000000000000000000001}', '{"n": 1e22}'),
        ('{"n": 12345678901234567890}', '{"n": 12345678901234567000}'),
        ('{"s": "\\u00e9\\/"}', '{"s":"é/"}'),
        ("", "{}"),
        (None, {}),
    ],
)
def test_equal_numbers_escapes_and_empty_values_have_one_spelling(one: Any, other: Any) -> None:
    assert canonical_arguments(one) == canonical_arguments(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"n": 1}', '{"n": "1"}'),
        ('{"n": true}', '{"n": 1}'),
        ('{"n": 1}', '{"n": 1'),
        ("[1]", "[1, 1]"),
    ],
)
def test_different_values_stay_different(one: str, other: str) -> None:
    assert canonical_arguments(one) != canonical_arguments(other)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_a_message_is_read_under_all_names_clients_use(name: str) -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'},
    }
    message = {"role": "assistant", "content": None, name: "why\n", "tool_calls": [call]}
    assert meaning_of_message(message) == AnswerMeaning("why", "", (("f", '{"a":2,"b":1}'),))


@pytest.mark.parametrize(
    "message",
    [
        {"content": [{"type": "image"}]},
        {"tool_calls": [{}]},
        {"tool_calls": [None]},
        {"content": 7},
    ],
)
def test_a_message_without_text_has_unknown_meaning(message: dict[str, Any]) -> None:
    assert meaning_of_message(message) is None


def test_a_texts_meaning_equals_its_readers_parts() -> None:
    text = '\n<think>\nwhy\n</think>\n\nSo.\n<tool_call>\n{"name": "f", "arguments": {"b": 1.0, "a": "\\u00e9"}}\n</tool_call>'
    expected = meaning("why", "So.", [("f", {"a": "é", "b": 1})])
    assert meaning_of_text(text, AnswerReader(HERMES)) == expected


def test_a_text_is_parsed_once() -> None:
    made: list[AnswerReader] = []

    def form() -> AnswerReader:
        made.append(AnswerReader(HERMES))
        return made[-1]

    texts = ReadTexts(max_characters=40)
    expected = AnswerMeaning("a", "b")
    assert (
        texts.meaning("<think>a</think>b", form, reader_context="")
        == texts.meaning("<think>a</think>b", form, reader_context="")
        == expected
    )
    assert len(made) == 1
    texts.meaning("<think>a</think>b", form, reader_context="other tools")
    texts.meaning("x" * 30, form, reader_context="")
    texts.meaning("<think>a</think>b", form, reader_context="")
    assert len(made) == 4  # it was forgotten and is made again
