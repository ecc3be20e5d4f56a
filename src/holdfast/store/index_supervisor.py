"""Keeps the index open when its files are deleted, damaged or replaced, and rebuilds it if need be.

The name of an index file is never reused (`<time>-<format>.sqlite`, the newest counts): when SQLite
closes a database, it removes its log by name, so a process that still has an old file open would
remove the log of a new one. Files of another format belong to another version, which may run.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, TypeVar

from holdfast.store.block import BadBlock, BlockKey, BlockMissing, Entry
from holdfast.store.block_file import BlockHeader, read_header
from holdfast.store.folder import BlockFile, StoreFolder, fingerprint_id
from holdfast.store.index import INDEX_FORMAT, BlockIndex
from holdfast.store.tables import DAMAGE_SIGNS

_LOG = logging.getLogger(__name__)
_ATTEMPTS = 4
# Primary result codes that do not mean damage: PERM, BUSY, LOCKED, NOMEM, READONLY,
# INTERRUPT, IOERR, FULL, CANTOPEN.
_NOT_DAMAGE = {3, 5, 6, 7, 8, 9, 10, 13, 14}
_FULL = 13
_IN_MEMORY = Path(":memory:")
_SUFFIX = f"-{INDEX_FORMAT}.sqlite"

Gone: TypeAlias = dict[BlockKey, tuple[BlockFile, BadBlock] | None]
Result = TypeVar("Result")


class IndexSupervisor:
    """The index of a folder. One thread only."""

    def __init__(self, folder: StoreFolder) -> None:
        self._folder = folder
        self._index: BlockIndex | None = None
        self._path = _IN_MEMORY  # of the index that was opened last
        self._file: tuple[int, int] | None = None  # device and inode of the open index
        self.gone: Gone = {}  # found when opening; the owner handles it

    def use(self, work: Callable[[BlockIndex], Result]) -> Result:
        """Call `work` with the open index; if that is damaged, again with a rebuilt one.

        Raises OSError, also if the disk is full or read-only, or another process holds the index.
        """
        for _ in range(_ATTEMPTS):
            try:
                return work(self._current())
            except DAMAGE_SIGNS as error:
                _raise_if_no_damage(error)
                _LOG.warning(
                    "the index of the store is damaged (%s); rebuilding it from the files",
                    error,
                )
                self.close()
                if self._path != _IN_MEMORY:
                    with self._folder.exclusive():
                        remove_index(self._path)
        raise OSError(errno.EIO, "the index is damaged again after every rebuild")

    def open_in_memory(self) -> None:
        """Use an index in memory, filled from the readable files: for read-only folders."""
        self.close()
        self._path = _IN_MEMORY
        self._index = BlockIndex(self._path)
        with contextlib.suppress(OSError):
            self.gone |= reconcile(self._index, self._folder)

    def close(self) -> None:
        """Close the index; the next use opens it again."""
        if self._index is not None:
            with contextlib.suppress(*DAMAGE_SIGNS):
                self._index.close()
        self._index = self._file = None

    def _current(self) -> BlockIndex:
        if self._index is not None and (
            self._path == _IN_MEMORY or _identity(self._path) == self._file
        ):
            return self._index
        if self._index is not None:
            _LOG.info("the index of the store was removed or replaced; reopening it")
            self.close()
        with self._folder.exclusive():
            self._folder.index_folder.mkdir(mode=0o700, exist_ok=True)
            *older, self._path = index_files(self._folder) or [
                self._folder.index_folder / f"{time.time_ns():020d}{_SUFFIX}"
            ]
            if not self._path.exists():  # the first of this format
                # of format 1
                older += [
                    path
                    for path in self._folder.index_folder.glob("*.sqlite")
                    if path.stem.isdigit()
                ]
                self._path.touch(mode=0o600)  # what SQLite keeps beside it gets the same mode
            for path in older:
                remove_index(path)
            self._index = BlockIndex(self._path)
            try:
                self._file = _identity(self._path)
                self.gone |= reconcile(self._index, self._folder)
            except BaseException:
                self.close()  # it may not agree with the files yet
                raise
        return self._index


def reconcile(index: BlockIndex, folder: StoreFolder) -> Gone:
    """Add what only the folder has, and remove what only the index has.

    Reads the headers of unknown files only. Returns the blocks that are gone, each with its file if
    that is damaged and still there. Raises OSError, sqlite3.Error.
    """
    unseen = index.places()
    wrong: list[BlockKey] = []
    fresh: dict[BlockKey, Entry] = {}
    fingerprints: dict[str, str] = {}
    damaged: Gone = {}
    for found in folder.block_files():
        place = unseen.pop(found.key, None)
        if place == (found.model, found.file_bytes):
            continue
        if place is not None:
            wrong.append(found.key)
        try:
            header = _header_of(found)
        except BlockMissing:
            continue
        except BadBlock as bad:
            damaged[found.key] = found, bad
            continue
        # The recency is lost; the time of writing is the best substitute.
        fresh[found.key] = Entry(
            block=header.block,
            model=found.model,
            file_bytes=found.file_bytes,
            last_used=found.modified,
        )
        fingerprints[found.model] = header.fingerprint
    wrong += unseen
    if wrong:
        index.remove_rows(wrong)
    if fresh:
        index.add(fresh.values(), fingerprints=fingerprints)
    index.recount()
    return dict.fromkeys(key for key in wrong if key not in fresh) | damaged


def _header_of(found: BlockFile) -> BlockHeader:
    header = read_header(found.path, found.key)
    if fingerprint_id(header.fingerprint) != found.model:
        raise BadBlock(found.key, "belongs to another model")
    return header


def index_files(folder: StoreFolder) -> list[Path]:
    """The index files of this version's format, oldest first."""
    return sorted(
        path
        for path in folder.index_folder.glob(f"*{_SUFFIX}")
        if path.name.removesuffix(_SUFFIX).isdigit()
    )


def remove_index(path: Path) -> None:
    """Remove an index file and SQLite's files beside it. Raises OSError."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _raise_if_no_damage(error: sqlite3.Error | UnicodeDecodeError) -> None:
    if isinstance(error, sqlite3.ProgrammingError):
        raise error
    code = getattr(error, "sqlite_errorcode", 11) & 0xFF
    if code in _NOT_DAMAGE:
        raise OSError(
            errno.ENOSPC if code == _FULL else errno.EIO, f"the index: {error}"
        ) from error
