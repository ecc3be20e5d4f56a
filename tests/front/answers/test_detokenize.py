"""Detokenizing a few tokens at a time gives the same text as decoding the whole."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from holdfast.front.answers.detokenize import PlacedToken, detokenizer, place_by_bytes
from holdfast.front.answers.pieces import TokenPieces
from tests.fakes import toy_tokenizers

FAMILIES = tuple(toy_tokenizers.EXACT)


@cache
def family(name: str) -> tuple[Tokenizer, TokenPieces]:
    tokenizer = toy_tokenizers.EXACT[name]()
    return tokenizer, TokenPieces(tokenizer)


@st.composite
def tokens_in_parts(draw: st.DrawFn) -> tuple[str, list[list[int]]]:
    """Random ids of a family: some unknown, many of them bytes of real characters."""
    name = draw(st.sampled_from(FAMILIES))
    tokenizer, _ = family(name)
    size = tokenizer.get_vocab_size()
    random_ids = st.lists(st.integers(0, size + 3), max_size=12)
    real_ids = st.text(max_size=8).map(
        lambda text: tokenizer.encode(text.replace("\0", ""), add_special_tokens=False).ids
    )
    ids = [
        token_id for run in draw(st.lists(random_ids | real_ids, max_size=4)) for token_id in run
    ]
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    return name, [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def joined(
    pieces: TokenPieces,
    parts: list[list[int]],
    *,
    at_start: bool = True,
    show_special: bool = False,
) -> str:
    text = detokenizer(pieces, at_start=at_start, show_special=show_special)
    return "".join([*(text.push(part) for part in parts), text.flush()])


@settings(max_examples=30)
@given(tokens_in_parts())
def test_decoding_in_parts_equals_decoding_the_whole(case: tuple[str, list[list[int]]]) -> None:
    name, parts = case
    tokenizer, pieces = family(name)
    whole = [token_id for part in parts for token_id in part]
    assert joined(pieces, parts) == tokenizer.decode(whole, skip_special_tokens=True)


@given(tokens_in_parts())
def test_special_tokens_can_be_shown_as_well(case: tuple[str, list[list[int]]]) -> None:
    name, parts = case
    tokenizer, pieces = family(name)
    whole = [token_id for part in parts for token_id in part]
    assert joined(pieces, parts, show_special=True) == tokenizer.decode(
        whole, skip_special_tokens=False
    )


@settings(max_examples=30)
@given(tokens_in_parts(), st.sampled_from(["a", "hello"]))
def test_a_continuation_adds_exactly_its_own_text(
    case: tuple[str, list[list[int]]], before: str
) -> None:
    name, parts = case
    tokenizer, pieces = family(name)
    ids = tokenizer.encode(before, add_special_tokens=False).ids
    whole = [*ids, *(token_id for part in parts for token_id in part)]
    expected = tokenizer.decode(whole, skip_special_tokens=True)
    assert (
        tokenizer.decode(ids, skip_special_tokens=True) + joined(pieces, parts, at_start=False)
        == expected
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_needs_the_slow_path(name: str) -> None:
    assert family(name)[1].rules.style != "opaque"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_multi_token_character_appears_when_complete(name: str) -> None:
    tokenizer, pieces = family(name)
    text = detokenizer(pieces)
    ids = tokenizer.encode("a🙂", add_special_tokens=False).ids
    shown = "".join(text.push([token_id]) for token_id in ids[:-1])
    assert shown == "a"
    assert text.push(ids[-1:]) + text.flush() == "🙂"


@pytest.mark.parametrize("name", FAMILIES)
def test_added_tokens_are_shown_and_special_ones_are_not(name: str) -> None:
    tokenizer, pieces = family(name)
    special = next(
        token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    )
    think = tokenizer.token_to_id("<think>")
    assert joined(pieces, [[think, special], [think]]) == "<think><think>"


def test_the_bytes_of_tokens_are_those_of_the_text() -> None:
    for name in FAMILIES:
        tokenizer, pieces = family(name)
        ids = tokenizer.encode("hello the world, привет 🙂\n", add_special_tokens=False).ids
        assert (
            b"".join(pieces.raw(token_id) for token_id in ids).decode().removeprefix(" ")
            == "hello the world, привет 🙂\n"
        )


@given(st.lists(st.integers(0, 8), max_size=30))
def test_an_unsupported_decoder_is_followed_by_windows(ids: list[int]) -> None:
    tokenizer = toy_tokenizers.word_pieces()
    pieces = TokenPieces(tokenizer)
    assert pieces.rules.style == "opaque"
    assert joined(pieces, [[token_id] for token_id in ids]) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte_level", "gemma"])
def test_a_known_token_needs_no_call_of_the_tokenizer(name: str) -> None:
    tokenizer, _ = family(name)
    asked: list[str] = []

    class Counted:
        def __getattr__(self, method: str) -> object:
            asked.append(method)
            return getattr(tokenizer, method)

    text = detokenizer(TokenPieces(Counted()))  # type: ignore[arg-type]
    ids = tokenizer.encode("hello the world 🙂 ", add_special_tokens=False).ids
    text.push(ids)
    asked.clear()
    for token_id in ids * 200:
        text.push((token_id,))
    assert asked == []


# Tokens decoded together are assigned the characters that they produced.


def placed(count: int) -> list[PlacedToken]:
    return [PlacedToken(token_id, 7, 7, "", None) for token_id in range(count)]


def test_the_bytes_of_one_character_have_its_position() -> None:
    tokens = placed(5)
    assert place_by_bytes("\n🙂", tokens, [b"\n", b"\xf0", b"\x9f", b"\x99", b"\x82"], start=7)
    assert [(token.start, token.end) for token in tokens] == [
        (7, 8),
        (8, 9),
        (8, 9),
        (8, 9),
        (8, 9),
    ]


def test_replaced_bytes_are_not_placed() -> None:
    tokens = placed(2)
    assert not place_by_bytes("\ufffd", tokens, [b"\xf0", b"\x9f"], start=7)
    assert [(token.start, token.end) for token in tokens] == [(7, 7), (7, 7)]


@given(st.text(min_size=1, max_size=10), st.data())
def test_every_character_belongs_to_the_tokens_of_its_bytes(text: str, data: st.DataObject) -> None:
    whole = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    raws = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    tokens = placed(len(raws))
    assert place_by_bytes(text, tokens, raws, start=7)
    done = 0
    for token, raw in zip(tokens, raws, strict=True):
        before, done = done, done + len(raw)
        if raw:
            assert token.start - 7 == len(_begun(whole, before))
            assert token.end - 7 == len(_begun(whole, done - 1)) + 1
            assert token.emitted == text[token.start - 7 : token.end - 7]


def _begun(whole: bytes, place: int) -> str:
    """The characters before the one that the byte at `place` belongs to."""
    while whole[place] & 0xC0 == 0x80:
        place -= 1
    return whole[:place].decode()
