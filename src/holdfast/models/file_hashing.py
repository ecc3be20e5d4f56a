"""Hashes the files of a model while the model loads, and caches the hashes for later starts.

The hashes are guaranteed to match what was loaded. For this, each file's stamp (`FileStamp`: size, times
and other numbers of the file system) is compared before and after the load, and a file that could have
changed with the same stamp (one that is not settled) is hashed a second time.

The cache identifies a file by its stamp, never by its name alone. A cache that is missing, damaged
or writable by other users counts as empty; then everything is hashed again.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import xxhash

from holdfast.errors import ModelLoadError
from holdfast.files import atomic_write, open_regular

PIECE_BYTES = 4 << 20  # hashing and reading release the GIL while they process one piece

ListFiles = Callable[[], Mapping[str, Path]]
CACHE_FORMAT = 1
MOST_ENTRIES = 1024
LEAST_BYTES = 1 << 20  # hashes of smaller files are not cached, because hashing them is fast
_MOST_CACHE_BYTES = 1 << 20
# Timestamps change in steps of up to 10 ms on local disks and 2 s on FAT. So a file that changed
# just before it was hashed may change again and keep the same stamp (Git calls such entries "racily
# clean").
SETTLED_NS = 3_000_000_000

logger = logging.getLogger("holdfast.models")


class ModelChanged(ModelLoadError):
    """A file of the model changed during the load: memory may hold a mix of versions."""


class FileHashing:
    """Hashes files on a thread while they are loaded. Ask for the result after the load.

    A context manager; leaving it early ends the thread.
    """

    def __init__(self, list_files: ListFiles, *, cache: HashCache) -> None:
        """list_files: returns the paths of all files by name; called again after the load, to
        notice changes.
        """
        self._list_files, self._cache = list_files, cache
        self._began_ns = time.time_ns()  # Unix time
        self._first_stamps = _stamps(list_files())  # path and stamp of each file, by name
        self._stop = threading.Event()
        self._hashes: dict[str, str] = {}  # by name
        self._failure: Exception | None = None  # raised on the thread
        self._thread = threading.Thread(target=self._run, name="holdfast-hashing", daemon=False)
        self._thread.start()

    def __enter__(self) -> FileHashing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def result(self) -> Mapping[str, str]:
        """Wait for the hashes and return them by file name. Raises ModelChanged, ModelLoadError."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        self._check_unchanged()
        second_hashing_ns = time.time_ns()
        unsettled = {
            name: (path, stamp)
            for name, (path, stamp) in self._first_stamps.items()
            if not stamp.is_settled(self._began_ns)
        }
        for name, (path, stamp) in unsettled.items():
            if self._hash(path, stamp) != self._hashes[name]:
                raise _changed(path)
        if unsettled:
            self._check_unchanged()
        for name, (_, stamp) in self._first_stamps.items():
            if stamp.is_settled(second_hashing_ns if name in unsettled else self._began_ns):
                self._cache.add(stamp, self._hashes[name])
        self._cache.save()
        return self._hashes

    def _check_unchanged(self) -> None:
        """Raise ModelChanged if a file has changed, appeared or disappeared since the first stamps."""
        stamps = _stamps(self._list_files())
        for name in sorted(self._first_stamps.keys() | stamps.keys()):
            if self._first_stamps.get(name) != stamps.get(name):
                path, _ = self._first_stamps.get(name) or stamps[name]
                raise _changed(path)

    def _run(self) -> None:
        """Hash all files that the cache does not have. The body of the thread."""
        try:
            for name, (path, stamp) in self._first_stamps.items():
                self._hashes[name] = self._cache.find(stamp) or self._hash(path, stamp)
        except ModelLoadError as error:
            self._failure = error

    def _hash(self, path: Path, stamp: FileStamp) -> str:
        """Return the file's hash; a meaningless one if `close` was called.

        Raises ModelChanged if its stamp differs, ModelLoadError if it cannot be read.
        """
        digest = xxhash.xxh3_128()
        piece = memoryview(bytearray(min(PIECE_BYTES, max(stamp.size, 1))))
        try:
            with open_regular(path) as file:
                if stamp_from(os.fstat(file.fileno())) != stamp:
                    raise _changed(path)
                while (count := file.readinto(piece)) and not self._stop.is_set():
                    digest.update(piece[:count])
        except FileNotFoundError:
            raise _changed(path) from None
        except OSError as error:
            raise ModelLoadError(f"a file of the model cannot be read: {error}") from error
        return digest.hexdigest()


def _stamps(files: Mapping[str, Path]) -> dict[str, tuple[Path, FileStamp]]:
    """Return the path and stamp of each existing file, by name."""
    stamps = {}
    for name, path in files.items():
        try:
            stamps[name] = (path, stamp_of(path))
        except (FileNotFoundError, NotADirectoryError):
            continue  # the loader will report the missing file
        except OSError as error:
            raise ModelLoadError(f"a file of the model cannot be read: {error}") from error
    return stamps


def _changed(path: Path) -> ModelChanged:
    return ModelChanged(f"{path} was changed while the model was loaded")


class FileStamp(msgspec.Struct, frozen=True, array_like=True):
    """Identifies a version of a file.

    It contains the change time, because programs can set only the modification time.
    """

    device: int
    inode: int
    size: int  # in bytes
    modified_ns: int
    changed_ns: int

    def is_settled(self, now_ns: int) -> bool:
        """Whether any later change to the file would change its stamp."""
        return now_ns - self.changed_ns > SETTLED_NS and abs(now_ns - self.modified_ns) > SETTLED_NS


class _CacheContent(msgspec.Struct, frozen=True):
    """The content of the cache's file, as JSON."""

    format: int
    # (stamp, hash) of each file, the most recently used last
    entries: tuple[tuple[FileStamp, str], ...]
    checksum: str  # of the entries


def stamp_of(path: Path) -> FileStamp:
    """The stamp of a file, following links. Raises OSError."""
    return stamp_from(path.stat())


def stamp_from(status: os.stat_result) -> FileStamp:
    """The stamp in a result of os.stat()."""
    return FileStamp(
        status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    )


class HashCache:
    """A cache of hashes in a file, which any process may replace. Not thread-safe."""

    def __init__(self, path: Path | None) -> None:
        """path: the file of the cache; None: cache nothing on disk."""
        self._path = path
        # hashes in the file when it was last read or written, and those that this process has used
        self._cached_hashes = {} if path is None else _load(path)
        self._used_hashes: dict[FileStamp, str] = {}

    def find(self, stamp: FileStamp) -> str | None:
        """Return the hash of a file with this stamp; None if it is unknown."""
        file_hash = self._cached_hashes.get(stamp)
        if file_hash is not None:
            self._used_hashes[stamp] = file_hash
        return file_hash

    def add(self, stamp: FileStamp, file_hash: str) -> None:
        """Store the hash (xxh3-128, hexadecimal) of a file. The stamp must be settled."""
        if stamp.size >= LEAST_BYTES:
            self._used_hashes[stamp] = file_hash

    def save(self) -> None:
        """Write new hashes. A failure is logged; it only slows down the next start."""
        if self._path is None or all(stamp in self._cached_hashes for stamp in self._used_hashes):
            return
        hashes = _load(self._path)  # another process may have written
        for stamp, file_hash in self._used_hashes.items():
            hashes.pop(stamp, None)  # so that the entry moves to the end
            hashes[stamp] = file_hash
        entries = tuple(hashes.items())[-MOST_ENTRIES:]
        content = _CacheContent(format=CACHE_FORMAT, entries=entries, checksum=_checksum(entries))
        try:
            _write(self._path, msgspec.json.encode(content))
        except OSError as error:
            logger.info("hashes of model files cannot be cached: %s", error)
        self._cached_hashes = hashes


def _load(path: Path) -> dict[FileStamp, str]:
    """The hashes in the cache's file, the most recently used last; empty if it cannot be trusted."""
    try:
        content = msgspec.json.decode(_read_private(path), type=_CacheContent)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    if content.format != CACHE_FORMAT or content.checksum != _checksum(content.entries):
        return {}
    return dict(content.entries)


def _read_private(path: Path) -> bytes:
    """The content of a file that no other user can write. Raises OSError."""
    folder = path.parent.lstat()
    if not stat.S_ISDIR(folder.st_mode) or not _only_we_can_write(folder):
        raise PermissionError(f"others can write {path.parent}")
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(file, "rb") as opened:
        status = os.fstat(file)
        if (
            not stat.S_ISREG(status.st_mode)
            or not _only_we_can_write(status)
            or status.st_size > _MOST_CACHE_BYTES
        ):
            raise PermissionError(f"{path} is not a regular file that only its owner can write")
        return opened.read(_MOST_CACHE_BYTES)


def _only_we_can_write(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(content)


def _checksum(entries: tuple[tuple[FileStamp, str], ...]) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(entries))
