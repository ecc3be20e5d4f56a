"""Replacements of Python's file calls: paths beneath the folder of the simulated disk go to it,
everything else to the kernel.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import mmap
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator
from typing import Any

from tests.simulation.disk import FIRST_DESCRIPTOR, SimulatedDisk, disk_now
from tests.simulation.disk_kernel import PAGE, Real
from tests.simulation.disk_sqlite import Connection


class Entry:
    """In place of `os.DirEntry`."""

    __slots__ = ("_disk", "_full", "_real", "name", "path")

    def __init__(
        self, disk: SimulatedDisk, real: os.DirEntry[str], folder: str, place: Any
    ) -> None:
        self._disk, self._real, self.name = disk, real, real.name
        self._full = os.path.join(folder, real.name)
        self.path = real.name if isinstance(place, int) else os.path.join(place, real.name)

    def __fspath__(self) -> str:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._real.is_dir(follow_symlinks=follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._real.is_file(follow_symlinks=follow_symlinks)

    def is_symlink(self) -> bool:
        return self._real.is_symlink()

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self._disk.stat(self._full, follow_symlinks=follow_symlinks)


class Listing:
    """In place of the iterator of `os.scandir`."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Entry]:
        return self

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> Listing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


class RawFile(io.RawIOBase):
    """In place of `io.FileIO`."""

    def __init__(self, file: int, mode: str, *, name: Any, owns: bool) -> None:
        self._file, self._owns = file, owns
        self.name, self.mode = name, mode
        self._reads = "r" in mode or "+" in mode
        self._writes = "r" not in mode or "+" in mode

    def fileno(self) -> int:
        self._check()
        return self._file

    def _check(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")

    def readable(self) -> bool:
        return self._reads

    def writable(self) -> bool:
        return self._writes

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._check()
        return os.readv(self._file, [buffer])

    def readall(self) -> bytes:
        self._check()
        parts = []
        size = os.fstat(self._file).st_size - os.lseek(self._file, 0, os.SEEK_CUR) + 1
        while part := os.read(self._file, max(size, PAGE)):
            parts.append(part)
        return b"".join(parts)

    def write(self, data: Any) -> int:
        self._check()
        return os.write(self._file, data)

    def seek(self, place: int, how: int = os.SEEK_SET) -> int:
        self._check()
        return os.lseek(self._file, place, how)

    def tell(self) -> int:
        return self.seek(0, os.SEEK_CUR)

    def truncate(self, size: int | None = None) -> int:
        self._check()
        size = self.tell() if size is None else size
        os.ftruncate(self._file, size)
        return size

    def close(self) -> None:
        if self.closed:
            return
        try:
            super().close()
        finally:
            if self._owns:
                os.close(self._file)


def _own_path(path: Any, place: int | None = None) -> str | None:
    """The path as a string if it is in the running world's folder."""
    disk = disk_now()
    if disk is None or isinstance(path, int):
        return None
    given: str | bytes = path if type(path) is str else os.fspath(path)
    name = os.fsdecode(given) if isinstance(given, bytes) else given
    if place is not None and place >= FIRST_DESCRIPTOR:
        return os.path.join(disk.path_of(place), name)
    if name.startswith(disk.prefix) or name == disk.folder:
        return name.rstrip("/") if name.endswith("/") else name
    return None


def _of_disk(number: int) -> SimulatedDisk:
    """The disk of a simulated descriptor. Raises OSError if its world has ended."""
    disk = disk_now()
    if disk is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), f"descriptor {number}")
    return disk


def _by_path(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    takes_descriptors = hasattr(SimulatedDisk, f"f{name}") or name == "utime"
    by_descriptor = "utime" if name == "utime" else f"f{name}"

    def call(path: Any, *args: Any, dir_fd: int | None = None, **more: Any) -> Any:
        found = _own_path(path, dir_fd)
        if found is not None:
            return getattr(disk_now(), name)(found, *args, **more)
        if takes_descriptors and isinstance(path, int) and path >= FIRST_DESCRIPTOR:
            return getattr(_of_disk(path), by_descriptor)(path, *args)
        if dir_fd is not None:
            more["dir_fd"] = dir_fd
        return real(path, *args, **more)

    return call


def _by_two_paths(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(source: Any, target: Any, **more: Any) -> Any:
        first = _own_path(source, more.get("src_dir_fd"))
        second = _own_path(target, more.get("dst_dir_fd"))
        if first is None and second is None:
            return real(source, target, **more)
        if first is None or second is None:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source), None, str(target))
        return getattr(disk_now(), name)(first, second)

    return call


def _by_descriptor(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(file: int, *args: Any) -> Any:
        if file < FIRST_DESCRIPTOR:
            return real(file, *args)
        return getattr(_of_disk(file), name)(file, *args)

    return call


def _passed_on(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """For calls that only need the kernel's descriptor."""

    def call(file: Any, *args: Any, **more: Any) -> Any:
        if isinstance(file, int) and file >= FIRST_DESCRIPTOR:
            file = _of_disk(file).descriptor(file, name).real
        return real(file, *args, **more)

    return call


def _close(file: int) -> None:
    if file < FIRST_DESCRIPTOR:
        return Real.close(file)
    return _of_disk(file).close_descriptor(file)


def _listing(real: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(path: Any = ".") -> Any:
        found = _own_path(path)
        if found is None and isinstance(path, int) and path >= FIRST_DESCRIPTOR:
            found = _of_disk(path).path_of(path)
        if found is None:
            return real(path)
        disk = disk_now()
        assert disk is not None
        entries = disk.entries(found)
        if name == "listdir":
            return [entry.name for entry in entries]
        place = path if isinstance(path, int) else os.fspath(path)
        return Listing([Entry(disk, entry, found, place) for entry in entries])

    return call


_FLAGS = {
    "r": os.O_RDONLY,
    "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
}


def _open_file(
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Callable[[Any, int], int] | None = None,
) -> Any:
    """In place of `open`."""
    is_ours = file >= FIRST_DESCRIPTOR if isinstance(file, int) else _own_path(file) is not None
    if not is_ours:
        return Real.file(file, mode, buffering, encoding, errors, newline, closefd, opener)
    kind = mode.translate({ord("b"): None, ord("t"): None})
    number = file
    if not isinstance(file, int):
        flags = _FLAGS[kind[0]] | os.O_CLOEXEC
        if "+" in kind:
            flags = flags & ~os.O_WRONLY | os.O_RDWR
        number = os.open(file, flags, 0o666) if opener is None else opener(file, flags)
        if stat.S_ISDIR(Real.fstat(_of_disk(number).descriptor(number, "open").real).st_mode):
            os.close(number)
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    raw = RawFile(number, kind, name=file, owns=closefd)
    if kind[0] == "a":
        raw.seek(0, os.SEEK_END)
    if buffering == 0:
        return raw
    size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
    buffered: Any
    if "+" in kind:
        buffered = io.BufferedRandom(raw, size)
    elif kind[0] == "r":
        buffered = io.BufferedReader(raw, size)
    else:
        buffered = io.BufferedWriter(raw, size)
    if "b" in mode:
        return buffered
    text = io.TextIOWrapper(buffered, encoding, errors, newline, buffering == 1)
    text.mode = mode  # type: ignore[misc]
    return text


def _connect(database: Any, *args: Any, **more: Any) -> sqlite3.Connection:
    """In place of `sqlite3.connect`."""
    disk = disk_now()
    if disk is None or isinstance(database, int) or _own_path(database) is None:
        plain: sqlite3.Connection = Real.connect(database, *args, **more)
        return plain
    return Connection(disk, database, *args, **more)


class _Map(mmap.mmap):
    def __new__(cls, fileno: int, *args: Any, **more: Any) -> _Map:
        if fileno >= FIRST_DESCRIPTOR:
            fileno = _of_disk(fileno).descriptor(fileno, "mmap").real
        return super().__new__(cls, fileno, *args, **more)


def install() -> None:
    """Replace Python's calls, once for the whole interpreter."""
    if os.close is _close:
        return
    replaced: dict[str, Callable[..., Any]] = {"close": _close}
    for name in ("open", "stat", "lstat", "statvfs", "mkdir", "rmdir", "unlink", "remove", "utime"):
        replaced[name] = _by_path(name, getattr(os, name))
    for name in ("rename", "replace", "link"):
        replaced[name] = _by_two_paths(name, getattr(os, name))
    for name in ("listdir", "scandir"):
        replaced[name] = _listing(getattr(os, name), name)
    for name in (
        "read", "pread", "readv", "write", "pwrite", "writev", "fsync", "fstat", "ftruncate", "lseek",
    ):  # fmt: skip
        replaced[name] = _by_descriptor(name, getattr(os, name))
    replaced["fdatasync"] = _by_descriptor("fsync", os.fdatasync)
    for name in (
        "fchmod", "isatty", "get_inheritable", "set_inheritable", "get_blocking", "set_blocking",
        "fstatvfs", "posix_fadvise",
    ):  # fmt: skip
        if hasattr(os, name):
            replaced[name] = _passed_on(name, getattr(os, name))
    for name, call in replaced.items():
        real = getattr(os, name)
        for known in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if real in known:
                known.add(call)
        setattr(os, name, call)
    shutil._USE_CP_SENDFILE = False  # type: ignore[attr-defined]
    io.open = builtins.open = _open_file
    fcntl.flock = _by_descriptor("flock", fcntl.flock)
    fcntl.fcntl = _passed_on("fcntl", fcntl.fcntl)
    sqlite3.connect = _connect  # type: ignore[assignment]
    mmap.mmap = _Map  # type: ignore[misc]
