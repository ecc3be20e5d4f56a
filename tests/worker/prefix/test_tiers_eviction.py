from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.worker.prefix.tiers import EvictionOrder


def drain(order: EvictionOrder) -> list[bytes]:
    left = []
    while (key := order.next_to_leave()) is not None:
        order.remove(key)
        left.append(key)
    return left


def test_the_least_recently_used_leave_first_children_before_parents() -> None:
    order = EvictionOrder()
    order.add(b"root", parent=None)
    order.add(b"old branch", parent=b"root")
    order.add(b"other", parent=None)
    order.add(b"young branch", parent=b"root")
    assert drain(order) == [b"old branch", b"other", b"young branch", b"root"]


def test_removed_keys_do_not_accumulate_in_the_order() -> None:
    order = EvictionOrder()
    keys = [number.to_bytes(2, "big") for number in range(200)]
    for key in keys:
        order.add(key, parent=None)
    for key in keys:
        order.remove(key)
        order.check_invariants()


def test_using_a_path_saves_it() -> None:
    order = EvictionOrder()
    for key, parent in ((b"a", None), (b"b", b"a"), (b"c", None), (b"d", b"c")):
        order.add(key, parent=parent)
    order.touch([b"a", b"b", b"not here"])
    assert drain(order) == [b"d", b"c", b"b", b"a"]


def test_a_held_key_stays_with_its_parents_until_fully_released() -> None:
    order = EvictionOrder()
    order.add(b"a", parent=None)
    order.add(b"b", parent=b"a")
    order.add(b"c", parent=None)
    with order.pinned([b"b", b"comes later"]):
        order.hold_keys([b"b"])
        assert order.held == 1
        order.add(b"comes later", parent=None)
        assert drain(order) == [b"c"]
    assert drain(order) == [b"comes later"]
    order.release_keys([b"b"])
    assert drain(order) == [b"b", b"a"]


def test_releasing_a_hold_twice_is_harmless() -> None:
    order = EvictionOrder()
    hold = order.pinned([b"a"])
    other = order.pinned([b"a"])
    order.add(b"a", parent=None)
    hold.close()
    hold.close()
    assert order.next_to_leave() is None
    other.close()
    assert order.next_to_leave() == b"a"


def test_many_holds_of_one_key_do_not_fill_the_order() -> None:
    order = EvictionOrder()
    order.add(b"a", parent=None)
    for _ in range(1000):
        with order.pinned([b"a"]):
            pass
        order.check_invariants()
    assert drain(order) == [b"a"]


keys = st.integers(0, 11).map(lambda index: b"%d" % index)


class EvictionStates(RuleBasedStateMachine):
    """Compared with a plain list of members with the times of their uses.

    A key's parent is always the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.order = EvictionOrder()
        self.used: dict[bytes, int] = {}
        self.holds: list[bytes] = []
        self.now = 0

    def parent(self, key: bytes) -> bytes | None:
        return None if int(key) < 3 else b"%d" % (int(key) // 2)

    def may_leave(self, key: bytes) -> bool:
        return key not in self.holds and not any(self.parent(other) == key for other in self.used)

    @rule(key=keys)
    def add(self, key: bytes) -> None:
        if key not in self.used:
            self.now += 1
            self.used[key] = self.now
            self.order.add(key, parent=self.parent(key))

    @rule(key=keys)
    def touch_a_path(self, key: bytes) -> None:
        self.now += 1
        path = [key]
        while (parent := self.parent(path[-1])) is not None:
            path.append(parent)
        self.order.touch(path)
        self.used.update({each: self.now for each in path if each in self.used})

    @rule(key=keys)
    def hold(self, key: bytes) -> None:
        self.order.hold_keys([key])
        self.holds.append(key)

    @precondition(lambda self: self.holds)
    @rule(pick=st.integers(0, 100))
    def release(self, pick: int) -> None:
        self.order.release_keys([self.holds.pop(pick % len(self.holds))])

    @rule(key=keys)
    def drop(self, key: bytes) -> None:
        if key in self.used:
            self.order.remove(key)
            del self.used[key]

    @rule()
    def evict(self) -> None:
        key = self.order.next_to_leave()
        able = [each for each in self.used if self.may_leave(each)]
        if key is None:
            assert able == []
            return
        assert key in able
        assert self.used[key] == min(self.used[each] for each in able)
        self.order.remove(key)
        del self.used[key]

    @invariant()
    def the_books_agree(self) -> None:
        self.order.check_invariants()
        assert len(self.order) == len(self.used)
        assert self.order.held == len(set(self.holds) & self.used.keys())


EvictionStates.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestEvictionStates = EvictionStates.TestCase
