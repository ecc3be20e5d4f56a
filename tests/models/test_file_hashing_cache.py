"""The hash cache is right or empty."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from holdfast.models import file_hashing
from holdfast.models.file_hashing import LEAST_BYTES, SETTLED_NS, FileStamp, HashCache, stamp_of

STAMP = FileStamp(device=1, inode=2, size=LEAST_BYTES, modified_ns=3, changed_ns=4)
FOUND = "ab" * 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hashes" / "files.json"


def kept(path: Path, *found: tuple[FileStamp, str]) -> Path:
    cache = HashCache(path)
    for stamp, known in found or ((STAMP, FOUND),):
        cache.add(stamp, known)
    cache.save()
    return path


def test_saved_hashes_are_found_by_their_stamp_only(path: Path) -> None:
    kept(path)
    assert HashCache(path).find(STAMP) == FOUND
    for field in STAMP.__struct_fields__:
        assert HashCache(path).find(msgspec.structs.replace(STAMP, **{field: 99_999_999})) is None


def test_only_its_owner_can_read_or_write_it(path: Path) -> None:
    kept(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_without_a_path_hashes_are_not_saved() -> None:
    cache = HashCache(None)
    cache.add(STAMP, FOUND)
    cache.save()
    assert HashCache(None).find(STAMP) is None


def _replace(path: Path, found: bytes, other: bytes) -> None:
    path.write_bytes(path.read_bytes().replace(found, other, 1))


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


HARMS: dict[str, Callable[[Path], object]] = {
    "forged": lambda path: _replace(path, b"abab", b"cdcd"),
    "of another format": lambda path: _replace(path, b'"format":1', b'"format":9'),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-10]),
    "too large": lambda path: path.write_bytes(path.read_bytes() + b" " * (2 << 20)),
    "no JSON": lambda path: path.write_bytes(b"\xff\x00 not JSON"),
    "writable by others": lambda path: path.chmod(0o666),
    "in a folder writable by others": lambda path: path.parent.chmod(0o777),
    "a link": _link,
    "a FIFO": _fifo,
    "missing": Path.unlink,
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_or_shared_cache_is_replaced(path: Path, harm: str) -> None:
    kept(path)
    HARMS[harm](path)
    cache = HashCache(path)
    assert cache.find(STAMP) is None
    path.parent.chmod(0o700)
    cache.add(STAMP, FOUND)
    cache.save()
    assert HashCache(path).find(STAMP) == FOUND


def test_an_unwritable_location_is_harmless(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept(tmp_path / "file" / "cache.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_small_files_are_not_worth_an_entry(path: Path) -> None:
    kept(path, (msgspec.structs.replace(STAMP, size=LEAST_BYTES - 1), "00"))
    assert HashCache(path).find(msgspec.structs.replace(STAMP, size=LEAST_BYTES - 1)) is None


def numbered(number: int) -> tuple[FileStamp, str]:
    return msgspec.structs.replace(STAMP, inode=number), f"{number:032x}"


def test_it_is_bounded_and_drops_the_least_recently_used(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_hashing, "MOST_ENTRIES", 3)
    kept(path, *(numbered(number) for number in range(3)))
    cache = HashCache(path)
    assert cache.find(numbered(0)[0])
    cache.add(*numbered(7))
    cache.save()
    left = HashCache(path)
    assert [bool(left.find(numbered(number)[0])) for number in (0, 1, 2, 7)] == [
        True,
        False,
        True,
        True,
    ]


def test_concurrent_writes_never_damage_the_cache(path: Path) -> None:
    def write(first: int) -> None:
        for number in range(first, first + 20):
            kept(path, numbered(number))

    threads = [threading.Thread(target=write, args=(100 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = HashCache(path)
    found = [number for number in range(400) if last.find(numbered(number)[0])]
    assert found  # a writer may drop another's entry: that file is hashed again
    assert all(last.find(numbered(number)[0]) == numbered(number)[1] for number in found)
    assert [name.name for name in path.parent.iterdir()] == [path.name]


def test_a_link_counts_as_its_target(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("weights")
    (tmp_path / "link").symlink_to("blob")
    assert stamp_of(tmp_path / "link") == stamp_of(tmp_path / "blob")


def test_a_stamp_is_settled_when_any_change_would_show() -> None:
    long_ago = msgspec.structs.replace(STAMP, modified_ns=0, changed_ns=1000)
    now = 1000 + SETTLED_NS + 1
    assert long_ago.is_settled(now)
    assert not long_ago.is_settled(now - 1)
    assert not msgspec.structs.replace(long_ago, changed_ns=now + 5).is_settled(now)
    assert not msgspec.structs.replace(long_ago, modified_ns=now - 5).is_settled(now)
    # set manually; the change time counts
    assert msgspec.structs.replace(long_ago, modified_ns=now + 10**15).is_settled(now)
