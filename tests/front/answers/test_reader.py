"""An answer is read in one pass into reasoning, text and calls, without losing text, wherever it is
split.
"""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.answers.reader import AnswerReader
from holdfast.front.output import (
    OutputDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from holdfast.front.toolcalls.declared import DeclaredTools
from holdfast.front.toolcalls.dialect import ModelDialect, ReasoningFormat
from holdfast.front.toolcalls.families import FAMILIES
from tests.fakes.whole_answers import whole_answer

THINK = ReasoningFormat(start="<think>", end="</think>")
TOKENS = {"<think>": 1, "</think>": 2, "<tool_call>": 3, "</tool_call>": 4}
TOOLS = DeclaredTools(
    [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "parameters": {"type": "object", "required": ["city"]},
            },
        },
        {"type": "function", "function": {"name": "stop"}},
    ]
)
AS_TOKENS = ModelDialect(
    family="hermes", calls=FAMILIES["hermes"].calls, reasoning=THINK, marker_ids=TOKENS
)
AS_TEXT = ModelDialect(family="hermes", calls=FAMILIES["hermes"].calls, reasoning=THINK)
FRAMED = ModelDialect(
    family="hermes",
    calls=FAMILIES["hermes"].calls,
    reasoning=THINK,
    frame=("<answer>", "</answer>"),
)
BOTH = pytest.mark.parametrize("dialect", [AS_TOKENS, AS_TEXT], ids=["tokens", "text"])

pieces = st.sampled_from(
    [
        "<think>", "</think>", "<tool_call>", "</tool_call>", "{", "}", "[", "]", "True", "1", "name", "get_weather", ":", ",",
        '{"name": "get_weather", "arguments": {"city": "Rom"}}', '{"arguments": {"x": 1.50}, "name": "stop"}', '"', "\\", "'",
        '{"name": "stop", "arguments": ', '{"a": [1, {"b": null}]', "```json\n", "```", " ", "\n", "\n\n", "a", "🙂",
        "<tool", "</th",
    ]
)  # fmt: skip
texts = st.lists(pieces, max_size=12).map("".join)
places = st.lists(st.integers(0, 400), max_size=12)


def cut(text: str, at: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in at), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def read(
    text: str,
    dialect: ModelDialect = AS_TOKENS,
    *,
    at: list[int] | None = None,
    ends_cut: bool = False,
    **rules: bool,
) -> list[OutputDelta]:
    reader = AnswerReader(dialect, tools=TOOLS, **rules)  # type: ignore[arg-type]
    parts = [
        part for piece in cut(dialect.markers.encode(text), at or []) for part in reader.push(piece)
    ]
    return [*parts, *reader.flush(was_cut_off=ends_cut)]


def joined(parts: list[OutputDelta]) -> list[tuple[object, ...]]:
    """The parts, with adjacent parts of one kind joined."""
    found: list[tuple[object, ...]] = []
    for part in parts:
        match part:
            case TextDelta():
                entry: tuple[object, ...] = (part.kind, part.text)
            case ToolArgumentsDelta():
                entry = ("arguments", part.text)
            case ToolCallStarted():
                entry = (part.name, part.id)
            case ToolCallFinished():
                entry = (part.repairs,)
        if (
            found
            and len(entry) == 2
            and entry[0] in ("text", "reasoning", "arguments")
            and found[-1][0] == entry[0]
        ):
            found[-1] = (entry[0], str(found[-1][1]) + str(entry[1]))
        else:
            found.append(entry)
    return found


def outcome(
    text: str, dialect: ModelDialect = AS_TOKENS, **rules: bool
) -> tuple[str, str, list[tuple[str, dict[str, object]]]]:
    whole = whole_answer(read(text, dialect, **rules))
    return whole.reasoning, whole.text, [(call.name, dict(call.arguments)) for call in whole.calls]


@BOTH
@given(
    text=texts,
    at=places,
    in_reasoning=st.booleans(),
    reads_calls=st.booleans(),
    ends_cut=st.booleans(),
)
def test_cuts_change_nothing(
    dialect: ModelDialect,
    text: str,
    at: list[int],
    in_reasoning: bool,
    reads_calls: bool,
    ends_cut: bool,
) -> None:
    in_parts = read(
        text, dialect, at=at, ends_cut=ends_cut, in_reasoning=in_reasoning, reads_calls=reads_calls
    )
    at_once = read(
        text, dialect, ends_cut=ends_cut, in_reasoning=in_reasoning, reads_calls=reads_calls
    )
    assert joined(in_parts) == joined(at_once)


@given(
    text=st.lists(pieces | st.sampled_from(["<answer>", "</answer>", "<ans"]), max_size=10).map(
        "".join
    ),
    at=places,
    in_reasoning=st.booleans(),
    ends_cut=st.booleans(),
)
def test_cuts_change_nothing_in_an_answer_between_marks(
    text: str, at: list[int], in_reasoning: bool, ends_cut: bool
) -> None:
    whole = read(text, FRAMED, in_reasoning=in_reasoning, ends_cut=ends_cut)
    assert joined(
        read(text, FRAMED, at=at, in_reasoning=in_reasoning, ends_cut=ends_cut)
    ) == joined(whole)


@given(text=texts, at=places)
def test_without_reasoning_and_calls_the_text_is_unchanged(text: str, at: list[int]) -> None:
    dialect = ModelDialect(family="hermes", calls=FAMILIES["hermes"].calls, marker_ids=TOKENS)
    parts = read(text, dialect, at=at, reads_calls=False)
    assert "".join(part.text for part in parts if isinstance(part, TextDelta)) == text


@BOTH
@given(text=texts, at=places, in_reasoning=st.booleans())
def test_the_fragments_of_a_finished_call_join_to_an_object(
    dialect: ModelDialect, text: str, at: list[int], in_reasoning: bool
) -> None:
    parts = read(text, dialect, at=at, in_reasoning=in_reasoning)
    begun, arguments = False, ""
    for part in parts:
        if isinstance(part, ToolCallStarted):
            assert not begun
            begun, arguments = True, ""
        elif isinstance(part, ToolArgumentsDelta):
            assert begun and part.text
            arguments += part.text
        elif isinstance(part, ToolCallFinished):
            assert begun and isinstance(json.loads(arguments), dict)
            begun = False
    assert not begun


@BOTH
@given(text=texts, at=places)
def test_positions_refer_to_the_whole_text(dialect: ModelDialect, text: str, at: list[int]) -> None:
    for part in read(text, dialect, at=at):
        if isinstance(part, TextDelta):
            assert text[part.start : part.start + len(part.text)] == part.text


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>'
ROME = [("get_weather", {"city": "Rom"})]


@BOTH
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", ("", "hello", [])),
        ("<think>\nhm\n</think>\n\nhello", ("hm", "hello", [])),
        (f"<think>\nhm\n</think>\n\n{CALL}", ("hm", "", ROME)),
        (f"Let me see.\n\n{CALL}\n", ("", "Let me see.", ROME)),
        (f"{CALL}\n{CALL}", ("", "", [*ROME, *ROME])),
        (f"{CALL}\n\nand so\n<think>more</think>\non", ("more", "and so\non", ROME)),
        ("</think>\n\nhello", ("", "hello", [])),
        ("\n\n<think>\n\n</think>\n\nhello", ("", "hello", [])),
        ("<think>cut off", ("cut off", "", [])),
    ],
)
def test_reasoning_text_and_calls_are_separated(
    dialect: ModelDialect, text: str, expected: tuple[str, str, list[tuple[str, dict[str, object]]]]
) -> None:
    assert outcome(text, dialect) == expected


def test_a_lone_end_of_thought_is_shown_only_if_quoted() -> None:
    assert outcome("hm</think>\n\nhello", AS_TEXT) == ("", "hm\n\nhello", [])
    assert outcome("a `</think>` ends it", AS_TEXT) == ("", "a `</think>` ends it", [])


def test_a_thought_opened_by_the_prompt_needs_no_marker() -> None:
    assert outcome("hm\n</think>\n\nhello", in_reasoning=True) == ("hm", "hello", [])
    assert outcome("<think>\nhm\n</think>\n\nhello", in_reasoning=True) == ("hm", "hello", [])


def test_a_call_to_a_declared_tool_ends_a_thought() -> None:
    assert outcome(f"so I call\n{CALL}", in_reasoning=True) == ("so I call", "", ROME)
    other = CALL.replace("get_weather", "unknown")
    assert outcome(f"so I call {other} or", in_reasoning=True) == (f"so I call {other} or", "", [])


def test_talk_of_calls_in_a_thought_stays_a_thought() -> None:
    assert outcome("one writes <tool_call> and a name</think>", in_reasoning=True) == (
        "one writes <tool_call> and a name",
        "",
        [],
    )
    assert outcome(f"like `{CALL}` it</think>ok", AS_TEXT, in_reasoning=True) == (
        f"like `{CALL}` it",
        "ok",
        [],
    )


def test_without_marker_tokens_calls_in_thoughts_must_be_complete() -> None:
    assert outcome(f"so\n{CALL}", AS_TEXT, in_reasoning=True) == ("so", "", ROME)
    missing = CALL.replace("city", "town")
    assert outcome(f"so\n{missing}", AS_TEXT, in_reasoning=True) == (f"so\n{missing}", "", [])


def test_markers_that_are_tokens_cannot_be_written_with_letters() -> None:
    reader = AnswerReader(AS_TOKENS, tools=TOOLS)
    text = '<think>\n<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    assert whole_answer([*reader.push(text), *reader.flush()]).text == text


def test_without_calls_their_markup_is_text() -> None:
    assert outcome(f"so {CALL}", reads_calls=False) == ("", f"so {CALL}", [])


def test_a_started_call_cut_by_length_stays_open() -> None:
    assert joined(read('<tool_call>\n{"name": "stop", "arguments": {"a": "b', ends_cut=True)) == [
        ("stop", ""),
        ("arguments", '{"a": "b'),
    ]
    assert joined(read('so <tool_call>\n{"name": "st', ends_cut=True)) == [
        ("text", 'so <tool_call>\n{"name": "st')
    ]
    assert joined(read(f"{CALL}\n<tool_", AS_TEXT, ends_cut=True))[-1] == ((),)


def test_text_that_is_not_a_valid_call_stays_text() -> None:
    assert outcome("<tool_call>\nnonsense\n</tool_call>") == (
        "",
        "<tool_call>\nnonsense\n</tool_call>",
        [],
    )
    assert outcome('<tool_call>\n{"name": "stop"') == ("", '<tool_call>\n{"name": "stop"', [])


def test_a_long_run_of_white_space_is_text() -> None:
    assert outcome("a" + "\n" * 100 + CALL) == ("", "a" + "\n" * 100, ROME)


def test_a_thought_in_a_channel_is_a_single_part() -> None:
    harmony = ModelDialect(family="harmony", calls=FAMILIES["harmony"].calls)
    reader = AnswerReader(harmony, tools=TOOLS)
    for character in "<|channel|>analysis<|message|>one two three<|end|>":
        reader.push(character)
    assert len(reader.thoughts) == 1


@BOTH
@pytest.mark.parametrize(
    "arguments",
    ["1" * 5000, '{"city": ' + "1" * 5000 + "}", '{"n": [-' + "1" * 5000 + "]}"],
    ids=len,
)
@pytest.mark.parametrize(
    "shape", ['{{"name": "stop", "arguments": {}}}', '{{"arguments": {}, "name": "stop"}}']
)
def test_a_number_that_python_cannot_parse_causes_no_error(
    dialect: ModelDialect, shape: str, arguments: str
) -> None:
    text = "<tool_call>" + shape.format(arguments) + "</tool_call>"
    reasoning, shown, calls = outcome(text, dialect)
    assert "1" * 5000 in reasoning + shown + str(calls)


@BOTH
@pytest.mark.parametrize("inner", ['{"a": "\\ud800"}', '{"a": 1e999}', '{"a": "\\ud83d\\ude00"}'])
def test_doubly_encoded_arguments_are_unwrapped_once(dialect: ModelDialect, inner: str) -> None:
    parts = read(
        '<tool_call>{"name": "stop", "arguments": ' + json.dumps(inner) + "}</tool_call>", dialect
    )
    assert "".join(part.text for part in parts if isinstance(part, ToolArgumentsDelta)) == inner


@BOTH
def test_white_space_unknown_to_json_becomes_plain_white_space(dialect: ModelDialect) -> None:
    text = '<tool_call>{"name": "stop", "arguments": {\u2028"a"\xa0:\u3000[1,\x0b2]}}</tool_call>'
    assert outcome(text, dialect) == ("", "", [("stop", {"a": [1, 2]})])


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize(
    "again",
    ["<tool_call>", '<tool_call>{"type": "', "{", '[{"', "```json", '{"name":"stop","type":["'],
    ids=lambda text: text,
)
def test_repeated_beginnings_of_a_call_take_linear_time(dialect: ModelDialect, again: str) -> None:
    text = f"{again}\n" * 2000
    start = time.process_time()
    assert outcome(text, dialect)[1].count(again) == 2000
    # some took 4 s, some minutes, when each was rescanned from the next one on
    assert time.process_time() - start < 3


@BOTH
@pytest.mark.parametrize(
    "text", [f"{CALL}\nor\n" * 150, f"{CALL}\n" * 150 + "no", "<tool_call>\n" * 150], ids=len
)
def test_a_thought_that_considers_many_calls_makes_none(dialect: ModelDialect, text: str) -> None:
    assert outcome(text, dialect, in_reasoning=True) == (text, "", [])


def test_a_thought_contains_calls_only_if_calls_are_read() -> None:
    dialect = ModelDialect(family="harmony", calls=FAMILIES["harmony"].calls, reasoning=THINK)
    text = "so<|start|>assistant to=functions.stop<|channel|>commentary json<|message|>{}<|call|>"
    parts = read(text, dialect, reads_calls=False, in_reasoning=True)
    assert not [part for part in parts if isinstance(part, ToolCallStarted)]
