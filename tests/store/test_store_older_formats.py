"""Stores and files that earlier versions wrote."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.store.block import fingerprint_id, read_block, read_header
from holdfast.store.folder import MARKER
from holdfast.store.store import BlockStore
from tests.fakes.stored_blocks import FINGERPRINT, bytes_of, make_block

# Of November 2026: four blocks, a pin and a session.
OF_FORMAT_1 = Path(__file__).parent / "data" / "store_with_index_of_format_1.tar.gz"
WITHOUT_FORM = Path(__file__).parent / "data" / "block_without_kv_bits.block"


def found_in(store: BlockStore) -> dict[str, bytes]:
    records = store.records()
    return {} if records is None else dict(records.found)


def test_an_earlier_versions_cache_is_deleted_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tarfile.open(OF_FORMAT_1) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / "store"
    kept = [tmp_path / "beside", folder / "answers" / "a", folder / "responses" / "b"]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    for _ in range(2):
        with BlockStore(folder, fingerprint=FINGERPRINT) as store:
            store.put(make_block([77]))
            assert store.flush()
            assert [entry.block for entry in store.entries()] == [make_block([77]).block]
            assert found_in(store) == {}
            store.check_invariants()
            assert store.statistics().bad_blocks == 0
    assert [path.read_text() for path in kept] == ["mine"] * 3
    assert (folder / MARKER).is_file()
    (line,) = caplog.messages
    assert "deleted the cache of an earlier version" in line


def test_a_header_that_does_not_state_the_form_is_read() -> None:
    block = make_block([1, 2, 3])
    assert read_header(WITHOUT_FORM, block.key) == (block.block, FINGERPRINT)
    found = read_block(WITHOUT_FORM, block.key, model=fingerprint_id(FINGERPRINT))
    assert bytes_of(found) == replace(block, form=None)
