"""The prefix tree under random insertions and removals, compared with a list of all stored chains."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.store.block import BlockKey, child_key, root_key
from holdfast.worker.prefix.chain import (
    Root,
    pack_tokens,
)
from holdfast.worker.prefix.tree import PrefixTree
from tests.fakes.chains import a_block, a_checkpoint, match, store_chain

ROOTS = (Root(root_key("model")), Root(root_key("model", "tenant")))
roots = st.sampled_from(ROOTS)
tokens = st.lists(st.integers(0, 2), max_size=14)
picks = st.integers(0, 10**6)


def shared_tokens(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    return next(
        (at for at, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other),
        min(len(ours), len(theirs)),
    )


class TreeStates(RuleBasedStateMachine):
    """For every key with a node, `chains` and `states` have the root and all tokens up to its end,
    `blocks` its own tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.chains: dict[BlockKey, tuple[Root, tuple[int, ...]]] = {}
        self.states: dict[BlockKey, tuple[Root, tuple[int, ...]]] = {}
        self.blocks: dict[BlockKey, tuple[int, ...]] = {}
        # key, root, start, chain up to the end
        self.foreign: list[tuple[BlockKey, Root, int, tuple[int, ...]]] = []

    def stored_tokens(self, root: Root, chain: tuple[int, ...]) -> int:
        return max(
            (shared_tokens(chain, other) for where, other in self.chains.values() if where == root),
            default=0,
        )

    @rule(root=roots, chain=tokens, block_tokens=st.integers(1, 6))
    def read_a_chain(self, root: Root, chain: list[int], block_tokens: int) -> None:
        begin = self.stored_tokens(root, tuple(chain))
        assert match(self.tree, chain, root=root).tokens == begin
        keys = store_chain(self.tree, root, chain, block_tokens=block_tokens)
        for index, key in enumerate(keys):
            end = min(begin + (index + 1) * block_tokens, len(chain))
            self.chains[key] = (root, tuple(chain[:end]))
            self.blocks[key] = tuple(chain[begin + index * block_tokens : end])

    @rule(root=roots, chain=tokens, cuts=st.sets(st.integers(1, 13), max_size=4))
    def take_in_a_chain_of_another_process(
        self, root: Root, chain: list[int], cuts: set[int]
    ) -> None:
        parent, parent_tokens = root.key, 0
        ends = sorted({cut for cut in cuts if cut < len(chain)} | {len(chain)} - {0})
        for begin, end in zip([0, *ends], ends, strict=False):
            run = chain[begin:end]
            key = child_key(parent, parent_tokens, pack_tokens(run), "kv")
            is_stored = self.stored_tokens(root, tuple(chain[:end])) == end
            insertion = self.tree.insert(
                a_block(key, parent_key=parent, parent_tokens=parent_tokens, token_ids=run)
            )
            assert insertion == (not is_stored)
            if not is_stored:
                self.chains[key] = (root, tuple(chain[:end]))
                self.blocks[key] = tuple(run)
            parent, parent_tokens = key, len(run)
            self.foreign.append((key, root, begin, tuple(chain[:end])))

    @precondition(lambda self: self.foreign)
    @rule(pick=picks, cut=picks, run=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def take_in_a_branch_of_another_process(self, pick: int, cut: int, run: list[int]) -> None:
        parent, root, start, chain = self.foreign[pick % len(self.foreign)]
        if parent not in self.tree:
            return
        parent_tokens = 1 + cut % (len(chain) - start)
        begin = start + parent_tokens
        chain = (*chain[:begin], *run)
        key = child_key(parent, parent_tokens, pack_tokens(run), "kv")
        is_stored = self.stored_tokens(root, chain) == len(chain)
        insertion = self.tree.insert(
            a_block(key, parent_key=parent, parent_tokens=parent_tokens, token_ids=run)
        )
        assert insertion == (not is_stored)
        self.foreign.append((key, root, begin, chain))
        if not is_stored:
            self.chains[key], self.blocks[key] = (root, chain), tuple(run)

    @precondition(lambda self: self.chains)
    @rule(pick=picks, cut=st.integers(1, 14))
    def keep_a_state(self, pick: int, cut: int) -> None:
        root, chain = list(self.chains.values())[pick % len(self.chains)]
        chain = chain[: 1 + cut % len(chain)]
        end = match(self.tree, chain, root=root).end
        assert end.position == len(chain)
        key = child_key(end.parent_key, end.parent_tokens, b"", "state")
        is_stored = (root, chain) in self.states.values()
        insertion = self.tree.insert(
            a_checkpoint(key, parent_key=end.parent_key, position=len(chain))
        )
        assert insertion == (not is_stored)
        if not is_stored:
            self.states[key] = (root, chain)

    @precondition(lambda self: self.chains)
    @rule(pick=picks)
    def remove_a_block(self, pick: int) -> None:
        key = list(self.chains)[pick % len(self.chains)]
        is_needed = any(self.tree.has_node(each) for each in self.tree.subtree(key) if each != key)
        if is_needed:
            with pytest.raises(AssertionError):
                self.tree.remove(key)
        else:
            self.tree.remove(key)
        self.forget_what_is_gone()

    @precondition(lambda self: self.chains)
    @rule(pick=picks)
    def remove_a_block_with_all_behind_it(self, pick: int) -> None:
        key = list(self.chains)[pick % len(self.chains)]
        subtree = self.tree.subtree(key)
        assert subtree[-1] == key
        for each in subtree:
            self.tree.remove(each)
        behind = {each for each in self.chains if each not in self.tree}
        assert behind <= set(subtree)
        self.forget_what_is_gone()

    @precondition(lambda self: self.states)
    @rule(pick=picks)
    def remove_a_state(self, pick: int) -> None:
        key = list(self.states)[pick % len(self.states)]
        self.tree.remove(key)
        del self.states[key]

    def forget_what_is_gone(self) -> None:
        for book in (self.chains, self.states):
            for key in [key for key in book if key not in self.tree]:
                del book[key]

    @rule(root=roots, probe=tokens)
    def look_up(self, root: Root, probe: list[int]) -> None:
        chain = tuple(probe)
        found = match(self.tree, probe, root=root)
        assert found.tokens == self.stored_tokens(root, chain)
        end = 0
        for block in found.blocks:
            assert block.start <= end < block.end
            whole = self.blocks[block.key]
            assert whole[end - block.start : block.tokens] == chain[end : block.end]
            end = block.end
        assert end == found.tokens
        expected = {
            len(seen): key
            for key, (where, seen) in self.states.items()
            if where == root and seen == chain[: len(seen)]
        }
        assert {state.position: state.key for state in found.states} == {
            at: key for at, key in expected.items() if at <= end
        }
        assert [state.position for state in found.states] == sorted(
            state.position for state in found.states
        )

    @invariant()
    def the_books_agree(self) -> None:
        self.tree.check_invariants()
        assert {
            key for key in self.tree if self.tree.has_node(key)
        } == self.chains.keys() | self.states.keys()
        stored = {
            (root, chain[:end])
            for root, chain in self.chains.values()
            for end in range(1, len(chain) + 1)
        }
        assert self.tree.tokens == len(stored)


TreeStates.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
TestTreeStates = TreeStates.TestCase
