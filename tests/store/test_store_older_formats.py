"""Stores that earlier versions have written, as their own code left them on disk."""

from __future__ import annotations

import logging
import tarfile
from pathlib import Path

import pytest

from holdfast.store.index import INDEX_FORMAT
from holdfast.store.store import BlockStore
from tests.fakes.stored_blocks import FINGERPRINT, bytes_of, make_block, make_chain

CHAIN = make_chain(3)
BLOCKS = [*CHAIN, make_block([], after=CHAIN[1], kind="state")]
# Of November 2026: blocks CHAIN and a state, a pin, a session; its index kept tokens in a table of
# their own.
WITH_INDEX_OF_FORMAT_1 = Path(__file__).parent / "data" / "store_with_index_of_format_1.tar.gz"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with tarfile.open(WITH_INDEX_OF_FORMAT_1) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "store"


def test_a_store_with_an_older_index_is_read(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (beside := folder.parent / "beside").write_text("mine")
    with caplog.at_level(logging.INFO), BlockStore(folder, fingerprint=FINGERPRINT) as store:
        assert {entry.block for entry in store.entries()} == {block.block for block in BLOCKS}
        assert all(bytes_of(store.read(block.key).result()) == block for block in BLOCKS)
        assert store.records() == {"a" * 32: b"a session"}
        store.put(make_block([77]))
        assert store.flush()
        store.check_invariants()
        assert store.statistics().bad_blocks == 0
    assert caplog.messages == []
    (index,) = (folder / "index").glob("*.sqlite")
    assert index.stem.endswith(f"-{INDEX_FORMAT}")
    assert [path.name for path in sorted(folder.parent.iterdir())] == ["beside", "store"]
    assert beside.read_text() == "mine"


def test_two_versions_on_one_folder_keep_to_the_indexes_of_their_own_formats(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (old,) = (folder / "index").glob("*.sqlite")
    of_format_1 = old.read_bytes()
    with BlockStore(folder, fingerprint=FINGERPRINT) as store:
        store.pin([CHAIN[0].key], holder="a")
        assert store.flush()
        old.write_bytes(of_format_1)  # as the other version does when it finds its own gone
        store.put(make_block([77]))
        assert store.flush()
    with BlockStore(folder, fingerprint=FINGERPRINT) as store:
        assert len(store.entries()) == len(BLOCKS) + 1
        assert [entry.block.key for entry in store.entries() if entry.pinned] == [CHAIN[0].key]
    assert old.read_bytes() == of_format_1
    assert caplog.messages == []


def test_a_store_of_an_earlier_kind_of_fingerprint_is_begun_anew_with_one_line_in_the_log(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (beside := folder.parent / "beside").write_text("mine")
    with BlockStore(
        folder, fingerprint="new", is_outdated=lambda fingerprint: fingerprint == FINGERPRINT
    ) as store:
        assert store.entries() == ()
        assert store.records() == {}
    (line,) = caplog.messages
    assert "deleted 4 blocks" in line
    assert "and 1 session" in line
    assert beside.read_text() == "mine"
