from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.store.block import fingerprint_id
from holdfast.store.folder import (
    StoreFolder,
)
from holdfast.store.index import BlockIndex, reconcile
from holdfast.store.write_ahead import salvage
from tests.fakes.stored_blocks import (
    FINGERPRINT,
    file_bytes,
    filled,
    make_block,
    make_chain,
    write_file,
)

MODEL = fingerprint_id(FINGERPRINT)
CHAIN = make_chain(6)


def test_an_empty_index_is_rebuilt_from_the_files(tmp_path: Path) -> None:
    folder, index = filled(tmp_path, CHAIN), BlockIndex(Path(":memory:"))
    os.utime(folder.block_path(CHAIN[0].key, model=MODEL), (0, 1234.0))
    assert reconcile(index, folder) == {}
    entries = index.entries(0.0)
    assert [entry.block for entry in entries] == [block.block for block in CHAIN]
    assert entries[0].last_used == 1234.0
    assert index.fingerprints() == {MODEL: FINGERPRINT}
    index.check_invariants()
    assert reconcile(index, folder) == {}


@given(
    deleted=st.sets(st.integers(0, 5)),
    cut=st.sets(st.integers(0, 5)),
    forgotten=st.sets(st.integers(0, 5)),
)
@settings(max_examples=30)
def test_index_and_files_agree_afterwards(
    deleted: set[int], cut: set[int], forgotten: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, index = filled(tmp_path_factory.mktemp("store"), CHAIN), BlockIndex(Path(":memory:"))
    reconcile(index, folder)
    index.pin([block.key for block in CHAIN], holder="", until=9.0)
    for number in deleted:
        folder.block_path(CHAIN[number].key, model=MODEL).unlink()
    for number in cut - deleted:
        os.truncate(folder.block_path(CHAIN[number].key, model=MODEL), 100)
    index.remove_rows([CHAIN[number].key for number in forgotten])
    gone = reconcile(index, folder)
    assert {found.key for found in gone.values() if found is not None} == {
        CHAIN[number].key for number in cut - deleted
    }
    assert gone.keys() == {CHAIN[number].key for number in (deleted - forgotten) | (cut - deleted)}
    entries = index.entries(1.0)
    lost = deleted | cut
    assert {entry.block.key for entry in entries if not entry.is_missing} == {
        CHAIN[n].key for n in range(6) if n not in lost
    }
    # a lost block stays known while a block that follows it is stored
    known = {n for n in range(6) if n not in lost or n not in forgotten}
    assert {entry.block.key for entry in entries if entry.is_missing} == {
        CHAIN[n].key
        for n in known & lost
        if any(end not in lost and known.issuperset(range(n, end)) for end in range(n, 6))
    }
    assert all(entry.pinned for entry in entries)
    index.check_invariants()


def test_a_file_in_another_models_folder_is_damage(tmp_path: Path) -> None:
    folder, index = filled(tmp_path, CHAIN), BlockIndex(Path(":memory:"))
    other = folder.make_model_folder("model two")
    block = make_block([77])
    write_file(other / f"{block.key.hex()}.block", block)
    gone = reconcile(index, folder)
    assert [found.path.parent for found in gone.values() if found is not None] == [other]


def test_only_complete_files_of_a_dead_writer_are_saved(tmp_path: Path) -> None:
    dead, folder = StoreFolder(tmp_path), StoreFolder(tmp_path)
    dead.prepare()
    whole, half, wrong = make_block([1]), make_block([2]), make_block([3])
    write_file(dead.incoming() / f"{whole.key.hex()}.part", whole)
    (dead.incoming() / f"{half.key.hex()}.part").write_bytes(file_bytes(half)[:-1])
    write_file(dead.incoming() / f"{wrong.key.hex()}.part", whole)
    (dead.incoming() / "nonsense.part").write_bytes(b"")
    with folder.exclusive():
        assert salvage(folder) == 0
        os.close(dead._claim or 0)  # as a kill does
        assert salvage(folder) == 1
    assert [found.key for found in folder.block_files()] == [whole.key]
    assert list((tmp_path / "incoming").iterdir()) == []


@pytest.mark.parametrize(
    "damage", ["file_bytes = 7", "file_bytes = -1", "file_bytes = 1 << 50", "file_bytes = 'seven'"]
)
def test_rows_with_wrong_sizes_are_repaired(tmp_path: Path, damage: str) -> None:
    folder, index = filled(tmp_path / "s", CHAIN), BlockIndex(tmp_path / "i.sqlite")
    reconcile(index, folder)
    with sqlite3.connect(tmp_path / "i.sqlite") as other:
        other.execute(f"UPDATE blocks SET {damage} WHERE key = ?", (CHAIN[2].key,))
    assert reconcile(index, folder) == {}
    assert {entry.block.key for entry in index.entries(0.0)} == {block.key for block in CHAIN}
    index.check_invariants()
