"""Remembered texts have the tokens of the whole, within a limit and separately for each tenant."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.front.prompt import beginnings, text_splits
from holdfast.front.prompt.known_answers import AnswerMeaning
from holdfast.front.prompt.text_places import AnswerFrame
from holdfast.front.prompt.token_memory import TokenMemory, _Piece
from holdfast.front.prompt.tokenize import Tokenizer
from holdfast.wire.requests import TokenIds
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


HEADER, END = "<|im_start|>", "<|im_end|>"
FRAME = AnswerFrame(headers=(HEADER,), ends=(END,))


@settings(max_examples=60)
@given(
    kind=st.integers(0, len(toy_tokenizers.EXACT) - 1),
    turns=st.lists(
        st.lists(st.sampled_from(WORDS), max_size=30).map("".join), min_size=2, max_size=6
    ),
    edited=st.integers(0, 200),
    tenants=st.lists(st.sampled_from(["", "t"]), min_size=12, max_size=12),
    places=st.lists(st.integers(0, 200), max_size=4),
    short=st.booleans(),
)
def test_a_later_turn_is_read_like_a_first_one(
    tokenizers: list[Tokenizer],
    kind: int,
    turns: list[str],
    edited: int,
    tenants: list[str],
    places: list[int],
    short: bool,
) -> None:
    memory, tokenizer = TokenMemory(), tokenizers[kind]
    text = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beginnings, "_MIN_LENGTH", 0)
        patch.setattr(beginnings, "_END_LENGTH", 8)
        patch.setattr(text_splits, "_SHORT_CHARACTERS", 1 if short else 64)
        patch.setattr(text_splits, "_LONG_CHARACTERS", 3 if short else 80)
        for number, turn in enumerate(turns):
            text += turn
            for part, asked in enumerate((text, text[:edited] + "x" + text[edited:])):
                tenant = tenants[2 * number + part]
                opened = memory.cut_prompt(asked, tokenizer, frame=FRAME, tenant=tenant)
                assert list(opened.candidates) == list(FRAME.candidates(asked))
                known = [min(place, len(asked)) for place in places]
                found = memory.tokens_of(asked, tokenizer, tenant=tenant, places=known)
                (whole,) = tokenizer.encode_in_place([asked])
                assert found.token_ids == whole.token_ids
                assert [found.tokens_before(at) for at in known] == [
                    whole.tokens_before(at) for at in known
                ]
                memory.check_invariants()


@settings(max_examples=60)
@given(
    kind=st.integers(0, len(toy_tokenizers.EXACT) - 1),
    turns=st.lists(
        st.tuples(
            st.lists(st.sampled_from(WORDS), min_size=1, max_size=30).map("".join),
            st.lists(st.integers(0, 80), max_size=3),
            st.lists(st.integers(0, 80), max_size=3),
            st.booleans(),
            st.booleans(),
        ),
        min_size=2,
        max_size=6,
    ),
    framed=st.booleans(),
)
def test_known_positions_outlive_forgotten_pieces(
    tokenizers: list[Tokenizer],
    kind: int,
    turns: list[tuple[str, list[int], list[int], bool, bool]],
    framed: bool,
) -> None:
    memory, tokenizer = TokenMemory(), tokenizers[kind]
    frame = FRAME if framed else None
    text = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beginnings, "_MIN_LENGTH", 0)
        patch.setattr(beginnings, "_END_LENGTH", 8)
        for turn, first, second, *forgets in turns:
            text += turn
            if forgets[0]:
                forget_pieces(memory)
            opened = memory.cut_prompt(text, tokenizer, frame=frame)
            memory.check_invariants()
            places = [min(place, len(text)) for place in first]
            if places:  # of images, for example
                memory.tokens_of(text, tokenizer, places=places)
                memory.check_invariants()
            if forgets[1]:
                forget_pieces(memory)
            edges = [edge for spans in opened.candidates for span in spans for edge in span]
            places += [*edges, *(min(place, len(text)) for place in second)]
            found = memory.tokens_of(text, tokenizer, places=places)
            memory.check_invariants()
            (whole,) = tokenizer.encode_in_place([text])
            assert found.token_ids == whole.token_ids
            assert [found.tokens_before(at) for at in places] == [
                whole.tokens_before(at) for at in places
            ]


def forget_pieces(memory: TokenMemory) -> None:
    """Let the memory forget all pieces, as if other texts had displaced them."""
    pieces = memory._pieces
    for key in dict(pieces.items()):
        pieces.put(key, _Piece(TokenIds(), {}), size=pieces._limit + 1)
    assert not pieces.items()


def test_meanings_are_read_again_only_for_other_tools() -> None:
    memory, tokenizer = TokenMemory(), NotingTokenizer()
    tools: list[dict[str, str]] = [{}]
    read: list[str] = []

    def meaning(text: str) -> AnswerMeaning:
        read.append(text)
        return AnswerMeaning(content=text)

    def turn(text: str, tools: list[dict[str, str]]) -> list[str]:
        read.clear()
        opened = memory.cut_prompt(text, tokenizer, frame=FRAME, tools=tools)
        for (span,) in opened.candidates:
            assert opened.meaning(span, meaning).content == text[span.start : span.end]
        return list(read)

    answers = [f"{HEADER}{'hello ' * 300}{number}{END} the " for number in range(9)]
    assert len(turn("".join(answers[:8]), tools)) == 8
    # the last ones could still become parts of longer answers
    assert len(turn("".join(answers), tools)) == 4
    assert len(turn("".join(answers), [{}])) == 9


def test_a_prompt_takes_the_place_of_its_earlier_turn() -> None:
    memory, tokenizer = TokenMemory(max_bytes=8 << 20), NotingTokenizer()
    text = ""
    for number in range(40):
        text += f"{HEADER}{'hello ' * 1000}{number}{END}"
        memory.cut_prompt(text, tokenizer)
        memory.check_invariants()
    assert len(memory._prompts.items()) == 1
    for number in range(100):
        memory.cut_prompt(f"{number} {text[:5000]}", tokenizer)
    assert len(memory._prompts.items()) <= 64
    memory.check_invariants()


@pytest.mark.parametrize("word", ["hello ", "é ", "字 ", "🙂 "])
def test_a_prompt_takes_at_most_the_memory_that_is_counted(word: str) -> None:
    memory, tokenizer = TokenMemory(), NotingTokenizer()
    text = "".join(f"{HEADER}{word}{number}{END}" for number in range(1000))
    tracemalloc.start()
    try:
        taken = tracemalloc.get_traced_memory()[0]
        for turn in range(2):
            asked = f"{text}{turn}"
            opened = memory.cut_prompt(asked, tokenizer, frame=FRAME, tools=())
            for spans in opened.candidates:
                for span in spans:
                    opened.meaning(span, lambda said: AnswerMeaning(content=said))
            edges = [edge for spans in opened.candidates for span in spans for edge in span]
            memory.tokens_of(asked, tokenizer, places=edges)
            memory.check_invariants()
        del opened, asked, edges, spans, span
        forget_pieces(memory)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - taken
    finally:
        tracemalloc.stop()
    counted = memory._prompts._texts._used
    assert counted / 2 < taken < 1.05 * counted


def test_the_prompts_of_four_agents_are_remembered_by_default() -> None:
    memory, tokenizer = TokenMemory(), NotingTokenizer()
    turns = f"{HEADER}{'hello ' * 100}{END}" * 650
    agents = [f"{agent} {turns}" for agent in range(4)]
    for text in agents:
        assert len(text) > 400_000
        memory.cut_prompt(text, tokenizer, frame=FRAME)
        memory.tokens_of(text, tokenizer)
    assert [prompt.text for prompt in memory._prompts.items()] == agents


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
    memory, tokenizer = TokenMemory(max_bytes=2400), NotingTokenizer()
    for text in ("hello", "world", "hello", "the", "hello", "the", "world"):
        memory.tokens_of(text, tokenizer)
    assert tokenizer.asked == ["hello", "world", "the", "world"]
    memory.check_invariants()
