"""Prompts of a wanted length."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from holdfast_bench.prompts import WORDS, PromptMaker, text_of, words


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> PromptMaker:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(WordLevel({"?": 0, ".": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return PromptMaker(folder)


@pytest.mark.parametrize("tokens", [1, 2, 17, 500, 3000])
def test_a_text_has_the_requested_number_of_tokens(maker: PromptMaker, tokens: int) -> None:
    assert abs(len(maker.tokens(maker.text(tokens, seed="a"))) - tokens) <= 2


def test_texts_of_different_seeds_differ_from_the_start(maker: PromptMaker) -> None:
    assert maker.text(50, seed="a") == maker.text(50, seed="a")
    assert maker.text(50, seed="a").split()[:3] != maker.text(50, seed="b").split()[:3]


def test_without_a_tokenizer_lengths_are_estimated(tmp_path: Path) -> None:
    guessing = PromptMaker(tmp_path)
    assert 40 < len(guessing.text(100, seed="a").split()) < 100
    assert guessing.tokens("two words.") == ["two", " ", "words", "."]


@given(st.integers(min_value=1, max_value=300))
def test_texts_have_the_requested_number_of_words(count: int) -> None:
    text = text_of(count, seed="s")
    assert len(text.split()) == count
    assert all(word.rstrip(".") in set(words()) for word in text.split()[:5])


def test_the_words_of_the_lexicon_are_unique() -> None:
    assert len(set(words())) == len(words()) == WORDS
