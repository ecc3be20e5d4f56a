"""An unwritable folder costs only the blocks."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.store.block import BlockMissing, BlockUnreadable
from holdfast.store.io_thread import RETRY_SECONDS
from holdfast.store.maintenance import StoreLimits
from holdfast.store.store import BlockStore
from tests.fakes.failing_disk import failing_disk
from tests.fakes.moved_clock import MovedClock
from tests.fakes.stored_blocks import FINGERPRINT, bytes_of, make_block, make_chain
from tests.fakes.volumes import read_only, small_volume

CHAIN = make_chain(6)
NO_SPARE = StoreLimits(volume_percent=100, spare_bytes=0)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def put_all(store: BlockStore) -> bool:
    for block in CHAIN:
        store.put(block)
    return store.flush()


def test_a_deleted_folder_is_reported_once_and_recreated_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = MovedClock()
    with BlockStore(tmp_path / "s", fingerprint=FINGERPRINT, clocks=clock.clocks()) as store:
        assert put_all(store)
        shutil.rmtree(tmp_path / "s")
        with pytest.raises(BlockMissing):
            store.read(CHAIN[0].key).result()
        for _ in range(3):
            assert not put_all(store)
        assert store.entries() == ()
        store.touch([CHAIN[0].key])
        store.pin([CHAIN[0].key])
        assert store.statistics().mode == "memory-only"
        assert not (tmp_path / "s").exists()
        assert len(warnings_of(caplog)) == 1
        clock.moved_seconds += RETRY_SECONDS + 1
        assert put_all(store)
        assert store.statistics().mode == "writing"
        assert bytes_of(store.read(CHAIN[0].key).result()) == CHAIN[0]
        assert len(store.entries()) == len(CHAIN)
        assert len(warnings_of(caplog)) == 1
        assert store.statistics().outages == 1
        store.check_invariants()


def test_the_index_may_be_deleted_at_any_time(tmp_path: Path) -> None:
    with BlockStore(tmp_path / "s", fingerprint=FINGERPRINT) as store:
        for number, block in enumerate(CHAIN):
            store.put(block)
            store.flush()
            if number % 2:
                shutil.rmtree(tmp_path / "s" / "index")
        assert len(store.entries()) == len(CHAIN)
        assert store.statistics().blocks == len(CHAIN)
        assert not any(store.statistics().dropped_blocks.values())
        store.check_invariants()


def test_the_index_may_be_deleted_just_before_eviction(tmp_path: Path) -> None:
    limits = StoreLimits(budget_bytes=4 * 1500, volume_percent=100, spare_bytes=0)
    with BlockStore(tmp_path / "s", fingerprint=FINGERPRINT, limits=limits) as store:
        for number in range(12):
            store.put(make_block([number]))
            store.flush()
            shutil.rmtree(tmp_path / "s" / "index")
        assert not any(store.statistics().dropped_blocks.values())
        assert store.statistics().evicted_blocks >= 8


@pytest.mark.parametrize("name", ["blocks", "incoming", "quarantine"])
def test_inner_folders_may_be_deleted_at_any_time(tmp_path: Path, name: str) -> None:
    clock = MovedClock()
    with BlockStore(tmp_path / "s", fingerprint=FINGERPRINT, clocks=clock.clocks()) as store:
        assert put_all(store)
        shutil.rmtree(tmp_path / "s" / name)
        store.put(make_block([77]))
        store.flush()
        clock.moved_seconds += RETRY_SECONDS + 1
        store.put(make_block([78]))
        assert store.flush()
        assert bytes_of(store.read(make_block([78]).key).result()) == make_block([78])
        assert put_all(store)
        assert {entry.block.key for entry in store.entries()} >= {block.key for block in CHAIN}
        store.check_invariants()


def test_a_read_only_store_is_read_but_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with BlockStore(tmp_path / "s", fingerprint=FINGERPRINT) as store:
        put_all(store)
    with read_only(tmp_path / "s"), BlockStore(tmp_path / "s", fingerprint=FINGERPRINT) as store:
        assert [entry.block.key for entry in store.entries()] == [block.key for block in CHAIN]
        assert bytes_of(store.read(CHAIN[3].key).result()) == CHAIN[3]
        store.put(make_block([50]))
        store.remove([CHAIN[0].key])
        store.touch([CHAIN[0].key])
        assert store.flush() is False
        assert store.statistics().dropped_blocks["memory_only"] == 1
        assert len(warnings_of(caplog)) == 1


def test_a_store_recovers_from_being_read_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = MovedClock()
    with BlockStore(tmp_path / "s", fingerprint=FINGERPRINT, clocks=clock.clocks()) as store:
        store.put(CHAIN[0])
        assert store.flush()
        with read_only(tmp_path / "s"):
            assert not put_all(store)
            assert bytes_of(store.read(CHAIN[0].key).result()) == CHAIN[0]
        clock.moved_seconds += RETRY_SECONDS + 1
        assert put_all(store)
        assert len(store.entries()) == len(CHAIN)
        assert len(warnings_of(caplog)) == 1


def test_a_folder_that_cannot_be_created_is_not_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with BlockStore(tmp_path / "file" / "s", fingerprint=FINGERPRINT) as store:
        assert not put_all(store)
        assert store.entries() == ()
        with pytest.raises(BlockUnreadable):
            store.read(CHAIN[0].key).result()
        assert len(warnings_of(caplog)) == 1


def test_a_folder_replaced_by_someone_else_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = MovedClock()
    with BlockStore(tmp_path / "s", fingerprint=FINGERPRINT, clocks=clock.clocks()) as store:
        put_all(store)
        shutil.rmtree(tmp_path / "s")
        (tmp_path / "s").mkdir()
        (tmp_path / "s" / "thesis.tex").write_text("mine")
        clock.moved_seconds += RETRY_SECONDS + 1
        assert not put_all(store)
        clock.moved_seconds += RETRY_SECONDS + 1
        assert not put_all(store)
        assert {path.name for path in (tmp_path / "s").iterdir()} <= {"thesis.tex", "lock"}


def test_a_small_volume_is_filled_and_then_old_blocks_evicted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = [make_block([number], part_bytes=(500_000,)) for number in range(100)]
    with (
        small_volume(tmp_path / "v", size_bytes=16 << 20) as volume,
        BlockStore(volume / "s", fingerprint=FINGERPRINT, limits=NO_SPARE) as store,
    ):
        for block in blocks:
            store.put(block)
            store.flush()
        statistics = store.statistics()
        kept = {entry.block.key for entry in store.entries()}
        assert statistics.mode == "writing"
        assert not any(statistics.dropped_blocks.values())
        assert statistics.evicted_blocks > 60
        assert blocks[-1].key in kept
        assert all(bytes_of(store.read(key).result()).key == key for key in kept)
        store.check_invariants()


def test_a_volume_filled_by_others_pauses_the_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = MovedClock()
    big = [make_block([number], part_bytes=(200_000,)) for number in range(20)]
    with (
        small_volume(tmp_path / "v", size_bytes=2 << 20) as volume,
        BlockStore(
            volume / "s", fingerprint=FINGERPRINT, limits=NO_SPARE, clocks=clock.clocks()
        ) as store,
    ):
        assert store.flush()
        fill(volume / "ballast")
        for block in big:
            store.put(block)
        store.flush()
        assert store.statistics().written_bytes == 0
        assert sum(store.statistics().dropped_blocks.values()) == len(big)
        assert len(warnings_of(caplog)) <= 1
        (volume / "ballast").unlink()
        clock.moved_seconds += RETRY_SECONDS + 1
        store.put(big[0])
        assert store.flush()
        assert bytes_of(store.read(big[0].key).result()) == big[0]


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as ballast:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    ballast.write(bytes(size))
            except OSError:
                continue


LIMITED_SIZE = """
import resource, sys
from pathlib import Path
from holdfast.store.store import BlockStore
from tests.fakes.stored_blocks import FINGERPRINT, make_block
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
small, large = make_block([1]), make_block([2], part_bytes=(600_000,))
with BlockStore(Path(sys.argv[1]), fingerprint=FINGERPRINT) as store:
    store.put(small)
    assert store.flush()
    store.put(large)
    assert not store.flush()
    assert store.statistics().mode == "memory-only", store.statistics()
    assert store.read(small.key).result().key == small.key
print("unharmed")
"""

LIMITED_FILES = """
import resource, sys
from pathlib import Path
from holdfast.store.store import BlockStore
from tests.fakes.stored_blocks import FINGERPRINT, make_block
resource.setrlimit(resource.RLIMIT_NOFILE, (140, 140))
blocks = [make_block([number], part_bytes=(50,)) for number in range(400)]
with BlockStore(Path(sys.argv[1]), fingerprint=FINGERPRINT) as store:
    for block in blocks:
        store.put(block)
    assert store.flush()
    assert store.statistics().blocks == len(blocks), store.statistics()
    futures = [store.read(block.key) for block in blocks]
    assert [future.result().key for future in futures] == [block.key for block in blocks]
print("unharmed")
"""


def printed(program: str, folder: Path) -> str:
    """The program's output when run on an empty folder in a separate process."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"},
    )  # fmt: skip
    assert list((folder / "incoming").iterdir()) == []
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_file_size_limit_is_harmless(tmp_path: Path) -> None:
    assert printed(LIMITED_SIZE, tmp_path / "s") == "unharmed\n"


def test_few_files_are_open_for_any_number_of_blocks(tmp_path: Path) -> None:
    assert printed(LIMITED_FILES, tmp_path / "s") == "unharmed\n"


def test_a_full_volume_is_reported_once_and_used_again_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = StoreLimits(volume_percent=100, spare_bytes=1 << 20)
    with small_volume(tmp_path / "volume", size_bytes=8 << 20) as volume:
        (volume / "another program's").write_bytes(bytes(7 << 20))
        with BlockStore(volume / "s", fingerprint=FINGERPRINT, limits=limits) as store:
            put_all(store)
            statistics = store.statistics()
            assert (statistics.mode, statistics.blocks) == ("memory-only", 0)
            (volume / "another program's").unlink()
            assert put_all(store)
            statistics = store.statistics()
            assert (statistics.mode, statistics.blocks) == ("writing", len(CHAIN))


def test_only_the_owner_may_read_a_stores_files(tmp_path: Path) -> None:
    with BlockStore(tmp_path / "s", fingerprint=FINGERPRINT, served_as="a model") as store:
        assert put_all(store)
        modes = {
            str(path.relative_to(tmp_path)): path.stat().st_mode & 0o777
            for path in tmp_path.rglob("*")
            if path.is_file()
        }
    assert any(name.endswith("/name") for name in modes)
    assert any("-wal" in name for name in modes)
    assert {name: oct(mode) for name, mode in modes.items() if mode != 0o600} == {}


def test_a_file_that_cannot_be_deleted_now_is_deleted_later(tmp_path: Path) -> None:
    path = tmp_path / "s" / "blocks"
    with (
        failing_disk(tmp_path) as disk,
        BlockStore(tmp_path / "s", fingerprint=FINGERPRINT) as store,
    ):
        assert put_all(store)
        disk.fail("unlink", errno.EACCES, only=CHAIN[-1].key.hex())
        store.remove([CHAIN[-1].key, make_block([9]).key])
        store.flush()
        assert disk.failed
        assert len(list(path.rglob("*.block"))) == len(CHAIN)
        disk.heal()
        store.flush()
        assert len(list(path.rglob("*.block"))) == len(CHAIN) - 1
        assert [entry.block.key for entry in store.entries()] == [block.key for block in CHAIN[:-1]]


def test_a_removed_block_that_is_put_again_is_kept(tmp_path: Path) -> None:
    with (
        failing_disk(tmp_path) as disk,
        BlockStore(tmp_path / "s", fingerprint=FINGERPRINT) as store,
    ):
        assert put_all(store)
        disk.fail("unlink", errno.EIO, times=2, only=CHAIN[-1].key.hex())
        store.remove([CHAIN[-1].key])
        store.put(CHAIN[-1])
        disk.heal()
        assert store.flush()
        assert bytes_of(store.read(CHAIN[-1].key).result()) == CHAIN[-1]
        assert len(store.entries()) == len(CHAIN)


def test_an_undeletable_file_does_not_stop_other_evictions(
    tmp_path: Path,
) -> None:
    limits = StoreLimits(budget_bytes=6 * 1500, volume_percent=100, spare_bytes=0)
    blocks = [make_block([number]) for number in range(20)]
    with (
        failing_disk(tmp_path) as disk,
        BlockStore(tmp_path / "s", fingerprint=FINGERPRINT, limits=limits) as store,
    ):
        disk.fail("unlink", errno.EACCES, only=blocks[0].key.hex())
        for block in blocks:
            store.put(block)
            store.flush()
        statistics = store.statistics()
        assert statistics.mode == "writing"
        assert not any(statistics.dropped_blocks.values())
        assert statistics.stored_bytes <= 6 * 1500
        kept = {entry.block.key for entry in store.entries()}
        assert {blocks[0].key, blocks[-1].key} <= kept


def test_the_writing_thread_survives_a_disk_that_cannot_tell_whether_a_missing_block_is_back(
    tmp_path: Path,
) -> None:
    with (
        failing_disk(tmp_path) as disk,
        BlockStore(tmp_path / "store", fingerprint=FINGERPRINT) as store,
    ):
        store.put(CHAIN[0])
        store.flush()
        (path,) = (tmp_path / "store").glob("blocks/*/*.block")
        path.unlink()
        disk.fail("stat", errno.EIO, only=".block")
        with pytest.raises(BlockMissing):
            store.read(CHAIN[0].key).result()
        store.flush()
        assert disk.failed
        disk.heal()
        store.put(CHAIN[0])
        store.flush()
        assert bytes_of(store.read(CHAIN[0].key).result()) == CHAIN[0]
