"""The prefix tree: which token sequences are cached, and in which blocks.

There is one root per model and tenant.

Plain data structures without MLX; one thread only.

A node holds the tokens of a block that no earlier block had stored. Usually these are all tokens of
the block. But two processes that share a store may cut a chain at different positions; then the
first `offset` tokens of a block are in other nodes. Each token of a chain is in exactly one node,
so a match is unambiguous and takes one comparison per block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from holdfast.store.block import Block, BlockKey
from holdfast.wire.events import Divergence
from holdfast.wire.requests import TOKEN_BYTES, token_at
from holdfast.worker.engine.plan import BLOCK_TOKENS
from holdfast.worker.prefix.chain import ChainBlock, ChainState, Cursor, Node, follow


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest stored prefix of a chain."""

    blocks: tuple[ChainBlock, ...]
    states: tuple[ChainState, ...]
    # None if no block is stored after the match, or if all tokens match
    divergence: Divergence | None
    end: Cursor

    @property
    def tokens(self) -> int:
        """The length of the match."""
        return self.end.position


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where the block or state of a key is: its tokens end in `node`.

    A state does not contain tokens; `start` is its position.
    """

    node: Node
    start: int
    tokens: int
    is_state: bool

    @property
    def cut(self) -> int:
        """For a state: the number of the node's own tokens before it."""
        return self.start - self.node.start


class PrefixTree:
    """All stored chains. A match takes one lookup and one comparison per block."""

    def __init__(self) -> None:
        self._roots: dict[BlockKey, Node] = {}
        self._entries: dict[BlockKey, _Entry] = {}
        self.tokens = 0  # shared prefixes count once

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def roots(self) -> int:
        """The number of roots (tenants) that have stored chains."""
        return len(self._roots)

    def has_node(self, key: BlockKey) -> bool:
        """Whether a key is stored and matches can return it: no other blocks contain all its
        tokens.
        """
        entry = self._entries.get(key)
        if entry is None:
            return False
        if entry.is_state:
            return entry.node.states.get(entry.cut) == key
        return entry.node.key == key

    @property
    def root_nodes(self) -> Mapping[BlockKey, Node]:
        """The roots that have stored chains, by key."""
        return self._roots

    def has_root(self, root: BlockKey) -> bool:
        """Whether a root has stored chains."""
        return root in self._roots

    def match(self, packed: bytes, *, root: BlockKey) -> PrefixMatch:
        """The longest stored prefix of packed tokens."""
        node = self._roots.get(root)
        if node is None:
            return PrefixMatch((), (), None, Cursor(root))
        path = follow(node, 0, packed)
        states = tuple(
            ChainState(node.states[cut], node.start + cut)
            for node, used in path
            if node.states
            for cut in sorted(node.states)
            if cut <= used
        )
        blocks = tuple(
            [ChainBlock(node.key, node.offset + cut, node.start + cut) for node, cut in path[1:]]
        )
        end = Cursor(root, *path[-1])
        is_partial = end.position * TOKEN_BYTES < len(packed)
        return PrefixMatch(blocks, states, _divergence(end, packed) if is_partial else None, end)

    def is_valid(self, cursor: Cursor) -> bool:
        """Whether the node of a cursor is still in the tree; true without a node."""
        node = cursor.node
        if node is None:
            return True
        if node.parent is None:
            return self._roots.get(node.key) is node
        entry = self._entries.get(node.key)
        return entry is not None and entry.node is node

    def advance(self, cursor: Cursor, packed: bytes | bytearray, *, end: int) -> None:
        """Move a cursor along its chain as far as the chain is stored, at most to token `end`.

        A cursor that is no longer valid starts again at the root.
        """
        if not self.is_valid(cursor):
            cursor.node = None
            cursor.cut = 0
        at = cursor.position
        node = cursor.node or self._roots.get(cursor.root)
        if node is not None and at < end:
            path = follow(node, cursor.cut, packed, at=at * TOKEN_BYTES, end=end * TOKEN_BYTES)
            cursor.node, cursor.cut = path[-1]

    def append(self, cursor: Cursor, key: BlockKey, packed: bytes) -> None:
        """Add a block at a valid cursor whose next token is not stored; moves the cursor to its
        end.
        """
        assert key not in self._entries, "a stored block is stored again"
        assert 0 < len(packed) <= BLOCK_TOKENS * TOKEN_BYTES, "an empty block, or one too long"
        node = cursor.node
        if node is None or node.parent is None:
            node = self._root(cursor.root)
        start = cursor.position
        child = self._add_child(Node(key, node, cursor.cut, start, 0, packed))
        self._entries[key] = _Entry(child, start, child.tokens, is_state=False)
        cursor.node = child
        cursor.cut = child.tokens

    def append_checkpoint(self, cursor: Cursor, key: BlockKey) -> None:
        """Add a state at a valid cursor where there is none."""
        node = cursor.node
        assert node is not None, "a state of no tokens"
        assert cursor.cut not in node.states, "a stored state is stored again"
        self._entries[key] = _Entry(node, cursor.position, 0, is_state=True)
        node.states[cursor.cut] = key

    def checkpoint_at(self, cursor: Cursor) -> BlockKey | None:
        """The state stored at a valid cursor; None if there is none."""
        return None if cursor.node is None else cursor.node.states.get(cursor.cut)

    def _root(self, key: BlockKey) -> Node:
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Node(key, None, 0, 0, 0, b"")
        return root

    def _add_child(self, child: Node) -> Node:
        assert child.parent is not None
        child.parent.branches.setdefault(child.parent_cut, {})[child.packed[:TOKEN_BYTES]] = child
        self.tokens += child.tokens
        return child

    def insert(self, block: Block) -> bool:
        """Add a block or state, and its root if necessary; returns whether it is new.

        A block is not new if its key is known, or if other blocks contain all of its tokens; as
        long as these blocks stay, its key is a valid parent. Raises ValueError if the parent is not
        stored, or if the block is empty or longer than BLOCK_TOKENS.
        """
        if block.kind == "state":
            return self._insert_state(block.key, parent_key=block.parent_key, position=block.start)
        key = block.key
        packed = block.packed_tokens
        if not 0 < len(packed) <= BLOCK_TOKENS * TOKEN_BYTES:
            raise ValueError(f"a block has 1 to {BLOCK_TOKENS} tokens, not {block.tokens}")
        if key in self._entries:
            return False
        node, cut = self._resolve(key, block.parent_key, block.parent_tokens)
        start = node.start + cut
        node, cut = follow(node, cut, packed)[-1]
        offset = node.start + cut - start
        is_new = offset < block.tokens
        if is_new:
            own = packed[offset * TOKEN_BYTES :]
            node = self._add_child(Node(key, node, cut, start + offset, offset, own))
        else:
            node.covered.append(key)
        self._entries[key] = _Entry(node, start, block.tokens, is_state=False)
        return is_new

    def _insert_state(self, key: BlockKey, *, parent_key: BlockKey, position: int) -> bool:
        if key in self._entries:
            return False
        parent = self._entries.get(parent_key)
        if parent is None or parent.is_state:
            raise ValueError(
                f"state {key.hex()[:12]} follows block {parent_key.hex()[:12]}, which is not stored"
            )
        node, cut = self._resolve(key, parent_key, position - parent.start)
        self._entries[key] = _Entry(node, position, 0, is_state=True)
        if cut in node.states:
            node.covered.append(key)
            return False
        node.states[cut] = key
        return True

    def remove(self, key: BlockKey) -> None:
        """Remove a state, a covered block, or a block without successors together with the blocks
        it covers.

        Raises KeyError for an unknown key.
        """
        entry = self._entries[key]
        node = entry.node
        if node.key == key:
            self._remove_node(node)
        elif entry.is_state and node.states.get(entry.cut) == key:
            del node.states[entry.cut]
            same = [each for each in node.covered if self._is_state_at(each, entry.start)]
            self._uncover(node, same)
        else:
            node.covered.remove(key)
        del self._entries[key]

    def _is_state_at(self, key: BlockKey, position: int) -> bool:
        entry = self._entries[key]
        return entry.is_state and entry.start == position

    def _remove_node(self, node: Node) -> None:
        assert not node.branches, "a block is removed before those that follow it"
        assert not node.states, "a block is removed before its states"
        self._uncover(node, list(node.covered))
        self.tokens -= node.tokens
        node.detach()
        root = node
        while root.parent is not None:
            root = root.parent
        if not root.branches:
            del self._roots[root.key]

    def _uncover(self, node: Node, keys: list[BlockKey]) -> None:
        for key in keys:
            node.covered.remove(key)
            del self._entries[key]

    def place_of(self, key: BlockKey) -> tuple[Node, int]:
        """The node of a key, and the cut of a state in that node (0 for a block).

        Raises KeyError for an unknown key.
        """
        entry = self._entries[key]
        return entry.node, entry.cut if entry.is_state else 0

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        """The block that a block or state directly follows; None for the first block of a chain.

        Raises KeyError for an unknown key.
        """
        node = self._before(key)
        return None if node is None or node.parent is None else node.key

    def _before(self, key: BlockKey) -> Node | None:
        """The node that a block or state directly follows."""
        node = self._entries[key].node
        return node.parent if node.key == key else node

    def with_ancestors(self, keys: Iterable[BlockKey]) -> set[BlockKey]:
        """Those of the given keys that are stored, and the keys of all their ancestors."""
        found: set[BlockKey] = set()
        for key in keys:
            if key not in self._entries:
                continue
            found.add(key)
            node = self._before(key)
            while node is not None and node.parent is not None and node.key not in found:
                found.add(node.key)
                node = node.parent
        return found

    def subtree(self, key: BlockKey) -> tuple[BlockKey, ...]:
        """A key and all keys that depend on it, in an order in which they can be removed."""
        node = self._entries[key].node
        return tuple(node.keys_children_first()) if node.key == key else (key,)

    def run_of(self, key: BlockKey) -> tuple[int, int]:
        """The position of a block's first token, and the number of its tokens.

        Raises KeyError for an unknown key.
        """
        entry = self._entries[key]
        return entry.start, entry.tokens

    def block_of(self, key: BlockKey) -> Block:
        """The block or state of a key in the tree, in the store's form.

        Raises KeyError for an unknown key.
        """
        entry = self._entries[key]
        node = entry.node
        if entry.is_state:
            return Block(
                key=key,
                parent_key=node.key,
                parent_tokens=node.offset + entry.cut,
                kind="state",
                start=entry.start,
                packed_tokens=b"",
            )
        place = Cursor(key, node.parent, node.parent_cut).back_at(entry.start)
        packed = node.packed
        start = node.start
        while start > entry.start and node.parent is not None:  # tokens that other nodes hold
            packed = node.parent.packed[: node.parent_cut * TOKEN_BYTES] + packed
            node = node.parent
            start = node.start
        return Block(
            key=key,
            parent_key=place.parent_key,
            parent_tokens=place.parent_tokens,
            kind="kv",
            start=entry.start,
            packed_tokens=packed[(entry.start - start) * TOKEN_BYTES :],
        )

    def precedes(self, key: BlockKey, other: BlockKey) -> bool:
        """Whether a block is `other` or precedes it. The cost grows with the number of blocks
        before `other`.
        """
        entry = self._entries.get(other)
        node = None if entry is None else entry.node
        while node is not None:
            if node.key == key:
                return True
            node = node.parent
        return False

    def _resolve(self, key: BlockKey, parent_key: BlockKey, parent_tokens: int) -> tuple[Node, int]:
        """Find where the first `parent_tokens` tokens of the parent block end. Returns the node in
        which they end, and the number of its tokens up to there.
        """
        if parent_tokens == 0 and parent_key not in self._entries:
            return self._root(parent_key), 0
        parent = self._entries.get(parent_key)
        if parent is None or parent.is_state or not 0 < parent_tokens <= parent.tokens:
            raise ValueError(
                f"entry {key.hex()[:12]} continues block {parent_key.hex()[:12]} after "
                f"{parent_tokens} tokens, but that parent prefix is not stored"
            )
        position = parent.start + parent_tokens
        node = parent.node
        while position <= node.start and node.parent is not None:
            node = node.parent
        return node, position - node.start

    def check_invariants(self) -> None:
        """Assert that each token is in one node, that each key's location is correct, and that no
        root is empty.
        """
        seen: dict[BlockKey, Node] = {}
        tokens = 0
        for key, root in self._roots.items():
            assert root.key == key, "a root under another key"
            assert root.parent is None, "a root with a parent"
            assert root.branches, "an empty root"
            for node in root.descendants():
                node.check_invariants()
                tokens += node.tokens
                own = () if node.parent is None else (node.key,)
                for each in (*own, *node.states.values(), *node.covered):
                    assert each not in seen, "a key in two places"
                    seen[each] = node
        assert tokens == self.tokens, "miscounted tokens"
        assert seen.keys() == self._entries.keys(), "the keys of the nodes and the entries differ"
        assert all(self._entries[key].node is node for key, node in seen.items()), (
            "a key leads to another node"
        )


def _divergence(end: Cursor, packed: bytes) -> Divergence | None:
    node = end.node
    found = token_at(packed, end.position)
    assert node is not None
    if end.cut < node.tokens:
        stored = token_at(node.packed, end.cut)
    elif branches := node.branches.get(end.cut):
        stored = int.from_bytes(next(reversed(branches)), "little")
    else:
        return None
    return Divergence(position=end.position, stored_token_id=stored, prompt_token_id=found)
