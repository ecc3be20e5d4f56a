"""A disk whose operations fail: calls of `os` raise errors for paths beneath one folder.

SQLite makes its own system calls; for it, the matching sqlite3 error is raised.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.sqlite_errors import sqlite_error

# operations, and the calls of `os` that perform them
OPERATIONS: dict[str, tuple[str, ...]] = {
    "open": ("open",),
    "read": ("pread", "readv", "read"),
    "write": ("write", "writev"),
    "sync": ("fsync",),
    "rename": ("replace", "rename", "link"),
    "unlink": ("unlink", "remove", "rmdir"),
    "stat": ("stat", "lstat", "fstat"),
    "list": ("scandir", "listdir"),
    "mkdir": ("mkdir",),
    "touch": ("utime",),
}
ERRORS = (
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM,
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EINTR, errno.EBUSY, errno.ETIMEDOUT,
    errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG,
)  # fmt: skip


@dataclass
class FailingDisk:
    """times: how many calls fail. `failed` counts the failed calls."""

    folder: Path
    operation: str = ""
    error: int = 0
    times: int = 0
    only: str = ""  # of the paths that contain this
    failed: int = 0
    calls: int = 0  # of this operation on such paths
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _paths: dict[int, str] = field(default_factory=dict)  # of open files

    def fail(self, operation: str, error: int, *, times: int = 10**9, only: str = "") -> None:
        with self._lock:
            self.operation, self.error, self.times, self.only = operation, error, times, only
            self.failed = self.calls = 0

    def heal(self) -> None:
        self.times = 0

    def check(self, operation: str, path: object) -> None:
        name = self._paths.get(path, "") if isinstance(path, int) else os.fspath(path)  # type: ignore[call-overload]
        with self._lock:
            if operation != self.operation or not self.times:
                return
            if not str(name).startswith(str(self.folder)) or self.only not in str(name):
                return
            self.times -= 1
            self.failed += 1
        if operation == "sqlite":
            raise sqlite_error(self.error)
        raise OSError(self.error, os.strerror(self.error), str(name))

    def wrapped(self, operation: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            self.check(operation, path)
            result = call(path, *args, **kwargs)
            if call is _OPEN:
                self._paths[result] = os.fspath(path)
            return result

        return checked


_OPEN = os.open


@contextmanager
def failing_disk(folder: Path) -> Iterator[FailingDisk]:
    disk = FailingDisk(folder)

    class Connection(sqlite3.Connection):
        def __init__(self, database: Any, *args: Any, **kwargs: Any) -> None:
            self.path = str(database)
            disk.check("sqlite", self.path)
            super().__init__(database, *args, **kwargs)

        def execute(self, *args: Any) -> sqlite3.Cursor:
            disk.check("sqlite", self.path)
            return super().execute(*args)

        def executemany(self, *args: Any) -> sqlite3.Cursor:
            disk.check("sqlite", self.path)
            return super().executemany(*args)

    connect = sqlite3.connect
    with pytest.MonkeyPatch.context() as changed:
        for operation, names in OPERATIONS.items():
            for name in names:
                changed.setattr(os, name, disk.wrapped(operation, getattr(os, name)))
        for module in (io, builtins):
            changed.setattr(module, "open", disk.wrapped("open", builtins.open))
        changed.setattr(
            sqlite3, "connect", lambda path, **more: connect(path, factory=Connection, **more)
        )
        yield disk
