from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from holdfast.errors import ModelLoadError
from holdfast.models.download import check_files

CONTENT = bytes(1000)


def linked(folder: Path, name: str, blob_name: str, content: bytes = CONTENT) -> Path:
    """A file of a snapshot, as in the cache."""
    (folder / "blobs").mkdir(exist_ok=True)
    (folder / "blobs" / blob_name).write_bytes(content)
    (folder / name).symlink_to(Path("blobs") / blob_name)
    return folder / name


def test_complete_files_are_kept_and_read_once(tmp_path: Path) -> None:
    large = linked(tmp_path, "model.safetensors", hashlib.sha256(CONTENT).hexdigest())
    small = linked(tmp_path, "config.json", hashlib.sha1(b"blob 1000\0" + CONTENT).hexdigest())
    read: list[int] = []
    check_files([large, small], read=read.append)
    assert sum(read) == 2000
    assert large.exists()
    assert small.exists()


def test_a_file_without_a_known_hash_is_not_judged(tmp_path: Path) -> None:
    file = linked(tmp_path, "a", "no-hash")
    check_files([file])
    assert file.exists()


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], b"\1" + CONTENT[1:], CONTENT + b"\0"])
def test_a_damaged_file_is_named_and_removed_with_its_link(tmp_path: Path, damage: bytes) -> None:
    whole = linked(tmp_path, "a.safetensors", hashlib.sha256(CONTENT).hexdigest())
    bad = linked(tmp_path, "b.safetensors", hashlib.sha256(b"other").hexdigest(), damage)
    with pytest.raises(ModelLoadError, match=r"removed: b\.safetensors; they must be"):
        check_files([whole, bad])
    assert whole.exists()
    assert not bad.is_symlink()
    assert len(list((tmp_path / "blobs").iterdir())) == 1
