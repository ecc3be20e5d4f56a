from __future__ import annotations

import os
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.config import StoreSettings
from holdfast.store.block import (
    BadBlock,
    BlockMissing,
    BlockUnreadable,
    StoreChanges,
    StoredBlock,
    StoreRefused,
    fingerprint_id,
)
from holdfast.store.inspect import clear_store
from holdfast.store.maintenance import StoreLimits, store_limits
from holdfast.store.store import BlockStore
from tests.fakes.moved_clock import MovedClock
from tests.fakes.stored_blocks import FINGERPRINT, bytes_of, make_block, make_chain

CHAIN = make_chain(6)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    with BlockStore(tmp_path / "store", fingerprint=FINGERPRINT) as opened:
        yield opened


@contextmanager
def busy(store: BlockStore) -> Iterator[None]:
    """Block the writing thread."""
    go_on = threading.Event()
    store._mailbox.send(lambda: go_on.wait() and None)
    yield
    go_on.set()


def path_of(store_path: Path, key: bytes, fingerprint: str = FINGERPRINT) -> Path:
    return store_path / "blocks" / fingerprint_id(fingerprint) / f"{key.hex()}.block"


def test_blocks_are_readable_before_they_are_on_disk(store: BlockStore) -> None:
    store.put(CHAIN[0])
    assert bytes_of(store.read(CHAIN[0].key).result()) == CHAIN[0]
    assert store.flush()
    assert bytes_of(store.read(CHAIN[0].key).result()) == CHAIN[0]
    assert store.statistics().written_bytes == store.statistics().stored_bytes > 0


def test_another_store_lists_all_blocks_parents_first(store: BlockStore, tmp_path: Path) -> None:
    state = make_block([], after=CHAIN[2], kind="state")
    for block in [*CHAIN, state]:
        store.put(block)
    store.close()
    with BlockStore(tmp_path / "store", fingerprint=FINGERPRINT) as again:
        entries = again.entries()
        assert {entry.block.key for entry in entries} == {block.key for block in [*CHAIN, state]}
        assert [entry.block.start for entry in entries] == sorted(
            block.block.start for block in [*CHAIN, state]
        )
        assert [entry.block for entry in entries if entry.block.kind == "state"] == [state.block]
        assert all(bytes_of(again.read(block.key).result()) == block for block in CHAIN)
        again.check_invariants()


def test_put_does_not_wait_for_the_disk(store: BlockStore) -> None:
    with busy(store):
        for block in CHAIN:
            store.put(block)
        assert store.statistics().queued_blocks == len(CHAIN)
        assert store.flush(timeout_seconds=0.0) is False
        assert store.read(CHAIN[0].key).result() is CHAIN[0]
    assert store.flush()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is the process's")
def test_the_writing_thread_yields_to_computing_ones(store: BlockStore) -> None:
    found: list[int] = []
    store._mailbox.send(lambda: found.append(os.getpriority(os.PRIO_PROCESS, 0)))
    assert store.flush()
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert found == [max(mine, 10)]


def test_durable_and_lost_blocks_are_reported_once(store: BlockStore) -> None:
    for block in CHAIN:
        store.put(block)
    store.flush()
    store.remove([CHAIN[5].key])
    store.flush()
    changes = store.changes()
    assert changes.stored == tuple(block.key for block in CHAIN)
    assert changes.lost == (CHAIN[5].key,)
    assert store.changes().stored == ()


def test_an_equal_block_is_written_once(store: BlockStore) -> None:
    for _ in range(3):
        store.put(CHAIN[0])
        store.flush()
    assert store.statistics().written_bytes == store.statistics().stored_bytes
    assert store.statistics().blocks == 1
    assert set(store.changes().stored) == {CHAIN[0].key}


def test_models_share_a_folder_but_no_block(tmp_path: Path) -> None:
    other = make_chain(2, fingerprint="model two")
    with (
        BlockStore(tmp_path / "s", fingerprint=FINGERPRINT) as first,
        BlockStore(tmp_path / "s", fingerprint="model two") as second,
    ):
        first.put(CHAIN[0])
        second.put(other[0])
        assert first.flush()
        assert second.flush()
        assert [entry.block.key for entry in first.entries()] == [CHAIN[0].key]
        assert [entry.block.key for entry in second.entries()] == [other[0].key]
        with pytest.raises(BlockMissing):
            first.read(other[0].key).result()


def test_a_removed_block_is_missing_even_if_it_was_queued(store: BlockStore) -> None:
    store.put(CHAIN[0])
    store.remove([CHAIN[0].key])
    store.flush()
    with pytest.raises(BlockMissing):
        store.read(CHAIN[0].key).result()
    assert store.entries() == ()
    assert store.statistics().blocks == 0


def test_a_removed_block_is_reported_lost_once_however_often_it_is_read(store: BlockStore) -> None:
    key = CHAIN[0].key
    store.put(CHAIN[0])
    store.flush()
    store.changes()
    store.remove([key])
    store.flush()
    for _ in range(2):
        with pytest.raises(BlockMissing):
            store.read(key).result()
    store.flush()
    assert store.changes().lost == (key,)


def test_a_failed_read_of_a_removed_block_does_not_lose_its_next_copy(store: BlockStore) -> None:
    key = CHAIN[0].key
    store.put(CHAIN[0])
    store.flush()
    store.remove([key])
    store.flush()
    is_free = threading.Event()

    def stand_still() -> None:
        is_free.wait()

    store._mailbox.send(stand_still)
    with pytest.raises(BlockMissing):
        store.read(key).result()
    store.changes()
    store.put(CHAIN[0])
    is_free.set()
    store.flush()
    assert store.changes() == StoreChanges(stored=(key,), lost=())


def test_a_block_is_not_listed_before_its_parent_arrives(store: BlockStore) -> None:
    store.put(CHAIN[0])
    store.put(CHAIN[2])
    assert [entry.block.key for entry in store.entries()] == [CHAIN[0].key]
    store.put(CHAIN[1])
    assert [entry.block.key for entry in store.entries()] == [block.key for block in CHAIN[:3]]


def test_a_damaged_block_is_a_miss_counted_and_set_aside(store: BlockStore, tmp_path: Path) -> None:
    store.put(CHAIN[0])
    store.flush()
    path = path_of(tmp_path / "store", CHAIN[0].key)
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)
    with pytest.raises(BadBlock, match="payload checksum"):
        store.read(CHAIN[0].key).result()
    store.flush()
    with pytest.raises(BlockMissing):
        store.read(CHAIN[0].key).result()
    assert store.statistics().bad_blocks == 1
    assert [kept.read_bytes() for kept in (tmp_path / "store" / "quarantine").iterdir()] == [
        bytes(data)
    ]
    assert CHAIN[0].key in store.changes().lost
    store.put(CHAIN[0])
    store.flush()
    assert bytes_of(store.read(CHAIN[0].key).result()) == CHAIN[0]


def test_a_symlink_named_like_a_block_is_replaced_not_followed(
    store: BlockStore, tmp_path: Path
) -> None:
    store.put(CHAIN[0])
    store.flush()
    path = path_of(tmp_path / "store", CHAIN[1].key)
    (tmp_path / "mine").write_text("mine")
    path.symlink_to(tmp_path / "mine")
    with pytest.raises(BadBlock, match="plain file"):
        store.read(CHAIN[1].key).result()
    store.put(CHAIN[1])
    store.flush()
    assert bytes_of(store.read(CHAIN[1].key).result()) == CHAIN[1]
    assert (tmp_path / "mine").read_text() == "mine"


def test_changed_index_rows_are_rebuilt_from_the_files(store: BlockStore, tmp_path: Path) -> None:
    for block in CHAIN:
        store.put(block)
    store.flush()
    (path,) = (tmp_path / "store" / "index").glob("*.sqlite")
    with sqlite3.connect(path) as other:
        other.execute(
            "UPDATE blocks SET packed_tokens = x'0000000011111111' WHERE key = ?", (CHAIN[0].key,)
        )
        other.execute("UPDATE blocks SET start = start + 1 WHERE key = ?", (CHAIN[3].key,))
    assert [entry.block for entry in store.entries()] == [block.block for block in CHAIN]
    store.check_invariants()


def test_a_row_with_a_wrong_size_costs_no_block(store: BlockStore, tmp_path: Path) -> None:
    chain = make_chain(4)
    for block in chain:
        store.put(block)
    store.close()
    (index,) = (tmp_path / "store" / "index").glob("*.sqlite")
    with sqlite3.connect(index) as database:
        database.execute("UPDATE blocks SET file_bytes = 7 WHERE key = ?", (chain[1].key,))
    with BlockStore(tmp_path / "store", fingerprint=FINGERPRINT) as opened:
        assert [entry.block.key for entry in opened.entries()] == [block.key for block in chain]
        opened.flush()
        assert opened.changes().lost == ()
        opened.check_invariants()


def test_evicted_blocks_are_the_least_recently_used_and_reported(tmp_path: Path) -> None:
    clock = MovedClock()
    # five blocks of 1,4xx bytes
    limits = StoreLimits(budget_bytes=5 * 1500, volume_percent=100, spare_bytes=0)
    branches = [make_block([number], part_bytes=(1000,)) for number in range(20)]
    with BlockStore(
        tmp_path / "s", fingerprint=FINGERPRINT, limits=limits, clocks=clock.clocks()
    ) as store:
        for number, block in enumerate(branches):
            clock.moved_seconds += 10
            store.put(block)
            store.flush()
            clock.moved_seconds += 10
            store.touch([branches[0].key])
            assert store.statistics().stored_bytes <= limits.budget_bytes
            if number > 7:
                assert branches[0].key in {entry.block.key for entry in store.entries()}
        kept = {entry.block.key for entry in store.entries()}
        assert branches[0].key in kept
        assert branches[19].key in kept
        changes = store.changes()
        assert set(changes.lost) == {block.key for block in branches} - kept
        statistics = store.statistics()
        assert statistics.evicted_blocks == len(changes.lost)
        assert not any(statistics.dropped_blocks.values())
        store.check_invariants()


def test_pinned_blocks_stay_until_they_expire_even_after_restarts(tmp_path: Path) -> None:
    clock = MovedClock()
    limits = StoreLimits(budget_bytes=4 * 1500, volume_percent=100, spare_bytes=0)
    chain = make_chain(2, part_bytes=(1000,))
    others = [make_block([number], part_bytes=(1000,)) for number in range(100, 120)]

    def fill(blocks: list[StoredBlock]) -> set[bytes]:
        with BlockStore(
            tmp_path / "s", fingerprint=FINGERPRINT, limits=limits, clocks=clock.clocks()
        ) as store:
            for block in blocks:
                clock.moved_seconds += 1
                store.put(block)
                store.flush()
            return {entry.block.key for entry in store.entries()}

    with BlockStore(
        tmp_path / "s", fingerprint=FINGERPRINT, limits=limits, clocks=clock.clocks()
    ) as store:
        store.pin([chain[1].key], holder="session", until=clock.clocks().wall() + 1000)
        for block in chain:
            store.put(block)
    assert {block.key for block in chain} <= fill(others[:10])
    clock.moved_seconds += 1000
    assert not {block.key for block in chain} & fill(others[10:])
    (index,) = (tmp_path / "s").glob("index/*.sqlite")
    assert sqlite3.connect(index).execute("SELECT count(*) FROM pins").fetchone() == (0,), (
        "old pins do not gather"
    )


def test_tighter_limits_apply_from_the_next_opening(store: BlockStore, tmp_path: Path) -> None:
    for block in CHAIN:
        store.put(block)
    store.close()
    limits = StoreLimits(budget_bytes=4 * 1500, volume_percent=100, spare_bytes=0)
    with BlockStore(tmp_path / "store", fingerprint=FINGERPRINT, limits=limits) as again:
        kept = [entry.block.key for entry in again.entries()]
        assert kept == [block.key for block in CHAIN[: len(kept)]]
        assert 0 < again.statistics().stored_bytes <= limits.budget_bytes
        assert set(again.changes().lost) == {block.key for block in CHAIN[len(kept) :]}


def test_a_block_that_fits_nowhere_is_dropped_without_evictions(
    tmp_path: Path,
) -> None:
    limits = StoreLimits(budget_bytes=10_000, volume_percent=100, spare_bytes=0)
    with BlockStore(tmp_path / "s", fingerprint=FINGERPRINT, limits=limits) as store:
        store.put(CHAIN[0])
        store.put(make_block([9], part_bytes=(20_000,)))
        store.flush()
        assert store.statistics().dropped_blocks["no_room"] == 1
        assert [entry.block.key for entry in store.entries()] == [CHAIN[0].key]


def test_a_block_that_does_not_fit_beside_pinned_ones_is_dropped_without_evictions(
    tmp_path: Path,
) -> None:
    limits = StoreLimits(budget_bytes=10_000, volume_percent=100, spare_bytes=0)
    pinned = make_block([1], part_bytes=(5000,))
    other = make_block([2], part_bytes=(2000,))
    with BlockStore(tmp_path / "s", fingerprint=FINGERPRINT, limits=limits) as store:
        store.put(pinned)
        store.put(other)
        store.pin([pinned.key], holder="session", until=4e9)
        store.flush()
        store.put(make_block([3], part_bytes=(6000,)))
        store.flush()
        assert store.statistics().dropped_blocks["no_room"] == 1
        assert {entry.block.key for entry in store.entries()} == {pinned.key, other.key}


def test_a_store_above_its_limit_shrinks_even_if_a_new_block_does_not_fit(tmp_path: Path) -> None:
    pinned, other, new = (
        make_block([number], part_bytes=(size,))
        for number, size in ((1, 5000), (2, 2000), (3, 2000))
    )

    def opened(budget_bytes: int) -> BlockStore:
        limits = StoreLimits(budget_bytes=budget_bytes, volume_percent=100, spare_bytes=0)
        return BlockStore(tmp_path / "s", fingerprint=FINGERPRINT, limits=limits)

    with opened(6000) as store:
        store.put(pinned)
        store.pin([pinned.key], holder="session", until=4e9)
        store.flush()
        with opened(20_000) as of_another_process:
            of_another_process.put(other)
            of_another_process.flush()
        store.put(new)
        store.flush()
        assert {entry.block.key for entry in store.entries()} == {pinned.key}


def test_all_processes_together_respect_the_daily_write_limit(tmp_path: Path) -> None:
    clock = MovedClock()
    limits = StoreLimits(daily_write_bytes=4 * 1500)
    blocks = [make_block([number], part_bytes=(1000,)) for number in range(10)]
    for half in (blocks[:3], blocks[3:]):
        with BlockStore(
            tmp_path / "s", fingerprint=FINGERPRINT, limits=limits, clocks=clock.clocks()
        ) as store:
            for block in half:
                store.put(block)
            store.flush()
            last = store.statistics()
    assert last.written_today_bytes <= limits.daily_write_bytes
    assert last.dropped_blocks["daily_budget"] > 0
    clock.moved_seconds += 86400
    with BlockStore(
        tmp_path / "s", fingerprint=FINGERPRINT, limits=limits, clocks=clock.clocks()
    ) as store:
        store.put(blocks[9])
        store.flush()
        assert store.changes().stored == (blocks[9].key,)


def test_a_full_queue_drops_blocks_and_counts_them(tmp_path: Path) -> None:
    with BlockStore(
        tmp_path / "s", fingerprint=FINGERPRINT, limits=StoreLimits(queue_blocks=2)
    ) as store:
        with busy(store):
            for block in CHAIN:
                store.put(block)
            assert store.statistics().dropped_blocks["queue_full"] == len(CHAIN) - 2
        store.flush()
        assert set(store.changes().lost) == {block.key for block in CHAIN[2:]}


def test_a_command_may_clear_an_open_stores_folder(store: BlockStore, tmp_path: Path) -> None:
    for block in CHAIN:
        store.put(block)
    store.flush()
    assert set(clear_store(tmp_path / "store").keys) == {block.key for block in CHAIN}
    assert store.entries() == ()


def test_a_wrong_clock_drops_no_pins_at_an_opening(tmp_path: Path) -> None:
    """The clock is 400 days ahead of the times in the store."""
    clock = MovedClock()
    clock.moved_seconds = -400 * 86_400.0
    with BlockStore(tmp_path / "s", fingerprint=FINGERPRINT, clocks=clock.clocks()) as store:
        for block in CHAIN[:2]:
            store.put(block)
        store.pin([CHAIN[1].key], holder="session", until=clock.clocks().wall() + 1000)
    with BlockStore(tmp_path / "s", fingerprint=FINGERPRINT) as store:
        store.entries()
    with BlockStore(tmp_path / "s", fingerprint=FINGERPRINT, clocks=clock.clocks()) as store:
        assert [entry.pinned for entry in store.entries()] == [False, True]


def test_a_foreign_folder_is_refused_before_any_thread_starts(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    threads = threading.active_count()
    with pytest.raises(StoreRefused):
        BlockStore(tmp_path, fingerprint=FINGERPRINT)
    assert threading.active_count() == threads


def test_a_closed_store_refuses_silently_and_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())  # other tests of this process may have separate stores
    store = BlockStore(tmp_path / "s", fingerprint=FINGERPRINT)
    store.put(CHAIN[0])
    store.close()
    store.close()
    store.put(CHAIN[1])
    store.touch([CHAIN[0].key])
    assert store.flush() is False
    assert store.entries() == ()
    with pytest.raises(BlockUnreadable, match="closed"):
        store.read(CHAIN[0].key).result(60)
    assert not [
        thread
        for thread in set(threading.enumerate()) - before
        if thread.name.startswith("holdfast-store")
    ]
    assert list((tmp_path / "s" / "incoming").iterdir()) == []


def test_nothing_outside_the_folder_changes(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with BlockStore(tmp_path / "s", fingerprint=FINGERPRINT) as store:
        for block in CHAIN:
            store.put(block)
        store.flush()
        clear_store(tmp_path / "s")
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.name != "s"}
    assert after == before


@pytest.mark.parametrize("forbidden", ["disk_bytes", "daily_write_bytes"])
def test_a_budget_of_zero_writes_no_block(tmp_path: Path, forbidden: str) -> None:
    limits = store_limits(StoreSettings(**{forbidden: 0}))
    with BlockStore(tmp_path / "s", fingerprint=FINGERPRINT, limits=limits) as store:
        for block in CHAIN:
            store.put(block)
        store.flush()
        assert not list((tmp_path / "s").rglob("*.block"))
        assert not list((tmp_path / "s").rglob("*.part"))
        assert store.entries() == ()
        assert store.statistics().written_bytes == 0
        assert sum(store.statistics().dropped_blocks.values()) == len(CHAIN)
