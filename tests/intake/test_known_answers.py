"""Answers as the tokens that were generated."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from holdfast.intake.known_answers import KnownAnswers
from holdfast.intake.prompt import PromptText, Turn

MARK = "|"


def by_characters(text: str, *, pair: str = "") -> SimpleNamespace:
    """An encoding: a token for each `pair` and for every other character; ids of single characters are their code points."""
    token_ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    at = 0
    while at < len(text):
        width = len(pair) if pair and text.startswith(pair, at) else 1
        token_ids.append(ord(text[at]) if width == 1 else 1_000_000)
        offsets.append((at, at + width))
        at += width
    return SimpleNamespace(ids=token_ids, offsets=offsets)


def singly(text: str) -> list[int]:
    return [ord(character) for character in text]


def asked(text: str, *turns: Turn, branch_points: tuple[int, ...] = ()) -> PromptText:
    return PromptText(text=text, turns=turns, branch_points=branch_points)


def test_an_answer_comes_back_as_it_was_generated() -> None:
    known = KnownAnswers()
    known.add("abba", singly("abba"), canonical=by_characters("abba", pair="bb").ids)
    whole = "|u|bb|a|abba|u|bb|"
    prompt = asked(whole, Turn("u", False), Turn("abba", True))
    assert list(known.put_back(prompt, by_characters(whole, pair="bb")).token_ids) == [
        *by_characters("|u|bb|a|", pair="bb").ids,
        *singly("abba"),
        *by_characters("|u|bb|", pair="bb").ids,
    ]
    assert known.put_back_answers == 1


def test_a_user_who_said_the_same_before_keeps_his_tokens() -> None:
    known = KnownAnswers()
    known.add("bb", [7, 8], canonical=by_characters("bb", pair="bb").ids)
    whole = "|bb|bb|"
    tokens = known.put_back(asked(whole, Turn("bb", False), Turn("bb", True)), by_characters(whole, pair="bb"))
    assert tokens.token_ids == (ord("|"), 1_000_000, ord("|"), 7, 8, ord("|"))


def test_what_the_tokenizer_gives_anyway_is_not_remembered() -> None:
    known = KnownAnswers()
    known.add("abc", singly("abc"), canonical=singly("abc"))
    assert not known.has_any_of(asked("abc", Turn("abc", True)))
    assert len(known) == 0


def test_an_answer_whose_edge_is_within_a_token_is_left_alone() -> None:
    known = KnownAnswers()
    known.add("ba", [7, 8], canonical=[9])
    whole = "|bba|"
    tokenized = by_characters(whole, pair="bb")
    assert list(known.put_back(asked(whole, Turn("ba", True)), tokenized).token_ids) == tokenized.ids


def test_another_tenants_answers_are_not_used() -> None:
    known = KnownAnswers()
    known.add("ab", [5], canonical=[6], tenant="one")
    prompt = asked("ab", Turn("ab", True))
    assert known.has_any_of(prompt, tenant="one")
    assert not known.has_any_of(prompt, tenant="two")
    assert list(known.put_back(prompt, by_characters("ab"), tenant="two").token_ids) == singly("ab")


@given(
    turns=st.lists(st.tuples(st.text("abc", max_size=6), st.booleans()), max_size=8),
    said=st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_splicing_changes_tokens_and_never_the_text(turns: list[tuple[str, bool]], said: list[str]) -> None:
    known = KnownAnswers(most_tokens=12)
    texts = {-number: text for number, (text, _) in enumerate(turns, start=1)}
    for number, (text, is_odd) in enumerate(turns, start=1):
        known.add(text, [-number] if is_odd else singly(text), canonical=singly(text))
        known.check_invariants()
    whole = MARK + MARK.join(piece for pair in zip([text for text, _ in turns], said, strict=False) for piece in pair) + MARK
    turns_of_it = [turn for (text, _), other in zip(turns, said, strict=False) for turn in (Turn(text, True), Turn(other, False))]
    marks = tuple(place for place, character in enumerate(whole) if character == MARK)
    tokens = known.put_back(asked(whole, *turns_of_it, branch_points=marks), by_characters(whole))
    assert "".join(texts[token] if token < 0 else chr(token) for token in tokens.token_ids) == whole
    assert [tokens.token_ids[place] for place in tokens.branch_points] == [ord(MARK)] * len(marks)


@given(lengths=st.lists(st.integers(1, 5), max_size=20))
def test_the_oldest_answers_go_first(lengths: list[int]) -> None:
    known = KnownAnswers(most_tokens=8)
    for number, length in enumerate(lengths):
        known.add(f"answer {number}", [number] * length, canonical=[])
        known.check_invariants()
        assert known.has_any_of(asked("", Turn(f"answer {number}", True)))


def test_an_answer_that_the_template_cuts_short_is_a_loss_and_counts_once() -> None:
    known = KnownAnswers()
    known.add("<think>because</think>Yes", [1, 2, 3, 4], canonical=[1, 2, 3, 4])
    known.add("No \n", [5, 6], canonical=[5, 6])
    messages = [Turn("Is it?", False), Turn("<think>because</think>Yes", True), Turn("Is it?", False), Turn("No \n", True)]
    whole, cut = "|Is it?|<think>because</think>Yes|Is it?|No|", "|Is it?|Yes|Is it?|No|"
    assert known.count_dropped(asked(whole, *messages)) == 0
    assert known.count_dropped(asked(cut, *messages), tenant="another") == 0
    assert known.count_dropped(asked(cut, *messages)) == 4
    assert known.count_dropped(asked(cut, *messages)) == 0
    assert known.dropped_tokens == 4


def test_what_others_wrote_into_a_history_is_no_loss() -> None:
    assert KnownAnswers().count_dropped(asked("|", Turn("I never said that", True))) == 0


def test_the_oldest_answers_are_no_longer_counted() -> None:
    known = KnownAnswers(most_counted=2)
    for text in ("one", "two", "three"):
        known.add(text, [1], canonical=[1])
    assert known.count_dropped(asked("", *(Turn(text, True) for text in ("one", "two", "three")))) == 2
