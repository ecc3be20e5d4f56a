from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.prefix.keys import pack_tokens, root_key
from holdfast.worker.prefix.piece import Cursor, Piece
from holdfast.worker.prefix.tree import PrefixTree
from tests.fakes.chains import store_chain

ROOT = root_key("model")


def test_a_piece_ends_behind_its_tokens_and_a_checkpoint_where_it_stands() -> None:
    assert Piece(b"a", "kv", 3, 4, 1).end == 7
    assert Piece(b"s", "state", 5).end == 5


def test_a_cursor_without_a_node_stands_at_the_root() -> None:
    cursor = Cursor(ROOT)
    assert (cursor.position, cursor.parent_key, cursor.parent_tokens) == (0, ROOT, 0)
    assert cursor.back_at(0).position == 0


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=20),
    st.lists(st.integers(0, 2), max_size=20),
    st.integers(1, 6),
    st.data(),
)
def test_a_cursor_that_goes_back_stands_where_one_does_that_has_walked_there(
    chain: list[int], other: list[int], block_tokens: int, data: st.DataObject
) -> None:
    tree = PrefixTree()
    store_chain(tree, ROOT, other, block_tokens=3)
    store_chain(tree, ROOT, chain, block_tokens=block_tokens)
    packed = pack_tokens(chain)
    cursor = Cursor(ROOT)
    tree.advance(cursor, packed, end=len(chain))
    assert cursor.position == len(chain)
    position = data.draw(st.integers(0, len(chain)))
    walked = Cursor(ROOT)
    tree.advance(walked, packed, end=position)
    back = cursor.back_at(position)
    assert (back.position, back.parent_key, back.parent_tokens) == (
        position,
        walked.parent_key,
        walked.parent_tokens,
    )
