"""kill -9 at any instant: found blocks are right, and nearly all are found."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from holdfast.store.block import BadBlock, fingerprint_id, read_block
from holdfast.store.store import BlockStore
from tests.fakes.store_writers import Told, kill_after, start_writer
from tests.fakes.stored_blocks import FINGERPRINT, is_right


def check_after_a_kill(folder: Path, told: Told) -> None:
    with BlockStore(folder, fingerprint=FINGERPRINT) as store:
        found = {entry.block.key for entry in store.entries()}
        assert told.stored <= found, "a block that was said to be durable is gone"
        old = {key for key, at in told.put.items() if at < told.killed_at - 1.0}
        assert len(old & found) >= 0.9 * len(old)
        for key in found & told.put.keys():
            assert is_right(store.read(key).result())
        assert store.statistics().bad_blocks == 0
        store.check_invariants()
    assert list((folder / "incoming").iterdir()) == []
    assert list((folder / "quarantine").iterdir()) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_writer_leaves_only_whole_blocks(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    told = kill_after(
        start_writer(tmp_path / "s", "--first", str(seed * 1000)), dice.randrange(1, 300)
    )
    check_after_a_kill(tmp_path / "s", told)


def test_unnamed_files_of_a_killed_writer_are_finished(tmp_path: Path) -> None:
    for attempt in range(20):
        writer = start_writer(
            tmp_path / "s", "--first", str(attempt * 1000), "--part-bytes", "9000"
        )
        told = kill_after(writer, 40 + attempt)
        assert told.put
        left = {
            bytes.fromhex(path.stem)
            for path in (tmp_path / "s" / "incoming").glob("*/*.part")
            if is_whole(path)
        }
        with BlockStore(tmp_path / "s", fingerprint=FINGERPRINT) as store:
            found = {entry.block.key for entry in store.entries()}
            assert left <= found
            if left:
                return
    pytest.skip("no kill fell between a write and its rename")


def is_whole(path: Path) -> bool:
    try:
        read_block(path, bytes.fromhex(path.stem), model=fingerprint_id(FINGERPRINT))
    except BadBlock:
        return False
    return True


@pytest.mark.slow
def test_thirty_kills_over_one_folder_lose_almost_nothing(tmp_path: Path) -> None:
    dice = random.Random(4)
    for number in range(30):
        writer = start_writer(
            tmp_path / "s",
            "--first",
            str(number * 100_000),
            "--part-bytes",
            str(dice.choice([3_000, 100_000])),
        )
        told = kill_after(writer, dice.randrange(1, 3000))
        check_after_a_kill(tmp_path / "s", told)
