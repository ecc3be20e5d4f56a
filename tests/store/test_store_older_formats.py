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
# Of November 2026: blocks CHAIN and a state, a pin, a session; its index kept tokens in a table of their own.
WITH_INDEX_OF_FORMAT_1 = Path(__file__).parent / "data" / "store_with_index_of_format_1.tar.gz"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with tarfile.open(WITH_INDEX_OF_FORMAT_1) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "store"


def test_a_store_with_an_older_index_is_read_with_one_line_in_the_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (beside := folder.parent / "beside").write_text("mine")
    with caplog.at_level(logging.INFO), BlockStore(folder, fingerprint=FINGERPRINT) as store:
        assert {entry.block for entry in store.entries()} == {block.block for block in BLOCKS}
        assert all(bytes_of(store.read(block.key).result()) == block for block in BLOCKS)
        assert store.records() == {"a" * 32: b"a session"}
        store.put(make_block([77]))
        assert store.flush()
        store.check_invariants()
        assert store.statistics().bad_blocks == 0
    (line,) = caplog.messages
    assert f"it has format 1, not {INDEX_FORMAT}" in line
    assert [path.name for path in sorted(folder.parent.iterdir())] == ["beside", "store"]
    assert beside.read_text() == "mine"


def test_the_index_is_made_anew_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with BlockStore(folder, fingerprint=FINGERPRINT) as store:
            assert len(store.entries()) == len(BLOCKS)
    assert len(caplog.messages) == 1
