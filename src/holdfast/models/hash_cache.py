"""Hashes of whole files, kept from one start to the next.

A file is known by what the system says of it, never by its name alone.

A cache that is missing, damaged or not ours alone is an empty one: then everything is hashed again,
which only takes time.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import msgspec
import xxhash

from holdfast.files import atomic_write

CACHE_FORMAT = 1
MOST_ENTRIES = 1024
LEAST_BYTES = 1 << 20  # smaller files are read faster than they are worth remembering
_MOST_CACHE_BYTES = 1 << 20
# Timestamps have steps, of 10 ms at most on local disks and of 2 s on FAT: a file that was changed
# a moment before it is hashed may change again and look the same. (Git calls such entries "racily
# clean".)
SETTLED_NS = 3_000_000_000

logger = logging.getLogger("holdfast.models")


class FileStamp(msgspec.Struct, frozen=True, array_like=True):
    """What the system says of a file.

    The time of the last change cannot be set by anybody, the time of modification can.
    """

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    def is_settled(self, now_ns: int) -> bool:
        """Whether any change from now on would show in the stamp."""
        return now_ns - self.changed_ns > SETTLED_NS and abs(now_ns - self.modified_ns) > SETTLED_NS


class _Content(msgspec.Struct, frozen=True):
    format: int
    # (stamp, hash) of each file; the one that was used last comes last
    entries: tuple[tuple[FileStamp, str], ...]
    checksum: str


def stamp_of(path: Path) -> FileStamp:
    """The stamp of the file that `path` leads to, links followed. Raises OSError."""
    return stamp_from(path.stat())


def stamp_from(status: os.stat_result) -> FileStamp:
    """The stamp out of what the system said."""
    return FileStamp(
        status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    )


class HashCache:
    """The hashes in one file.

    Any process may read or write it at any time: it is replaced as a whole. One thread per object.
    """

    def __init__(self, path: Path | None) -> None:
        """path: None keeps nothing."""
        self._path = path
        self._known = {} if path is None else _load(path)
        self._used: dict[FileStamp, str] = {}

    def find(self, stamp: FileStamp) -> str | None:
        """The hash of a file that looks like this, if it is known."""
        known = self._known.get(stamp)
        if known is not None:
            self._used[stamp] = known
        return known

    def add(self, stamp: FileStamp, found: str) -> None:
        """Remember the hash (xxh3-128, hexadecimal) of a whole file whose stamp was settled before
        it was read.
        """
        if stamp.size >= LEAST_BYTES:
            self._used[stamp] = found

    def save(self) -> None:
        """Write what is new.

        A folder that cannot be written costs the next start some time, and nothing else.
        """
        if self._path is None or all(stamp in self._known for stamp in self._used):
            return
        known = _load(self._path)  # another process may have written
        for stamp, found in self._used.items():
            known.pop(stamp, None)
            known[stamp] = found
        entries = tuple(known.items())[-MOST_ENTRIES:]
        content = _Content(format=CACHE_FORMAT, entries=entries, checksum=_checksum(entries))
        try:
            _replace(self._path, msgspec.json.encode(content))
        except OSError as error:
            logger.info("hashes of model files are not kept for the next start: %s", error)
        self._known = known


def _load(path: Path) -> dict[FileStamp, str]:
    try:
        content = msgspec.json.decode(_read_private(path), type=_Content)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    if content.format != CACHE_FORMAT or content.checksum != _checksum(content.entries):
        return {}
    return dict(content.entries)


def _read_private(path: Path) -> bytes:
    """The content of a file that nobody else could have written. Raises OSError."""
    folder = path.parent.lstat()
    if not stat.S_ISDIR(folder.st_mode) or not _is_ours_alone(folder):
        raise PermissionError(f"{path.parent} may be written by others")
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(file, "rb") as opened:
        status = os.fstat(file)
        if (
            not stat.S_ISREG(status.st_mode)
            or not _is_ours_alone(status)
            or status.st_size > _MOST_CACHE_BYTES
        ):
            raise PermissionError(f"{path} is not a plain file of ours")
        return opened.read(_MOST_CACHE_BYTES)


def _is_ours_alone(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(content)


def _checksum(entries: tuple[tuple[FileStamp, str], ...]) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(entries))
