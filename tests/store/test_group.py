from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.store.block import Block
from holdfast.store.block_file import encode_block, read_block
from holdfast.store.folder import StoreFolder
from holdfast.store.group import WriteGroup
from holdfast.store.keys import fingerprint_id
from holdfast.store.statistics import WriteCounters
from tests.store.chains import FINGERPRINT, bytes_of, make_chain

CHAIN = make_chain(4)


def new_group(path: Path) -> tuple[WriteGroup, StoreFolder, WriteCounters]:
    folder, counters = StoreFolder(path), WriteCounters()
    folder.prepare()
    return WriteGroup(folder, fingerprint=FINGERPRINT, counters=counters), folder, counters


def write(group: WriteGroup, block: Block) -> None:
    group.write(block, encode_block(block, fingerprint=FINGERPRINT, created=3.0), now=3.0)


def test_files_get_their_names_when_the_group_is_published(tmp_path: Path) -> None:
    group, folder, counters = new_group(tmp_path)
    between: list[int] = []
    for block in CHAIN:
        write(group, block)
    assert list(folder.block_files()) == []
    assert len(list(folder.incoming().glob("*.part"))) == 4
    rows = group.publish(between=lambda: between.append(1))
    assert [row.entry.key for row in rows] == [block.key for block in CHAIN]
    for row, block in zip(rows, CHAIN, strict=True):
        path = folder.block_path(block.key, model=fingerprint_id(FINGERPRINT))
        assert bytes_of(read_block(path, block.key).block) == block
        assert row.entry.file_bytes == path.stat().st_size
        assert path.stat().st_mode & 0o777 == 0o600
    assert len(between) == 4
    assert list(folder.incoming().glob("*.part")) == []
    assert (counters.written_blocks, counters.written_bytes) == (4, group.file_bytes)
    folder.release()


def test_an_abandoned_group_leaves_nothing(tmp_path: Path) -> None:
    group, folder, _ = new_group(tmp_path)
    write(group, CHAIN[0])
    group.abandon()
    assert list(folder.incoming().glob("*.part")) == []
    assert list(folder.block_files()) == []
    folder.release()


def test_no_file_stays_open(tmp_path: Path) -> None:
    group, folder, _ = new_group(tmp_path)
    folder.incoming()
    before = len(os.listdir("/dev/fd"))
    for block in CHAIN:
        write(group, block)
    group.publish(between=lambda: None)
    assert len(os.listdir("/dev/fd")) == before
    folder.release()


def test_a_write_that_fails_leaves_no_file_behind(tmp_path: Path) -> None:
    group, folder, _ = new_group(tmp_path)
    incoming = folder.incoming()
    (incoming / f"{CHAIN[0].key.hex()}.part").mkdir()
    with pytest.raises(OSError):
        write(group, CHAIN[0])
    assert group.blocks == []
    assert group.file_bytes == 0
