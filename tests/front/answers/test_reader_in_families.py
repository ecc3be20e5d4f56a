"""In every family, a call that a thought quotes or considers is reasoning; one that ends the answer
is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.output import ChoiceFinished
from holdfast.front.prompt.known_answers import meaning_of_deltas, meaning_of_text
from holdfast.front.toolcalls.call_format import Call
from holdfast.front.toolcalls.dialect import ModelDialect, ReasoningFormat
from holdfast.front.toolcalls.families import FAMILIES as RECORDS
from holdfast.wire.events import FinishReason
from tests.fakes.family_bundles import bundle_of
from tests.fakes.family_templates import FAMILY_TEMPLATES
from tests.fakes.recorded_answers import TOOLS
from tests.fakes.told_answers import by_tokens, heard, told

FAMILIES = {name: family.calls for name, family in RECORDS.items()}
THINKING = sorted(name for name, family in FAMILY_TEMPLATES.items() if family.thought[0])
ROME = Call("get_weather", {"city": "Rome", "days": 3}, "functions.get_weather:0")
TIME = Call("get_time", {"tz": "CET"}, "functions.get_time:1")
WEIGHED = "I could use\n{rome}\nWait, that is dangerous; I had better ask.\n"


def marks_of(dialect: ModelDialect) -> tuple[str, str]:
    assert dialect.reasoning is not None
    return dialect.reasoning.start, dialect.reasoning.end


def thought_of(text: str, dialect: ModelDialect) -> tuple[str, str]:
    """A thought as shown: its text stripped of white space."""
    return ("thought", filled(text, dialect).strip())


def filled(text: str, dialect: ModelDialect) -> str:
    """The text with calls as the family writes them, and the markers of thoughts."""
    assert dialect.calls is not None
    start, end = marks_of(dialect)
    both = dialect.calls.write([ROME, TIME])
    return text.format(
        start=start,
        end=end,
        rome=dialect.calls.write([ROME]),
        time=dialect.calls.write([TIME]),
        both=both,
    )


def every_place(text: str, dialect: ModelDialect) -> list[list[int]]:
    """All ways to split a text in two; the first leaves it whole."""
    return [[place] for place in range(len(dialect.markers.encode(text)) + 1)]


def called(*calls: Call) -> list[Any]:
    return [(call.name, dict(call.arguments), ()) for call in calls]


def answers(dialect: ModelDialect, *, parallel: bool) -> dict[str, tuple[str, list[Any]]]:
    """Answers whose thoughts contain calls, and their expected parts."""

    def thought(text: str) -> tuple[str, str]:
        return thought_of(text, dialect)

    found: dict[str, tuple[str, list[Any]]] = {
        "weighed, then asked": (
            "{start}" + WEIGHED + "{end}\n\nMay I?",
            [thought(WEIGHED), "May I?"],
        ),
        "the last words of a thought": (
            "{start}So:\n{rome}\n{end}\n\nMay I?",
            [thought("So:\n{rome}"), "May I?"],
        ),
        "nothing but a call": ("{start}{rome}{end}May I?", [thought("{rome}"), "May I?"]),
        "two calls, weighed apart": (
            "{start}Either\n{rome}\nor\n{time}\nbut no.{end}May I?",
            [thought("Either\n{rome}\nor\n{time}\nbut no."), "May I?"],
        ),
        "weighed, then made": (
            "{start}" + WEIGHED + "{end}\n\n{time}",
            [thought(WEIGHED), *called(TIME)],
        ),
        "weighed in a second thought": (
            "{start}Hm.{end}Well.\n{start}" + WEIGHED + "{end}\n\nMay I?",
            [("thought", "Hm."), "Well.", thought(WEIGHED), "May I?"],
        ),
        "the end of an open thought": (
            "{start}I had better look.\n{rome}",
            [("thought", "I had better look."), *called(ROME)],
        ),
        "white space behind it": ("{start}Hm.\n{rome}\n\n", [("thought", "Hm."), *called(ROME)]),
        "one weighed and one made": (
            "{start}" + WEIGHED + "So\n{time}",
            [thought(WEIGHED + "So"), *called(TIME)],
        ),
        "weighed in an open thought": (
            "{start}" + WEIGHED,
            [("thought", filled(WEIGHED, dialect))],
        ),
    }
    if parallel:
        found["two at the end"] = ("{start}Hm.\n{both}", [("thought", "Hm."), *called(ROME, TIME)])
    return {name: (filled(text, dialect), says) for name, (text, says) in found.items()}


# half of the families with markers as tokens, half with markers as text
@pytest.mark.parametrize(
    ("name", "as_tokens"), [(name, place % 2 == 0) for place, name in enumerate(THINKING)]
)
def test_only_a_call_that_ends_the_answer_is_made(name: str, as_tokens: bool) -> None:
    found = bundle_of(name)
    dialect = found.dialect if as_tokens else replace(found.dialect, marker_ids={})
    for case, (text, says) in answers(dialect, parallel=found.dialect_report.parallel).items():
        for at in ([], range(len(text)), range(0, len(text), 5)):
            assert told(dialect, TOOLS, text, at=at) == says, case


@pytest.mark.parametrize("name", THINKING)
def test_a_client_sees_the_same_token_by_token(name: str) -> None:
    found = bundle_of(name)
    for case, (text, says) in answers(
        found.dialect, parallel=found.dialect_report.parallel
    ).items():
        assert heard(by_tokens(found.tokenizer, found.dialect, TOOLS, text)) == says, case


@pytest.mark.parametrize(
    "case",
    [pytest.param("weighed, then asked", marks=pytest.mark.slow), "one weighed and one made"],
)
@pytest.mark.parametrize("name", THINKING)
def test_two_pieces_read_like_the_whole_wherever_split(name: str, case: str) -> None:
    found = bundle_of(name)
    text, says = answers(found.dialect, parallel=False)[case]
    encoded = found.dialect.markers.encode(text)
    for place in range(len(name) % 3, len(encoded), 3):  # every place in a third of the families
        assert told(found.dialect, TOOLS, text, at=[place]) == says, encoded[place:]


def test_a_call_in_a_thought_cut_by_length_is_reasoning() -> None:
    for name in THINKING:
        dialect = bundle_of(name).dialect
        for text in ("Hm.\n{rome}", "Hm.\n{rome}\n", "Hm.\n{rome}\n{time}"):
            whole = filled("{start}" + text, dialect)
            for at in ([], range(len(whole))):
                assert told(dialect, TOOLS, whole, at=at, ends_cut=True) == [
                    ("thought", filled(text, dialect))
                ], name
        events = by_tokens(
            bundle_of(name).tokenizer, dialect, TOOLS, whole, reason=FinishReason.LENGTH
        )
        assert isinstance(events[-1], ChoiceFinished)
        assert (events[-1].calls, events[-1].finish_reason) == (0, "length")
        assert heard(events) == [("thought", filled(text, dialect))]


@pytest.mark.parametrize(
    ("name", "reason"),
    list(zip(THINKING, cycle((FinishReason.STOP, FinishReason.LENGTH)), strict=False)),
)
def test_the_remembered_answer_equals_the_shown_one(name: str, reason: FinishReason) -> None:
    found = bundle_of(name)
    for case, (text, _) in answers(found.dialect, parallel=found.dialect_report.parallel).items():
        events = by_tokens(found.tokenizer, found.dialect, TOOLS, text, reason=reason)
        deltas = [event for event in events if not isinstance(event, ChoiceFinished)]
        encoded = found.dialect.markers.encode(text)
        read = meaning_of_text(
            encoded, found.answer_reader(TOOLS), was_cut_off=reason is FinishReason.LENGTH
        )
        assert meaning_of_deltas(deltas) in (read, None), case


def test_a_channel_of_visible_text_ends_a_thought() -> None:
    dialect = bundle_of("kimi_k3").dialect
    text = "<|open|>think<|sep|>Hm.<|open|>response<|sep|>Yes.<|close|>response<|sep|>"
    assert told(dialect, TOOLS, text) == [("thought", "Hm."), "Yes."]


def test_a_cut_call_after_a_channel_ending_a_thought_is_made() -> None:
    dialect = bundle_of("kimi_k3").dialect
    text = filled(
        "{start}Hm.<|open|>response<|sep|>Yes.<|close|>response<|sep|>{rome}<|open|>resp", dialect
    )
    for at in (*every_place(text, dialect), range(len(text))):
        said = told(dialect, TOOLS, text, at=at, ends_cut=True)
        assert said[:3] == [("thought", "Hm."), "Yes.", *called(ROME)], at


def test_the_end_of_a_thought_counts_after_visible_text_too() -> None:
    dialect = bundle_of("kimi_k3").dialect
    inner = "Hm.<|open|>response<|sep|>Yes.<|close|>response<|sep|>"
    start, end = marks_of(dialect)
    text = f"{start}{inner}{end}<|open|>response<|sep|>No.<|close|>response<|sep|>"
    for at in (*every_place(text, dialect), range(len(text))):
        for ends_cut in (False, True):
            said = told(dialect, TOOLS, text, at=at, ends_cut=ends_cut)
            assert said == [("thought", inner), "No."], at


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<|channel><|channel>thought\nHm.<channel|>Yes.", [("thought", "Hm."), "Yes."]),
        ("<|channel>thought\n<|channel>thought\nHm.<channel|>Yes.", [("thought", "Hm."), "Yes."]),
        ("<|channel>thought\nHm.<channel|><|channel>Yes.", [("thought", "Hm."), "Yes."]),
        ("Yes.<|channel>thought\n<channel|><channel|>", ["Yes."]),
    ],
)
def test_doubled_and_lone_markers_are_not_shown(text: str, says: list[Any]) -> None:
    dialect = bundle_of("gemma4").dialect
    assert told(dialect, TOOLS, text) == says
    assert told(dialect, TOOLS, text, at=range(len(text))) == says


def test_the_end_of_a_thought_counts_within_a_call_too() -> None:
    for name in THINKING:
        dialect = bundle_of(name).dialect
        _, end = marks_of(dialect)
        half, _, rest = filled("Hm.\n{rome}", dialect).partition("Rome")
        said = told(dialect, TOOLS, marks_of(dialect)[0] + half + end + "May I?")
        assert said == [("thought", half.strip()), "May I?"], name
        assert said == told(
            dialect, TOOLS, marks_of(dialect)[0] + half + end + "May I?", at=range(len(half + rest))
        )


# The same for every family with <think> markers, as Qwen uses.

GENERAL = sorted(
    name
    for name, family in FAMILIES.items()
    if any(family.write([ROME]).startswith(mark) for mark in family.markers)
)


def general(name: str) -> ModelDialect:
    marks = [
        mark
        for mark in FAMILIES[name].markers
        if not any(other in mark for other in FAMILIES[name].markers if other != mark)
    ]
    return ModelDialect(
        family=name,
        calls=FAMILIES[name],
        reasoning=ReasoningFormat(start="<think>", end="</think>"),
        marker_ids={mark: number for number, mark in enumerate(("<think>", "</think>", *marks))},
    )


@pytest.mark.parametrize("name", [name for name in GENERAL if not FAMILIES[name].channel_starts])
def test_every_family_makes_a_final_call_in_a_thought(name: str) -> None:
    dialect = general(name)
    text = filled("Hm.\n{rome}", dialect)
    for at in ([], range(len(text))):
        assert told(dialect, TOOLS, text, at=at, in_reasoning=True) == [
            ("thought", "Hm."),
            *called(ROME),
        ]
    weighed = filled(WEIGHED, dialect)
    assert told(dialect, TOOLS, weighed, in_reasoning=True) == [("thought", weighed)]


words = st.sampled_from(["{end}", "{rome}", "{time}", "Hm.", " ", "\n", "`", "{both}"])


@given(
    name=st.sampled_from(GENERAL),
    thought=st.lists(words.filter("{end}".__ne__), max_size=6).map("".join),
    behind=st.lists(words, max_size=3).map("".join),
    at=st.lists(st.integers(0, 400), max_size=8),
    ends_cut=st.booleans(),
)
def test_everything_before_the_end_of_a_thought_is_reasoning(
    name: str, thought: str, behind: str, at: Sequence[int], ends_cut: bool
) -> None:
    dialect = general(name)
    inner = filled(thought, dialect)
    outer = filled(f"So{behind}", dialect)
    said = told(
        dialect, TOOLS, f"{inner}</think>{outer}", at=at, in_reasoning=True, ends_cut=ends_cut
    )
    if inner.strip():
        kind, text = said.pop(0)
        assert (kind, text.strip()) == ("thought", inner.strip())
    assert said == told(dialect, TOOLS, outer, ends_cut=ends_cut)


@pytest.mark.parametrize("ends_cut", [False, True])
@pytest.mark.parametrize("thought", ["{rome}Hm.", "{rome}`{rome}"])
@pytest.mark.parametrize("name", [name for name in GENERAL if FAMILIES[name].channel_starts])
def test_the_end_of_a_thought_counts_whenever_it_comes(
    name: str, thought: str, ends_cut: bool
) -> None:
    dialect = general(name)
    inner = filled(thought, dialect)
    text = f"{inner}</think>So"
    for at in (*every_place(text, dialect)[:: 2 + ends_cut], range(len(text))):
        said = told(dialect, TOOLS, text, at=at, in_reasoning=True, ends_cut=ends_cut)
        assert said == [("thought", inner), "So"], at
