"""Tests of the agreement of answers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_bench.quality import agreement, common_prefix

words = st.lists(st.sampled_from(["a", "b", "c"]), max_size=8)


def test_tokens_agree_up_to_the_first_difference() -> None:
    found = agreement(["a b c d", "x"], ["a b X d", "x"], cut=str.split)
    assert found is not None
    assert (found.tokens, found.agreeing_tokens, found.answers, found.equal_answers) == (5, 3, 2, 1)
    assert found.rate == 0.6


def test_a_longer_answer_does_not_fully_agree() -> None:
    found = agreement(["a b"], ["a b c"], cut=str.split)
    assert found is not None
    assert (found.agreeing_tokens, found.tokens) == (2, 3)


def test_without_answers_the_agreement_is_none() -> None:
    assert agreement([], [], cut=str.split) is None


@given(words, words)
def test_the_common_prefix_is_the_longest_one(left: list[str], right: list[str]) -> None:
    length = common_prefix(left, right)
    assert left[:length] == right[:length]
    assert length == min(len(left), len(right)) or left[length] != right[length]
