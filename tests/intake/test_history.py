"""Answers as the tokens that were generated."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.intake.history import AnswerHistory, Said, Tokenized

MARK = "|"


def by_characters(text: str, *, pair: str = "") -> Tokenized:
    """A token per character, but one for each occurrence of `pair`: ids of single characters are their code points."""
    token_ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    at = 0
    while at < len(text):
        width = len(pair) if pair and text.startswith(pair, at) else 1
        token_ids.append(ord(text[at]) if width == 1 else 1_000_000)
        offsets.append((at, at + width))
        at += width
    return Tokenized(token_ids, offsets)


def singly(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_an_answer_comes_back_as_it_was_generated() -> None:
    history = AnswerHistory()
    history.remember("abba", singly("abba"), canonical=by_characters("abba", pair="bb").token_ids)
    whole = "|u|bb|a|abba|u|bb|"
    spliced = history.splice(whole, by_characters(whole, pair="bb"), [Said("u", False), Said("abba", True)])
    assert spliced.token_ids == [
        *by_characters("|u|bb|a|", pair="bb").token_ids,
        *singly("abba"),
        *by_characters("|u|bb|", pair="bb").token_ids,
    ]
    assert history.statistics().spliced == 1


def test_a_user_who_said_the_same_before_keeps_his_tokens() -> None:
    history = AnswerHistory()
    history.remember("bb", [7, 8], canonical=by_characters("bb", pair="bb").token_ids)
    whole = "|bb|bb|"
    spliced = history.splice(whole, by_characters(whole, pair="bb"), [Said("bb", False), Said("bb", True)])
    assert spliced.token_ids == [ord("|"), 1_000_000, ord("|"), 7, 8, ord("|")]


def test_what_the_tokenizer_gives_anyway_is_not_remembered() -> None:
    history = AnswerHistory()
    history.remember("abc", singly("abc"), canonical=singly("abc"))
    assert not history.knows_any([Said("abc", True)])
    assert history.statistics().tokens == 0


def test_an_answer_whose_edge_is_within_a_token_is_left_alone() -> None:
    history = AnswerHistory()
    history.remember("ba", [7, 8], canonical=[9])
    whole = "|bba|"
    tokenized = by_characters(whole, pair="bb")
    assert history.splice(whole, tokenized, [Said("ba", True)]).token_ids == tokenized.token_ids


def test_another_tenants_answers_are_not_used() -> None:
    history = AnswerHistory()
    history.remember("ab", [5], canonical=[6], tenant="one")
    assert history.knows_any([Said("ab", True)], tenant="one")
    assert not history.knows_any([Said("ab", True)], tenant="two")
    assert history.splice("ab", by_characters("ab"), [Said("ab", True)], tenant="two").token_ids == singly("ab")


@given(
    turns=st.lists(st.tuples(st.text("abc", max_size=6), st.booleans()), max_size=8),
    said=st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_splicing_changes_tokens_and_never_the_text(turns: list[tuple[str, bool]], said: list[str]) -> None:
    history = AnswerHistory(most_tokens=12)
    texts = {-number: text for number, (text, _) in enumerate(turns, start=1)}
    for number, (text, is_odd) in enumerate(turns, start=1):
        history.remember(text, [-number] if is_odd else singly(text), canonical=singly(text))
        history.check_invariants()
    whole = MARK + MARK.join(piece for pair in zip([text for text, _ in turns], said, strict=False) for piece in pair) + MARK
    messages = [
        message for (text, _), other in zip(turns, said, strict=False) for message in (Said(text, True), Said(other, False))
    ]
    spliced = history.splice(whole, by_characters(whole), messages)
    assert "".join(texts[token] if token < 0 else chr(token) for token in spliced.token_ids) == whole
    tokens = by_characters(whole).token_ids
    marks = [place for place, token in enumerate(tokens) if token == ord(MARK)]
    assert [spliced.token_ids[spliced.place(mark)] for mark in marks] == [ord(MARK)] * len(marks)


@given(lengths=st.lists(st.integers(1, 5), max_size=20))
def test_the_oldest_answers_go_first(lengths: list[int]) -> None:
    history = AnswerHistory(most_tokens=8)
    for number, length in enumerate(lengths):
        history.remember(f"answer {number}", [number] * length, canonical=[])
        history.check_invariants()
        assert history.knows_any([Said(f"answer {number}", True)])


def test_an_answer_that_the_template_cuts_short_is_a_loss_and_counts_once() -> None:
    history = AnswerHistory()
    history.remember("<think>because</think>Yes", [1, 2, 3, 4], canonical=[1, 2, 3, 4])
    history.remember("No \n", [5, 6], canonical=[5, 6])
    messages = [Said("Is it?", False), Said("<think>because</think>Yes", True), Said("Is it?", False), Said("No \n", True)]
    whole, cut = "|Is it?|<think>because</think>Yes|Is it?|No|", "|Is it?|Yes|Is it?|No|"
    assert history.dropped(whole, messages) == 0
    assert history.dropped(cut, messages, tenant="another") == 0
    assert history.dropped(cut, messages) == 4
    assert history.dropped(cut, messages) == 0
    assert history.statistics().dropped_tokens == 4


def test_what_others_wrote_into_a_history_is_no_loss() -> None:
    assert AnswerHistory().dropped("|", [Said("I never said that", True)]) == 0


def test_the_oldest_answers_are_no_longer_counted() -> None:
    history = AnswerHistory(most_told=2)
    for text in ("one", "two", "three"):
        history.remember(text, [1], canonical=[1])
    assert history.dropped("", [Said(text, True) for text in ("one", "two", "three")]) == 2
