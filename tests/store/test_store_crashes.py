"""kill -9 at any instant: found blocks are right, and nearly all are found."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

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
