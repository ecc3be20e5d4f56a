import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.wire.requests import TokenIds

ids = st.lists(st.integers(0, 2**32 - 1), max_size=20)
places = st.integers(-25, 25) | st.none()


@given(left=ids, right=ids, start=places, end=places)
def test_packed_ids_can_be_sliced_joined_and_read(
    left: list[int], right: list[int], start: int, end: int
) -> None:
    packed = TokenIds.of(left)
    assert (list(packed), len(packed)) == (left, len(left))
    assert packed[start:end] == TokenIds.of(left[start:end])
    assert packed + TokenIds.of(right) == TokenIds.of(left + right)
    assert all(each in packed for each in left)
    assert packed.view.tolist() == left


@given(ids)
def test_packed_ids_are_encoded_as_their_bytes(given_ids: list[int]) -> None:
    packed = TokenIds.of(given_ids)
    sent = msgspec.msgpack.encode(packed)
    assert msgspec.msgpack.decode(sent, type=TokenIds) == packed
    assert packed.packed in sent


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_an_id_out_of_range_is_an_error(token_id: int) -> None:
    with pytest.raises(OverflowError):
        TokenIds.of([1, token_id])
