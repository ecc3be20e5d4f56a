from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from holdfast.store.folder import StoreFolder
from holdfast.store.index import BlockIndex
from holdfast.store.index_keeper import IndexKeeper, IndexUnavailable, index_files
from tests.store.chains import FINGERPRINT, filled, make_chain

CHAIN = make_chain(6)
KEYS = {block.key for block in CHAIN}


def listed(keeper: IndexKeeper) -> set[bytes]:
    return {entry.key for entry in keeper.use(lambda index: index.entries(FINGERPRINT))[0]}


def keeper_of(path: Path) -> tuple[StoreFolder, IndexKeeper]:
    folder = filled(path, CHAIN)
    return folder, IndexKeeper(folder)


def test_an_index_is_made_found_again_and_kept(tmp_path: Path) -> None:
    folder, keeper = keeper_of(tmp_path)
    assert listed(keeper) == KEYS
    keeper.use(lambda index: index.touch({CHAIN[0].key: 1e10}))
    keeper.close()
    assert listed(keeper) == KEYS
    assert keeper.use(lambda index: index.entries(FINGERPRINT))[0][0].last_used == 1e10
    assert len(index_files(folder)) == 1
    assert keeper.rebuilt == 0
    keeper.close()


def test_an_index_that_is_deleted_while_it_is_open_is_made_anew_under_another_name(tmp_path: Path) -> None:
    folder, keeper = keeper_of(tmp_path)
    assert listed(keeper) == KEYS
    (before,) = index_files(folder)
    for path in folder.index_folder.iterdir():
        path.unlink()
    assert listed(keeper) == KEYS
    assert keeper.rebuilt == 1
    assert before not in index_files(folder)
    keeper.close()


def test_a_folder_of_indexes_that_is_deleted_is_made_anew(tmp_path: Path) -> None:
    folder, keeper = keeper_of(tmp_path)
    assert listed(keeper) == KEYS
    for path in folder.index_folder.iterdir():
        path.unlink()
    folder.index_folder.rmdir()
    assert listed(keeper) == KEYS
    keeper.close()


def test_two_keepers_move_to_the_new_index_together(tmp_path: Path) -> None:
    folder, first = keeper_of(tmp_path)
    second = IndexKeeper(folder)
    assert listed(first) == listed(second) == KEYS
    index_files(folder)[0].unlink()
    assert listed(first) == KEYS
    assert listed(second) == KEYS
    first.use(lambda index: index.remove([CHAIN[0].key]))
    assert listed(second) == KEYS - {CHAIN[0].key}
    first.close()
    second.close()
    assert len(index_files(folder)) == 1


@pytest.mark.parametrize("seed", range(40))
def test_no_damage_to_an_index_loses_or_changes_a_block(tmp_path: Path, seed: int) -> None:
    folder, keeper = keeper_of(tmp_path)
    assert listed(keeper) == KEYS
    keeper.close()
    (path,) = index_files(folder)
    dice = random.Random(seed)
    data = bytearray(path.read_bytes())
    for _ in range(dice.choice([1, 10, 300])):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data[: dice.choice([len(data), dice.randrange(len(data))])])
    entries, damaged = keeper.use(lambda index: index.entries(FINGERPRINT))
    assert {entry.key for entry in entries} | set(damaged) == KEYS
    right = {block.key: block for block in CHAIN}
    assert all(entry.token_ids == right[entry.key].token_ids for entry in entries)
    keeper.use(lambda index: index.holdings(0.0))
    keeper.use(BlockIndex.totals)
    keeper.close()


def test_damage_that_shows_later_makes_the_index_anew(tmp_path: Path) -> None:
    _, keeper = keeper_of(tmp_path)
    assert listed(keeper) == KEYS
    tries = []

    def fails_once(index: BlockIndex) -> int:
        tries.append(index.path)
        if len(tries) == 1:
            raise sqlite3.DatabaseError("database disk image is malformed")
        return index.totals().blocks

    assert keeper.use(fails_once) == len(KEYS)
    assert len(set(tries)) == 2
    assert keeper.rebuilt == 1
    keeper.close()


def test_an_index_that_another_process_holds_is_not_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, keeper = keeper_of(tmp_path)
    monkeypatch.setattr("holdfast.store.index.BUSY_SECONDS", 0.0)
    assert listed(keeper) == KEYS
    other = sqlite3.connect(index_files(folder)[0], isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(IndexUnavailable):
        keeper.use(lambda index: index.remove([]))
    other.execute("ROLLBACK")
    keeper.use(lambda index: index.remove([]))
    assert keeper.rebuilt == 0
    keeper.close()


def test_errors_of_our_own_are_not_taken_for_damage(tmp_path: Path) -> None:
    _, keeper = keeper_of(tmp_path)
    with pytest.raises(sqlite3.ProgrammingError):
        keeper.use(lambda index: index._database.execute("SELECT ?"))
    assert keeper.rebuilt == 0
    keeper.close()


def test_an_index_in_memory_is_filled_from_the_files(tmp_path: Path) -> None:
    folder, keeper = keeper_of(tmp_path)
    keeper.open_in_memory()
    assert keeper.in_memory
    assert listed(keeper) == KEYS
    assert index_files(folder) == []
    keeper.close()
    StoreFolder(tmp_path / "nowhere")
    lost = IndexKeeper(StoreFolder(tmp_path / "nowhere"))
    lost.open_in_memory()
    assert listed(lost) == set()
    lost.close()
