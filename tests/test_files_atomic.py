"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from holdfast.files import atomic_create, atomic_write, sync_to_drive

F_FULLFSYNC = 51  # as macOS numbers it; Linux has none


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"before")
    with atomic_write(target) as file:
        file.write(b"after")
        file.flush()
        assert target.read_bytes() == b"before"
    assert target.read_bytes() == b"after"
    assert target.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("failure", [OSError, KeyboardInterrupt])
def test_an_unfinished_file_leaves_nothing_behind(
    tmp_path: Path, failure: type[BaseException]
) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"before")
    with pytest.raises(failure):
        _begin_and_fail(target, failure)
    assert target.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [target]


def test_of_several_concurrent_writers_the_first_complete_file_stays(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with atomic_create(target) as slow:
        slow.write(b"second")
        with atomic_create(target) as fast:
            fast.write(b"first")
    assert target.read_bytes() == b"first"
    assert target.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == [target]


def test_without_hard_links_a_file_is_still_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("os.link", refused)
    with atomic_create(tmp_path / "file") as file:
        file.write(b"whole")
    assert (tmp_path / "file").read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def _begin_and_fail(target: Path, failure: type[BaseException]) -> None:
    with atomic_write(target) as file:
        file.write(b"aft")
        raise failure


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    with atomic_write(path) as file:
        file.write(b"whole")
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("refusal", [None, errno.ENOTSUP, errno.ENOTTY, errno.EINVAL])
def test_a_mac_flushes_its_drive_and_other_volumes_use_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int | None
) -> None:
    calls: list[str] = []

    def fcntl_of_a_mac(file: int, command: int) -> int:
        assert command == F_FULLFSYNC
        calls.append("full")
        if refusal is not None:
            raise OSError(refusal, os.strerror(refusal))
        return 0

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", F_FULLFSYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", fcntl_of_a_mac)
    monkeypatch.setattr(os, "fsync", lambda file: calls.append("plain"))
    with (tmp_path / "file").open("wb") as file:
        sync_to_drive(file.fileno())
    assert calls == (["full"] if refusal is None else ["full", "plain"])


def test_a_failing_full_sync_is_not_taken_for_unsupported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(file: int, command: int) -> int:
        raise OSError(errno.EIO, "the drive has failed")

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", F_FULLFSYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", failing)
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="failed"):
        sync_to_drive(file.fileno())
