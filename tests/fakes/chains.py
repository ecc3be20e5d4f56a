"""Chains of tokens as blocks of a prefix tree and of an index, whose payloads weigh one byte per
token.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.store.block import KEY_BYTES, Block, BlockKey, child_key
from holdfast.worker.engine.plan import BLOCK_TOKENS
from holdfast.worker.prefix.chain import Cursor, Root, pack_tokens
from holdfast.worker.prefix.index import PrefixIndex
from holdfast.worker.prefix.lookup import ReusePlan
from holdfast.worker.prefix.tree import PrefixMatch, PrefixTree
from tests.fakes.disk_side import FakeDisk
from tests.fakes.payloads import Weight


def named(name: str) -> BlockKey:
    """A key without a block."""
    return name.encode().ljust(KEY_BYTES, b".")


def a_block(
    key: BlockKey, *, parent_key: BlockKey, parent_tokens: int, token_ids: Sequence[int]
) -> Block:
    """In the disk's form; its start is wrong, but no tree reads it."""
    return Block(
        key=key,
        parent_key=parent_key,
        parent_tokens=parent_tokens,
        kind="kv",
        start=parent_tokens,
        packed_tokens=pack_tokens(token_ids),
    )


def a_checkpoint(key: BlockKey, *, parent_key: BlockKey, position: int) -> Block:
    """In the disk's form."""
    return Block(
        key=key,
        parent_key=parent_key,
        parent_tokens=position,
        kind="state",
        start=position,
        packed_tokens=b"",
    )


def match(tree: PrefixTree, chain: Sequence[int], *, root: Root) -> PrefixMatch:
    """The stored blocks of a chain."""
    return tree.match(pack_tokens(chain), root=root)


def store_chain(
    tree: PrefixTree, root: Root, chain: Sequence[int], *, block_tokens: int = BLOCK_TOKENS
) -> list[BlockKey]:
    """Store the missing blocks of a chain, as a sequence that reads it does; returns the new keys."""
    keys: list[BlockKey] = []
    cursor, packed = Cursor(root), pack_tokens(chain)
    tree.advance(cursor, packed, end=len(chain))
    for begin in range(cursor.position, len(chain), block_tokens):
        own = packed[4 * begin : 4 * (begin + block_tokens)]
        keys.append(child_key(cursor.parent_key, cursor.parent_tokens, own, "kv"))
        block = Block(
            key=keys[-1],
            parent_key=cursor.parent_key,
            parent_tokens=cursor.parent_tokens,
            kind="kv",
            start=begin,
            packed_tokens=own,
        )
        tree.append(cursor, block)
    return keys


def stored(index: PrefixIndex, chain: Sequence[int], *, tenant: str = "") -> Cursor:
    """A cursor at the end of a chain's stored prefix."""
    cursor = Cursor(index.root(tenant=tenant))
    index.tree.advance(cursor, pack_tokens(chain), end=len(chain))
    return cursor


def insert_at(
    index: PrefixIndex, cursor: Cursor, tokens: Sequence[int], *, disk: FakeDisk | None = None
) -> Block | None:
    """Insert a block at a cursor, and give it to the disk."""
    block = index.insert(cursor, pack_tokens(tokens), Weight(len(tokens)))
    if block is not None and disk is not None:
        disk.put(block)
    return block


def read_chain(
    index: PrefixIndex,
    chain: Sequence[int],
    *,
    block_tokens: int = 4,
    tenant: str = "",
    disk: FakeDisk | None = None,
) -> list[Block]:
    """Insert the new blocks of a chain as a sequence that reads it does, as far as there is room."""
    cursor = stored(index, chain, tenant=tenant)
    blocks: list[Block] = []
    while cursor.position < len(chain):
        block = insert_at(
            index, cursor, chain[cursor.position : cursor.position + block_tokens], disk=disk
        )
        if block is None:
            break
        blocks.append(block)
    index.check_invariants()
    return blocks


def fill_gaps(
    index: PrefixIndex, chain: Sequence[int], *, disk: FakeDisk | None = None
) -> list[BlockKey]:
    """Fill the gaps of a chain, as a sequence that has computed it. Returns the keys that it stores
    again.
    """
    keys: list[BlockKey] = []
    for key in index.to_fill(stored(index, chain)):
        keys.append(key)
        block = index.fill(key, Weight(index.tree.run_of(key)[1]), holder=None)
        if disk is not None:
            disk.put(block)
    index.check_invariants()
    return keys


def keep_checkpoint(
    index: PrefixIndex, chain: Sequence[int], *, nbytes: int = 1, tenant: str = ""
) -> Block | None:
    """Store a checkpoint at the end of a stored chain."""
    cursor = stored(index, chain, tenant=tenant)
    assert cursor.position == len(chain)
    return index.insert_checkpoint(cursor, Weight(nbytes, (tenant, tuple(chain))))


def plan_of(
    index: PrefixIndex,
    chain: Sequence[int],
    *,
    tenant: str = "",
    anywhere: bool = True,
    limit: int = 10**6,
) -> ReusePlan:
    """The plan for a sequence with these tokens."""
    root = index.root(tenant=tenant)
    return index.planner.plan(
        pack_tokens(chain), root=root, resumable_anywhere=anywhere, limit=limit
    )
