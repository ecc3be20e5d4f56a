"""Chains of tokens as blocks of a prefix tree."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.prefix.keys import child_key, pack_tokens
from holdfast.prefix.tree import BLOCK_TOKENS, Insertion, PrefixTree
from holdfast.store.block import BlockKey


def store_chain(tree: PrefixTree, root: BlockKey, chain: Sequence[int], *, block_tokens: int = BLOCK_TOKENS) -> list[BlockKey]:
    """Store what is missing of a chain, as a sequence does that reads it; the new keys."""
    keys: list[BlockKey] = []
    place = tree.place(pack_tokens(chain), root=root)
    parent, parent_tokens = place.parent_key, place.parent_tokens
    for begin in range(place.position, len(chain), block_tokens):
        run = chain[begin : begin + block_tokens]
        key = child_key(parent, parent_tokens, pack_tokens(run), "kv")
        assert tree.insert_block(key, parent_key=parent, parent_tokens=parent_tokens, token_ids=run) is Insertion.NEW
        parent, parent_tokens = key, len(run)
        keys.append(key)
    return keys
