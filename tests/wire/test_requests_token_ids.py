from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.wire.requests import common_tokens, token_at
from holdfast.worker.prefix.chain import pack_tokens

token_ids = st.integers(0, 2**32 - 1)


@given(
    shared=st.lists(token_ids, max_size=1500),
    ours=st.lists(token_ids, max_size=700),
    theirs=st.lists(token_ids, max_size=700),
)
def test_common_tokens_equal_a_plain_count(
    shared: list[int], ours: list[int], theirs: list[int]
) -> None:
    ours, theirs = shared + ours, shared + theirs
    counted = next(
        (
            index
            for index, (one, other) in enumerate(zip(ours, theirs, strict=False))
            if one != other
        ),
        min(len(ours), len(theirs)),
    )
    assert common_tokens(pack_tokens(ours), pack_tokens(theirs)) == counted


def test_the_first_difference_is_found_in_any_byte() -> None:
    ours = list(range(3000))
    for index in range(0, 3000, 7):
        for byte in range(4):
            theirs = [*ours]
            theirs[index] ^= 1 << (8 * byte + 7)
            assert common_tokens(pack_tokens(ours), pack_tokens(theirs)) == index


def test_a_token_round_trips() -> None:
    assert token_at(pack_tokens([1, 2**32 - 1, 70_000]), 1) == 2**32 - 1
