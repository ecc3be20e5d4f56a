"""Chains of tokens: which blocks store a chain, and up to which token.

A chain consists of all tokens that one sequence has processed, from its first token on. It is
stored as blocks of keys and values, and as states (checkpoints of window and recurrent layers) at
some positions. The key of a block is a hash that covers everything before the block, so equal keys
mean equal chains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from holdfast.store.block import Block, BlockKey
from holdfast.wire.requests import TOKEN_BYTES, TokenIds, common_tokens
from holdfast.worker.engine.plan import BLOCK_TOKENS
from holdfast.worker.kv.bits import KVBits


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Pack token ids as little-endian uint32. Raises OverflowError if an id does not fit."""
    return TokenIds.of(token_ids).packed


# Session records contain the next three classes: their serialized names must not change.
class ChainBlock(msgspec.Struct, frozen=True, gc=False):
    """A block as part of a chain, which contains the first `tokens` tokens of the block. They end
    at position `end` of the chain.

    A block may begin before the end of the previous block; then the overlapping tokens are equal.
    """

    key: BlockKey
    tokens: int
    end: int

    @property
    def start(self) -> int:
        """The position of the block's first token."""
        return self.end - self.tokens


class ChainState(msgspec.Struct, frozen=True, gc=False):
    """A stored state (checkpoint) after the first `position` tokens of a chain."""

    key: BlockKey
    position: int


class Branch(
    msgspec.Struct, frozen=True, kw_only=True, rename={"blocks": "steps", "form": "kv_bits"}
):
    """A stored chain: its blocks from the first token on, and states along them, in order."""

    blocks: tuple[ChainBlock, ...] = ()
    states: tuple[ChainState, ...] = ()
    form: KVBits = "native"

    @property
    def tokens(self) -> int:
        """The length of the chain."""
        return self.blocks[-1].end if self.blocks else 0

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        """The keys of all blocks, parents first, then those of the states."""
        blocks = tuple([block.key for block in self.blocks])
        return (*blocks, *(state.key for state in self.states))

    def extends(self, other: Branch) -> bool:
        """Whether this chain begins with all blocks of another chain."""
        if not other.blocks:
            return True
        *first_blocks, last = other.blocks
        count = len(first_blocks)
        if len(self.blocks) <= count or self.blocks[:count] != tuple(first_blocks):
            return False
        own_block = self.blocks[count]
        return own_block.key == last.key and own_block.tokens >= last.tokens


@dataclass(frozen=True, slots=True)
class Root:
    """What all chains below one root of the tree have in common.

    key: the parent key of their first blocks. form: how their sequences hold keys and values.
    """

    key: BlockKey
    tenant: str = ""
    form: KVBits = "native"

    def form_at(self, end: int) -> KVBits:
        """The form of a stored block that ends at this position. An incomplete block is never
        quantized, so that a sequence can continue from its end.
        """
        return "native" if end % BLOCK_TOKENS else self.form


@dataclass(slots=True, eq=False)
class Node:
    """A node of the prefix tree: a root, a stored block or a stored state.

    Two blocks can overlap. The node's own tokens are those that no earlier block contains; a root
    and a state have none. A cut is a position within them: how many of them come before it.
    """

    key: BlockKey
    parent: Node | None  # None for a root
    parent_cut: int  # this node follows the first `parent_cut` own tokens of its parent
    start: int  # position of the first own token in the chain
    offset: int  # number of the block's tokens before its own ones; other nodes hold them
    packed: bytes  # the own tokens, as little-endian uint32
    block: Block | None = None  # None for a root
    nbytes: int = 0  # of the payload or of its file
    # the nodes that follow this one: cut -> packed first token -> node
    branches: dict[int, dict[bytes, Node]] = field(default_factory=dict)
    states: dict[int, Node] = field(default_factory=dict)  # cut -> the state saved there
    # blocks without own tokens, whose last token is one of this node's; and further states at a cut
    # that `states` already has
    covered: list[Node] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """The number of own tokens."""
        return len(self.packed) // TOKEN_BYTES

    @property
    def is_state(self) -> bool:
        """Whether the node is a state."""
        return self.block is not None and self.block.kind == "state"

    @property
    def is_covered(self) -> bool:
        """Whether this is a state whose place in the tree another state has taken, so that lookups
        find that one.
        """
        if self.packed or self.parent is None:
            return False
        return self.parent.states.get(self.parent_cut) is not self

    def detach(self) -> None:
        """Remove this node from its parent."""
        assert self.parent is not None, "a root cannot be detached"
        branches = self.parent.branches[self.parent_cut]
        del branches[self.packed[:TOKEN_BYTES]]
        if not branches:
            del self.parent.branches[self.parent_cut]

    def children(self) -> Iterator[Node]:
        """The nodes that directly follow any of the own tokens."""
        for branches in self.branches.values():
            yield from branches.values()

    def descendants(self) -> Iterator[Node]:
        """This node and all nodes below it, parents first.

        Not recursive, because a chain of 100,000 tokens may have that many levels.
        """
        pending = [self]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children())

    def keys_children_first(self) -> Iterator[BlockKey]:
        """All keys of this node and of the nodes below it, in an order in which they can be
        removed.
        """
        for node in reversed(list(self.descendants())):
            for each in (*node.covered, *node.states.values(), node):
                yield each.key

    def check_invariants(self) -> None:
        """Assert that this node and its children are consistent."""
        assert self.packed or self.parent is None, "a block without tokens"
        for cut, branches in self.branches.items():
            assert branches, "a cut without branches"
            assert 0 < cut <= self.tokens or self.parent is None, "a branch outside its parent"
            for first_token, child in branches.items():
                assert child.packed[:TOKEN_BYTES] == first_token, "a branch under another token"
                assert child.parent is self, "a branch with another parent"
                assert child.parent_cut == cut, "a branch at another cut"
                assert child.start == self.start + cut, "a gap in a chain"
                own_token = self.packed[cut * TOKEN_BYTES : (cut + 1) * TOKEN_BYTES]
                assert first_token != own_token, "a token in two nodes"
        assert all(0 < cut <= self.tokens for cut in self.states), "a state outside its block"


def follow(
    node: Node, cut: int, packed: bytes | bytearray, *, at: int = 0, end: int | None = None
) -> list[tuple[Node, int]]:
    """Follow packed tokens through the tree, starting after the first `cut` own tokens of a node.

    Returns the visited nodes, each with the number of its tokens that match. at, end: the range
    of bytes of `packed` to follow; all by default.
    """
    path: list[tuple[Node, int]] = []
    end = len(packed) if end is None else end
    while True:
        node_packed = node.packed[cut * TOKEN_BYTES :] if cut else node.packed
        matching_bytes = len(node_packed)
        if not packed.startswith(node_packed, at, end):
            window = packed[at : min(at + matching_bytes, end)]
            matching_bytes = common_tokens(node_packed, window) * TOKEN_BYTES
        at += matching_bytes
        cut += matching_bytes // TOKEN_BYTES
        path.append((node, cut))
        if at == end:
            return path
        branches = node.branches.get(cut)
        child = branches.get(bytes(packed[at : at + TOKEN_BYTES])) if branches else None
        if child is None:
            return path
        node = child
        cut = 0


@dataclass(slots=True, eq=False)
class Cursor:
    """The position up to which a sequence's chain is known to be stored: after `cut` own tokens of
    `node`.

    The next block is added there. Without a node, the cursor is at the root. The node may be
    evicted since then; `PrefixTree.is_valid` tells whether the cursor is still valid.
    """

    root: Root
    node: Node | None = None
    cut: int = 0

    @property
    def position(self) -> int:
        """The number of tokens of the chain before the cursor."""
        return 0 if self.node is None else self.node.start + self.cut

    @property
    def parent_key(self) -> BlockKey:
        """The key of the block, or of the root, that the next block follows."""
        return self.root.key if self.node is None else self.node.key

    @property
    def parent_tokens(self) -> int:
        """How many tokens of the parent block precede the next block."""
        return 0 if self.node is None else self.node.offset + self.cut

    def back_at(self, position: int) -> Cursor:
        """A cursor at an earlier position of the same chain. The cost grows with the number of
        blocks in between.
        """
        node = self.node
        while node is not None and position <= node.start and node.parent is not None:
            node = node.parent
        return Cursor(self.root, node, 0 if node is None else position - node.start)
