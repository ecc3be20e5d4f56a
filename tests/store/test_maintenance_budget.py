from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.config import StoreSettings
from holdfast.store.block import Block, Entry, reachable_keys
from holdfast.store.maintenance import (
    DAILY_WRITE_BYTES,
    StoreLimits,
    allowed_bytes,
    choose_victims,
    eviction_order,
    store_limits,
)

sizes = st.integers(0, 10**6)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


ROOT = key(10**6)


@st.composite
def forests(draw: st.DrawFn) -> list[Entry]:
    """Trees of blocks and states, some without their parents, in any order."""
    entries: list[Entry] = []
    for number in range(draw(st.integers(0, 25))):
        place = draw(st.integers(0, number))  # 0: a first block
        parents = [entry.block for entry in entries if entry.block.kind == "kv"]
        parent = parents[place % len(parents)] if place and parents else None
        cut = 0 if parent is None else draw(st.integers(1, 4))
        entries.append(
            Entry(
                block=Block(
                    key=key(number),
                    parent_key=ROOT if parent is None else parent.key,
                    parent_tokens=cut,
                    kind=draw(st.sampled_from(["kv", "state"])),
                    start=0 if parent is None else parent.start + cut,
                    packed_tokens=b"",
                ),
                model="",
                file_bytes=draw(st.integers(1, 10)),
                last_used=float(draw(st.integers(0, 5))),
                pinned=draw(st.integers(0, 9)) == 0,
            )
        )
    gone = (
        draw(st.sets(st.sampled_from([entry.block.key for entry in entries]), max_size=3))
        if entries
        else set()
    )
    return draw(st.permutations([entry for entry in entries if entry.block.key not in gone]))


def ancestors(entry: Entry, by_key: dict[bytes, Entry]) -> list[Entry]:
    found = []
    while entry.block.parent_key in by_key:
        entry = by_key[entry.block.parent_key]
        found.append(entry)
    return found


@settings(max_examples=50)
@given(forest=forests())
def test_children_go_before_their_parents(forest: list[Entry]) -> None:
    order = [entry.block.key for entry in eviction_order(forest)]
    by_key = {entry.block.key: entry for entry in forest}
    assert len(order) == len(set(order))
    for entry in forest:
        for ancestor in ancestors(entry, by_key):
            if ancestor.block.key in order:
                assert order.index(entry.block.key) < order.index(ancestor.block.key)


@settings(max_examples=50)
@given(forest=forests())
def test_only_pinned_blocks_and_their_ancestors_are_safe_from_eviction(
    forest: list[Entry],
) -> None:
    by_key = {entry.block.key: entry for entry in forest}
    kept = {entry.block.key for entry in forest if entry.pinned}
    kept |= {
        ancestor.block.key
        for entry in forest
        if entry.pinned
        for ancestor in ancestors(entry, by_key)
    }
    assert {entry.block.key for entry in eviction_order(forest)} == by_key.keys() - kept


@settings(max_examples=50)
@given(forest=forests(), excess=st.integers(-5, 200))
def test_no_more_is_evicted_than_necessary(forest: list[Entry], excess: int) -> None:
    freed = [victim.file_bytes for victim in choose_victims(forest, excess_bytes=excess)]
    assert sum(freed[:-1]) < max(1, excess)
    assert sum(freed) >= excess or len(freed) == len(eviction_order(forest))


@settings(max_examples=50)
@given(forest=forests())
def test_unreachable_blocks_go_first_then_the_least_recently_used(
    forest: list[Entry],
) -> None:
    by_key = {entry.block.key: entry for entry in forest}
    reachable = {
        entry.block.key
        for entry in forest
        if [entry, *ancestors(entry, by_key)][-1].block.start == 0
    }
    order = eviction_order(forest)
    newest = {
        entry.block.key: max(
            [other.last_used for other in forest if entry in ancestors(other, by_key)], default=0.0
        )
        for entry in forest
    }  # fmt: skip
    ranks = [
        (entry.block.key in reachable, max(newest[entry.block.key], entry.last_used))
        for entry in order
    ]
    assert ranks == sorted(ranks)
    in_depth_order = sorted(forest, key=lambda entry: entry.block.start)
    assert reachable == reachable_keys(in_depth_order)


@settings(max_examples=50)
@given(forest=forests())
def test_ancestors_of_a_block_being_written_stay(forest: list[Entry]) -> None:
    by_key = {entry.block.key: entry for entry in forest}
    for parent in forest:
        order = eviction_order(forest, in_use={parent.block.key})
        kept = {parent.block.key, *(ancestor.block.key for ancestor in ancestors(parent, by_key))}
        assert not kept & {victim.block.key for victim in order}


def test_a_prefix_used_by_one_branch_outlives_the_other() -> None:
    root = Block(
        key=key(1), parent_key=ROOT, parent_tokens=0, kind="kv", start=0, packed_tokens=b""
    )
    shared = Entry(block=root, model="", file_bytes=10, last_used=1.0)
    behind = replace(root, parent_key=key(1), parent_tokens=4, start=4)
    old = replace(shared, block=replace(behind, key=key(2)), last_used=2.0)
    new = replace(shared, block=replace(behind, key=key(3)), last_used=9.0)
    other = replace(shared, block=replace(root, key=key(4)), last_used=5.0)
    assert [entry.block.key for entry in eviction_order([shared, old, new, other])] == [
        key(2),
        key(4),
        key(3),
        key(1),
    ]


@given(budget=sizes, percent=st.floats(0, 100), spare=sizes, total=sizes, free=sizes, stored=sizes)
def test_every_limit_is_kept(
    budget: int, percent: float, spare: int, total: int, free: int, stored: int
) -> None:
    limits = StoreLimits(budget_bytes=budget, volume_percent=percent, spare_bytes=spare)
    allowed = allowed_bytes(
        limits, volume_bytes=total, free_bytes=min(free, total), stored_bytes=stored
    )
    assert 0 <= allowed <= budget
    assert allowed <= total * percent / 100
    assert allowed <= max(stored, stored + min(free, total) - spare)


def test_a_volume_filled_by_others_stops_growth_but_evicts_nothing() -> None:
    limits = StoreLimits(volume_percent=50, spare_bytes=100)
    assert allowed_bytes(limits, volume_bytes=1000, free_bytes=0, stored_bytes=300) == 300


def test_the_default_limits_leave_most_of_the_volume_free() -> None:
    assert (
        allowed_bytes(StoreLimits(), volume_bytes=10**12, free_bytes=10**12, stored_bytes=0)
        == 2 * 10**11
    )
    assert StoreLimits().daily_write_bytes is None


def test_the_default_limits_are_the_volume_and_daily_writes() -> None:
    assert store_limits(StoreSettings()) == StoreLimits(daily_write_bytes=DAILY_WRITE_BYTES)


def test_configured_values_become_limits() -> None:
    assert store_limits(StoreSettings(disk_bytes=7, daily_write_bytes=3)) == StoreLimits(
        budget_bytes=7, daily_write_bytes=3
    )
