from __future__ import annotations

import time
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.store.block import BlockKey, child_key, root_key
from holdfast.wire.events import Divergence
from holdfast.worker.engine.plan import BLOCK_TOKENS
from holdfast.worker.prefix.chain import (
    ChainBlock,
    ChainState,
    Root,
    pack_tokens,
)
from holdfast.worker.prefix.tree import PrefixTree
from tests.fakes.chains import a_block, a_checkpoint, match, named, store_chain

ROOT = Root(root_key("model"))
token_lists = st.lists(st.integers(0, 2), max_size=30)


def shared_tokens(ours: list[int], theirs: list[int]) -> int:
    return next(
        (at for at, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other),
        min(len(ours), len(theirs)),
    )


@given(inserted=st.lists(st.tuples(token_lists, st.integers(1, 9)), max_size=8), probe=token_lists)
def test_the_longest_match_agrees_with_a_linear_scan(
    inserted: list[tuple[list[int], int]], probe: list[int]
) -> None:
    tree = PrefixTree()
    for chain, block_tokens in inserted:
        store_chain(tree, ROOT, chain, block_tokens=block_tokens)
        tree.check_invariants()
    expected = max((shared_tokens(chain, probe) for chain, _ in inserted), default=0)
    assert match(tree, probe, root=ROOT).tokens == expected


@given(inserted=st.lists(token_lists, max_size=8), probe=token_lists)
def test_a_divergence_is_reported_only_where_another_chain_continues(
    inserted: list[list[int]], probe: list[int]
) -> None:
    tree = PrefixTree()
    for chain in inserted:
        store_chain(tree, ROOT, chain, block_tokens=5)
    found = match(tree, probe, root=ROOT)
    going_on = {
        chain[found.tokens]
        for chain in inserted
        if chain[: found.tokens] == probe[: found.tokens] and len(chain) > found.tokens
    }
    if found.tokens == len(probe) or not going_on:
        assert found.divergence is None
    else:
        assert found.divergence is not None
        assert found.divergence.position == found.tokens
        assert found.divergence.prompt_token_id == probe[found.tokens]
        assert found.divergence.stored_token_id in going_on


@given(token_lists, token_lists, st.integers(1, 9))
def test_every_token_is_stored_once(one: list[int], other: list[int], block_tokens: int) -> None:
    tree = PrefixTree()
    store_chain(tree, ROOT, one, block_tokens=block_tokens)
    store_chain(tree, ROOT, other, block_tokens=block_tokens)
    assert tree.tokens == len(one) + len(other) - shared_tokens(one, other)
    before = len(tree)
    assert store_chain(tree, ROOT, one, block_tokens=3) == []
    assert len(tree) == before


def test_a_branch_inside_a_block_uses_a_part() -> None:
    tree = PrefixTree()
    (first,) = store_chain(tree, ROOT, [1, 2, 3, 4, 5])
    (second,) = store_chain(tree, ROOT, [1, 2, 3, 9, 9])
    found = match(tree, [1, 2, 3, 9, 9, 7], root=ROOT)
    assert found.blocks == (ChainBlock(first, 3, 3), ChainBlock(second, 2, 5))
    assert found.divergence is None
    assert (found.end.parent_key, found.end.parent_tokens, found.end.position) == (second, 2, 5)
    found = match(tree, [1, 2, 8], root=ROOT)
    assert found.blocks == (ChainBlock(first, 2, 2),)
    assert found.divergence == Divergence(position=2, stored_token_id=3, prompt_token_id=8)


def test_roots_share_nothing() -> None:
    tree = PrefixTree()
    other = Root(root_key("model", "somebody else"))
    store_chain(tree, ROOT, [1, 2, 3])
    assert match(tree, [1, 2, 3], root=other).tokens == 0
    store_chain(tree, other, [1, 2])
    assert match(tree, [1, 2, 3], root=other).tokens == 2
    assert (tree.tokens, tree.roots) == (5, 2)


def test_states_are_listed_up_to_the_end_of_the_match() -> None:
    tree = PrefixTree()
    first, second = store_chain(tree, ROOT, [1, 2, 3, 4, 5, 6], block_tokens=3)
    for key, parent, position in (
        (named("s2"), first, 2),
        (named("s3"), first, 3),
        (named("s5"), second, 5),
    ):
        assert tree.insert(a_checkpoint(key, parent_key=parent, position=position))
    (branch,) = store_chain(tree, ROOT, [1, 2, 9])
    tree.insert(a_checkpoint(named("s3'"), parent_key=branch, position=3))
    s2, s3, s5 = (ChainState(named(f"s{position}"), position) for position in (2, 3, 5))
    assert match(tree, [1, 2, 3, 4, 5, 6], root=ROOT).states == (s2, s3, s5)
    assert match(tree, [1, 2, 3, 4, 9], root=ROOT).states == (s2, s3)
    assert match(tree, [1, 2, 9], root=ROOT).states == (s2, ChainState(named("s3'"), 3))
    assert match(tree, [1], root=ROOT).states == ()


def chain_cut_at(
    chain: list[int], cuts: list[int]
) -> list[tuple[BlockKey, BlockKey, int, list[int]]]:
    """The blocks that another process makes of a chain: key, parent key, the parent's tokens,
    tokens.
    """
    blocks = []
    parent, parent_tokens = ROOT.key, 0
    for begin, end in zip([0, *cuts], [*cuts, len(chain)], strict=True):
        key = child_key(parent, parent_tokens, pack_tokens(chain[begin:end]), "kv")
        blocks.append((key, parent, parent_tokens, chain[begin:end]))
        parent, parent_tokens = key, end - begin
    return blocks


def insert_all(
    tree: PrefixTree, blocks: list[tuple[BlockKey, BlockKey, int, list[int]]]
) -> list[bool]:
    return [
        tree.insert(a_block(key, parent_key=parent, parent_tokens=cut, token_ids=ids))
        for key, parent, cut, ids in blocks
    ]


def test_blocks_cut_differently_by_another_process_fit_in() -> None:
    tree = PrefixTree()
    ours = chain_cut_at([1, 2, 3, 4, 5, 6], [3])
    theirs = chain_cut_at([1, 2, 3, 4, 5, 7, 8], [2, 4])
    insert_all(tree, ours)
    assert insert_all(tree, theirs) == [False, False, True]
    tree.check_invariants()
    found = match(tree, [1, 2, 3, 4, 5, 7, 8], root=ROOT)
    assert found.blocks == (
        ChainBlock(ours[0][0], 3, 3),
        ChainBlock(ours[1][0], 2, 5),
        ChainBlock(theirs[2][0], 3, 7),
    )
    assert tree.insert(a_checkpoint(named("s"), parent_key=theirs[1][0], position=4))
    assert match(tree, [1, 2, 3, 4], root=ROOT).states == (ChainState(named("s"), 4),)
    tree.remove(theirs[2][0])
    with pytest.raises(AssertionError):
        tree.remove(ours[1][0])
    tree.remove(named("s"))
    tree.remove(ours[1][0])
    assert theirs[1][0] not in tree, "what was covered goes with what covered it"
    assert theirs[0][0] in tree
    tree.check_invariants()


def test_a_state_with_two_keys_is_removed_with_the_first() -> None:
    tree = PrefixTree()
    ours, theirs = chain_cut_at([1, 2, 3, 4], [3]), chain_cut_at([1, 2, 3, 4], [2])
    insert_all(tree, ours + theirs)
    assert tree.insert(a_checkpoint(named("ours"), parent_key=ours[1][0], position=4))
    assert not tree.insert(a_checkpoint(named("theirs"), parent_key=theirs[1][0], position=4))
    tree.remove(named("ours"))
    assert named("theirs") not in tree
    tree.check_invariants()


def test_only_leaves_are_removed_and_roots_with_their_last_block() -> None:
    tree = PrefixTree()
    first, second = store_chain(tree, ROOT, [1, 2, 3, 4], block_tokens=2)
    tree.insert(a_checkpoint(named("state"), parent_key=second, position=4))
    for needed in (first, second):
        with pytest.raises(AssertionError):
            tree.remove(needed)
    assert tree.subtree(first) == (named("state"), second, first)
    assert tree.with_ancestors([named("state"), named("unknown")]) == {
        named("state"),
        second,
        first,
    }
    for key in tree.subtree(first):
        tree.remove(key)
        tree.check_invariants()
    assert (len(tree), tree.roots, tree.tokens) == (0, 0, 0)
    with pytest.raises(KeyError):
        tree.remove(first)


def test_a_block_without_its_parent_is_refused() -> None:
    tree = PrefixTree()
    (block,) = store_chain(tree, ROOT, [1, 2, 3])
    for parent, cut in ((named("unknown"), 1), (block, 4), (block, 0)):
        with pytest.raises(ValueError, match="not stored"):
            tree.insert(a_block(named("new"), parent_key=parent, parent_tokens=cut, token_ids=[1]))
    for parent, position in ((named("unknown"), 1), (block, 4), (block, 0), (ROOT.key, 0)):
        with pytest.raises(ValueError, match="not stored"):
            tree.insert(a_checkpoint(named("new"), parent_key=parent, position=position))
    for tokens in ([], [1] * (BLOCK_TOKENS + 1)):
        with pytest.raises(ValueError, match="a block has"):
            tree.insert(a_block(named("new"), parent_key=block, parent_tokens=3, token_ids=tokens))
    tree.check_invariants()


def test_known_blocks_and_states_are_not_stored_again() -> None:
    tree = PrefixTree()
    blocks = chain_cut_at([1, 2, 3, 4], [2])
    assert insert_all(tree, blocks) == [True] * 2
    assert insert_all(tree, blocks) == [False] * 2
    tree.insert(a_checkpoint(named("s"), parent_key=blocks[1][0], position=4))
    assert not tree.insert(a_checkpoint(named("s"), parent_key=blocks[1][0], position=4))
    assert not tree.insert(a_checkpoint(named("t"), parent_key=blocks[1][0], position=4))


def test_a_hundred_thousand_tokens_are_matched_in_milliseconds() -> None:
    tree = PrefixTree()
    chain = array("I", (token * 7919 % 150_000 for token in range(100_000)))
    store_chain(tree, ROOT, chain, block_tokens=BLOCK_TOKENS)
    seconds = []
    for _ in range(20):
        begin = time.perf_counter()
        assert match(tree, chain, root=ROOT).tokens == 100_000
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.005
