from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from holdfast.store.budget import (
    UNLIMITED,
    Holding,
    StoreLimits,
    VolumeSpace,
    allowed_bytes,
    choose_victims,
    eviction_order,
    reachable_keys,
)

sizes = st.integers(0, 10**6)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


ROOT = key(10**6)


@st.composite
def forests(draw: st.DrawFn) -> list[Holding]:
    """Trees of blocks and states, some without their parents, in any order."""
    holdings: list[Holding] = []
    for number in range(draw(st.integers(0, 25))):
        place = draw(st.integers(0, number))  # 0: a first block
        parents = [holding for holding in holdings if not holding.is_state]
        parent = parents[place % len(parents)] if place and parents else None
        holdings.append(
            Holding(
                key=key(number),
                parent_key=ROOT if parent is None else parent.key,
                start=0 if parent is None else parent.start + draw(st.integers(1, 4)),
                file_bytes=draw(st.integers(1, 10)),
                last_used=float(draw(st.integers(0, 5))),
                pinned=draw(st.integers(0, 9)) == 0,
                is_state=draw(st.booleans()),
            )
        )
    gone = draw(st.sets(st.sampled_from([holding.key for holding in holdings]), max_size=3)) if holdings else set()
    return draw(st.permutations([holding for holding in holdings if holding.key not in gone]))


def ancestors(holding: Holding, by_key: dict[bytes, Holding]) -> list[Holding]:
    found = []
    while holding.parent_key in by_key:
        holding = by_key[holding.parent_key]
        found.append(holding)
    return found


@given(forest=forests())
def test_children_go_before_their_parents(forest: list[Holding]) -> None:
    order = [holding.key for holding in eviction_order(forest)]
    by_key = {holding.key: holding for holding in forest}
    assert len(order) == len(set(order))
    for holding in forest:
        for ancestor in ancestors(holding, by_key):
            if ancestor.key in order:
                assert order.index(holding.key) < order.index(ancestor.key)


@given(forest=forests())
def test_pinned_blocks_and_their_ancestors_stay_and_everything_else_may_go(forest: list[Holding]) -> None:
    by_key = {holding.key: holding for holding in forest}
    kept = {holding.key for holding in forest if holding.pinned}
    kept |= {ancestor.key for holding in forest if holding.pinned for ancestor in ancestors(holding, by_key)}
    assert {holding.key for holding in eviction_order(forest)} == by_key.keys() - kept


@given(forest=forests(), excess=st.integers(-5, 200))
def test_no_more_goes_than_must(forest: list[Holding], excess: int) -> None:
    eviction = choose_victims(forest, excess_bytes=excess)
    by_key = {holding.key: holding for holding in forest}
    freed = [by_key[victim].file_bytes for victim in eviction.keys]
    assert sum(freed) == eviction.freed_bytes
    assert sum(freed[:-1]) < max(1, excess)
    assert sum(freed) >= excess or len(freed) == len(eviction_order(forest))


@given(forest=forests())
def test_what_cannot_be_reached_goes_first_then_the_least_recently_used(forest: list[Holding]) -> None:
    by_key = {holding.key: holding for holding in forest}
    reachable = {holding.key for holding in forest if [holding, *ancestors(holding, by_key)][-1].start == 0}
    order = eviction_order(forest)
    newest = {
        holding.key: max(
            [other.last_used for other in forest if holding in ancestors(other, by_key)], default=0.0
        )
        for holding in forest
    }  # fmt: skip
    ranks = [(holding.key in reachable, max(newest[holding.key], holding.last_used)) for holding in order]
    assert ranks == sorted(ranks)
    in_depth_order = sorted(forest, key=lambda holding: holding.start)
    assert reachable == reachable_keys((holding.key, holding.parent_key, holding.start) for holding in in_depth_order)


@given(forest=forests())
def test_the_ancestors_of_a_block_that_is_being_written_stay(forest: list[Holding]) -> None:
    by_key = {holding.key: holding for holding in forest}
    for parent in forest:
        order = eviction_order(forest, in_use={parent.key})
        assert not {parent.key, *(ancestor.key for ancestor in ancestors(parent, by_key))} & {victim.key for victim in order}


def test_a_prefix_that_one_branch_still_uses_outlives_the_other_branch() -> None:
    shared = Holding(key(1), ROOT, 0, 10, 1.0, False, False)
    old, new = replace(shared, key=key(2), start=4, parent_key=key(1), last_used=2.0), replace(
        shared, key=key(3), start=4, parent_key=key(1), last_used=9.0
    )  # fmt: skip
    other = replace(shared, key=key(4), last_used=5.0)
    assert [holding.key for holding in eviction_order([shared, old, new, other])] == [key(2), key(4), key(3), key(1)]


@given(budget=sizes, percent=st.floats(0, 100), spare=sizes, total=sizes, free=sizes, stored=sizes)
def test_every_limit_is_kept(budget: int, percent: float, spare: int, total: int, free: int, stored: int) -> None:
    limits = StoreLimits(budget_bytes=budget, volume_percent=percent, spare_bytes=spare)
    allowed = allowed_bytes(limits, volume=VolumeSpace(total_bytes=total, free_bytes=min(free, total)), stored_bytes=stored)
    assert 0 <= allowed <= budget
    assert allowed <= total * percent / 100
    assert allowed <= max(stored, stored + min(free, total) - spare)


def test_a_volume_that_others_fill_stops_growth_but_costs_nothing_that_is_stored() -> None:
    full = VolumeSpace(total_bytes=1000, free_bytes=0)
    assert allowed_bytes(StoreLimits(volume_percent=50, spare_bytes=100), volume=full, stored_bytes=300) == 300


def test_the_default_limits_leave_most_of_the_volume_alone() -> None:
    volume = VolumeSpace(total_bytes=10**12, free_bytes=10**12)
    assert allowed_bytes(StoreLimits(), volume=volume, stored_bytes=0) == 2 * 10**11
    assert StoreLimits().daily_write_bytes == UNLIMITED
