"""Remembered texts have the tokens of the whole, within a limit and separately for each tenant."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.front.prompt.token_memory import TokenMemory
from holdfast.front.prompt.tokenize import Tokenizer
from tests.fakes import toy_tokenizers

WORDS = (
    "hello",
    " world",
    "<|im_start|>",
    "<|im_end|>\n",
    "<s>",
    "é",
    "🙂",
    " ",
    "the",
    "\n",
    "<think>",
    "</think>",
    "'s 12",
)


@pytest.fixture(scope="module")
def tokenizers() -> list[Tokenizer]:
    return [Tokenizer(make(), config={}) for make in toy_tokenizers.EXACT.values()]


@settings(max_examples=30)
@given(
    kind=st.integers(0, len(toy_tokenizers.EXACT) - 1),
    turns=st.lists(
        st.lists(st.sampled_from(WORDS), max_size=10).map("".join), min_size=1, max_size=5
    ),
    edited=st.integers(0, 40),
    max_bytes=st.sampled_from([0, 2000, 1 << 20]),
    places=st.lists(st.integers(0, 60), max_size=4),
)
def test_remembered_tokens_and_positions_survive_turns_and_edits(
    tokenizers: list[Tokenizer],
    kind: int,
    turns: list[str],
    edited: int,
    max_bytes: int,
    places: list[int],
) -> None:
    memory, tokenizer = TokenMemory(max_bytes=max_bytes), tokenizers[kind]
    text = ""
    for turn in turns:
        text += turn
        for asked in (text, text[:edited] + "x" + text[edited:]):
            known = [min(place, len(asked)) for place in places]
            found = memory.tokens_of(asked, tokenizer, places=known)
            (whole,) = tokenizer.encode_in_place([asked])
            assert found.token_ids == whole.token_ids
            assert [found.tokens_before(at) for at in known] == [
                whole.tokens_before(at) for at in known
            ]
            spans = [(start, end) for start in known for end in known]
            assert [found.span(*each) for each in spans] == [whole.span(*each) for each in spans]
            memory.check_invariants()


class NotingTokenizer(Tokenizer):
    """Records the requested texts."""

    def __init__(self) -> None:
        super().__init__(toy_tokenizers.byte_level(), config={})
        self.asked: list[str] = []

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        self.asked += texts
        return super().encode_all(texts)


def test_only_new_text_is_tokenized() -> None:
    memory, tokenizer = TokenMemory(), NotingTokenizer()
    first, second = f"<|im_start|>{'hello' * 20}", f"<|im_start|>{'world' * 20}"
    for text in (f"{first}<|im_end|>", f"{first}<|im_end|>{second}"):
        memory.tokens_of(text, tokenizer)
    assert tokenizer.asked == [first, "<|im_end|>", f"<|im_end|>{second}"]


def test_tenants_do_not_share_texts() -> None:
    memory, tokenizer = TokenMemory(), NotingTokenizer()
    for tenant in ("a", "b", "", "a"):
        memory.tokens_of("hello world", tokenizer, tenant=tenant)
    assert tokenizer.asked == ["hello world"] * 3


def test_the_least_recently_used_text_is_forgotten_first() -> None:
    memory, tokenizer = TokenMemory(max_bytes=1600), NotingTokenizer()
    for text in ("hello", "world", "hello", "the", "hello", "the", "world"):
        memory.tokens_of(text, tokenizer)
    assert tokenizer.asked == ["hello", "world", "the", "world"]
    memory.check_invariants()
