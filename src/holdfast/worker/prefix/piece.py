"""Chains of tokens as they are stored: the pieces that they are made of, and the place up to which
they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from holdfast.store.block import BlockKey, BlockKind
from holdfast.worker.prefix.node import Node


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A block's share of a chain, or a state checkpoint on it.

    A block's tokens `offset` to `offset + tokens` are the chain's tokens from `start` on. A
    checkpoint has no tokens of its
    own: it has seen the first `start` tokens of the chain.
    """

    key: BlockKey
    kind: BlockKind
    start: int
    tokens: int = 0
    offset: int = 0

    @property
    def end(self) -> int:
        """How far the chain goes with it."""
        return self.start + self.tokens


@dataclass(slots=True, eq=False)
class Cursor:
    """How far a sequence's chain is known to be stored: behind `cut` own tokens of `node`.

    The next block goes there.

    What it stands on may be evicted: the tree tells whether it is still good. Without a node it
    stands at the root.
    """

    root: BlockKey
    node: Node | None = None
    cut: int = 0

    @property
    def position(self) -> int:
        """Tokens of the chain before it."""
        return 0 if self.node is None else self.node.start + self.cut

    @property
    def parent_key(self) -> BlockKey:
        """The block (or root) that the next block has to follow."""
        return self.root if self.node is None else self.node.key

    @property
    def parent_tokens(self) -> int:
        """How many tokens of that block."""
        return 0 if self.node is None else self.node.offset + self.cut

    def back_at(self, position: int) -> Cursor:
        """A cursor on the same chain at an earlier position; costs a step for each block between."""
        node = self.node
        while node is not None and position <= node.start and node.parent is not None:
            node = node.parent
        return Cursor(self.root, node, 0 if node is None else position - node.start)
