"""Which tokens are stored, and under which keys: a tree of chains, one root per model and tenant. Pure bookkeeping, one thread.

A node stands for the tokens of a block that no other block had stored before it. Usually that is the whole block; but two
processes that share a store can cut one chain at different places, and then a block's first tokens (`offset` of them) lie in
other nodes. So each token of a chain is in exactly one node, matching never has a choice, and it costs one comparison per block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from holdfast.prefix.keys import pack_tokens
from holdfast.prefix.node import Node, check_node, children_first, detach, follow, nodes_beneath
from holdfast.prefix.packed import token_at
from holdfast.store.block import TOKEN_BYTES, BlockKey

BLOCK_TOKENS = 256


class UnknownParent(Exception):
    """A block or state cannot be placed: what it follows is not in the tree."""


class StillNeeded(Exception):
    """A block cannot be removed: others follow it."""


class Insertion(Enum):
    """What became of an inserted block or state."""

    NEW = "new"
    KNOWN = "known"  # the same key is there
    COVERED = "covered"  # other keys have all of it; the key is good as a parent for as long as they stay


@dataclass(frozen=True, slots=True)
class Piece:
    """A block's share of a match: its tokens `offset` to `offset + tokens` are the chain's tokens from `start` on."""

    key: BlockKey
    start: int
    tokens: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class StateAt:
    """A stored state and how many tokens it has seen."""

    position: int
    key: BlockKey


@dataclass(frozen=True, slots=True)
class Diverged:
    """At `position` something is stored that goes on with the token `expected`; `found` was asked for."""

    position: int
    expected: int
    found: int


@dataclass(frozen=True, slots=True)
class Place:
    """A place behind which a block can stand: `parent_tokens` tokens of block (or root) `parent_key`, `position` of the chain."""

    parent_key: BlockKey
    parent_tokens: int
    position: int


@dataclass(frozen=True, slots=True)
class Standing:
    """A block's own packed tokens, the place behind which they stand, and how many tokens the whole block has; 0 for a state."""

    place: Place
    packed: bytes
    block_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest stored beginning of some tokens."""

    tokens: int
    pieces: tuple[Piece, ...]
    states: tuple[StateAt, ...]  # along the pieces, ascending
    diverged: Diverged | None  # None when nothing else is stored behind the match, or nothing more was asked for
    end: Place


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a key's tokens are: they end in `node`. A state has none and begins where it stands."""

    node: Node
    start: int
    tokens: int
    is_state: bool

    def is_state_at(self, position: int) -> bool:
        """Whether this is a state that has seen `position` tokens."""
        return self.is_state and self.start == position


class PrefixTree:
    """All stored chains. Costs of a match: one lookup and one comparison of bytes per block, nothing per token."""

    def __init__(self) -> None:
        self._roots: dict[BlockKey, Node] = {}
        self._entries: dict[BlockKey, _Entry] = {}
        self._tokens = 0

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def tokens(self) -> int:
        """Tokens stored, those of shared prefixes once."""
        return self._tokens

    @property
    def roots(self) -> int:
        """Roots that have anything stored."""
        return len(self._roots)

    def has_node(self, key: BlockKey) -> bool:
        """Whether a key is in the tree and is the one that matches give for its tokens or its boundary, so not a covered one."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        return entry.node.states.get(entry.start - entry.node.start) == key if entry.is_state else entry.node.key == key

    def has_root(self, root: BlockKey) -> bool:
        """Whether anything is stored under a root."""
        return root in self._roots

    def match(self, token_ids: Iterable[int], *, root: BlockKey) -> PrefixMatch:
        """The longest stored beginning of `token_ids`. An array("I") saves the packing of a list (1 ms per 100,000)."""
        return self.match_packed(pack_tokens(token_ids), root=root)

    def match_packed(self, packed: bytes, *, root: BlockKey) -> PrefixMatch:
        """`match` for tokens that are packed already."""
        node = self._roots.get(root)
        if node is None:
            return PrefixMatch(0, (), (), None, Place(root, 0, 0))
        path = follow(node, 0, packed)
        pieces = tuple(Piece(node.key, node.start, cut, node.offset) for node, cut in path[1:])
        states = tuple(
            StateAt(node.start + cut, node.states[cut])
            for node, used in path
            if node.states
            for cut in sorted(node.states)
            if cut <= used
        )
        node, cut = path[-1]
        position = node.start + cut
        diverged = _divergence(node, cut, packed, position) if position * TOKEN_BYTES < len(packed) else None
        return PrefixMatch(position, pieces, states, diverged, Place(node.key, node.offset + cut, position))

    def missing(self, token_ids: Iterable[int], *, root: BlockKey) -> int:
        """The position from which nothing of the chain is stored; its length when everything is."""
        return self.place(pack_tokens(token_ids), root=root).position

    def place(self, packed: bytes, *, root: BlockKey) -> Place:
        """Where the longest stored beginning of packed tokens ends: what a block with the rest has to follow."""
        node = self._roots.get(root)
        if node is None:
            return Place(root, 0, 0)
        node, cut = follow(node, 0, packed)[-1]
        return Place(node.key, node.offset + cut, node.start + cut)

    def insert_block(self, key: BlockKey, *, parent_key: BlockKey, parent_tokens: int, token_ids: Iterable[int]) -> Insertion:
        """Add a block. Parents go first; a parent with 0 tokens is a root, which is made when it is not there.

        Raises UnknownParent, and ValueError for a block that is empty or longer than BLOCK_TOKENS.
        """
        return self.insert_packed(key, parent_key=parent_key, parent_tokens=parent_tokens, packed=pack_tokens(token_ids))

    def insert_packed(self, key: BlockKey, *, parent_key: BlockKey, parent_tokens: int, packed: bytes) -> Insertion:
        """`insert_block` for tokens that are packed already."""
        if not 0 < len(packed) <= BLOCK_TOKENS * TOKEN_BYTES:
            raise ValueError(f"a block has 1 to {BLOCK_TOKENS} tokens, not {len(packed) // TOKEN_BYTES}")
        if key in self._entries:
            return Insertion.KNOWN
        node, cut = self._resolve(key, parent_key, parent_tokens)
        start = node.start + cut
        tokens = len(packed) // TOKEN_BYTES
        node, cut = follow(node, cut, packed)[-1]
        offset = node.start + cut - start
        if offset == tokens:
            self._entries[key] = _Entry(node, start, tokens, is_state=False)
            node.covered.append(key)
            return Insertion.COVERED
        own = packed[offset * TOKEN_BYTES :]
        child = Node(key, node, cut, start + offset, offset, own)
        node.branches.setdefault(cut, {})[own[:TOKEN_BYTES]] = child
        self._entries[key] = _Entry(child, start, tokens, is_state=False)
        self._tokens += tokens - offset
        return Insertion.NEW

    def insert_state(self, key: BlockKey, *, parent_key: BlockKey, position: int) -> Insertion:
        """Add a state that has seen `position` tokens, the last of them in block `parent_key`. Raises UnknownParent."""
        if key in self._entries:
            return Insertion.KNOWN
        parent = self._entries.get(parent_key)
        if parent is None or parent.is_state:
            raise UnknownParent(f"state {key.hex()[:12]} follows {parent_key.hex()[:12]}, which is not stored")
        node, cut = self._resolve(key, parent_key, position - parent.start)
        self._entries[key] = _Entry(node, position, 0, is_state=True)
        if cut in node.states:
            node.covered.append(key)
            return Insertion.COVERED
        node.states[cut] = key
        return Insertion.NEW

    def remove(self, key: BlockKey) -> None:
        """Take out a state, a covered block or a block that nothing follows.

        What is covered by it goes with it. Raises StillNeeded, and KeyError for an unknown key.
        """
        entry = self._entries[key]
        node = entry.node
        if node.key == key:
            self._remove_node(node)
        elif entry.is_state and node.states.get(entry.start - node.start) == key:
            del node.states[entry.start - node.start]
            self._uncover(node, [each for each in node.covered if self._entries[each].is_state_at(entry.start)])
        else:
            node.covered.remove(key)
        del self._entries[key]

    def _remove_node(self, node: Node) -> None:
        if node.branches or node.states:
            raise StillNeeded(f"block {node.key.hex()[:12]} has blocks or states behind it")
        self._uncover(node, list(node.covered))
        self._tokens -= node.tokens
        detach(node)
        root = node
        while root.parent is not None:
            root = root.parent
        if not root.branches:
            del self._roots[root.key]

    def _uncover(self, node: Node, keys: list[BlockKey]) -> None:
        for key in keys:
            node.covered.remove(key)
            del self._entries[key]

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        """The block that a block or state directly follows; None for the first of a chain. Raises KeyError for an unknown key."""
        entry = self._entries[key]
        node = entry.node if entry.is_state or entry.node.key != key else entry.node.parent
        return None if node is None or node.parent is None else node.key

    def with_ancestors(self, keys: Iterable[BlockKey]) -> set[BlockKey]:
        """The keys that are in the tree, with every block before them."""
        found: set[BlockKey] = set()
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                continue
            found.add(key)
            node: Node | None = entry.node if entry.node.key != key else entry.node.parent
            while node is not None and node.parent is not None and node.key not in found:
                found.add(node.key)
                node = node.parent
        return found

    def subtree(self, key: BlockKey) -> tuple[BlockKey, ...]:
        """A key with everything that cannot stay without it, in an order in which it can be removed: `key` is the last."""
        entry = self._entries[key]
        return tuple(children_first(entry.node)) if entry.node.key == key else (key,)

    def children(self, key: BlockKey) -> tuple[BlockKey, ...]:
        """The blocks that directly follow any token of a block."""
        node = self._entries[key].node
        return tuple(child.key for branches in node.branches.values() for child in branches.values())

    def attached(self, key: BlockKey) -> tuple[BlockKey, ...]:
        """The states within a block, and the keys that it covers."""
        node = self._entries[key].node
        return (*node.states.values(), *node.covered)

    def standing(self, key: BlockKey) -> Standing:
        """Where a block or state that has a node stands. Raises KeyError for an unknown key."""
        entry = self._entries[key]
        node = entry.node
        if entry.is_state:
            return Standing(Place(node.key, node.offset + entry.start - node.start, entry.start), b"", 0)
        assert node.parent is not None, "a root has no key among the entries"
        place = Place(node.parent.key, node.parent.offset + node.parent_cut, node.start)
        return Standing(place, node.packed, entry.tokens)

    def _resolve(self, key: BlockKey, parent_key: BlockKey, parent_tokens: int) -> tuple[Node, int]:
        """The node that holds the last of a block's first `parent_tokens` tokens, and how many of its own go up to there."""
        if parent_tokens == 0 and parent_key not in self._entries:
            root = self._roots.get(parent_key)
            if root is None:
                root = self._roots[parent_key] = Node(parent_key, None, 0, 0, 0, b"")
            return root, 0
        parent = self._entries.get(parent_key)
        if parent is None or parent.is_state or not 0 < parent_tokens <= parent.tokens:
            raise UnknownParent(
                f"{key.hex()[:12]} follows {parent_tokens} tokens of {parent_key.hex()[:12]}, which are not stored"
            )
        position = parent.start + parent_tokens
        node = parent.node
        while position <= node.start and node.parent is not None:
            node = node.parent
        return node, position - node.start

    def check_invariants(self) -> None:
        """Assert that every token is in one node, that every key is found where it says, and that no root is empty."""
        seen: dict[BlockKey, Node] = {}
        tokens = 0
        for key, root in self._roots.items():
            assert root.key == key, "a root under another's key"
            assert root.parent is None, "a root with a parent"
            assert root.branches, "an empty root"
            for node in nodes_beneath(root):
                check_node(node)
                tokens += node.tokens
                own = () if node.parent is None else (node.key,)
                for each in (*own, *node.states.values(), *node.covered):
                    assert each not in seen, "a key in two places"
                    seen[each] = node
        assert tokens == self._tokens, "miscounted tokens"
        assert seen.keys() == self._entries.keys(), "the keys of the nodes and of the book differ"
        assert all(self._entries[key].node is node for key, node in seen.items()), "a key leads to another node"


def _divergence(node: Node, cut: int, packed: bytes, position: int) -> Diverged | None:
    found = token_at(packed, position)
    if cut < node.tokens:
        return Diverged(position, token_at(node.packed, cut), found)
    branches = node.branches.get(cut)
    if not branches:
        return None
    return Diverged(position, int.from_bytes(next(reversed(branches)), "little"), found)
