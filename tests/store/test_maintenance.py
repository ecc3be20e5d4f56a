from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.machine.retention_clock import RetentionClock
from holdfast.store.block import fingerprint_id
from holdfast.store.folder import (
    StoreFolder,
)
from holdfast.store.index import IndexSupervisor
from holdfast.store.maintenance import StoreLimits, StoreMaintenance, quarantined_files
from tests.fakes.stored_blocks import FINGERPRINT, filled, make_block, make_chain, write_file

CHAIN = make_chain(6)
KEYS = [block.key for block in CHAIN]
MODEL = fingerprint_id(FINGERPRINT)
LIMITS = StoreLimits(volume_percent=100.0, spare_bytes=0)


def maintenance_of(
    path: Path, limits: StoreLimits = LIMITS
) -> tuple[StoreFolder, IndexSupervisor, StoreMaintenance]:
    folder = filled(path, CHAIN)
    supervisor = IndexSupervisor(folder)
    return (
        folder,
        supervisor,
        StoreMaintenance(folder, supervisor, limits, RetentionClock(wall=lambda: 100.0)),
    )


def kept(folder: StoreFolder, supervisor: IndexSupervisor) -> set[bytes]:
    """The remaining keys, on which index and files agree."""
    files = {found.key for found in folder.block_files()}
    assert set(supervisor.use(lambda index: index.places())) == files
    supervisor.use(lambda index: index.check_invariants())
    return files


@pytest.mark.parametrize("wrong_bytes", [None, 0, -(1 << 50), 1 << 50])
def test_room_is_made_from_the_end_of_a_chain_even_if_sizes_are_wrong(
    tmp_path: Path, wrong_bytes: int | None
) -> None:
    folder, supervisor, maintenance = maintenance_of(tmp_path)
    one = next(folder.block_files()).file_bytes
    if wrong_bytes is not None:
        change = "UPDATE blocks SET file_bytes = ? WHERE key = ?"
        supervisor.use(lambda index: index._database.execute(change, (wrong_bytes, KEYS[5])))
    evicted = maintenance.evict(2 * one)
    assert [(entry.block.key, entry.file_bytes) for entry in evicted] == [
        (KEYS[5], one),
        (KEYS[4], one),
    ]
    assert kept(folder, supervisor) == set(KEYS[:4])
    assert maintenance.evict(one, in_use=[KEYS[3]]) == []
    assert maintenance.set_aside_damaged() == (0, [])


def test_room_is_made_only_if_needed_and_possible(tmp_path: Path) -> None:
    folder, supervisor, maintenance = maintenance_of(tmp_path, replace(LIMITS, budget_bytes=20_000))
    assert maintenance.make_room(1000, in_use=()) == []
    assert maintenance.make_room(20_001, in_use=()) == []
    assert len(maintenance.make_room(15_000, in_use=())) in (3, 4)
    assert maintenance.shortage_bytes(15_000) == 0
    assert maintenance.shortage_bytes(21_000) > 0
    assert maintenance.allowed_bytes() == 20_000
    assert len(kept(folder, supervisor)) in (2, 3)


def test_only_files_that_are_still_damaged_are_set_aside(tmp_path: Path) -> None:
    folder, supervisor, maintenance = maintenance_of(tmp_path)
    supervisor.use(lambda index: index.stored_bytes())
    good = folder.block_path(KEYS[0], model=MODEL)
    bad = folder.block_path(KEYS[5], model=MODEL)
    bad.write_bytes(bad.read_bytes()[:-1] + b"!")
    assert maintenance.recheck_file(good, KEYS[0]) is False, "was damaged a moment ago"
    assert maintenance.recheck_file(bad, KEYS[5]) is True
    assert not bad.exists()
    assert maintenance.recheck_file(bad, KEYS[5]) is True, "gone"
    assert kept(folder, supervisor) == set(KEYS[:5])
    assert len(quarantined_files(folder.quarantine_folder)) == 1


def test_a_sound_file_of_another_model_is_set_aside_too(tmp_path: Path) -> None:
    folder, _, maintenance = maintenance_of(tmp_path)
    foreign = make_block([1], fingerprint="model two")
    path = folder.block_path(foreign.key, model=MODEL)
    write_file(path, foreign, fingerprint="model two")
    assert maintenance.recheck_file(path, foreign.key) is True
    assert not path.exists()


@pytest.mark.parametrize("most_files", [0, 2])
def test_files_found_damaged_at_opening_are_set_aside_within_limits(
    tmp_path: Path, most_files: int
) -> None:
    folder, supervisor, maintenance = maintenance_of(
        tmp_path, replace(LIMITS, quarantine_files=most_files)
    )
    for key in KEYS[:3]:
        folder.block_path(key, model=MODEL).write_bytes(b"damaged")
    supervisor.use(lambda index: index.stored_bytes())
    damaged, gone = maintenance.set_aside_damaged()
    assert damaged == 3
    assert set(gone) == set(KEYS[:3])
    assert len(quarantined_files(folder.quarantine_folder)) == most_files
    assert kept(folder, supervisor) == set(KEYS[3:])
