from __future__ import annotations

from array import array

from holdfast.prefix.addition import Addition, Outcome
from holdfast.prefix.evicted import Evicted, EvictionCause
from holdfast.prefix.index import PrefixIndex
from holdfast.prefix.keys import pack_tokens
from holdfast.prefix.ram import Residence
from holdfast.prefix.reuse import NewTokens, NoBoundary, NothingStored, PlannedPiece, PlannedState, ReusePlan
from holdfast.prefix.tree import Diverged
from holdfast.store.block import Block
from tests.fakes.disk_side import FakeDisk
from tests.fakes.payloads import Weight

CHAIN = [1, 2, 3, 4, 5, 6, 7, 8]


def library(*, budget: int = 1000, disk: FakeDisk | None = None) -> PrefixIndex:
    return PrefixIndex(fingerprint="model", ram_budget_bytes=budget, disk=disk)


def added(
    library: PrefixIndex, chain: list[int], *, run_tokens: int = 4, tenant: str = "", disk: FakeDisk | None = None
) -> list[Addition]:
    """What a sequence does that reads a chain: keeps what is missing, a byte for each token."""
    added = []
    for begin in range(library.missing(chain, tenant=tenant), len(chain), run_tokens):
        run = chain[: begin + run_tokens]
        addition = library.add_run(run, start=begin, payload=Weight(len(run) - begin), tenant=tenant)
        if addition.new_block is not None and disk is not None:
            disk.put(addition.new_block)
        added.append(addition)
    library.check_invariants()
    return added


def read(
    library: PrefixIndex, chain: list[int], *, run_tokens: int = 4, tenant: str = "", disk: FakeDisk | None = None
) -> list[Block]:
    """The blocks of what was added."""
    additions = added(library, chain, run_tokens=run_tokens, tenant=tenant, disk=disk)
    return [addition.block for addition in additions if addition.block is not None]


def given(addition: Addition) -> Block:
    assert addition.block is not None
    return addition.block


def plan(library: PrefixIndex, chain: list[int], *, tenant: str = "", anywhere: bool = True, limit: int = 10**6) -> ReusePlan:
    return library.plan(chain, tenant=tenant, resumable_anywhere=anywhere, limit=limit)


def test_what_was_read_is_planned_to_the_token_and_the_rest_is_explained() -> None:
    memory = library()
    assert plan(memory, CHAIN).shortfall == NothingStored()
    first, second = read(memory, CHAIN)
    whole = plan(memory, CHAIN)
    assert (whole.tokens, whole.shortfall, whole.ram_tokens, whole.to_read) == (8, None, 8, ())
    assert whole.pieces == (PlannedPiece(first.key, 0, 4, 0, Residence.RAM), PlannedPiece(second.key, 4, 4, 0, Residence.RAM))
    assert plan(memory, [*CHAIN, 9]).shortfall == NewTokens(8)
    diverging = plan(memory, [1, 2, 3, 4, 5, 9, 9])
    assert (diverging.tokens, diverging.shortfall) == (5, Diverged(5, expected=6, found=9))
    assert [piece.tokens for piece in diverging.pieces] == [4, 1]
    assert [piece.tokens for piece in plan(memory, CHAIN, limit=6).pieces] == [4, 2]
    limited = plan(memory, CHAIN, limit=4)
    assert (limited.tokens, limited.shortfall, limited.keys) == (4, None, (first.key,))


def test_tenants_share_nothing() -> None:
    memory = library()
    read(memory, CHAIN, tenant="one")
    assert plan(memory, CHAIN, tenant="other").shortfall == NothingStored()
    read(memory, CHAIN, tenant="other")
    assert memory.statistics().ram.resident_bytes == 16
    assert memory.statistics().tenants == 2


def test_a_model_with_states_is_resumed_at_the_last_boundary_within_the_limit() -> None:
    memory = library()
    first, _ = read(memory, CHAIN)
    assert plan(memory, CHAIN, anywhere=False).shortfall == NoBoundary(8, 0)
    state = given(memory.add_state(CHAIN[:3], payload=Weight(5)))
    assert (state.parent_key, state.parent_tokens, state.start, state.kind) == (first.key, 3, 3, "state")
    last = given(memory.add_state(CHAIN, payload=Weight(5)))
    exact = plan(memory, CHAIN, anywhere=False)
    assert (exact.tokens, exact.state, exact.shortfall) == (8, PlannedState(last.key, 8, Residence.RAM), None)
    repeated = plan(memory, CHAIN, anywhere=False, limit=7)
    assert (repeated.tokens, repeated.keys, repeated.shortfall) == (3, (first.key, state.key), NoBoundary(7, 3))
    assert plan(memory, [*CHAIN, 9], anywhere=False).shortfall == NewTokens(8)
    memory.check_invariants()


def test_what_is_stored_is_not_stored_again_and_what_has_no_parent_is_refused() -> None:
    memory = library()
    (first, *_) = read(memory, CHAIN)
    assert memory.add_run(CHAIN[:4], start=0, payload=Weight(4)).outcome is Outcome.STORED
    assert memory.add_run(CHAIN[:2], start=0, payload=Weight(2)).outcome is Outcome.STORED
    assert memory.add_run([*CHAIN, 9, 9], start=9, payload=Weight(1)).outcome is Outcome.NO_PARENT
    assert memory.add_state([*CHAIN, 9], payload=Weight(1)).outcome is Outcome.NO_PARENT
    assert memory.add_state([], payload=Weight(1)).outcome is Outcome.NO_PARENT
    memory.add_state(CHAIN[:4], payload=Weight(1))
    assert memory.add_state(CHAIN[:4], payload=Weight(1)).outcome is Outcome.STORED
    overlapping = memory.add_run([1, 2, 3, 9, 9], start=0, payload=Weight(5)).new_block
    assert overlapping is not None
    assert plan(memory, [1, 2, 3, 9, 9]).pieces == (
        PlannedPiece(first.key, 0, 3, 0, Residence.RAM),
        PlannedPiece(overlapping.key, 3, 2, 3, Residence.RAM),
    )
    memory.check_invariants()


def test_a_shared_prefix_costs_its_bytes_once() -> None:
    memory = library()
    for agent in range(6):
        read(memory, [*range(100), 200 + agent])
    assert memory.statistics().ram.resident_bytes == 106


def test_without_a_disk_the_least_recently_used_is_gone_and_the_miss_says_so() -> None:
    memory = library(budget=12)
    read(memory, CHAIN)
    memory.accept(plan(memory, CHAIN[:4]))
    read(memory, [9, 9, 9, 9, 9, 9, 9, 9])
    assert plan(memory, CHAIN).shortfall == Evicted(4, 4, EvictionCause.EVICTED)
    assert plan(memory, CHAIN).tokens == 4
    assert plan(memory, [1, 2, 3, 4, 5, 5]).shortfall == Evicted(4, 1, EvictionCause.EVICTED)
    assert plan(memory, [1, 2, 3, 4, 6]).shortfall == NewTokens(4)
    read(memory, [8, 8, 8, 8, 8, 8, 8, 8])
    assert plan(memory, CHAIN).shortfall == Evicted(0, 8, EvictionCause.EVICTED)
    memory.check_invariants()


def test_a_lost_state_is_named_as_the_reason() -> None:
    memory = library(budget=16)
    read(memory, CHAIN)
    memory.add_state(CHAIN[:2], payload=Weight(1))
    memory.add_state(CHAIN[:6], payload=Weight(7))
    memory.accept(plan(memory, CHAIN))
    memory.accept(plan(memory, CHAIN[:2], anywhere=False))
    read(memory, [9, 9, 9, 9])
    assert plan(memory, CHAIN, anywhere=False).shortfall == Evicted(2, 4, EvictionCause.EVICTED)


def test_a_block_never_pushes_out_what_stands_before_it() -> None:
    memory = library(budget=8)
    outcomes = [addition.outcome for addition in added(memory, [*range(20)])]
    assert outcomes == [Outcome.NEW] * 2 + [Outcome.NO_ROOM] + [Outcome.NO_PARENT] * 2
    assert plan(memory, [*range(20)]).tokens == 8


def test_what_is_held_is_not_evicted() -> None:
    memory = library(budget=8)
    read(memory, CHAIN)
    with memory.hold([plan(memory, CHAIN).keys[-1]]):
        assert [addition.outcome for addition in added(memory, [9, 9, 9])] == [Outcome.NO_ROOM]
        assert plan(memory, CHAIN).tokens == 8
    assert [addition.outcome for addition in added(memory, [9, 9, 9])] == [Outcome.NEW]
    assert plan(memory, CHAIN).tokens == 4


def test_what_ram_lets_go_is_planned_from_disk_and_comes_back() -> None:
    disk = FakeDisk()
    memory = library(budget=8, disk=disk)
    first, second = read(memory, CHAIN, disk=disk)
    assert memory.residence(first.key) is Residence.BOTH
    memory.disk_changed(stored=disk.write().stored)
    read(memory, [9] * 8, disk=disk)
    again = plan(memory, CHAIN)
    assert (again.tokens, again.ram_tokens, again.disk_tokens, again.to_read) == (8, 0, 8, (first.key, second.key))
    assert not memory.restored(first.key, Weight(4)), "what is being saved cannot go, for the store's queue holds it too"
    memory.disk_changed(stored=disk.write().stored)
    with memory.hold(again.keys):
        assert memory.restored(first.key, Weight(4))
        assert memory.restored(second.key, Weight(4))
    memory.accept(again)
    assert disk.touched == [(first.key, second.key)]
    assert plan(memory, CHAIN).to_read == ()
    assert memory.statistics().reused_disk_tokens == 8
    memory.check_invariants()


def test_a_disk_takes_what_ram_has_no_room_for() -> None:
    disk = FakeDisk()
    memory = library(budget=4, disk=disk)
    read(memory, CHAIN, disk=disk)
    assert [piece.residence for piece in plan(memory, CHAIN).pieces] == [Residence.BOTH, Residence.DISK]


def test_a_new_library_finds_what_another_one_stored() -> None:
    disk = FakeDisk()
    memory = library(disk=disk)
    read(memory, CHAIN, disk=disk)
    disk.put(given(memory.add_state(CHAIN[:6], payload=Weight(1))))
    disk.write()
    lonely = given(memory.add_run([*CHAIN, 9], start=8, payload=Weight(1)))
    disk.put(lonely)
    disk.put(given(memory.add_run([*CHAIN, 9, 9], start=9, payload=Weight(1))))
    disk.write()
    del disk.kept[lonely.key]
    after = library(disk=disk)
    loaded = after.load()
    assert (loaded.placed, loaded.covered, loaded.unreachable) == (3, 0, 1)
    assert plan(after, CHAIN).disk_tokens == 8
    assert plan(after, CHAIN, anywhere=False).tokens == 6
    assert after.load() == loaded
    after.check_invariants()


def test_what_the_disk_loses_stays_in_ram_and_is_offered_again() -> None:
    disk = FakeDisk()
    memory = library(disk=disk)
    first, second = read(memory, CHAIN, disk=disk)
    assert memory.disk_changed(lost=disk.drop([first.key]).lost) == ()
    memory.disk_changed(stored=disk.write().stored)
    assert memory.residence(first.key) is Residence.RAM
    (unsaved,) = memory.unsaved()
    assert (unsaved.key, unsaved.packed_tokens, unsaved.parent_tokens) == (first.key, pack_tokens([1, 2, 3, 4]), 0)
    disk.put(unsaved)
    memory.save_again(unsaved)
    memory.disk_changed(stored=disk.write().stored)
    assert memory.residence(first.key) is Residence.BOTH
    assert memory.unsaved() == ()
    assert memory.residence(second.key) is Residence.BOTH
    memory.check_invariants()


def test_what_the_disk_failed_to_take_may_be_evicted_unless_something_behind_it_is_held() -> None:
    disk = FakeDisk()
    memory = library(budget=4, disk=disk)
    first, second = read(memory, CHAIN, disk=disk)
    memory.disk_changed(lost=disk.drop([first.key]).lost)
    memory.disk_changed(stored=disk.write().stored)
    assert (memory.residence(first.key), memory.residence(second.key)) == (Residence.RAM, Residence.DISK)
    with memory.hold([second.key]):
        read(memory, [9], disk=disk)
        assert plan(memory, CHAIN).tokens == 8
    read(memory, [8], disk=disk)
    assert plan(memory, CHAIN).shortfall == Evicted(0, 8, EvictionCause.EVICTED)
    assert second.key not in disk.kept


def test_an_unreadable_copy_on_disk_costs_nothing_while_ram_has_it_too() -> None:
    disk = FakeDisk()
    memory = library(budget=4, disk=disk)
    first, second = read(memory, CHAIN, disk=disk)
    memory.disk_changed(stored=disk.write().stored)
    disk.condemn(first.key)
    assert memory.unreadable([first.key, b"unknown"]) == ()
    assert (memory.residence(first.key), first.key in disk.kept) == (Residence.RAM, False)
    assert memory.unreadable([second.key]) == (second.key,)
    assert plan(memory, CHAIN).shortfall == Evicted(4, 4, EvictionCause.UNREADABLE)
    memory.check_invariants()


def test_a_block_that_neither_has_takes_along_what_stands_behind_it() -> None:
    disk = FakeDisk()
    memory = library(budget=8, disk=disk)
    keys = [addition.key for addition in read(memory, [*range(16)], disk=disk)]
    memory.disk_changed(stored=disk.write().stored)
    assert memory.disk_changed(lost=disk.drop([keys[2]]).lost) == (keys[3], keys[2])
    assert disk.kept.keys() == {keys[0], keys[1]}
    assert plan(memory, [*range(16)]).shortfall == Evicted(8, 8, EvictionCause.EVICTED)
    assert memory.forget([keys[0]], cause=EvictionCause.UNREADABLE) == (keys[1], keys[0])
    assert disk.kept == {}
    assert plan(memory, [*range(16)]).shortfall == Evicted(0, 16, EvictionCause.UNREADABLE)
    memory.check_invariants()
    assert len(read(memory, [*range(16)], disk=disk)) == 4


def test_forgetting_what_is_held_or_being_saved_leaves_no_holds_behind() -> None:
    disk = FakeDisk()
    memory = library(disk=disk)
    first, _ = read(memory, CHAIN, disk=disk)
    with memory.hold([first.key]):
        memory.forget([first.key], cause=EvictionCause.FORGOTTEN)
        assert disk.queued == {}
        assert memory.forget([first.key], cause=EvictionCause.FORGOTTEN) == ()
    memory.disk_changed(stored=[first.key])
    memory.check_invariants()
    assert memory.statistics().ram.held == 0
    assert plan(memory, CHAIN).shortfall == Evicted(0, 8, EvictionCause.FORGOTTEN)


def test_what_is_forgotten_while_it_is_saved_can_be_evicted_when_it_has_come_back() -> None:
    disk = FakeDisk()
    memory = library(budget=4, disk=disk)
    (first,) = read(memory, CHAIN[:4], disk=disk)
    memory.forget([first.key], cause=EvictionCause.FORGOTTEN)
    read(memory, CHAIN[:4], disk=disk)
    memory.disk_changed(stored=disk.write().stored)
    read(memory, [9], disk=disk)
    assert memory.residence(first.key) is Residence.DISK


def test_what_could_not_be_read_is_planned_no_more_even_while_it_is_saved() -> None:
    disk = FakeDisk()
    memory = library(budget=4, disk=disk)
    first, second = read(memory, CHAIN, disk=disk)
    assert plan(memory, CHAIN).to_read == (second.key,)
    assert memory.unreadable([first.key, second.key]) == (second.key,)
    assert plan(memory, CHAIN).to_read == ()
    memory.check_invariants()


def test_late_news_of_what_was_removed_do_no_harm_to_what_has_come_back() -> None:
    disk = FakeDisk()
    memory = library(budget=0, disk=disk)
    first, second = read(memory, CHAIN, disk=disk)
    memory.disk_changed(stored=disk.write().stored)
    disk.condemn(first.key)
    assert memory.unreadable([first.key]) == (second.key, first.key)
    read(memory, CHAIN, disk=disk)
    stored = disk.write([first.key]).stored
    assert memory.disk_changed(stored=stored, lost=disk.take_echoes().lost) == ()
    assert memory.disk_changed(stored=disk.write().stored) == ()
    assert plan(memory, CHAIN).tokens == 8
    memory.check_invariants()
    assert memory.disk_changed(lost=disk.drop([second.key]).lost) == (second.key,)


def test_reasons_of_accepted_plans_are_counted() -> None:
    memory = library()
    memory.accept(plan(memory, CHAIN))
    read(memory, CHAIN)
    memory.accept(plan(memory, CHAIN))
    memory.accept(plan(memory, [*CHAIN, 1]))
    statistics = memory.statistics()
    assert statistics.shortfalls == {"NothingStored": 1, "NewTokens": 1}
    assert (statistics.accepted_plans, statistics.reused_ram_tokens) == (3, 16)


def test_arrays_of_tokens_are_as_good_as_lists() -> None:
    memory = library()
    read(memory, CHAIN)
    assert memory.plan(array("I", CHAIN), resumable_anywhere=True, limit=8).tokens == 8
    assert memory.add_run(array("I", [*CHAIN, 9]), start=8, payload=Weight(1)).new_block is not None
