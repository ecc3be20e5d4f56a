"""The nodes of the tree of stored chains: own tokens, branches at any of them, states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.store.block import BlockKey
from holdfast.wire.token_ids import TOKEN_BYTES, common_tokens


@dataclass(slots=True, eq=False)
class Node:
    """A block's own tokens: those that no other block had stored before it. A root has none."""

    key: BlockKey
    parent: Node | None  # None for a root
    parent_cut: int  # of the parent's own tokens, how many this follows
    start: int
    offset: int
    packed: bytes
    # cut -> packed first token -> node
    branches: dict[int, dict[bytes, Node]] = field(default_factory=dict)
    states: dict[int, BlockKey] = field(default_factory=dict)  # cut -> key
    # blocks and states without a node of their own that end in this one
    covered: list[BlockKey] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """How many own tokens there are."""
        return len(self.packed) // TOKEN_BYTES


def follow(
    node: Node, cut: int, packed: bytes | bytearray, *, at: int = 0, end: int | None = None
) -> list[tuple[Node, int]]:
    """Walk along packed tokens from behind `cut` own tokens of a node; the nodes on the way, with
    how many own tokens match.

    at, end: the bytes of `packed` to walk along; all by default.
    """
    path: list[tuple[Node, int]] = []
    end = len(packed) if end is None else end
    while True:
        rest = node.packed[cut * TOKEN_BYTES :] if cut else node.packed
        used = len(rest)
        if not packed.startswith(rest, at, end):
            used = common_tokens(rest, packed[at : min(at + used, end)]) * TOKEN_BYTES
        at += used
        cut += used // TOKEN_BYTES
        path.append((node, cut))
        if at == end:
            return path
        branches = node.branches.get(cut)
        child = branches.get(bytes(packed[at : at + TOKEN_BYTES])) if branches else None
        if child is None:
            return path
        node, cut = child, 0


def detach(node: Node) -> None:
    """Take a node out of its parent."""
    parent = node.parent
    assert parent is not None, "a root is not detached"
    branches = parent.branches[node.parent_cut]
    del branches[node.packed[:TOKEN_BYTES]]
    if not branches:
        del parent.branches[node.parent_cut]


def nodes_beneath(node: Node) -> Iterator[Node]:
    """A node and all beneath it, parents first.

    Without recursion: a chain of 100,000 tokens can be that deep.
    """
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(child for branches in node.branches.values() for child in branches.values())


def children_first(node: Node) -> Iterator[BlockKey]:
    """All keys at a node and beneath it, in an order in which they can be removed."""
    for each in reversed(list(nodes_beneath(node))):
        yield from each.covered
        yield from each.states.values()
        yield each.key


def check_node(node: Node) -> None:
    """Assert what must hold between a node and its children."""
    assert node.packed or node.parent is None, "a node without tokens"
    for cut, branches in node.branches.items():
        assert branches, "a cut without branches"
        assert 0 < cut <= node.tokens or node.parent is None, "a branch outside its parent"
        for first, child in branches.items():
            assert child.packed[:TOKEN_BYTES] == first, "a branch under another's token"
            assert child.parent is node, "a branch with another parent"
            assert child.parent_cut == cut, "a branch at another cut"
            assert child.start == node.start + cut, "a gap in a chain"
            own = node.packed[cut * TOKEN_BYTES : (cut + 1) * TOKEN_BYTES]
            assert first != own, "a token that two nodes have"
    assert all(0 < cut <= node.tokens for cut in node.states), "a state outside its block"
