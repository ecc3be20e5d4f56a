from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from holdfast.store import folder as store_folder
from holdfast.store import write_ahead as publishing
from holdfast.store.block import StoredBlock, encode_block, fingerprint_id, read_block
from holdfast.store.folder import (
    StoreFolder,
)
from holdfast.store.write_ahead import WriteAhead
from holdfast.wire.events import StoreFigures
from tests.fakes.stored_blocks import FINGERPRINT, bytes_of, make_chain

CHAIN = make_chain(4)


def new_ahead(path: Path) -> tuple[WriteAhead, StoreFolder, StoreFigures]:
    folder, figures = StoreFolder(path), StoreFigures(model=fingerprint_id(FINGERPRINT))
    folder.prepare()
    return WriteAhead(folder, fingerprint=FINGERPRINT, figures=figures), folder, figures


def write(ahead: WriteAhead, block: StoredBlock) -> None:
    ahead.write(
        block.block,
        encode_block(block, fingerprint=FINGERPRINT),
        now=3.0,
        steady_now=7.0,
    )


def test_files_get_their_names_when_the_group_is_published(tmp_path: Path) -> None:
    ahead, folder, figures = new_ahead(tmp_path)
    between: list[int] = []
    for block in CHAIN:
        write(ahead, block)
    assert list(folder.block_files()) == []
    assert len(list(folder.incoming().glob("*.part"))) == 4
    group = ahead.group(most_bytes=10**6, most_blocks=10)
    ahead.publish(group, between=lambda: between.append(1))
    assert [entry.block for entry in group] == [block.block for block in CHAIN]
    for entry, block in zip(group, CHAIN, strict=True):
        path = folder.block_path(block.key, model=fingerprint_id(FINGERPRINT))
        assert bytes_of(read_block(path, block.key, model=entry.model)) == block
        assert entry.file_bytes == path.stat().st_size
        assert path.stat().st_mode & 0o777 == 0o600
    assert len(between) == 4
    assert list(folder.incoming().glob("*.part")) == []
    assert figures.written_bytes == ahead.file_bytes > 0
    assert ahead.parent_keys == {block.block.parent_key for block in CHAIN}
    ahead.drop(group)
    assert (len(ahead), ahead.file_bytes) == (0, 0)
    folder.release()


def test_a_group_flushes_the_drive_once_after_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, folder, _ = new_ahead(tmp_path)
    for block in CHAIN:
        write(ahead, block)
    calls: list[str] = []

    def fsync(file: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "plain")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(publishing, "sync_to_drive", lambda file: calls.append("full"))
    ahead.publish(
        ahead.group(most_bytes=10**6, most_blocks=10), between=lambda: calls.append("between")
    )
    blocks, model_folder = "folder", "folder"
    assert calls == ["plain", "between"] * 3 + ["full", "between"] + [blocks, model_folder]
    folder.release()


def test_an_abandoned_group_leaves_nothing(tmp_path: Path) -> None:
    ahead, folder, _ = new_ahead(tmp_path)
    write(ahead, CHAIN[0])
    ahead.abandon()
    assert list(folder.incoming().glob("*.part")) == []
    assert list(folder.block_files()) == []
    folder.release()


def test_no_file_stays_open(tmp_path: Path) -> None:
    ahead, folder, _ = new_ahead(tmp_path)
    folder.incoming()
    before = len(os.listdir("/dev/fd"))
    for block in CHAIN:
        write(ahead, block)
    assert len(os.listdir("/dev/fd")) == before
    ahead.publish(ahead.group(most_bytes=10**6, most_blocks=10), between=lambda: None)
    assert len(os.listdir("/dev/fd")) == before
    folder.release()


def test_a_failed_write_leaves_no_file_behind(tmp_path: Path) -> None:
    ahead, folder, _ = new_ahead(tmp_path)
    incoming = folder.incoming()
    (incoming / f"{CHAIN[0].key.hex()}.part").mkdir()
    with pytest.raises(OSError):
        write(ahead, CHAIN[0])
    assert len(ahead) == 0
    assert ahead.file_bytes == 0


def test_groups_are_bounded_and_take_the_oldest_first(tmp_path: Path) -> None:
    ahead, folder, _ = new_ahead(tmp_path)
    for block in CHAIN:
        write(ahead, block)
    keys = [block.key for block in CHAIN]
    assert [entry.block.key for entry in ahead.group(most_bytes=10**6, most_blocks=3)] == keys[:3]
    assert [entry.block.key for entry in ahead.group(most_bytes=1, most_blocks=3)] == keys[:1]
    assert ahead.oldest_at == 7.0
    ahead.drop(ahead.group(most_bytes=10**6, most_blocks=3))
    assert ahead.abandon() == keys[3:]
    folder.release()


def test_blocks_written_between_two_fsyncs_belong_to_the_next_group(tmp_path: Path) -> None:
    ahead, folder, _ = new_ahead(tmp_path)
    write(ahead, CHAIN[0])
    group = ahead.group(most_bytes=10**6, most_blocks=10)
    ahead.publish(group, between=lambda: write(ahead, CHAIN[1]))
    ahead.drop(group)
    assert [found.key for found in folder.block_files()] == [CHAIN[0].key]
    assert [entry.block.key for entry in ahead.group(most_bytes=10**6, most_blocks=10)] == [
        CHAIN[1].key
    ]
    ahead.abandon()
    folder.release()


def test_a_salvaged_file_is_synced_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, dead, _ = new_ahead(tmp_path)
    for block in CHAIN[:2]:
        write(ahead, block)
    incoming = dead.incoming()
    os.close(dead._claim or 0)  # as a kill does
    calls: list[str] = []
    replace = os.replace

    def fsync(file: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "plain")

    def named(source: Path, target: Path) -> None:
        calls.append("named")
        replace(source, target)

    folder = StoreFolder(tmp_path)
    folder.make_model_folder(FINGERPRINT)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", named)
    monkeypatch.setattr(publishing, "sync_to_drive", lambda file: calls.append("full"))
    with folder.exclusive():
        assert publishing.salvage(folder) == 2
    assert calls == ["plain", "full", "named", "named", "folder"]
    assert not incoming.exists()


def test_names_that_a_dead_process_has_given_are_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have died after the rename, before it synced the folder."""
    folder = StoreFolder(tmp_path)
    folder.prepare()
    model_folder = folder.make_model_folder(FINGERPRINT)
    synced: list[Path] = []
    monkeypatch.setattr(store_folder, "sync_folder", synced.append)
    with folder.exclusive():
        assert publishing.salvage(folder) == 0
    assert synced == [model_folder]
