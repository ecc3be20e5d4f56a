from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.store.inspect import clear_store
from holdfast.store.store import BlockStore

NAME, OTHER = "0" * 32, "1" * 32


def found_in(store: BlockStore) -> dict[str, bytes]:
    records = store.records()
    return {} if records is None else dict(records.found)


def files(folder: Path) -> list[Path]:
    return sorted((folder / "sessions").glob("*/*"))


def test_records_are_found_by_the_models_next_store(tmp_path: Path) -> None:
    with BlockStore(tmp_path, fingerprint="a model") as store:
        store.put_record(NAME, b"first")
        store.put_record(OTHER, b"other")
        store.put_record(NAME, b"second")
        assert found_in(store) == {NAME: b"second", OTHER: b"other"}
        store.remove_record(OTHER)
    with BlockStore(tmp_path, fingerprint="a model") as store:
        assert found_in(store) == {NAME: b"second"}
    with BlockStore(tmp_path, fingerprint="another model") as store:
        assert found_in(store) == {}
    assert [path.stat().st_mode & 0o777 for path in files(tmp_path)] == [0o600]


def test_a_damaged_or_misnamed_record_is_dropped(tmp_path: Path) -> None:
    with BlockStore(tmp_path, fingerprint="a model") as store:
        store.put_record(NAME, b"a record")
        store.flush()
        (path,) = files(tmp_path)
        whole = path.read_bytes()
        path.with_name(f"{OTHER}.session").write_bytes(whole)
        for position in range(len(whole)):
            path.write_bytes(
                whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :]
            )
            assert found_in(store) == {}
        path.write_bytes(whole)
        assert found_in(store) == {NAME: b"a record"}
        path.write_bytes(b"")
        assert found_in(store) == {}
    assert files(tmp_path) == []


def test_record_names_cannot_escape_the_folder(tmp_path: Path) -> None:
    with BlockStore(tmp_path, fingerprint="a model") as store:
        with pytest.raises(ValueError, match="not a record name"):
            store.put_record("../" + NAME, b"")
        store.put_record(NAME, b"after that")
        assert found_in(store) == {NAME: b"after that"}


def test_an_unwritable_folder_is_harmless(tmp_path: Path) -> None:
    place = tmp_path / "a file"
    place.write_text("in the way")
    with BlockStore(place / "store", fingerprint="a model") as store:
        store.put_record(NAME, b"lost")
        store.remove_record(NAME)
        assert found_in(store) == {}


def test_clearing_the_store_removes_the_records(tmp_path: Path) -> None:
    with BlockStore(tmp_path, fingerprint="a model") as store:
        store.put_record(NAME, b"gone")
    clear_store(tmp_path)
    assert files(tmp_path) == []
