"""The real system calls that the simulated disk replaces, and functions that use them."""

from __future__ import annotations

import fcntl
import io
import os
import sqlite3
import stat
from collections.abc import Sequence
from typing import Any

PAGE = 4096  # bytes
_SQLITE_SUFFIXES = (".sqlite", "-wal", "-shm", "-journal")


class Real:
    """The calls that `install` replaces."""

    open, close, read, pread, readv, preadv = (
        os.open, os.close, os.read, os.pread, os.readv, os.preadv,
    )  # fmt: skip
    write, pwrite, writev, fsync, ftruncate = os.write, os.pwrite, os.writev, os.fsync, os.ftruncate
    lseek, fstat, stat, lstat, statvfs = os.lseek, os.fstat, os.stat, os.lstat, os.statvfs
    rename, replace, link, unlink, rmdir = os.rename, os.replace, os.link, os.unlink, os.rmdir
    mkdir, scandir, utime = os.mkdir, os.scandir, os.utime
    file = io.open
    flock = fcntl.flock
    connect = sqlite3.connect


def exists(path: str) -> bool:
    """Whether a path exists, also as a broken link."""
    try:
        Real.lstat(path)
    except OSError:
        return False
    return True


def remove(path: str) -> None:
    """Remove a file or a whole folder, with the real calls."""
    if not stat.S_ISDIR(Real.lstat(path).st_mode):
        Real.unlink(path)
        return
    with Real.scandir(path) as entries:
        names = [entry.path for entry in entries]
    for name in names:
        remove(name)
    Real.rmdir(path)


def is_sqlite(path: str) -> bool:
    """Whether SQLite accesses this file from C, past Python's calls."""
    return path.endswith(_SQLITE_SUFFIXES)


def content_of(path: str) -> bytes:
    """All bytes of a file."""
    with Real.file(path, "rb", buffering=0) as file:
        return file.readall()


def files(folder: str) -> list[str]:
    """The paths of all files beneath a folder, in order, without those that SQLite maps into memory:
    truncating them would kill the real process.
    """
    with Real.scandir(folder) as entries:
        found = sorted((entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries)
    paths = []
    for path, is_folder in found:
        paths += files(path) if is_folder else [path]
    return [path for path in paths if not path.endswith("-shm")]


def first_bytes(buffers: Sequence[Any], size: int) -> list[memoryview]:
    """The first bytes of buffers."""
    found = []
    for buffer in buffers:
        view = memoryview(buffer).cast("B")[:size]
        found.append(view)
        size -= view.nbytes
        if not size:
            break
    return found
