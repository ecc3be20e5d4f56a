from __future__ import annotations

from holdfast.store.block import BlockKey
from holdfast.wire.events import CacheOutcome, Divergence
from holdfast.worker.prefix.chain import ChainBlock, ChainState, Cursor, pack_tokens
from holdfast.worker.prefix.index import PrefixIndex
from holdfast.worker.prefix.lookup import Shortfall
from holdfast.worker.prefix.tiers import Residence
from tests.fakes.chains import (
    fill_gaps,
    insert_at,
    keep_checkpoint,
    plan_of,
    read_chain,
    stored,
)
from tests.fakes.disk_side import FakeDisk
from tests.fakes.payloads import Weight

CHAIN = [1, 2, 3, 4, 5, 6, 7, 8]


def library(*, budget: int = 1000, disk: FakeDisk | None = None) -> PrefixIndex:
    return PrefixIndex(fingerprint="model", ram_budget_bytes=budget, disk=disk)


def test_stored_tokens_are_planned_exactly_and_misses_explained() -> None:
    memory = library()
    assert plan_of(memory, CHAIN).shortfall == Shortfall(CacheOutcome.NOTHING_STORED)
    first, second = read_chain(memory, CHAIN)
    whole = plan_of(memory, CHAIN)
    assert (whole.tokens, whole.shortfall, whole.to_read) == (
        8,
        Shortfall(CacheOutcome.COMPLETE),
        (),
    )
    assert whole.blocks == (ChainBlock(first.key, 4, 4), ChainBlock(second.key, 4, 8))
    assert plan_of(memory, [*CHAIN, 9]).shortfall == Shortfall(CacheOutcome.NEW_TOKENS)
    diverging = plan_of(memory, [1, 2, 3, 4, 5, 9, 9])
    found = Divergence(position=5, stored_token_id=6, prompt_token_id=9)
    assert (diverging.tokens, diverging.shortfall) == (
        5,
        Shortfall(CacheOutcome.DIVERGED, divergence=found),
    )
    assert [piece.tokens for piece in diverging.blocks] == [4, 1]
    assert [piece.tokens for piece in plan_of(memory, CHAIN, limit=6).blocks] == [4, 2]
    limited = plan_of(memory, CHAIN, limit=4)
    assert (limited.tokens, limited.shortfall, limited.keys) == (
        4,
        Shortfall(CacheOutcome.COMPLETE),
        (first.key,),
    )


def test_tenants_share_nothing() -> None:
    memory = library()
    read_chain(memory, CHAIN, tenant="one")
    assert plan_of(memory, CHAIN, tenant="other").shortfall == Shortfall(
        CacheOutcome.NOTHING_STORED
    )
    read_chain(memory, CHAIN, tenant="other")
    assert memory.figures().ram_bytes == 16
    assert memory.figures().tenants == 2


def test_a_model_with_states_resumes_at_the_last_boundary() -> None:
    memory = library()
    first, _ = read_chain(memory, CHAIN)
    assert plan_of(memory, CHAIN, anywhere=False).shortfall == Shortfall(
        CacheOutcome.NO_BOUNDARY, 8
    )
    state = keep_checkpoint(memory, CHAIN[:3], nbytes=5)
    assert state is not None
    assert (state.parent_key, state.parent_tokens, state.start, state.kind) == (
        first.key,
        3,
        3,
        "state",
    )
    last = keep_checkpoint(memory, CHAIN, nbytes=5)
    assert last is not None
    exact = plan_of(memory, CHAIN, anywhere=False)
    assert (exact.tokens, exact.state, exact.shortfall) == (
        8,
        ChainState(last.key, 8),
        Shortfall(CacheOutcome.COMPLETE),
    )
    repeated = plan_of(memory, CHAIN, anywhere=False, limit=7)
    assert (repeated.tokens, repeated.keys) == (3, (first.key, state.key))
    assert repeated.shortfall == Shortfall(CacheOutcome.NO_BOUNDARY, 4)
    assert plan_of(memory, [*CHAIN, 9], anywhere=False).shortfall == Shortfall(
        CacheOutcome.NEW_TOKENS
    )
    memory.check_invariants()


def test_stored_blocks_are_not_stored_again() -> None:
    memory = library()
    (first, *_) = read_chain(memory, CHAIN)
    assert read_chain(memory, CHAIN[:4]) == read_chain(memory, CHAIN[:2]) == []
    assert memory.insert_checkpoint(Cursor(memory.root()), Weight(1)) is None, "of no tokens"
    assert keep_checkpoint(memory, CHAIN[:4]) is not None
    assert keep_checkpoint(memory, CHAIN[:4]) is None
    (overlapping,) = read_chain(memory, [1, 2, 3, 9, 9])
    assert plan_of(memory, [1, 2, 3, 9, 9]).blocks == (
        ChainBlock(first.key, 3, 3),
        ChainBlock(overlapping.key, 2, 5),
    )
    memory.check_invariants()


def test_a_cursor_follows_the_stored_chain_to_its_end() -> None:
    memory = library()
    read_chain(memory, CHAIN)
    cursor = Cursor(memory.root())
    for end, position in ((3, 3), (2, 3), (6, 6), (99, 8)):
        memory.tree.advance(cursor, pack_tokens([*CHAIN, 9]), end=min(end, 9))
        assert cursor.position == position


def test_a_cursor_on_an_evicted_block_is_relocated_from_the_root() -> None:
    memory = library(budget=8)
    first, second = read_chain(memory, CHAIN)
    cursor = stored(memory, CHAIN)
    memory.forget([second.key], cause=CacheOutcome.FORGOTTEN)
    memory.tree.advance(cursor, pack_tokens([*CHAIN, 9]), end=9)
    assert (cursor.position, cursor.parent_key, cursor.parent_tokens) == (4, first.key, 4)
    again = insert_at(memory, cursor, CHAIN[4:])
    assert again == second
    memory.forget([first.key], cause=CacheOutcome.FORGOTTEN)
    memory.tree.advance(cursor, pack_tokens(CHAIN), end=8)
    assert (cursor.position, cursor.parent_key) == (0, cursor.root.key)
    memory.check_invariants()


def test_a_shared_prefix_costs_its_bytes_once() -> None:
    memory = library()
    for agent in range(6):
        read_chain(memory, [*range(100), 200 + agent])
    assert memory.figures().ram_bytes == 106


def test_without_a_disk_evicted_blocks_are_lost_and_reported() -> None:
    memory = library(budget=12)
    read_chain(memory, CHAIN)
    memory.accept(plan_of(memory, CHAIN[:4]))
    read_chain(memory, [9, 9, 9, 9, 9, 9, 9, 9])
    assert plan_of(memory, CHAIN).shortfall == Shortfall(CacheOutcome.EVICTED, 4)
    assert plan_of(memory, CHAIN).tokens == 4
    assert plan_of(memory, [1, 2, 3, 4, 5, 5]).shortfall == Shortfall(CacheOutcome.EVICTED, 1)
    assert plan_of(memory, [1, 2, 3, 4, 6]).shortfall == Shortfall(CacheOutcome.NEW_TOKENS)
    read_chain(memory, [8, 8, 8, 8, 8, 8, 8, 8])
    assert plan_of(memory, CHAIN).shortfall == Shortfall(CacheOutcome.EVICTED, 8)
    memory.check_invariants()


def test_a_lost_state_is_given_as_the_reason() -> None:
    memory = library(budget=16)
    read_chain(memory, CHAIN)
    keep_checkpoint(memory, CHAIN[:2])
    keep_checkpoint(memory, CHAIN[:6], nbytes=7)
    memory.accept(plan_of(memory, CHAIN))
    memory.accept(plan_of(memory, CHAIN[:2], anywhere=False))
    read_chain(memory, [9, 9, 9, 9])
    assert plan_of(memory, CHAIN, anywhere=False).shortfall == Shortfall(CacheOutcome.EVICTED, 4)


def test_a_block_never_evicts_its_ancestors() -> None:
    memory = library(budget=8)
    assert len(read_chain(memory, [*range(20)])) == 2
    assert plan_of(memory, [*range(20)]).tokens == 8


def test_held_blocks_are_not_evicted() -> None:
    memory = library(budget=8)
    read_chain(memory, CHAIN)
    with memory.hold_blocks([plan_of(memory, CHAIN).keys[-1]]):
        assert read_chain(memory, [9, 9, 9]) == []
        assert plan_of(memory, CHAIN).tokens == 8
    assert len(read_chain(memory, [9, 9, 9])) == 1
    assert plan_of(memory, CHAIN).tokens == 4


def test_blocks_evicted_from_ram_are_restored_from_disk() -> None:
    disk = FakeDisk()
    memory = library(budget=8, disk=disk)
    first, second = read_chain(memory, CHAIN, disk=disk)
    assert memory.residence(first.key) is Residence.BOTH
    memory.disk_changed(stored=disk.write().stored)
    read_chain(memory, [9] * 8, disk=disk)
    again = plan_of(memory, CHAIN)
    assert (again.tokens, again.to_read) == (8, (first.key, second.key))
    assert not memory.restored(first.key, Weight(4)), (
        "what is being saved cannot go, for the store's queue holds it too"
    )
    memory.disk_changed(stored=disk.write().stored)
    with memory.hold_blocks(again.keys):
        assert memory.restored(first.key, Weight(4))
        assert memory.restored(second.key, Weight(4))
    memory.accept(again)
    assert disk.touched == [(first.key, second.key)]
    assert plan_of(memory, CHAIN).to_read == ()
    memory.check_invariants()


def test_the_disk_takes_blocks_that_do_not_fit_into_ram() -> None:
    disk = FakeDisk()
    memory = library(budget=4, disk=disk)
    read_chain(memory, CHAIN, disk=disk)
    assert [memory.residence(key) for key in plan_of(memory, CHAIN).keys] == [
        Residence.BOTH,
        Residence.DISK,
    ]


def test_a_new_library_finds_blocks_of_another() -> None:
    disk = FakeDisk()
    memory = library(disk=disk)
    read_chain(memory, CHAIN, disk=disk)
    checkpoint = keep_checkpoint(memory, CHAIN[:6])
    assert checkpoint is not None
    disk.put(checkpoint)
    disk.write()
    lonely, _ = read_chain(memory, [*CHAIN, 9, 9], block_tokens=1, disk=disk)
    disk.write()
    del disk.kept[lonely.key]
    after = library(disk=disk)
    assert after.load() == 3
    assert (plan_of(after, CHAIN).tokens, len(plan_of(after, CHAIN).to_read)) == (8, 2)
    assert plan_of(after, CHAIN, anywhere=False).tokens == 6
    assert after.load() == 3
    after.check_invariants()


def test_blocks_lost_by_the_disk_are_offered_again() -> None:
    disk = FakeDisk()
    memory = library(disk=disk)
    first, second = read_chain(memory, CHAIN, disk=disk)
    assert memory.disk_changed(lost=disk.drop([first.key]).lost) == ()
    memory.disk_changed(stored=disk.write().stored)
    assert memory.residence(first.key) is Residence.RAM
    (unsaved,) = memory.unsaved()
    assert (unsaved.key, unsaved.packed_tokens, unsaved.parent_tokens) == (
        first.key,
        pack_tokens([1, 2, 3, 4]),
        0,
    )
    disk.put(unsaved)
    memory.begin_saving(unsaved)
    memory.disk_changed(stored=disk.write().stored)
    assert memory.residence(first.key) is Residence.BOTH
    assert memory.unsaved() == ()
    assert memory.residence(second.key) is Residence.BOTH
    memory.check_invariants()


def test_a_refused_block_may_be_evicted_unless_a_descendant_is_held() -> None:
    disk = FakeDisk()
    memory = library(budget=4, disk=disk)
    first, second = read_chain(memory, CHAIN, disk=disk)
    memory.disk_changed(lost=disk.drop([first.key]).lost)
    memory.disk_changed(stored=disk.write().stored)
    assert (memory.residence(first.key), memory.residence(second.key)) == (
        Residence.RAM,
        Residence.DISK,
    )
    with memory.hold_blocks([second.key]):
        read_chain(memory, [9], disk=disk)
        assert plan_of(memory, CHAIN).tokens == 8
    read_chain(memory, [8], disk=disk)
    assert plan_of(memory, CHAIN).shortfall == Shortfall(CacheOutcome.EVICTED, 8)
    assert first.key in memory.missing
    assert second.key in disk.kept, "useful again once the first is stored again"


def test_an_unreadable_disk_copy_costs_nothing_if_ram_has_it() -> None:
    disk = FakeDisk()
    memory = library(budget=4, disk=disk)
    first, second = read_chain(memory, CHAIN, disk=disk)
    memory.disk_changed(stored=disk.write().stored)
    disk.condemn(first.key)
    assert memory.unreadable([first.key, b"unknown"]) == ()
    assert (memory.residence(first.key), first.key in disk.kept) == (Residence.RAM, False)
    assert memory.unreadable([second.key]) == (second.key,)
    assert plan_of(memory, CHAIN).shortfall == Shortfall(CacheOutcome.UNREADABLE, 4)
    memory.check_invariants()


def test_a_block_missing_from_both_tiers_ends_reuse() -> None:
    disk = FakeDisk()
    memory = library(budget=8, disk=disk)
    keys = [addition.key for addition in read_chain(memory, [*range(16)], disk=disk)]
    memory.disk_changed(stored=disk.write().stored)
    assert memory.disk_changed(lost=disk.drop([keys[2]]).lost) == (keys[2],)
    assert disk.kept.keys() == {keys[0], keys[1], keys[3]}
    assert plan_of(memory, [*range(16)]).shortfall == Shortfall(CacheOutcome.EVICTED, 8)
    assert fill_gaps(memory, [*range(16)], disk=disk) == [keys[2]]
    assert plan_of(memory, [*range(16)]).shortfall == Shortfall(CacheOutcome.COMPLETE)
    memory.disk_changed(stored=disk.write().stored)
    assert disk.kept.keys() == set(keys)
    assert memory.forget([keys[0]], cause=CacheOutcome.UNREADABLE) == (*keys[:0:-1], keys[0])
    assert disk.kept == {}
    assert plan_of(memory, [*range(16)]).shortfall == Shortfall(CacheOutcome.UNREADABLE, 16)
    memory.check_invariants()
    assert len(read_chain(memory, [*range(16)], disk=disk)) == 4


def test_a_chain_that_leaves_a_missing_block_before_its_end_does_not_fill_it() -> None:
    """It has other tokens there."""
    disk = FakeDisk()
    memory = library(budget=0, disk=disk)
    first, _ = read_chain(memory, CHAIN, disk=disk)
    fork = [*CHAIN[:2], 9, 9, 9]
    memory.disk_changed(stored=disk.write().stored)
    memory.disk_changed(lost=disk.drop([first.key]).lost)
    read_chain(memory, fork, disk=disk)
    assert fill_gaps(memory, fork, disk=disk) == []
    assert first.key in memory.missing
    assert fill_gaps(memory, CHAIN, disk=disk) == [first.key]
    memory.check_invariants()


def test_a_missing_block_is_removed_with_its_last_descendant() -> None:
    disk = FakeDisk()
    memory = library(budget=0, disk=disk)
    keys = [addition.key for addition in read_chain(memory, [*range(16)], disk=disk)]
    memory.disk_changed(stored=disk.write().stored)
    memory.disk_changed(lost=disk.drop([keys[1], keys[2]]).lost)
    assert keys[1] in memory.missing
    assert keys[2] in memory.missing
    memory.check_invariants()
    memory.disk_changed(lost=disk.drop([keys[3]]).lost)
    assert plan_of(memory, [*range(16)]).tokens == 4
    assert disk.kept.keys() == {keys[0]}
    assert len(memory) == 1
    memory.check_invariants()


def before_a_block_in_ram(
    *, budget: int, chain: list[int] = CHAIN[:7]
) -> tuple[PrefixIndex, FakeDisk, BlockKey]:
    """An index of one chain, its disk, and the key of the first block. The last block, of three
    tokens, is only in RAM; all before it are missing.
    """
    disk = FakeDisk()
    memory = library(budget=0, disk=disk)
    *missing, last = [block.key for block in read_chain(memory, chain, disk=disk)]
    memory.disk_changed(stored=disk.write().stored)
    memory.disk_changed(lost=disk.drop(missing).lost)
    memory.set_ram_budget(budget)
    assert memory.restored(last, Weight(3))
    memory.disk_changed(lost=disk.drop([last]).lost)
    memory.check_invariants()
    assert set(missing) <= memory.missing
    assert memory.residence(last) is Residence.RAM
    return memory, disk, missing[0]


def test_a_state_is_stored_at_a_missing_block_whose_last_descendant_makes_room() -> None:
    memory, disk, missing = before_a_block_in_ram(budget=3)
    state = keep_checkpoint(memory, CHAIN[:4], nbytes=2)
    assert state is not None
    assert state.parent_key == missing
    disk.put(state)
    memory.check_invariants()
    assert fill_gaps(memory, CHAIN[:4], disk=disk) == [missing]
    plan = plan_of(memory, CHAIN[:4], anywhere=False)
    assert (plan.tokens, plan.state) == (4, ChainState(state.key, 4))


def test_a_block_is_stored_at_a_missing_block_whose_last_descendant_makes_room() -> None:
    memory, disk, missing = before_a_block_in_ram(budget=3)
    (block,) = read_chain(memory, [1, 2, 3, 9], disk=disk)
    assert block.parent_key == missing
    assert fill_gaps(memory, CHAIN[:4], disk=disk) == [missing]
    assert plan_of(memory, [1, 2, 3, 9]).tokens == 4


def test_a_missing_block_is_filled_though_its_last_descendant_makes_room() -> None:
    memory, disk, missing = before_a_block_in_ram(budget=4)
    assert fill_gaps(memory, CHAIN[:4], disk=disk) == [missing]
    assert plan_of(memory, CHAIN).keys == (missing,)


def test_a_missing_block_that_another_one_has_replaced_in_ram_is_not_filled() -> None:
    chain = [*range(11)]
    memory, disk, first = before_a_block_in_ram(budget=4, chain=chain)
    assert len(list(memory.to_fill(stored(memory, chain[:8])))) == 2
    assert fill_gaps(memory, chain[:8], disk=disk) == [first]
    assert plan_of(memory, chain).keys == (first,)


def test_a_late_read_restores_a_missing_block_though_its_last_descendant_makes_room() -> None:
    memory, _, missing = before_a_block_in_ram(budget=4)
    assert memory.restored(missing, Weight(4))
    memory.check_invariants()
    assert plan_of(memory, CHAIN).keys == (missing,)


def test_a_late_read_without_room_leaves_no_missing_block_without_descendants() -> None:
    memory, disk, missing = before_a_block_in_ram(budget=7)
    (other,) = read_chain(memory, [5, 6, 7, 8], disk=disk)
    with memory.hold_blocks([other.key]):
        assert not memory.restored(missing, Weight(4))
        memory.check_invariants()
    assert missing not in memory.missing


def test_an_unreadable_disk_copy_is_planned_and_offered_again() -> None:
    disk = FakeDisk()
    memory = library(budget=0, disk=disk)
    first, second = read_chain(memory, CHAIN, disk=disk)
    memory.disk_changed(stored=disk.write().stored)
    memory.mark_suspect(first.key)
    assert plan_of(memory, CHAIN).to_read == (first.key, second.key)
    assert fill_gaps(memory, CHAIN, disk=disk) == [first.key]
    memory.disk_changed(stored=disk.write().stored)
    assert fill_gaps(memory, CHAIN, disk=disk) == []
    assert disk.kept.keys() == {first.key, second.key}
    memory.check_invariants()


def test_forgetting_held_or_saving_blocks_leaves_no_holds() -> None:
    disk = FakeDisk()
    memory = library(disk=disk)
    first, _ = read_chain(memory, CHAIN, disk=disk)
    with memory.hold_blocks([first.key]):
        memory.forget([first.key], cause=CacheOutcome.FORGOTTEN)
        assert disk.queued == {}
        assert memory.forget([first.key], cause=CacheOutcome.FORGOTTEN) == ()
    memory.disk_changed(stored=[first.key])
    memory.check_invariants()
    assert memory.ram.held == 0
    assert plan_of(memory, CHAIN).shortfall == Shortfall(CacheOutcome.FORGOTTEN, 8)


def test_blocks_forgotten_while_saving_can_be_evicted_later() -> None:
    disk = FakeDisk()
    memory = library(budget=4, disk=disk)
    (first,) = read_chain(memory, CHAIN[:4], disk=disk)
    memory.forget([first.key], cause=CacheOutcome.FORGOTTEN)
    read_chain(memory, CHAIN[:4], disk=disk)
    memory.disk_changed(stored=disk.write().stored)
    read_chain(memory, [9], disk=disk)
    assert memory.residence(first.key) is Residence.DISK


def test_blocks_forgotten_after_planning_are_not_whole() -> None:
    memory = library()
    first, second = read_chain(memory, CHAIN)
    plan = plan_of(memory, CHAIN)
    assert memory.whole_blocks(plan.blocks) == [first.key, second.key]
    memory.forget([second.key], cause=CacheOutcome.FORGOTTEN)
    assert memory.whole_blocks(plan.blocks) == [first.key]


def test_unreadable_blocks_are_not_planned_even_while_saving() -> None:
    disk = FakeDisk()
    memory = library(budget=4, disk=disk)
    first, second = read_chain(memory, CHAIN, disk=disk)
    assert plan_of(memory, CHAIN).to_read == (second.key,)
    assert memory.unreadable([first.key, second.key]) == (second.key,)
    assert plan_of(memory, CHAIN).to_read == ()
    memory.check_invariants()


def test_late_removal_news_does_not_affect_a_block_stored_again() -> None:
    disk = FakeDisk()
    memory = library(budget=0, disk=disk)
    first, second = read_chain(memory, CHAIN, disk=disk)
    memory.disk_changed(stored=disk.write().stored)
    disk.condemn(first.key)
    assert memory.unreadable([first.key]) == (first.key,)
    assert fill_gaps(memory, CHAIN, disk=disk) == [first.key]
    changes = disk.write([first.key])
    assert memory.disk_changed(stored=changes.stored, lost=disk.take_echoes().lost) == ()
    assert memory.disk_changed(stored=disk.write().stored) == ()
    assert plan_of(memory, CHAIN).tokens == 8
    memory.check_invariants()
    assert memory.disk_changed(lost=disk.drop([second.key]).lost) == (second.key,)


def test_figures_count_blocks_without_a_store() -> None:
    memory = library(budget=12)
    read_chain(memory, CHAIN)
    read_chain(memory, [9] * 8)
    figures = memory.figures()
    assert (figures.kept_tokens, figures.ram_bytes, figures.ram_budget_bytes) == (12, 12, 12)
    assert (figures.ram_evicted_blocks, figures.tenants, figures.store) == (1, 1, None)


def test_a_smaller_budget_evicts_unheld_blocks_immediately() -> None:
    memory = library()
    first, second = read_chain(memory, CHAIN)
    with memory.hold_blocks((first.key,)):
        memory.set_ram_budget(0)
        assert memory.residence(first.key) is Residence.RAM
        assert memory.residence(second.key) is None
        assert memory.figures().ram_budget_bytes == 0
    memory.set_ram_budget(1000)
    memory.check_invariants()
    read_chain(memory, CHAIN)
    assert plan_of(memory, CHAIN).tokens == 8


def test_blocks_also_on_disk_survive_a_smaller_budget() -> None:
    disk = FakeDisk()
    memory = library(disk=disk)
    blocks = read_chain(memory, CHAIN)
    memory.disk_changed(stored=[block.key for block in blocks])
    memory.set_ram_budget(0)
    memory.check_invariants()
    assert {memory.residence(block.key) for block in blocks} == {Residence.DISK}


def test_blocks_held_during_a_budget_cut_are_evicted_later() -> None:
    memory = library()
    blocks = read_chain(memory, CHAIN)
    with memory.hold_blocks([blocks[-1].key]):
        memory.set_ram_budget(4)
        memory.check_invariants()
        assert memory.figures().ram_bytes == 8
    memory.evict_excess()
    assert memory.figures().ram_bytes == 4
    memory.check_invariants()
