from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.store.block import BadBlock
from holdfast.store.budget import StoreLimits
from holdfast.store.folder import StoreFolder
from holdfast.store.index_keeper import IndexKeeper
from holdfast.store.keys import fingerprint_id
from holdfast.store.maintenance import StoreMaintenance
from holdfast.store.quarantine import quarantined_files
from holdfast.store.records import Records
from tests.store.chains import FINGERPRINT, filled, make_block, make_chain, write_file

CHAIN = make_chain(6)
KEYS = [block.key for block in CHAIN]
MODEL = fingerprint_id(FINGERPRINT)
LIMITS = StoreLimits(volume_percent=100.0, spare_bytes=0)


def upkeep_of(path: Path, limits: StoreLimits = LIMITS) -> tuple[StoreFolder, IndexKeeper, StoreMaintenance]:
    folder = filled(path, CHAIN)
    keeper = IndexKeeper(folder)
    return folder, keeper, StoreMaintenance(folder, keeper, limits, lambda: 100.0)


def kept(folder: StoreFolder, keeper: IndexKeeper) -> set[bytes]:
    """The keys that are left; index and files agree about them."""
    files = {found.key for found in folder.block_files()}
    assert set(keeper.use(lambda index: index.places())) == files
    keeper.use(lambda index: index.check_invariants())
    return files


def test_room_is_made_from_the_end_of_a_chain(tmp_path: Path) -> None:
    folder, keeper, upkeep = upkeep_of(tmp_path)
    one = next(folder.block_files()).file_bytes
    eviction = upkeep.evict(2 * one)
    assert eviction.keys == (KEYS[5], KEYS[4])
    assert eviction.freed_bytes == 2 * one
    assert kept(folder, keeper) == set(KEYS[:4])
    assert upkeep.evict(one, in_use=[KEYS[3]]).keys == ()


@pytest.mark.parametrize("wrong_bytes", [0, -(1 << 50), 1 << 50])
def test_a_row_with_another_size_makes_nobody_go_or_stay(tmp_path: Path, wrong_bytes: int) -> None:
    folder, keeper, upkeep = upkeep_of(tmp_path)
    one = next(folder.block_files()).file_bytes
    keeper.use(lambda index: index._database.execute("UPDATE blocks SET file_bytes = ? WHERE key = ?", (wrong_bytes, KEYS[5])))
    eviction = upkeep.evict(2 * one)
    assert (eviction.keys, eviction.freed_bytes) == ((KEYS[5], KEYS[4]), 2 * one)
    assert kept(folder, keeper) == set(KEYS[:4])
    assert upkeep.settle_differences() == (0, [])


def test_a_row_with_another_size_is_healed_and_what_is_stored_is_counted_anew(tmp_path: Path) -> None:
    folder, keeper, upkeep = upkeep_of(tmp_path)
    before = keeper.use(lambda index: index.totals())
    keeper.use(lambda index: index._database.execute("UPDATE blocks SET file_bytes = -5000 WHERE key = ?", (KEYS[1],)))
    upkeep.heal_rows([KEYS[1]], fingerprint=FINGERPRINT)
    assert keeper.use(lambda index: index.totals()) == before
    assert kept(folder, keeper) == set(KEYS)


def test_no_room_is_made_where_there_is_some_or_can_be_none(tmp_path: Path) -> None:
    folder, keeper, upkeep = upkeep_of(tmp_path, replace(LIMITS, budget_bytes=20_000))
    assert upkeep.make_room(1000, in_use=()).keys == ()
    assert upkeep.make_room(20_001, in_use=()).keys == ()
    assert len(upkeep.make_room(15_000, in_use=()).keys) in (3, 4)
    assert upkeep.shortage_bytes(15_000) == 0
    assert upkeep.shortage_bytes(21_000) > 0
    assert upkeep.allowed_bytes() == 20_000
    assert len(kept(folder, keeper)) in (2, 3)


def test_blocks_without_parents_are_removed_unless_they_are_pinned(tmp_path: Path) -> None:
    folder, keeper, upkeep = upkeep_of(tmp_path)
    upkeep.remove([KEYS[2]], fingerprint=FINGERPRINT)
    keeper.use(lambda index: index.pin([KEYS[5]], holder="", until=101.0))
    removed = upkeep.remove_unreachable()
    assert set(removed.keys) == {KEYS[3], KEYS[4]}
    assert kept(folder, keeper) == {KEYS[0], KEYS[1], KEYS[5]}


def test_only_what_is_still_damaged_is_set_aside(tmp_path: Path) -> None:
    folder, keeper, upkeep = upkeep_of(tmp_path)
    keeper.use(lambda index: index.totals())
    good = folder.block_path(KEYS[0], model=MODEL)
    bad = folder.block_path(KEYS[5], model=MODEL)
    bad.write_bytes(bad.read_bytes()[:-1] + b"!")
    assert upkeep.condemn(good, BadBlock(KEYS[0], "was damaged a moment ago")) is False
    assert upkeep.condemn(bad, BadBlock(KEYS[5], "payload checksum")) is True
    assert upkeep.condemn(bad, BadBlock(KEYS[5], "payload checksum")) is False
    assert kept(folder, keeper) == set(KEYS[:5])
    assert len(quarantined_files(folder.quarantine_folder)) == 1


def test_a_sound_file_of_another_model_is_set_aside_too(tmp_path: Path) -> None:
    folder, _, upkeep = upkeep_of(tmp_path)
    foreign = make_block([1], fingerprint="model two")
    path = folder.block_path(foreign.key, model=MODEL)
    write_file(path, foreign, fingerprint="model two")
    assert upkeep.condemn(path, BadBlock(foreign.key, "belongs to another model")) is True
    assert not path.exists()


def test_damaged_rows_are_made_anew_from_the_files(tmp_path: Path) -> None:
    folder, keeper, upkeep = upkeep_of(tmp_path)
    keeper.use(lambda index: index._database.execute("UPDATE blocks SET start = 99 WHERE key = ?", (KEYS[1],)))
    keeper.use(
        lambda index: index._database.execute("DELETE FROM tokens WHERE id IN (SELECT id FROM blocks WHERE key = ?)", (KEYS[4],))
    )
    assert set(keeper.use(lambda index: index.entries(FINGERPRINT))[1]) == {KEYS[1], KEYS[4]}
    upkeep.heal_rows([KEYS[1], KEYS[4]], fingerprint=FINGERPRINT)
    entries, damaged = keeper.use(lambda index: index.entries(FINGERPRINT))
    assert damaged == []
    assert [entry.start for entry in entries] == [block.start for block in CHAIN]
    assert kept(folder, keeper) == set(KEYS)


@pytest.mark.parametrize("most_files", [0, 2])
def test_files_that_turn_out_damaged_at_an_opening_are_set_aside_within_bounds(tmp_path: Path, most_files: int) -> None:
    folder, keeper, upkeep = upkeep_of(tmp_path, replace(LIMITS, quarantine_files=most_files))
    for key in KEYS[:3]:
        folder.block_path(key, model=MODEL).write_bytes(b"damaged")
    keeper.use(lambda index: index.totals())
    damaged, gone = upkeep.settle_differences()
    assert damaged == 3
    assert set(gone) == set(KEYS[:3])
    assert len(quarantined_files(folder.quarantine_folder)) == most_files
    assert kept(folder, keeper) == set(KEYS[3:])


def test_what_is_kept_of_outdated_fingerprints_is_deleted_with_one_line_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, keeper, upkeep = upkeep_of(tmp_path / "s")
    (tmp_path / "beside").write_text("stays")
    other = make_block([1], fingerprint="model two")
    write_file(folder.make_model_folder("model two") / f"{other.key.hex()}.block", other, fingerprint="model two")
    for model in (FINGERPRINT, "model two"):
        Records(folder, model=fingerprint_id(model)).put("a" * 32, b"session")
    upkeep.forget_models(lambda fingerprint: fingerprint == FINGERPRINT)
    upkeep.forget_models(lambda fingerprint: fingerprint == FINGERPRINT)
    assert kept(folder, keeper) == {other.key}
    assert keeper.use(lambda index: list(index.fingerprints().values())) == ["model two"]
    assert Records(folder, model=MODEL).all() == {}
    assert Records(folder, model=fingerprint_id("model two")).all() == {"a" * 32: b"session"}
    assert (tmp_path / "beside").read_text() == "stays"
    (line,) = caplog.messages
    assert "begins anew: 6 blocks" in line
