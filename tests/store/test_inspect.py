from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.store.block import BadBlock, BlockMissing, StoreRefused, fingerprint_id
from holdfast.store.inspect import (
    clear_store,
    list_store,
    summarize_store,
)
from holdfast.store.maintenance import StoreLimits
from holdfast.store.store import BlockStore
from tests.fakes.stored_blocks import FINGERPRINT, make_block, make_chain
from tests.fakes.volumes import read_only

CHAIN = make_chain(5)
OTHER = make_chain(2, fingerprint="model two")
NO_LIMITS = StoreLimits(volume_percent=100.0, spare_bytes=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with two models, one state, one pin and one file left by a dead writer."""
    path = tmp_path / "s"
    with BlockStore(path, fingerprint=FINGERPRINT) as store:
        for block in [*CHAIN, make_block([], after=CHAIN[1], kind="state")]:
            store.put(block)
        store.pin([CHAIN[0].key])
    with BlockStore(path, fingerprint="model two") as store:
        for block in OTHER:
            store.put(block)
    return path


def block_path(folder: Path, key: bytes) -> Path:
    return next(folder.rglob(f"{key.hex()}.block"))


def quarantine_damaged(folder: Path) -> None:
    """Let a store find out that the last block of the chain is damaged."""
    block_path(folder, CHAIN[4].key).write_bytes(b"damaged")
    with BlockStore(folder, fingerprint=FINGERPRINT) as store:
        with pytest.raises((BadBlock, BlockMissing)):  # the store's own thread may find it first
            store.read(CHAIN[4].key).result()
        store.flush()


def test_the_list_shows_what_is_stored_of_each_model(folder: Path) -> None:
    first, second = list_store(folder)
    assert (first.fingerprint, first.blocks, first.states, first.tokens) == (FINGERPRINT, 6, 1, 20)
    assert (second.fingerprint, second.blocks, second.states, second.tokens) == (
        "model two",
        2,
        0,
        8,
    )
    assert first.model == fingerprint_id(FINGERPRINT)
    assert first.file_bytes == sum(
        path.stat().st_size for path in (folder / "blocks" / first.model).iterdir()
    )
    assert first.last_used > 0


def test_the_summary_counts_everything(folder: Path) -> None:
    block_path(folder, CHAIN[2].key).unlink()
    quarantine_damaged(folder)
    summary = summarize_store(folder, limits=NO_LIMITS)
    assert summary.blocks == 6
    assert summary.unreachable_blocks == 1
    assert summary.pinned_blocks == 1
    assert summary.quarantined_files == 1
    assert summary.quarantined_bytes == 7
    assert summary.file_bytes == sum(path.stat().st_size for path in folder.rglob("*.block"))
    assert summary.written_today_bytes >= summary.file_bytes
    assert summary.allowed_bytes > summary.file_bytes
    assert 0 < summary.volume_free_bytes <= summary.volume_bytes


def test_clearing_one_model_leaves_the_other(folder: Path) -> None:
    report = clear_store(folder, model=fingerprint_id("model two"))
    assert set(report.keys) == {block.key for block in OTHER}
    assert [holdings.fingerprint for holdings in list_store(folder)] == [FINGERPRINT]


def test_clearing_everything_leaves_an_empty_store_that_works(folder: Path) -> None:
    quarantine_damaged(folder)
    (folder / "mine.txt").write_text("mine")
    assert clear_store(folder).freed_bytes > 0
    assert list_store(folder) == ()
    assert summarize_store(folder, limits=NO_LIMITS).quarantined_files == 0
    assert (folder / "mine.txt").exists()
    with BlockStore(folder, fingerprint=FINGERPRINT) as store:
        store.put(CHAIN[0])
        assert store.flush()


def test_a_read_only_store_can_be_inspected(folder: Path) -> None:
    block_path(folder, CHAIN[4].key).chmod(0o600)
    with read_only(folder):
        assert len(list_store(folder)) == 2
        assert summarize_store(folder, limits=NO_LIMITS).blocks == 8


def test_a_folder_that_is_not_a_store_is_refused_unchanged(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("mine")
    for name in ("photos", "nothing"):
        for look in (list_store, clear_store):
            with pytest.raises(StoreRefused):
                look(tmp_path / name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreRefused, match="no store"):
        list_store(tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["cat.jpg", "empty", "photos"]
