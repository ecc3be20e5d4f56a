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
from holdfast.worker.prefix.chain import ChainBlock, ChainState, Cursor, Node, Root, follow


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


class PrefixTree:
    """All stored chains. A match takes one lookup and one comparison per block. A node's own tokens
    are those that no other node has; a cut is a number of own tokens.
    """

    def __init__(self) -> None:
        self._roots: dict[BlockKey, Node] = {}
        self._nodes: dict[BlockKey, Node] = {}  # without roots
        self.tokens = 0  # shared prefixes count once

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._nodes

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def roots(self) -> int:
        """The number of roots (tenants) that have stored chains."""
        return len(self._roots)

    def has_node(self, key: BlockKey) -> bool:
        """Whether a key is stored and matches can return it: no other blocks contain all its
        tokens.
        """
        node = self._nodes.get(key)
        return node is not None and not node.is_covered

    def node(self, key: BlockKey) -> Node:
        """The node of a key. Raises KeyError for an unknown key."""
        return self._nodes[key]

    @property
    def root_nodes(self) -> Mapping[BlockKey, Node]:
        """The roots that have stored chains, by key."""
        return self._roots

    def has_root(self, root: BlockKey) -> bool:
        """Whether a root has stored chains."""
        return root in self._roots

    def match(self, packed: bytes, *, root: Root) -> PrefixMatch:
        """The longest stored prefix of packed tokens."""
        node = self._roots.get(root.key)
        if node is None:
            return PrefixMatch((), (), None, Cursor(root))
        path = follow(node, 0, packed)
        states = tuple(
            ChainState(node.states[cut].key, node.start + cut)
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
        return self._nodes.get(node.key) is node

    def advance(self, cursor: Cursor, packed: bytes | bytearray, *, end: int) -> None:
        """Move a cursor along its chain as far as the chain is stored, at most to token `end`.

        A cursor that is no longer valid starts again at the root.
        """
        if not self.is_valid(cursor):
            cursor.node = None
            cursor.cut = 0
        at = cursor.position
        node = cursor.node or self._roots.get(cursor.root.key)
        if node is not None and at < end:
            path = follow(node, cursor.cut, packed, at=at * TOKEN_BYTES, end=end * TOKEN_BYTES)
            cursor.node, cursor.cut = path[-1]

    def append(self, cursor: Cursor, block: Block) -> Node:
        """Add a block or state at a valid cursor, which is moved to its end. The next token of the
        chain, or the state at the cursor, must not be stored.
        """
        assert block.key not in self._nodes, "a stored block is stored again"
        node = cursor.node
        if block.kind == "state":
            assert node is not None, "a state of no tokens"
            assert cursor.cut not in node.states, "a stored state is stored again"
        else:
            assert 0 < block.tokens <= BLOCK_TOKENS, "an empty block, or one too long"
        if node is None or node.parent is None:
            node = self._root(cursor.root.key)
        added = self._add(node, cursor.cut, block, offset=0)
        if block.kind == "kv":
            cursor.node = added
            cursor.cut = added.tokens
        return added

    def _root(self, key: BlockKey) -> Node:
        """The root with this key, which is added if it is new."""
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Node(key, None, 0, 0, 0, b"")
        return root

    def _add(self, parent: Node, cut: int, block: Block, *, offset: int) -> Node:
        """Add the tokens of a block from `offset` on, or a state, after `cut` own tokens."""
        packed = block.packed_tokens[offset * TOKEN_BYTES :]
        node = Node(block.key, parent, cut, parent.start + cut, offset, packed, block)
        self._nodes[block.key] = node
        self.tokens += node.tokens
        if packed:
            parent.branches.setdefault(cut, {})[packed[:TOKEN_BYTES]] = node
        elif block.kind == "kv" or parent.states.setdefault(cut, node) is not node:
            parent.covered.append(node)
        return node

    def checkpoint_at(self, cursor: Cursor) -> BlockKey | None:
        """The state stored at a valid cursor; None if there is none."""
        state = None if cursor.node is None else cursor.node.states.get(cursor.cut)
        return None if state is None else state.key

    def insert(self, block: Block) -> bool:
        """Add a block or state, and its root if necessary; returns whether it is new.

        A block is not new if its key is known, or if other blocks contain all of its tokens; as
        long as these blocks stay, its key is a valid parent. Raises ValueError if the parent is not
        stored, or if the block is empty or longer than BLOCK_TOKENS.
        """
        if block.kind == "kv" and not 0 < block.tokens <= BLOCK_TOKENS:
            raise ValueError(f"a block has 1 to {BLOCK_TOKENS} tokens, not {block.tokens}")
        if block.key in self._nodes:
            return False
        node, cut = self._find_predecessor(block)
        start = node.start + cut  # the position of the block's first token
        if block.kind == "kv":  # skip the tokens that other blocks have
            node, cut = follow(node, cut, block.packed_tokens)[-1]
        return not self._add(node, cut, block, offset=node.start + cut - start).is_covered

    def remove(self, key: BlockKey) -> None:
        """Remove a state, a covered block, or a block without successors together with the blocks
        it covers.

        Raises KeyError for an unknown key.
        """
        node = self._nodes[key]
        parent = node.parent
        assert parent is not None
        if node.packed:
            assert not node.branches, "a block is removed before those that follow it"
            assert not node.states, "a block is removed before its states"
            for each in node.covered:
                del self._nodes[each.key]
            self.tokens -= node.tokens
            node.detach()
            while parent.parent is not None:
                parent = parent.parent
            if not parent.branches:
                del self._roots[parent.key]
        elif node.is_covered:
            parent.covered.remove(node)
        else:
            del parent.states[node.parent_cut]
            for each in tuple(parent.covered):
                if each.is_state and each.start == node.start:
                    parent.covered.remove(each)
                    del self._nodes[each.key]
        del self._nodes[key]

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        """The block that a block or state directly follows; None for the first block of a chain.

        Raises KeyError for an unknown key.
        """
        parent = self._nodes[key].parent
        return None if parent is None or parent.parent is None else parent.key

    def with_ancestors(self, keys: Iterable[BlockKey]) -> set[BlockKey]:
        """Those of the given keys that are stored, and the keys of all their ancestors."""
        ancestors: set[BlockKey] = set()
        for key in keys:
            node = self._nodes.get(key)
            while node is not None and node.parent is not None and node.key not in ancestors:
                ancestors.add(node.key)
                node = node.parent
        return ancestors

    def subtree(self, key: BlockKey) -> tuple[BlockKey, ...]:
        """A key and all keys that depend on it, in an order in which they can be removed."""
        return tuple(self._nodes[key].keys_children_first())

    def run_of(self, key: BlockKey) -> tuple[int, int]:
        """The position of a block's first token, and the number of its tokens.

        Raises KeyError for an unknown key.
        """
        node = self._nodes[key]
        return node.start - node.offset, node.offset + node.tokens

    def block_of(self, key: BlockKey) -> Block:
        """The block or state of a key in the tree. Raises KeyError for an unknown key."""
        block = self._nodes[key].block
        assert block is not None
        return block

    def precedes(self, key: BlockKey, other: BlockKey) -> bool:
        """Whether a block is `other` or precedes it. The cost grows with the number of blocks
        before `other`.
        """
        node = self._nodes.get(other)
        while node is not None:
            if node.key == key:
                return True
            node = node.parent
        return False

    def _find_predecessor(self, block: Block) -> tuple[Node, int]:
        """Find what a block follows: the node in which its parent's tokens before it end, and the
        number of that node's own tokens up to there.
        """
        parent = self._nodes.get(block.parent_key)
        if parent is None and block.kind == "kv" and block.parent_tokens == 0:
            return self._root(block.parent_key), 0
        start, tokens = (0, 0) if parent is None else self.run_of(block.parent_key)
        tokens_before = block.parent_tokens if block.kind == "kv" else block.start - start
        if parent is None or parent.is_state or not 0 < tokens_before <= tokens:
            raise ValueError(
                f"{block.kind} {block.key.hex()[:12]} follows {tokens_before} tokens of block "
                f"{block.parent_key.hex()[:12]}, which are not stored"
            )
        node, position = parent, start + tokens_before
        while position <= node.start and node.parent is not None:
            node = node.parent
        return node, position - node.start

    def check_invariants(self) -> None:
        """Assert that each token is in one node, that each key's location is correct, and that no
        root is empty.
        """
        checked: dict[BlockKey, Node] = {}
        tokens = 0
        for key, root in self._roots.items():
            assert root.key == key, "a root under another key"
            assert root.parent is None, "a root with a parent"
            assert root.branches, "an empty root"
            for node in root.descendants():
                node.check_invariants()
                tokens += node.tokens
                stored_node = () if node.parent is None else (node,)  # a root is not stored
                for each in (*stored_node, *node.states.values(), *node.covered):
                    assert each.key not in checked, "a key in two places"
                    assert each is node or each.parent is node, "a node with another parent"
                    checked[each.key] = each
                assert all(each.is_covered for each in node.covered), "a node is not covered"
        assert tokens == self.tokens, "miscounted tokens"
        assert checked == self._nodes, "the tree has other nodes than its table"


def _divergence(end: Cursor, packed: bytes) -> Divergence | None:
    """Where and how a chain `packed`, longer than its match, differs from the stored chains: with
    several of them, from the latest. None if nothing is stored after the match. end: of the match.
    """
    node = end.node
    prompt_token_id = token_at(packed, end.position)
    assert node is not None
    if end.cut < node.tokens:
        stored_token_id = token_at(node.packed, end.cut)
    elif branches := node.branches.get(end.cut):
        stored_token_id = int.from_bytes(next(reversed(branches)), "little")
    else:
        return None
    return Divergence(
        position=end.position, stored_token_id=stored_token_id, prompt_token_id=prompt_token_id
    )
