"""Hashes are those of the loaded files, complete and of one version."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from holdfast.errors import ModelLoadError
from holdfast.models import file_hashing
from holdfast.models.file_hashing import FileHashing, HashCache, ModelChanged


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(file_hashing, "LEAST_BYTES", 1)
    monkeypatch.setattr(file_hashing, "PIECE_BYTES", 1000)
    folder = tmp_path / "model"
    folder.mkdir()
    for name in "ab":
        (folder / name).write_bytes(name.encode() * 4500)
    return folder


def listed(folder: Path) -> Callable[[], dict[str, Path]]:
    return lambda: {path.name: path for path in folder.iterdir()}


def hashes_of(folder: Path, cache: HashCache | None = None) -> dict[str, str]:
    with FileHashing(listed(folder), cache=cache or HashCache(None)) as hashing:
        return dict(hashing.result())


def test_every_byte_of_every_file_counts(folder: Path) -> None:
    expected = {name: xxhash.xxh3_128_hexdigest(name.encode() * 4500) for name in "ab"}
    assert hashes_of(folder) == expected
    for position in (0, 2250, 4499):
        content = bytearray(b"a" * 4500)
        content[position] ^= 1
        (folder / "a").write_bytes(content)
        assert hashes_of(folder)["a"] not in (expected["a"], "")


def overwrite(folder: Path) -> None:
    with (folder / "b").open("r+b") as file:
        file.write(b"c")


def replace(folder: Path) -> None:
    (folder.parent / "other").write_bytes(b"b" * 4500)
    os.replace(folder.parent / "other", folder / "b")


def lead_elsewhere(folder: Path) -> None:
    (folder / "b").unlink()
    (folder / "b").symlink_to("a")


CHANGES: dict[str, Callable[[Path], object]] = {
    "overwritten": overwrite,
    "replaced": replace,
    "removed": lambda folder: (folder / "b").unlink(),
    "added": lambda folder: (folder / "c").write_bytes(b"c"),
    "a link": lead_elsewhere,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_during_the_load_is_detected(folder: Path, change: str) -> None:
    with FileHashing(listed(folder), cache=HashCache(None)) as hashing:
        CHANGES[change](folder)
        with pytest.raises(ModelChanged, match=r"was changed while"):
            hashing.result()


def test_a_change_hidden_by_fresh_timestamps_is_detected(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content changes but not the stamp, as with a coarse clock of the file system."""
    stamps = {path.name: file_hashing.stamp_of(path) for path in folder.iterdir()}
    monkeypatch.setattr(file_hashing, "stamp_of", lambda path: stamps[path.name])
    monkeypatch.setattr(
        file_hashing,
        "stamp_from",
        lambda status: next(s for s in stamps.values() if s.inode == status.st_ino),
    )
    with FileHashing(listed(folder), cache=HashCache(None)) as hashing:
        hashing._thread.join()
        overwrite(folder)
        with pytest.raises(ModelChanged, match="b was changed"):
            hashing.result()


def test_only_settled_files_are_remembered(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache" / "hashes.json"
    hashes_of(folder, HashCache(path))
    assert not path.exists()


def test_cached_hashes_are_not_computed_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_hashing.FileStamp, "is_settled", lambda stamp, now_ns: True)
    path = tmp_path / "cache" / "hashes.json"
    first = hashes_of(folder, HashCache(path))

    def unread(hashing: FileHashing, path: Path, stamp: object) -> str:
        raise AssertionError(f"{path} was read again")

    monkeypatch.setattr(FileHashing, "_hash", unread)
    assert hashes_of(folder, HashCache(path)) == first


def test_a_file_under_an_old_name_is_another_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_hashing.FileStamp, "is_settled", lambda stamp, now_ns: True)
    path = tmp_path / "cache" / "hashes.json"
    before = hashes_of(folder, HashCache(path))
    status = (folder / "b").stat()
    overwrite(folder)
    # the time of the change cannot be set
    os.utime(folder / "b", ns=(status.st_atime_ns, status.st_mtime_ns))
    after = hashes_of(folder, HashCache(path))
    assert after["a"] == before["a"]
    assert after["b"] != before["b"]


def test_an_unreadable_file_is_reported_in_one_line(folder: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    (folder / "b").chmod(0)
    with pytest.raises(ModelLoadError, match="cannot be read"):
        hashes_of(folder)


def test_a_file_that_becomes_unreadable_is_reported_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with FileHashing(listed(folder), cache=HashCache(None)) as hashing:
        hashing._thread.join()
        monkeypatch.setattr(file_hashing, "open_regular", broken)
        with pytest.raises(ModelLoadError, match=r"cannot be read: .*Input/output error"):
            hashing.result()


def test_leaving_early_ends_the_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "large").touch()
    os.truncate(folder / "large", 1 << 40)  # a sparse file that takes hours
    with FileHashing(listed(folder), cache=HashCache(None)):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-hashing"]
