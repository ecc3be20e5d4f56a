"""Answers in place of the tokenizer's tokens."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.prompt.prepare import splice
from holdfast.front.prompt.tokenize import EncodedText, Tokenizer, TokenMemory, load_tokenizer
from holdfast.front.request import PlacedAnswer, PromptText
from holdfast.models.download import demo_folder

MARK = "|"


def by_characters(text: str, *, pair: str = "") -> EncodedText:
    """An encoding with a token for each `pair` and every other character; ids of single characters
    are their code points.
    """
    token_ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    at = 0
    while at < len(text):
        width = len(pair) if pair and text.startswith(pair, at) else 1
        token_ids.append(ord(text[at]) if width == 1 else 1_000_000)
        offsets.append((at, at + width))
        at += width

    def char_to_token(character: int) -> int | None:
        return next(
            (token for token, (start, end) in enumerate(offsets) if start <= character < end), None
        )

    found = SimpleNamespace(
        ids=token_ids,
        offsets=offsets,
        char_to_token=char_to_token,
        token_to_chars=offsets.__getitem__,
    )
    return EncodedText(found, characters=len(text))  # type: ignore[arg-type]


@cache
def bundled_tokenizer() -> Tokenizer:
    return load_tokenizer(demo_folder())


def singly(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def test_only_the_answers_tokens_are_replaced() -> None:
    whole = "|u|bb|a|abba|u|bb|"
    prompt = PromptText(text=whole, answers=(PlacedAnswer(8, 12, singly("abba")),))
    tokens = splice(prompt, by_characters(whole, pair="bb"))
    before, behind = (
        by_characters("|u|bb|a|", pair="bb").token_ids,
        by_characters("|u|bb|", pair="bb").token_ids,
    )
    assert tuple(tokens.token_ids) == (*before, *singly("abba"), *behind)
    assert tokens.put_back_tokens == 4


def test_answers_with_edges_within_tokens_are_skipped() -> None:
    whole = "|bba|"
    encoding = by_characters(whole, pair="bb")
    tokens = splice(PromptText(text=whole, answers=(PlacedAnswer(2, 4, (7, 8)),)), encoding)
    assert tokens.token_ids == encoding.token_ids
    assert tokens.put_back_tokens == 0


@given(said=st.lists(st.tuples(st.text("abc", max_size=6), st.integers(0, 6)), max_size=8))
def test_inserted_answers_shift_later_positions(said: list[tuple[str, int]]) -> None:
    whole = MARK + "".join(text + MARK for text, _ in said)
    marks = tuple(place for place, character in enumerate(whole) if character == MARK)
    answers = tuple(
        PlacedAnswer(start + 1, end, (9_000_000 + number,) * length)
        for number, (start, end, (text, length)) in enumerate(
            zip(marks, marks[1:], said, strict=False)
        )
        if text
    )
    tokens = splice(
        PromptText(text=whole, answers=answers, branch_points=marks), by_characters(whole)
    )
    expected = [ord(MARK)]
    for number, (text, length) in enumerate(said):
        expected += [*((9_000_000 + number,) * length if text else ()), ord(MARK)]
    assert list(tokens.token_ids) == expected
    assert [tokens.token_ids.view[place] for place in tokens.branch_points] == [ord(MARK)] * len(
        marks
    )


PIECES = (
    "hello",
    " world",
    "<|im_end|>",
    "<|im_\ufdd5end|>",
    "\ufdd5",
    "é",
    "😀",
    "日本",
    "\n",
    "a",
)


@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    places=st.lists(st.integers(0, 60), min_size=3, max_size=3),
    remembered=st.booleans(),
)
def test_positions_equal_those_of_a_scan_of_all_tokens(
    pieces: list[str], places: list[int], remembered: bool
) -> None:
    text, tokenizer = "".join(pieces), bundled_tokenizer()
    start, end, point = sorted(min(place, len(text)) for place in places)
    whole = tokenizer.backend.encode(text, add_special_tokens=False)
    offsets, ids = whole.offsets, whole.ids
    prompt = PromptText(
        text=text, answers=(PlacedAnswer(start, end, (9_000_000,)),), breakpoints=(point,)
    )
    inside = [
        number for number, (left, right) in enumerate(offsets) if start <= left and left < end
    ]
    cut = [left for left, right in offsets for edge in (start, end) if left < edge < right]
    fits = bool(inside) and not cut
    expected = [*ids[: inside[0]], 9_000_000, *ids[inside[-1] + 1 :]] if fits else ids
    of_memory = TokenMemory().tokens_of(text, tokenizer, places=(start, end, point))
    tokens = splice(prompt, of_memory if remembered else tokenizer.encode_in_place([text])[0])
    assert list(tokens.token_ids) == expected
    if not fits:
        assert tokens.breakpoints == (sum(right <= point for _, right in offsets),)
