from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from holdfast.store.block import root_key
from holdfast.worker.prefix.chain import (
    Branch,
    ChainBlock,
    ChainState,
    Cursor,
    Root,
    pack_tokens,
)
from holdfast.worker.prefix.tree import PrefixTree
from tests.fakes.chains import store_chain

ROOT = Root(root_key("model"))


def test_a_blocks_start_is_its_end_minus_its_tokens() -> None:
    assert ChainBlock(b"a", 5, 7).start == 2


def test_branches_are_serialized_with_the_names_of_session_records() -> None:
    branch = Branch(blocks=(ChainBlock(b"a", 2, 2),), states=(ChainState(b"s", 2),))
    encoded = msgspec.msgpack.encode(branch)
    assert msgspec.msgpack.decode(encoded) == {
        "steps": [{"key": b"a", "tokens": 2, "end": 2}],
        "states": [{"key": b"s", "position": 2}],
        "kv_bits": "native",
    }
    assert msgspec.msgpack.decode(encoded, type=Branch) == branch


def test_a_cursor_without_a_node_is_at_the_root() -> None:
    cursor = Cursor(ROOT)
    assert (cursor.position, cursor.parent_key, cursor.parent_tokens) == (0, ROOT.key, 0)
    assert cursor.back_at(0).position == 0


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=20),
    st.lists(st.integers(0, 2), max_size=20),
    st.integers(1, 6),
    st.data(),
)
def test_a_cursor_moved_back_equals_one_that_walked_there(
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
