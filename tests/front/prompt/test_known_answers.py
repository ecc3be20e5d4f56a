"""Past answers as the generated tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.answers.reader import AnswerReader
from holdfast.front.prompt.known_answers import (
    AnswerMeaning,
    KnownAnswers,
    PastAnswers,
    meaning,
    meaning_of_text,
)
from holdfast.front.prompt.text_places import AnswerFrame
from holdfast.front.request import PlacedAnswer
from holdfast.front.toolcalls.dialect import ModelDialect, ReasoningFormat
from holdfast.wire.requests import TokenIds

THINKS = ModelDialect(reasoning=ReasoningFormat(start="<think>", end="</think>"))
FRAME = AnswerFrame(headers=("A:",), ends=("|",))


def read(text: str) -> AnswerMeaning:
    return meaning_of_text(text, AnswerReader(THINKS))


def said(
    content: str, *, reasoning: str = "", calls: tuple[tuple[str, Any], ...] = ()
) -> AnswerMeaning:
    return meaning(reasoning, content, calls)


def answer(content: str | None, *, ids: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    calls = [
        {"id": each, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for each in ids
    ]
    return {
        "role": "assistant",
        "content": content,
        **({"tool_calls": calls} if calls else {}),
        **fields,
    }


def recalled(
    known: KnownAnswers, messages: Iterable[Any], *, tenant: str = ""
) -> tuple[PastAnswers, list[str]]:
    """The answers of a conversation, and the thoughts that are added to its messages."""
    past = PastAnswers(known)
    sent = (known.sent_answer(message, tenant=tenant) for message in messages)
    return past, ["" if each is None else past.recall(each) for each in sent]


def recall(known: KnownAnswers, messages: Iterable[Any], *, tenant: str = "") -> PastAnswers:
    return recalled(known, messages, tenant=tenant)[0]


def placed(past: PastAnswers, text: str) -> list[PlacedAnswer]:
    spans = FRAME.candidates(text)
    return list(past.places(spans, lambda span: read(text[span.start : span.end])))


def test_an_answer_is_recalled_as_generated_tokens() -> None:
    known = KnownAnswers()
    known.add(said("abba"), [7, 8])
    past = recall(known, [{"role": "user", "content": "abba"}, answer("abba")])
    # white space is ignored
    assert placed(past, "U:abba|A: abba |U:A:abba|") == [PlacedAnswer(9, 15, TokenIds.of((7, 8)))]
    assert known.count_dropped(past, placed_answers=1) == 0
    assert (known.put_back_answers, known.dropped_tokens) == (1, 0)


def test_the_answers_content_must_match_the_text() -> None:
    known = KnownAnswers()
    known.add(said("Yes", reasoning="because"), [7, 8])
    past = recall(known, [answer("Yes", reasoning="because")])
    assert placed(past, "A:<think>another</think>Yes|") == []
    assert placed(past, "A:Yes|") == []
    assert placed(past, "A:<think>because</think>\n\nYes|") == [
        PlacedAnswer(2, 29, TokenIds.of((7, 8)))
    ]


def test_equal_answers_are_distinguished_by_their_call_ids() -> None:
    known = KnownAnswers()
    same = said("", calls=(("f", "{}"),))
    for number in range(3):
        known.add(same, [number], call_ids=[f"call_{number}"])
    sent = [
        answer(None, ids=(call_id,))
        for call_id in ("call_2", "call_0", "call_1", "of another server")
    ]
    past = recall(known, sent)
    spans = FRAME.candidates("A:1|U:|A:2|U:|A:3|U:|A:4|U:|A:5|")
    found = past.places(spans, lambda span: same)
    assert [tuple(each.token_ids) for each in found] == [(2,), (0,), (1,), (2,)]


def test_a_thought_omitted_before_our_call_is_restored() -> None:
    known = KnownAnswers()
    known.add(said("", reasoning="why", calls=(("f", "{}"),)), [1], call_ids=["call_1"])
    known.add(said("Done.", reasoning="how"), [2])
    sent = [
        answer(None, ids=("call_1",)),
        answer(None, ids=("call_2",)),
        answer("Done."),
        answer(None, ids=("call_1",), reasoning="no"),
    ]
    assert recalled(known, sent)[1] == ["why", "", "", ""]


def test_an_answer_that_retokenizes_equally_is_not_restored() -> None:
    known = KnownAnswers()
    known.add(said("abc"), [1, 2, 3], is_as_tokenized=True)
    past = recall(known, [answer("abc")])
    assert placed(past, "A:abc|") == []
    assert known.count_dropped(past, placed_answers=0) == 0


def test_another_tenants_answers_are_not_used() -> None:
    known = KnownAnswers()
    known.add(said("ab"), [5], tenant="one")
    assert placed(recall(known, [answer("ab")], tenant="two"), "A:ab|") == []
    assert placed(recall(known, [answer("ab")], tenant="one"), "A:ab|") == [
        PlacedAnswer(2, 4, TokenIds.of((5,)))
    ]


@given(lengths=st.lists(st.integers(1, 5), max_size=20), again=st.integers(0, 3))
def test_the_least_recently_used_answers_go_first(lengths: list[int], again: int) -> None:
    known = KnownAnswers(max_tokens=8)
    for number, length in enumerate(lengths):
        known.add(said(f"answer {number % 7}"), [number] * length)
        recall(known, [answer(f"answer {again}")])
        known.check_invariants()
        assert placed(recall(known, [answer(f"answer {number % 7}")]), f"A:answer {number % 7}|")


def test_of_many_equal_answers_the_latest_are_remembered() -> None:
    known = KnownAnswers()
    for number in range(1000):
        known.add(said("", calls=(("f", {}),)), [number], call_ids=[f"call_{number}"])
    known.check_invariants()
    assert len(known) < 500


def test_of_equal_answers_beyond_the_limit_the_latest_are_remembered() -> None:
    known = KnownAnswers(max_tokens=5)
    calls = (("f", {}),)
    for number in range(4):
        known.add(said("", calls=calls), [number] * 2, call_ids=[f"call_{number}"])
        known.check_invariants()
    assert len(known) == 2
    (found,) = recall(known, [answer(None, ids=("call_3",))]).expected.values()
    assert tuple(found[0].answer.token_ids()) == (3, 3)


def test_an_answer_beyond_the_limit_is_not_remembered() -> None:
    known = KnownAnswers(max_tokens=2)
    known.add(said("one"), [1])
    known.add(said("two"), [1, 2, 3])
    known.check_invariants()
    assert len(known) == 1


def test_an_answer_returned_without_its_thought_counts_as_lost_once() -> None:
    known = KnownAnswers()
    thought = "because"
    known.add(said("Yes", reasoning=thought), [1, 2, 3, 4], is_as_tokenized=True)
    known.add(said("No"), [5, 6], is_as_tokenized=True)
    sent = [answer("Yes", reasoning=thought), answer("No \n")]

    def lost(text: str, tenant: str = "") -> int:
        past = recall(known, sent, tenant=tenant)
        placed(past, text)
        return known.count_dropped(past, placed_answers=0)

    whole, cut = f"A:<think>{thought}</think>Yes|U:Is it?|A:No|", "A:Yes|U:Is it?|A:No|"
    assert [lost(whole), lost(cut, "another"), lost(cut), lost(cut)] == [0, 0, 4, 0]
    assert known.dropped_tokens == 4
    known.check_invariants()


def test_foreign_history_does_not_count_as_lost() -> None:
    known = KnownAnswers()
    assert known.count_dropped(recall(known, [answer("I never said that")]), placed_answers=0) == 0


def test_messages_that_no_template_accepts_are_no_known_answers() -> None:
    sent: list[Any] = [
        "text",
        7,
        {"role": "assistant", "content": 7},
        {"role": "assistant", "tool_calls": "f"},
    ]
    assert recalled(KnownAnswers(), sent)[1] == [""] * 4
