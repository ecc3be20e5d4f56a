"""Which tokens are stored, and under which keys: a tree of chains, one root per model and tenant.

Pure bookkeeping, one thread.

A node stands for the tokens of a block that no other block had stored before it. Usually that is
the whole block; but two processes that share a store can cut one chain at different places, and
then a block's first tokens (`offset` of them) lie in other nodes. So each token of a chain is in
exactly one node, matching never has a choice, and it costs one comparison per block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from holdfast.store.block import Block, BlockKey
from holdfast.wire.events import Divergence
from holdfast.wire.token_ids import TOKEN_BYTES, token_at
from holdfast.worker.engine.plan import BLOCK_TOKENS
from holdfast.worker.prefix.node import (
    Node,
    check_node,
    children_first,
    detach,
    follow,
    nodes_beneath,
)
from holdfast.worker.prefix.piece import Cursor, Piece


@dataclass(frozen=True, slots=True)
class Standing:
    """A block's own packed tokens, what they stand behind, and how many tokens the whole block has;
    none for a checkpoint.
    """

    key: BlockKey
    parent_key: BlockKey
    parent_tokens: int
    packed: bytes
    block_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest stored beginning of some tokens."""

    pieces: tuple[Piece, ...]
    checkpoints: tuple[Piece, ...]  # along the pieces, ascending
    # None when nothing else is stored behind the match, or nothing more was asked for
    divergence: Divergence | None
    end: Cursor

    @property
    def tokens(self) -> int:
        """How long it is."""
        return self.end.position


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
    """All stored chains.

    Costs of a match: one lookup and one comparison of bytes per block, nothing per token.
    """

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
        """Whether a key is in the tree and is the one that matches give for its tokens or its
        boundary, so not a covered one.
        """
        entry = self._entries.get(key)
        if entry is None:
            return False
        return (
            entry.node.states.get(entry.start - entry.node.start) == key
            if entry.is_state
            else entry.node.key == key
        )

    def has_root(self, root: BlockKey) -> bool:
        """Whether anything is stored under a root."""
        return root in self._roots

    def match(self, packed: bytes, *, root: BlockKey) -> PrefixMatch:
        """The longest stored beginning of packed tokens."""
        node = self._roots.get(root)
        if node is None:
            return PrefixMatch((), (), None, Cursor(root))
        path = follow(node, 0, packed)
        checkpoints = tuple(
            Piece(node.states[cut], "state", node.start + cut)
            for node, used in path
            if node.states
            for cut in sorted(node.states)
            if cut <= used
        )
        end = Cursor(root, *path[-1])
        divergence = _divergence(end, packed) if end.position * TOKEN_BYTES < len(packed) else None
        pieces = tuple(
            [Piece(node.key, "kv", node.start, cut, node.offset) for node, cut in path[1:]]
        )
        return PrefixMatch(pieces, checkpoints, divergence, end)

    def holds(self, cursor: Cursor) -> bool:
        """Whether what a cursor stands on is still there. One without a node stands on nothing."""
        node = cursor.node
        if node is None:
            return True
        if node.parent is None:
            return self._roots.get(node.key) is node
        entry = self._entries.get(node.key)
        return entry is not None and entry.node is node

    def advance(self, cursor: Cursor, packed: bytes | bytearray, *, end: int) -> None:
        """Move a cursor along its chain, as far as it is stored, up to token `end`; from the root
        if it is good no more.
        """
        if not self.holds(cursor):
            cursor.node, cursor.cut = None, 0
        at = cursor.position
        node = cursor.node or self._roots.get(cursor.root)
        if node is not None and at < end:
            cursor.node, cursor.cut = follow(
                node, cursor.cut, packed, at=at * TOKEN_BYTES, end=end * TOKEN_BYTES
            )[-1]

    def append(self, cursor: Cursor, key: BlockKey, packed: bytes) -> None:
        """Add a block where a cursor stands that is good and cannot be advanced along its tokens;
        it moves behind the block.
        """
        assert key not in self._entries, "something stored is stored again"
        assert 0 < len(packed) <= BLOCK_TOKENS * TOKEN_BYTES, "a block of no tokens, or of too many"
        node = self._node_of(cursor)
        start = cursor.position
        child = self._add_child(Node(key, node, cursor.cut, start, 0, packed))
        self._entries[key] = _Entry(child, start, child.tokens, is_state=False)
        cursor.node, cursor.cut = child, child.tokens

    def append_checkpoint(self, cursor: Cursor, key: BlockKey) -> None:
        """Add a checkpoint where a cursor stands that is good, if there is none yet."""
        node = cursor.node
        assert node is not None, "a checkpoint of nothing"
        assert cursor.cut not in node.states, "something stored is stored again"
        self._entries[key] = _Entry(node, cursor.position, 0, is_state=True)
        node.states[cursor.cut] = key

    def checkpoint_at(self, cursor: Cursor) -> BlockKey | None:
        """The checkpoint that is stored where a good cursor stands."""
        return None if cursor.node is None else cursor.node.states.get(cursor.cut)

    def _node_of(self, cursor: Cursor) -> Node:
        if cursor.node is None or cursor.node.parent is None:
            return self._root(cursor.root)
        return cursor.node

    def _root(self, key: BlockKey) -> Node:
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Node(key, None, 0, 0, 0, b"")
        return root

    def _add_child(self, child: Node) -> Node:
        assert child.parent is not None
        child.parent.branches.setdefault(child.parent_cut, {})[child.packed[:TOKEN_BYTES]] = child
        self._tokens += child.tokens
        return child

    def insert(self, block: Block) -> bool:
        """Add a block or a checkpoint wherever it stands; whether it is new.

        Not new is what is there under its key, or whose tokens others have all of; its key is good
        as a parent as long as they stay. Parents go first; the root of a block with 0 parent tokens
        is made. Raises ValueError for a block whose parent is not stored, and for one that is empty
        or longer than BLOCK_TOKENS.
        """
        if block.kind == "state":
            return self._insert_state(block.key, parent_key=block.parent_key, position=block.start)
        key, packed = block.key, block.packed_tokens
        if not 0 < len(packed) <= BLOCK_TOKENS * TOKEN_BYTES:
            raise ValueError(f"a block has 1 to {BLOCK_TOKENS} tokens, not {block.tokens}")
        if key in self._entries:
            return False
        node, cut = self._resolve(key, block.parent_key, block.parent_tokens)
        start = node.start + cut
        node, cut = follow(node, cut, packed)[-1]
        offset = node.start + cut - start
        if offset == block.tokens:
            self._entries[key] = _Entry(node, start, block.tokens, is_state=False)
            node.covered.append(key)
            return False
        child = self._add_child(
            Node(key, node, cut, start + offset, offset, packed[offset * TOKEN_BYTES :])
        )
        self._entries[key] = _Entry(child, start, block.tokens, is_state=False)
        return True

    def _insert_state(self, key: BlockKey, *, parent_key: BlockKey, position: int) -> bool:
        if key in self._entries:
            return False
        parent = self._entries.get(parent_key)
        if parent is None or parent.is_state:
            raise ValueError(
                f"state {key.hex()[:12]} follows {parent_key.hex()[:12]}, which is not stored"
            )
        node, cut = self._resolve(key, parent_key, position - parent.start)
        self._entries[key] = _Entry(node, position, 0, is_state=True)
        if cut in node.states:
            node.covered.append(key)
            return False
        node.states[cut] = key
        return True

    def remove(self, key: BlockKey) -> None:
        """Take out a state, a covered block or a block that nothing follows.

        What is covered by it goes with it. Raises KeyError for an unknown key.
        """
        entry = self._entries[key]
        node = entry.node
        if node.key == key:
            self._remove_node(node)
        elif entry.is_state and node.states.get(entry.start - node.start) == key:
            del node.states[entry.start - node.start]
            self._uncover(
                node,
                [each for each in node.covered if self._entries[each].is_state_at(entry.start)],
            )
        else:
            node.covered.remove(key)
        del self._entries[key]

    def _remove_node(self, node: Node) -> None:
        assert not node.branches, "a block is removed that others follow"
        assert not node.states, "a block is removed before the checkpoints in it"
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
        """The block that a block or state directly follows; None for the first of a chain.

        Raises KeyError for an unknown key.
        """
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
        """A key with everything that cannot stay without it, in an order in which it can be
        removed: `key` is the last.
        """
        entry = self._entries[key]
        return tuple(children_first(entry.node)) if entry.node.key == key else (key,)

    def children(self, key: BlockKey) -> tuple[BlockKey, ...]:
        """The blocks that directly follow any token of a block."""
        node = self._entries[key].node
        return tuple(
            child.key for branches in node.branches.values() for child in branches.values()
        )

    def attached(self, key: BlockKey) -> tuple[BlockKey, ...]:
        """The states within a block, and the keys that it covers."""
        node = self._entries[key].node
        return (*node.states.values(), *node.covered)

    def standing(self, key: BlockKey) -> Standing:
        """Where a block or state that has a node stands. Raises KeyError for an unknown key."""
        entry = self._entries[key]
        node = entry.node
        if entry.is_state:
            return Standing(key, node.key, node.offset + entry.start - node.start, b"", 0)
        assert node.parent is not None, "a root has no key among the entries"
        return Standing(
            key, node.parent.key, node.parent.offset + node.parent_cut, node.packed, entry.tokens
        )

    def run_of(self, key: BlockKey) -> tuple[int, int]:
        """The position of a block's first token, and how many tokens the whole block has.

        Raises KeyError for an unknown key.
        """
        entry = self._entries[key]
        return entry.start, entry.tokens

    def stands_before(self, key: BlockKey, other: BlockKey) -> bool:
        """Whether a block that has a node is one of those that another one follows.

        Costs a step for each block before that.
        """
        entry = self._entries.get(other)
        node = None if entry is None else entry.node
        while node is not None:
            if node.key == key:
                return True
            node = node.parent
        return False

    def _resolve(self, key: BlockKey, parent_key: BlockKey, parent_tokens: int) -> tuple[Node, int]:
        """The node that holds the last of a block's first `parent_tokens` tokens, and how many of
        its own go up to there.
        """
        if parent_tokens == 0 and parent_key not in self._entries:
            return self._root(parent_key), 0
        parent = self._entries.get(parent_key)
        if parent is None or parent.is_state or not 0 < parent_tokens <= parent.tokens:
            raise ValueError(
                f"{key.hex()[:12]} follows {parent_tokens} tokens of {parent_key.hex()[:12]}, "
                "which are not stored"
            )
        position = parent.start + parent_tokens
        node = parent.node
        while position <= node.start and node.parent is not None:
            node = node.parent
        return node, position - node.start

    def check_invariants(self) -> None:
        """Assert that every token is in one node, that every key is found where it says, and that
        no root is empty.
        """
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
        assert all(self._entries[key].node is node for key, node in seen.items()), (
            "a key leads to another node"
        )


def _divergence(end: Cursor, packed: bytes) -> Divergence | None:
    node, found = end.node, token_at(packed, end.position)
    assert node is not None
    if end.cut < node.tokens:
        return Divergence(
            position=end.position,
            stored_token_id=token_at(node.packed, end.cut),
            prompt_token_id=found,
        )
    branches = node.branches.get(end.cut)
    if not branches:
        return None
    expected = int.from_bytes(next(reversed(branches)), "little")
    return Divergence(position=end.position, stored_token_id=expected, prompt_token_id=found)
