from __future__ import annotations

import errno
import random
import sqlite3
from pathlib import Path

import pytest

from holdfast.store.folder import StoreFolder
from holdfast.store.index import BlockIndex, IndexSupervisor, index_files
from tests.fakes.stored_blocks import filled, make_chain

CHAIN = make_chain(6)
KEYS = {block.key for block in CHAIN}


def listed(supervisor: IndexSupervisor) -> set[bytes]:
    return {entry.block.key for entry in supervisor.use(lambda index: index.entries(0.0))}


def supervisor_of(path: Path) -> tuple[StoreFolder, IndexSupervisor]:
    folder = filled(path, CHAIN)
    return folder, IndexSupervisor(folder)


def test_an_index_is_created_found_again_and_kept(tmp_path: Path) -> None:
    folder, supervisor = supervisor_of(tmp_path)
    assert listed(supervisor) == KEYS
    supervisor.use(lambda index: index.touch({CHAIN[0].key: 1e10}))
    supervisor.close()
    assert listed(supervisor) == KEYS
    assert supervisor.use(lambda index: index.entries(0.0))[0].last_used == 1e10
    assert len(index_files(folder)) == 1
    supervisor.close()


def test_a_deleted_open_index_is_recreated_under_another_name(
    tmp_path: Path,
) -> None:
    folder, supervisor = supervisor_of(tmp_path)
    assert listed(supervisor) == KEYS
    (before,) = index_files(folder)
    for path in folder.index_folder.iterdir():
        path.unlink()
    assert listed(supervisor) == KEYS
    assert before not in index_files(folder)
    supervisor.close()


def test_a_deleted_index_folder_is_recreated(tmp_path: Path) -> None:
    folder, supervisor = supervisor_of(tmp_path)
    assert listed(supervisor) == KEYS
    for path in folder.index_folder.iterdir():
        path.unlink()
    folder.index_folder.rmdir()
    assert listed(supervisor) == KEYS
    supervisor.close()


def test_two_supervisors_move_to_the_new_index_together(tmp_path: Path) -> None:
    folder, first = supervisor_of(tmp_path)
    second = IndexSupervisor(folder)
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
def test_no_index_damage_loses_or_changes_a_block(tmp_path: Path, seed: int) -> None:
    folder, supervisor = supervisor_of(tmp_path)
    assert listed(supervisor) == KEYS
    supervisor.close()
    (path,) = index_files(folder)
    dice = random.Random(seed)
    data = bytearray(path.read_bytes())
    for _ in range(dice.choice([1, 10, 300])):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data[: dice.choice([len(data), dice.randrange(len(data))])])
    entries = supervisor.use(lambda index: index.entries(0.0))
    assert [entry.block for entry in entries] == [block.block for block in CHAIN]
    supervisor.use(BlockIndex.stored_bytes)
    supervisor.close()


def test_a_changed_row_rebuilds_the_index_and_costs_no_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, supervisor = supervisor_of(tmp_path)
    assert listed(supervisor) == KEYS
    with sqlite3.connect(index_files(folder)[0]) as other:
        other.execute(
            "UPDATE blocks SET packed_tokens = x'0000000011111111' WHERE key = ?", (CHAIN[2].key,)
        )
    assert [entry.block for entry in supervisor.use(lambda index: index.entries(0.0))] == [
        block.block for block in CHAIN
    ]
    (line,) = caplog.messages
    assert "a row has a wrong checksum" in line
    supervisor.close()


def test_damage_found_later_rebuilds_the_index(tmp_path: Path) -> None:
    _, supervisor = supervisor_of(tmp_path)
    assert listed(supervisor) == KEYS
    tries = []

    def fails_once(index: BlockIndex) -> int:
        tries.append(index.path)
        if len(tries) == 1:
            raise sqlite3.DatabaseError("database disk image is malformed")
        return index.block_count()

    assert supervisor.use(fails_once) == len(KEYS)
    assert len(set(tries)) == 2
    supervisor.close()


def test_an_index_locked_by_another_process_is_not_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, supervisor = supervisor_of(tmp_path)
    monkeypatch.setattr("holdfast.store.index.BUSY_SECONDS", 0.0)
    assert listed(supervisor) == KEYS
    before = index_files(folder)
    other = sqlite3.connect(before[0], isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(OSError, match="locked"):
        supervisor.use(lambda index: index.remove([]))
    other.execute("ROLLBACK")
    supervisor.use(lambda index: index.remove([]))
    assert index_files(folder) == before
    supervisor.close()


def test_our_own_errors_are_not_taken_for_damage(tmp_path: Path) -> None:
    folder, supervisor = supervisor_of(tmp_path)
    assert listed(supervisor) == KEYS
    before = index_files(folder)
    with pytest.raises(sqlite3.ProgrammingError):
        supervisor.use(lambda index: index._database.execute("SELECT ?"))
    assert index_files(folder) == before
    supervisor.close()


def test_an_in_memory_index_is_filled_from_the_files(tmp_path: Path) -> None:
    folder, supervisor = supervisor_of(tmp_path)
    supervisor.open_in_memory()
    assert listed(supervisor) == KEYS
    assert index_files(folder) == []
    supervisor.close()
    StoreFolder(tmp_path / "nowhere")
    lost = IndexSupervisor(StoreFolder(tmp_path / "nowhere"))
    lost.open_in_memory()
    assert listed(lost) == set()
    lost.close()


def test_an_index_that_could_not_be_reconciled_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, supervisor = supervisor_of(tmp_path)

    def fails(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("holdfast.store.index.reconcile", fails)
        with pytest.raises(OSError, match="too many"):
            listed(supervisor)
    assert listed(supervisor) == KEYS
    supervisor.close()
