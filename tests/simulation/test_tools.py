from __future__ import annotations

import pytest

from tests.simulation.actions import Turn
from tests.simulation.formats import is_of_format
from tests.simulation.tools import Parsed, ToolCall, cut_call, parsed, with_plain_calls

LOOK = '<tool_call>\n{"name": "look", "arguments": {"x":1,"yes":"no"}}\n</tool_call>'


def test_calls_are_found_after_the_text_of_an_answer() -> None:
    call = ToolCall("", "look", '{"x":1,"yes":"no"}')
    assert parsed("a word") == Parsed("a word")
    assert parsed(f"a word\n{LOOK}\n{LOOK}") == Parsed("a word", (call, call))


@pytest.mark.parametrize(
    ("end", "call"),
    [
        ("<tool_call>", None),
        ('<tool_call>{"name": "fin', None),
        ('<tool_call>{"name":"find","arguments":', None),
        ('<tool_call>{"name":"find","arguments":{"wo', ToolCall("", "find", '{"wo')),
    ],
)
def test_an_answer_can_be_cut_off_within_a_call(end: str, call: ToolCall | None) -> None:
    found = parsed(f"{LOOK}\n{end}")
    assert (len(found.calls), found.cut) == (1, end)
    assert cut_call(found.cut) == call


def test_white_space_around_and_in_calls_does_not_matter_in_prompts() -> None:
    dense = '<tool_call>{"name":"look","arguments":{"x":1,"yes":"no"}}</tool_call>'
    assert with_plain_calls(f"a word\n{LOOK}!") == with_plain_calls(f"a word{dense}!")
    markup = " <tool_call></tool_call>"
    assert with_plain_calls(markup) == markup


@pytest.mark.parametrize(
    ("text", "name", "is_right"),
    [
        ('{"x": 3, "yes": "no"}', "point", True),
        ('{"x": 3, "yes": "no"', "point", False),
        ('{"x": 100, "yes": "no"}', "point", False),
        ('{"yes": "no"}', "point", False),
        ('{"x": 3, "yes": "no", "z": 1}', "point", False),
        ('{"words": ["a"], "is_last": true}', "words", True),
        ('{"words": ["a long word"]}', "words", False),
        ('{"words": [], "is_last": 1}', "words", False),
        ('"yes"', "pick", True),
        ("yes", "pick", False),
        ("[]", "any", False),
        ('{"a": [1]}', "any", True),
    ],
)
def test_an_answer_of_a_format_fits_its_schema(text: str, name: str, is_right: bool) -> None:
    turn = Turn(at=0.0, agent="a0", protocol="messages", format=name)
    assert is_of_format(text, turn) == is_right
