"""Summarizes the prefix tree for people who want to see what is cached, where, and for whom.

Device thread only; no MLX. The tree may have many thousands of blocks, but people look at a few
hundred shapes. So blocks that follow each other without a fork become one part, and only the largest
parts are listed; each says how many further ones follow it. There may also be many thousands of
trees: one for each tenant, and so for each `cache_salt`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from holdfast.lru_cache import LruCache
from holdfast.store.block import BlockKey
from holdfast.wire.cache_map import CacheMap, CacheMapQuestion, CachePart, CacheTree
from holdfast.worker.engine.fingerprint import Fingerprints
from holdfast.worker.kv.bits import BITS, KVBits
from holdfast.worker.prefix.chain import Branch, Node
from holdfast.worker.prefix.index import PrefixIndex
from holdfast.worker.prefix.lookup import LiveChain
from holdfast.worker.prefix.tiers import Residence
from holdfast.worker.prefix.tree import PrefixTree

MOST_PARTS = 240
# a block takes 2.4 microseconds (a core of a Xeon at 2.1 GHz), and requests wait until it is done
MOST_BLOCKS = 20_000
MOST_USERS = 256  # sessions whose chains are shown
MOST_NAMES = 6  # of sessions, for one part
KEPT_SECONDS = 1.0  # how long a map is sent again instead of a new one
MOST_KEPT = 16

_NO_OWNER = CacheTree(is_own=False, form=None, adapter="", tokens=0)
_FORMS: tuple[KVBits, ...] = ("native", *BITS)


@dataclass(frozen=True, slots=True)
class CacheUser:
    """A session, and the chains that it uses."""

    session_id: str
    tenant: str
    branches: Sequence[Branch]


@dataclass(slots=True, eq=False)
class _Part:
    """Blocks of a tree that follow each other without a fork, shown as one."""

    tree: int  # index of the tree
    parent: _Part | None
    start: int  # position of the first token
    tokens: int = 0
    blocks: int = 0
    nbytes: int = 0  # of its blocks and states
    live_tokens: int = 0
    ram_tokens: int = 0
    disk_tokens: int = 0
    saved_tokens: int = 0  # on disk, even if they are in memory as well
    below_tokens: int = 0  # in all parts that follow
    running: int = 0  # running requests that begin with it
    sessions: dict[str, None] = field(default_factory=dict)  # an ordered set
    children: list[_Part] = field(default_factory=list)
    place: int | None = None  # among the parts that are listed

    @property
    def whole_tokens(self) -> int:
        return self.tokens + self.below_tokens

    def with_ancestors(self) -> Iterator[_Part]:
        """This part and all parts before it, the last first."""
        part: _Part | None = self
        while part is not None:
            yield part
            part = part.parent


@dataclass(frozen=True, slots=True)
class _ChainEnd:
    """Where the chain of a session or of a running request ends."""

    rank: int  # by last use
    session_id: str  # empty: none
    is_running: bool  # of a running request
    cut: int  # own tokens of the node before the end


def cache_map(
    index: PrefixIndex,
    question: CacheMapQuestion,
    *,
    fingerprints: Fingerprints,
    users: Sequence[CacheUser],
    chains: Iterable[LiveChain],
) -> CacheMap:
    """Summarize the trees that a question asks for.

    users: the sessions of all tenants, the last used first. chains: the live chains.
    """
    recent = users[:MOST_USERS]
    tenants = [question.tenant]
    if question.sees_all:
        tenants += dict.fromkeys(user.tenant for user in recent if user.tenant != question.tenant)
    owners = _tree_owners(index, tenants, own=question.tenant, fingerprints=fingerprints)
    roots = index.tree.root_nodes
    shown = [key for key in owners if key in roots]
    count = len(shown)
    if question.sees_all:
        count = len(roots)
        shown = list(dict.fromkeys((*shown, *islice(roots, MOST_BLOCKS))))
    visit = _Visit(index, _chain_ends(index.tree, recent, chains))
    for tree, key in enumerate(shown):
        visit.begin(roots[key], tree)
    visit.visit_nodes()
    parts = _largest_parts(visit.parts)
    for end, part in sorted(visit.ends_in_parts, key=lambda pair: pair[0].rank):
        _count_user(end, part)
    first_parts: dict[int, list[_Part]] = {}  # by tree
    for part in visit.parts:
        if part.parent is None:
            first_parts.setdefault(part.tree, []).append(part)
    # the trees of the listed parts first, then others
    listed = list(dict.fromkeys((*(part.tree for part in parts), *range(len(shown)))))[:MOST_PARTS]
    places = {tree: place for place, tree in enumerate(listed)}
    return CacheMap(
        call_id=question.call_id,
        trees=tuple(
            _cache_tree(owners.get(shown[tree], _NO_OWNER), first_parts.get(tree, ()))
            for tree in listed
        ),
        hidden_trees=count - len(listed),
        parts=tuple(_cache_part(part, tree=places[part.tree]) for part in parts),
        blocks=visit.blocks,
        is_complete=visit.is_complete,
    )


class RecentMaps:
    """Keeps maps for a moment, so that clients that ask often cost the device little."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: LruCache[tuple[str, bool], tuple[float, CacheMap]] = LruCache(MOST_KEPT)

    def answer(
        self, question: CacheMapQuestion, make_map: Callable[[CacheMapQuestion], CacheMap]
    ) -> CacheMap:
        """The map that a question asks for: the last one, or a new one if that is too old."""
        key = (question.tenant, question.sees_all)
        now = self._clock()
        kept = self._kept.get(key)
        if kept is None or now - kept[0] >= KEPT_SECONDS:
            kept = (now, make_map(question))
            self._kept.put(key, kept)
        return msgspec.structs.replace(kept[1], call_id=question.call_id)


def _tree_owners(
    index: PrefixIndex, tenants: Iterable[str], *, own: str, fingerprints: Fingerprints
) -> dict[BlockKey, CacheTree]:
    """The trees of these tenants, still empty, by root. own: the tenant that asks."""
    owned = fingerprints.cache_tenants(own)
    return {
        index.root(tenant=tenant, form=form).key: CacheTree(
            is_own=tenant in owned,
            form=form,
            adapter=fingerprints.adapter_of(tenant),
            tokens=0,
        )
        for tenant in dict.fromkeys((*owned, *tenants))
        for form in _FORMS
    }


def _chain_ends(
    tree: PrefixTree, users: Sequence[CacheUser], chains: Iterable[LiveChain]
) -> dict[BlockKey, list[_ChainEnd]]:
    """The ends of all chains that are in use, by the key of the node in which they end."""
    ends: dict[BlockKey, list[_ChainEnd]] = {}
    for rank, user in enumerate(users):
        for branch in user.branches:
            # all blocks before a known one are known as well
            last = next((each for each in reversed(branch.blocks) if tree.has_node(each.key)), None)
            if last is not None:
                cut = last.end - tree.node(last.key).start
                ends.setdefault(last.key, []).append(_ChainEnd(rank, user.session_id, False, cut))
    for chain in chains:
        node = chain.cursor.node
        if node is not None and tree.has_node(node.key):
            end = _ChainEnd(-chain.used, chain.session_id, not chain.is_parked, chain.cursor.cut)
            ends.setdefault(node.key, []).append(end)
    return ends


class _Visit:
    """Visits the tree breadth first, so that the beginnings of prompts come first. A node's own tokens
    are those that no other node has; other nodes may follow any of them.
    """

    def __init__(self, index: PrefixIndex, ends: Mapping[BlockKey, Sequence[_ChainEnd]]) -> None:
        self._index = index
        self._ends = ends
        # node, own tokens to skip, part before it, index of the tree
        self._pending: deque[tuple[Node, int, _Part | None, int]] = deque()
        self.parts: list[_Part] = []
        self.ends_in_parts: list[tuple[_ChainEnd, _Part]] = []  # ends of chains, with their parts
        self.blocks = 0  # counted so far

    @property
    def is_complete(self) -> bool:
        return not self._pending and self.blocks < MOST_BLOCKS

    def begin(self, root: Node, tree: int) -> None:
        for child in root.children():
            self._pending.append((child, 0, None, tree))

    def visit_nodes(self) -> None:
        """Visit the nodes that follow, up to the limit, and count the tokens below each part."""
        while self._pending and self.blocks < MOST_BLOCKS:
            node, cut, parent, tree = self._pending.popleft()
            part = _Part(tree, parent, node.start + cut)
            self.parts.append(part)
            if parent is not None:
                parent.children.append(part)
            for following, at in self._extend(part, node, cut):
                self._pending.append((following, at, part, tree))
        for part in reversed(self.parts):
            if part.parent is not None:
                part.parent.below_tokens += part.whole_tokens

    def _extend(self, part: _Part, node: Node, cut: int) -> list[tuple[Node, int]]:
        """Extend a part to the next fork; returns what follows it."""
        while self.blocks < MOST_BLOCKS:
            end = min((fork for fork in node.branches if fork > cut), default=node.tokens)
            self._count_tokens(part, node, cut, end)
            children = list(node.branches.get(end, {}).values())
            if end < node.tokens:
                return [(node, end), *((child, 0) for child in children)]
            if len(children) != 1:
                return [(child, 0) for child in children]
            (node,) = children
            cut = 0
        return []

    def _count_tokens(self, part: _Part, node: Node, cut: int, end: int) -> None:
        """Count own tokens `cut` to `end` of a node in a part: where they are, and who uses them."""
        index, tokens = self._index, end - cut
        if cut == 0:
            part.blocks += 1
            self.blocks += 1
        part.tokens += tokens
        part.nbytes += node.nbytes * tokens // node.tokens
        part.nbytes += sum(each.nbytes for at, each in node.states.items() if cut < at <= end)
        residence = index.residence(node.key)
        if residence is None:
            return  # missing
        if index.holder_of(node.key) is not None:
            part.live_tokens += tokens
        elif residence is Residence.DISK:
            part.disk_tokens += tokens
        else:
            part.ram_tokens += tokens
        if residence is not Residence.RAM:
            part.saved_tokens += tokens
        for each in self._ends.get(node.key, ()):
            if cut < each.cut <= end:
                self.ends_in_parts.append((each, part))


def _largest_parts(parts: Iterable[_Part]) -> list[_Part]:
    """The parts to list, each after its parent: those that most tokens begin with."""
    heap = [
        (-part.whole_tokens, place, part) for place, part in enumerate(parts) if not part.parent
    ]
    heapq.heapify(heap)
    number = len(heap)
    listed: list[_Part] = []
    while heap and len(listed) < MOST_PARTS:
        *_, part = heapq.heappop(heap)
        part.place = len(listed)
        listed.append(part)
        for child in part.children:
            number += 1
            heapq.heappush(heap, (-child.whole_tokens, number, child))
    return listed


def _count_user(end: _ChainEnd, part: _Part) -> None:
    """Count the user of a chain that ends in a part in this part and in all parts before it."""
    for each in part.with_ancestors():
        each.running += end.is_running
        if end.session_id:
            each.sessions.setdefault(end.session_id)


def _cache_tree(owner: CacheTree, first_parts: Sequence[_Part]) -> CacheTree:
    """Summarize one tree. first_parts: those that start at token 0."""
    hidden = [part for part in first_parts if part.place is None]
    return msgspec.structs.replace(
        owner,
        tokens=sum(part.whole_tokens for part in first_parts),
        hidden_parts=len(hidden),
        hidden_tokens=sum(part.whole_tokens for part in hidden),
    )


def _cache_part(part: _Part, *, tree: int) -> CachePart:
    """tree: its place among the trees that are listed."""
    hidden = [child for child in part.children if child.place is None]
    return CachePart(
        tree=tree,
        parent=None if part.parent is None else part.parent.place,
        start=part.start,
        tokens=part.tokens,
        blocks=part.blocks,
        bytes=part.nbytes,
        live_tokens=part.live_tokens,
        ram_tokens=part.ram_tokens,
        disk_tokens=part.disk_tokens,
        saved_tokens=part.saved_tokens,
        below_tokens=part.below_tokens,
        running=part.running,
        sessions=tuple(part.sessions)[:MOST_NAMES],
        session_count=len(part.sessions),
        hidden_parts=len(hidden),
        hidden_tokens=sum(child.whole_tokens for child in hidden),
    )
