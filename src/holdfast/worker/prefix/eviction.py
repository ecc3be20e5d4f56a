"""Who has to leave RAM: the least recently used of those that nobody in RAM follows, held ones
excepted.

A use of a child is a use of its parents, and a child leaves before its parent; so a shared prefix
outlives its branches.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from contextlib import ExitStack

from holdfast.store.block import BlockKey


class EvictionOrder:
    """The order in which keys may leave.

    Parents may come and go in any order; whoever is not a member holds nobody back.

    All costs are logarithmic in the number of members: leaves wait in a heap, and entries that are
    out of date are put right when they come up.
    """

    def __init__(self) -> None:
        self._last_used: dict[BlockKey, int] = {}  # of every member
        self._parents: dict[BlockKey, BlockKey | None] = {}
        # members that follow a key, which need not be a member
        self._children: dict[BlockKey, int] = {}
        # of any keys, so that a hold outlives a key that leaves and comes back
        self._holds: dict[BlockKey, int] = {}
        # every member without children and holds is in it at least once
        self._leaves: list[tuple[int, BlockKey]] = []
        self._uses = 0

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._last_used

    def __len__(self) -> int:
        return len(self._last_used)

    @property
    def held(self) -> int:
        """Members that may not leave because somebody holds them."""
        return sum(key in self._last_used for key in self._holds)

    def add(self, key: BlockKey, *, parent: BlockKey | None) -> None:
        """A key comes in, as the most recently used one."""
        assert key not in self._last_used, "a key comes in twice"
        self._uses += 1
        self._last_used[key], self._parents[key] = self._uses, parent
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        self._offer(key)

    def remove(self, key: BlockKey) -> None:
        """A key leaves, for whatever reason."""
        del self._last_used[key]
        parent = self._parents.pop(key)
        if parent is None:
            return
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            self._offer(parent)

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Keys were used together, all at once. A child is to be touched with its parents."""
        self._uses += 1
        for key in keys:
            if key in self._last_used:
                self._last_used[key] = self._uses

    def hold(self, keys: Iterable[BlockKey]) -> None:
        """Keep keys from leaving until they are released as often as they were held."""
        for key in keys:
            self._holds[key] = self._holds.get(key, 0) + 1

    def release(self, keys: Iterable[BlockKey]) -> None:
        """Take holds back."""
        for key in keys:
            self._holds[key] -= 1
            if not self._holds[key]:
                del self._holds[key]
                self._offer(key)

    def held_until_closed(self, keys: Iterable[BlockKey]) -> ExitStack:
        """Hold keys until what is returned is closed: by hand or at a context's end.

        To close it again does nothing.
        """
        held = tuple(keys)
        self.hold(held)
        hold = ExitStack()
        hold.callback(self.release, held)
        return hold

    def next_to_leave(self) -> BlockKey | None:
        """Who has to leave first; None when nobody may. It stays until it is removed."""
        while self._leaves:
            last_used, key = self._leaves[0]
            used = self._last_used.get(key)
            if used is None or key in self._children or key in self._holds:
                heapq.heappop(self._leaves)  # it is offered again when the last child or hold goes
            elif used != last_used:
                heapq.heapreplace(self._leaves, (used, key))
            else:
                return key
        return None

    def _offer(self, key: BlockKey) -> None:
        used = self._last_used.get(key)
        if used is None or key in self._children or key in self._holds:
            return
        heapq.heappush(self._leaves, (used, key))
        # many holds of the same keys leave copies behind
        if len(self._leaves) > 64 + 2 * len(self._last_used):
            self._leaves = [
                (used, key) for key, used in self._last_used.items() if self._may_leave(key)
            ]
            heapq.heapify(self._leaves)

    def _may_leave(self, key: BlockKey) -> bool:
        return key not in self._children and key not in self._holds

    def check_invariants(self) -> None:
        """Assert that children are counted right and that everybody who may leave will come up."""
        children: dict[BlockKey, int] = {}
        for parent in self._parents.values():
            if parent is not None:
                children[parent] = children.get(parent, 0) + 1
        assert self._parents.keys() == self._last_used.keys(), "members differ"
        assert children == self._children, "children are miscounted"
        assert all(count > 0 for count in self._holds.values()), "a hold of nothing"
        leaving = {key for key in self._last_used if self._may_leave(key)}
        assert leaving <= {key for _, key in self._leaves}, (
            "a key that may leave is not in the order"
        )
        assert len(self._leaves) <= 65 + 2 * len(self._last_used), "the order is full of copies"
