"""The image folder keeps and removes files."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import WorkerUnavailable
from holdfast.files import atomic_write
from holdfast.front.images import folder as folder_module
from holdfast.front.images.folder import ImageFolder


def names(folder: ImageFolder) -> set[str]:
    return {path.name for path in folder.path.iterdir()}


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_an_image_is_written_for_its_owner_only(tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path / "images", max_bytes=1000)
    name = folder.hold_image(b"cat")
    path = tmp_path / "images" / name
    assert (name, path.read_bytes()) == (name_of(b"cat"), b"cat")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    folder.check_invariants()


def test_an_image_is_held_again_without_its_bytes(tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path / "images", max_bytes=1000)
    name = folder.hold_image(b"cat")
    folder.release_images([name])
    assert folder.hold_existing(name)
    assert folder._holds == {name: 1}
    (tmp_path / "images" / name).unlink()
    assert not folder.hold_existing(name)
    assert not folder.hold_existing(name_of(b"dog"))
    assert folder._holds == {name: 1}


def test_an_image_outlives_its_server(tmp_path: Path) -> None:
    name = ImageFolder(tmp_path, max_bytes=1000).hold_image(b"cat")
    written_at = (tmp_path / name).stat().st_ino
    assert ImageFolder(tmp_path, max_bytes=1000).hold_image(b"cat") == name
    assert (tmp_path / name).stat().st_ino == written_at


@pytest.mark.parametrize("damage", [b"", b"c", b"dog", b"cat and more"])
def test_a_damaged_file_is_written_again(damage: bytes, tmp_path: Path) -> None:
    name = ImageFolder(tmp_path, max_bytes=1000).hold_image(b"cat")
    (tmp_path / name).write_bytes(damage)
    folder = ImageFolder(tmp_path, max_bytes=1000)
    assert not folder.hold_existing(name)
    assert folder.hold_image(b"cat") == name
    assert (tmp_path / name).read_bytes() == b"cat"


def test_a_file_unreadable_to_a_worker_is_checked_again(tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path, max_bytes=1000)
    name = folder.hold_image(b"cat")
    (tmp_path / name).write_bytes(b"dog")
    folder.forget([name])
    assert not folder.hold_existing(name)
    folder.hold_image(b"cat")
    assert (tmp_path / name).read_bytes() == b"cat"


def test_the_least_recently_used_unused_images_are_removed(tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path, max_bytes=30)
    held, old, used, newer = (f"image {number}".encode() + b" " for number in range(4))
    for place, data in enumerate((held, old, used)):
        name = folder.hold_image(data)
        if data != held:
            folder.release_images([name])
        os.utime(tmp_path / name, (place, place))
    folder.release_images([folder.hold_image(used)])  # touches it
    folder.hold_image(newer)
    assert names(folder) == {name_of(held), name_of(used), name_of(newer)}
    folder.release_images([name_of(held), name_of(newer)])
    folder.hold_image(b"x" * 30)
    assert names(folder) == {name_of(b"x" * 30)}
    folder.check_invariants()


def test_files_of_dead_writers_are_removed_and_foreign_files_stay(tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path, max_bytes=10)
    torn = tmp_path / f".{'a' * 60}.k3fp"
    strange = tmp_path / "notes.txt"
    for path in (torn, strange):
        path.write_bytes(b"x" * 50)
        os.utime(path, (0, 0))
    folder.hold_image(b"cat")
    assert names(folder) == {"notes.txt", name_of(b"cat")}


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    (tmp_path / "images").write_bytes(b"a file, not a folder")
    with pytest.raises(WorkerUnavailable, match="images cannot be kept"):
        ImageFolder(tmp_path / "images", max_bytes=1000).hold_image(b"cat")


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=40))
def test_the_size_limit_holds_except_for_images_in_use(
    tmp_path_factory: pytest.TempPathFactory, uses: list[tuple[int, bool]]
) -> None:
    folder = ImageFolder(tmp_path_factory.mktemp("images"), max_bytes=40)
    held: list[str] = []
    for number, stays in uses:
        name = folder.hold_image(bytes([number]) * (number + 5))
        held.append(name)
        if not stays:
            folder.release_images([held.pop()])
        assert set(held) <= names(folder)
        sizes = {path.name: path.stat().st_size for path in folder.path.iterdir()}
        in_use = sum(sizes[each] for each in set(held))
        assert sum(sizes.values()) <= max(40, in_use + 14)
        folder.check_invariants()


def test_tenants_share_no_image(tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path, max_bytes=1000)
    ours = folder.hold_image(b"cat", tenant="ours")
    theirs = folder.hold_image(b"cat", tenant="theirs")
    assert len({ours, theirs, folder.hold_image(b"cat")}) == 3


def test_a_release_does_not_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ImageFolder(tmp_path, max_bytes=1000)
    name = folder.hold_image(b"cat")
    writes, may_write = threading.Event(), threading.Event()

    @contextmanager
    def slow(path: Path) -> Iterator[BinaryIO]:
        writes.set()
        may_write.wait(60)
        with atomic_write(path) as file:
            yield file

    monkeypatch.setattr(folder_module, "atomic_write", slow)
    with ThreadPoolExecutor(2) as threads:
        writing = threads.submit(folder.hold_image, b"dog")
        assert writes.wait(60)
        releasing = threads.submit(folder.release_images, [name])
        try:
            releasing.result(20)
            assert not writing.done()
        finally:
            may_write.set()
        assert writing.result(60) == name_of(b"dog")


def test_a_full_folder_is_not_scanned_for_every_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ImageFolder(tmp_path, max_bytes=1000)
    scans = 0
    files = folder._files

    def counted() -> list[tuple[float, int, str]]:
        nonlocal scans
        scans += 1
        return files()

    monkeypatch.setattr(folder, "_files", counted)
    for number in range(200):
        folder.release_images([folder.hold_image(number.to_bytes(10, "big"))])
    assert scans <= 12  # at the start, and after every tenth image once full
    assert len(names(folder)) <= 100
    folder.check_invariants()


def test_an_image_is_not_removed_while_a_thread_holds_it(tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path, max_bytes=100)  # room for a few of the images

    def used(first: int) -> None:
        for number in range(200):
            data = bytes([(first + number * 7) % 40]) * 20
            name = folder.hold_image(data)
            assert (tmp_path / name).read_bytes() == data
            folder.release_images([name])

    with ThreadPoolExecutor(8) as threads:
        for each in [threads.submit(used, first) for first in range(8)]:
            each.result()
    assert not folder._holds
    folder.check_invariants()
