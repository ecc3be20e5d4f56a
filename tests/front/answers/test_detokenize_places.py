"""Tokens decoded together are assigned the characters that they produced."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.answers.detokenize import PlacedToken, spread


def placed(count: int) -> list[PlacedToken]:
    return [PlacedToken(token_id, 7, 7, "", None) for token_id in range(count)]


def test_the_bytes_of_one_character_have_its_position() -> None:
    tokens = placed(5)
    assert spread("\n🙂", tokens, [b"\n", b"\xf0", b"\x9f", b"\x99", b"\x82"], start=7)
    assert [(token.start, token.end) for token in tokens] == [
        (7, 8),
        (8, 9),
        (8, 9),
        (8, 9),
        (8, 9),
    ]


def test_replaced_bytes_are_not_spread() -> None:
    tokens = placed(2)
    assert not spread("\ufffd", tokens, [b"\xf0", b"\x9f"], start=7)
    assert [(token.start, token.end) for token in tokens] == [(7, 7), (7, 7)]


@given(st.text(min_size=1, max_size=10), st.data())
def test_every_character_belongs_to_the_tokens_of_its_bytes(text: str, data: st.DataObject) -> None:
    whole = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    raws = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    tokens = placed(len(raws))
    assert spread(text, tokens, raws, start=7)
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
