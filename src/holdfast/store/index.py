"""The index: the stored blocks, their last uses and pins, and the number of bytes written today.

SQLite, one thread per object.

The index saves reading every header at the start, and contains what the files cannot: last uses and
pins. The files are the truth: an index that is lost, damaged or in an older format is rebuilt from
them. Every row has a checksum over its immutable columns (the seal), because SQLite has none, and a
row with the wrong tokens would return the wrong block.

A pin protects a block from eviction for a holder, such as a session, until it expires. A lost block has
no file any more. If stored blocks follow it, its row remains, with 0 as the size of its file.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec
import xxhash

from holdfast.store.block import (
    BadBlock,
    Block,
    BlockKey,
    BlockMissing,
    BlockUnreadable,
    Entry,
    by_place,
    fingerprint_id,
    read_header,
)
from holdfast.store.folder import BlockFile, StoreFolder

# Python decodes SQLite's texts and messages, and those of a damaged file may not be UTF-8. Damage
# that our own checks find is a DatabaseError without a code.
DAMAGE_SIGNS = (sqlite3.Error, UnicodeDecodeError)
_LONGEST_RETRY_SECONDS = 0.01  # the time to the next try is random, up to this
INDEX_FORMAT = 2
BUSY_SECONDS = 5.0

# `seal` is a checksum of the first eight columns of `blocks`
_SCHEMA = """
CREATE TABLE models (model TEXT PRIMARY KEY, fingerprint TEXT NOT NULL);
CREATE TABLE blocks (
    key BLOB NOT NULL,
    parent BLOB NOT NULL,
    parent_tokens INTEGER NOT NULL,
    kind TEXT NOT NULL,
    start INTEGER NOT NULL,
    packed_tokens BLOB NOT NULL,
    model TEXT NOT NULL,
    file_bytes INTEGER NOT NULL,
    seal INTEGER NOT NULL,
    last_used REAL NOT NULL
);
CREATE UNIQUE INDEX blocks_by_key ON blocks (key);
CREATE INDEX blocks_of_model ON blocks (model);
CREATE INDEX blocks_by_parent ON blocks (parent);
CREATE TABLE pins (
    key BLOB NOT NULL, holder TEXT NOT NULL, until REAL NOT NULL, PRIMARY KEY (key, holder)
) WITHOUT ROWID;
CREATE TABLE written (day TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TABLE totals (
    one INTEGER PRIMARY KEY CHECK (one = 1), blocks INTEGER NOT NULL, bytes INTEGER NOT NULL
);
INSERT INTO totals VALUES (1, 0, 0);
CREATE TRIGGER block_added AFTER INSERT ON blocks BEGIN
    UPDATE totals SET blocks = blocks + 1, bytes = bytes + new.file_bytes;
END;
CREATE TRIGGER block_removed AFTER DELETE ON blocks BEGIN
    UPDATE totals SET blocks = blocks - 1, bytes = bytes - old.file_bytes;
END;
"""
_ADD = "INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO NOTHING"
_COUNT_WRITTEN = (
    "INSERT INTO written VALUES (?, ?) ON CONFLICT (day) DO UPDATE SET bytes = bytes + "
    "excluded.bytes"
)
# whether stored blocks follow a block, directly or after missing ones
_STORED_AFTER = """
WITH RECURSIVE below (key, file_bytes) AS (
    SELECT key, file_bytes FROM blocks WHERE parent = ?
    UNION
    SELECT blocks.key, blocks.file_bytes FROM below JOIN blocks ON blocks.parent = below.key
    WHERE below.file_bytes = 0
) SELECT 1 FROM below WHERE file_bytes > 0 LIMIT 1
"""
_KIND = 3  # columns
_START = 4
_SEALED_COLUMNS = 8
_LOG = logging.getLogger(__name__)
_ATTEMPTS = 4
# primary result codes that do not indicate damage: PERM, BUSY, LOCKED, NOMEM, READONLY, INTERRUPT,
# IOERR, FULL, CANTOPEN, PROTOCOL
_NOT_DAMAGE = {3, 5, 6, 7, 8, 9, 10, 13, 14, 15}
_FULL = 13
_IN_MEMORY = Path(":memory:")


def use_write_ahead_log(database: sqlite3.Connection, *, busy_seconds: float) -> None:
    """Switch the file to a write-ahead log. Waits up to `busy_seconds` for other processes.

    SQLite's own timeout does not apply here: if two processes switch one file at the same time, one
    of them fails immediately, because otherwise each would wait for the other. Raises
    sqlite3.Error.
    """
    deadline = time.monotonic() + busy_seconds
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
        time.sleep(_LONGEST_RETRY_SECONDS * random.random())


def make_tables(database: sqlite3.Connection, schema: str, *, version: int) -> int:
    """Create the tables, marked with `version`, unless the file has tables already.

    Returns the version of the tables in the file. Raises sqlite3.Error.
    """
    file_version = _version_of(database)
    if file_version == 0:
        try:
            database.executescript(
                f"BEGIN IMMEDIATE; {schema} PRAGMA user_version = {version}; COMMIT;"
            )
        except sqlite3.OperationalError:
            # another process has just created them, or the disk failed
            if database.in_transaction:
                database.execute("ROLLBACK")
            if _version_of(database) == 0:
                raise
        file_version = _version_of(database)
    return file_version


def clear_tables(path: Path, *tables: str, busy_seconds: float) -> None:
    """Delete all rows of these tables of a database file, even if a server has the file open. If
    the rows cannot be deleted, delete the file.

    Raises OSError.
    """
    if not path.is_file():
        return
    try:
        with contextlib.closing(
            sqlite3.connect(path, timeout=busy_seconds, isolation_level=None)
        ) as database:
            for table in tables:
                database.execute(f"DELETE FROM {table}")
            database.execute("VACUUM")
    except DAMAGE_SIGNS:
        path.unlink(missing_ok=True)


def _version_of(database: sqlite3.Connection) -> int:
    """The version that `make_tables` has written to the file; 0 without tables."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    return int(version)


def _seal(columns: tuple[object, ...]) -> int:
    """The checksum of a row's immutable columns, which are all before the column `seal`."""
    # SQLite's integers are signed
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(columns)) - 2**63


class BlockIndex:
    """One open index. Every method may raise sqlite3.Error, which `IndexSupervisor` handles."""

    def __init__(self, path: Path) -> None:
        """Open the index at `path`; create it if necessary. ":memory:" means without a file."""
        self.path = path
        self._database = sqlite3.connect(
            path, timeout=BUSY_SECONDS, isolation_level=None, cached_statements=64
        )
        try:
            self._prepare()
        except DAMAGE_SIGNS:
            self._database.close()
            raise

    def _prepare(self) -> None:
        """Create the tables if necessary, and check the file. Raises sqlite3.DatabaseError if it is
        damaged or in another format.
        """
        use_write_ahead_log(self._database, busy_seconds=BUSY_SECONDS)
        # a killed process loses nothing; after a power cut, the index is repaired from the block
        # files
        self._database.execute("PRAGMA synchronous = NORMAL")
        self._database.execute("PRAGMA journal_size_limit = 4194304")
        if (version := make_tables(self._database, _SCHEMA, version=INDEX_FORMAT)) != INDEX_FORMAT:
            raise sqlite3.DatabaseError(f"it has format {version}, not {INDEX_FORMAT}")
        # Earlier versions did not create this index. Without it, `mark_lost` takes longer, so a disk
        # that is too full for it is no error.
        with contextlib.suppress(sqlite3.OperationalError):
            self._database.execute("CREATE INDEX IF NOT EXISTS blocks_by_parent ON blocks (parent)")
        (verdict,) = self._database.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(str(verdict))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction that locks out other writers; rolled back if the block raises."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def _write(self, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
        with self._writing():
            self._database.executemany(statement, rows)

    def close(self) -> None:
        """Close the file. Merges the write-ahead log if no other process has the file open."""
        self._database.close()

    def add(self, entries: Collection[Entry], *, fingerprints: Mapping[str, str]) -> None:
        """Add blocks, and the fingerprints of their models, in one transaction.

        Existing rows are not changed, except those of missing blocks.
        """
        rows = [
            (*msgspec.structs.astuple(entry.block), entry.model, entry.file_bytes, entry.last_used)
            for entry in entries
        ]
        with self._writing():
            self._database.executemany(
                "INSERT OR IGNORE INTO models VALUES (?, ?)", fingerprints.items()
            )
            self._database.executemany(
                "DELETE FROM blocks WHERE key = ? AND file_bytes = 0",
                [(entry.block.key,) for entry in entries],
            )
            self._database.executemany(
                _ADD, ((*row[:-1], _seal(row[:-1]), row[-1]) for row in rows)
            )

    def remove(self, keys: Iterable[BlockKey]) -> None:
        """Remove blocks and their pins."""
        key_rows = [(key,) for key in keys]
        with self._writing():
            self._database.executemany("DELETE FROM blocks WHERE key = ?", key_rows)
            self._database.executemany("DELETE FROM pins WHERE key = ?", key_rows)

    def remove_rows(self, keys: Iterable[BlockKey]) -> None:
        """Remove the rows of blocks, but not their pins: `reconcile` may add the rows again."""
        self._write("DELETE FROM blocks WHERE key IS ?", [(key,) for key in keys])

    def mark_lost(self, keys: Iterable[BlockKey]) -> None:
        """Record that the files of blocks are gone.

        Their rows are removed, unless stored blocks follow them: those become usable again once the
        lost block is stored again, and only its row says which tokens it had. Pins are kept.
        """
        lost_keys = set(keys)
        if not lost_keys:
            return
        with self._writing():
            lost_rows = [
                row
                for key in lost_keys
                for row in self._database.execute("SELECT * FROM blocks WHERE key = ?", (key,))
            ]
            # children first, so that a row is there if and only if it is needed
            for row in sorted(lost_rows, key=lambda row: (row[_START], row[_KIND]), reverse=True):
                self._database.execute("DELETE FROM blocks WHERE key = ?", row[:1])
                if self._database.execute(_STORED_AFTER, row[:1]).fetchone() is not None:
                    sealed_columns = (*row[: _SEALED_COLUMNS - 1], 0)  # no bytes in a file
                    self._database.execute(_ADD, (*sealed_columns, _seal(sealed_columns), row[-1]))

    def touch(self, use_times: Mapping[BlockKey, float]) -> None:
        """Record when blocks were used, in seconds since the epoch. Never moves a time backwards."""
        self._write(
            "UPDATE blocks SET last_used = max(last_used, ?) WHERE key = ?",
            [(use_time, key) for key, use_time in use_times.items()],
        )

    def pin(self, keys: Iterable[BlockKey], *, holder: str, until: float) -> None:
        """Protect blocks from eviction for `holder`, up to the time `until` in seconds since the epoch.

        The blocks need not be stored yet.
        """
        self._write(
            "INSERT OR REPLACE INTO pins VALUES (?, ?, ?)", [(key, holder, until) for key in keys]
        )

    def unpin(self, keys: Iterable[BlockKey], *, holder: str) -> None:
        """Remove a holder's pins."""
        self._write(
            "DELETE FROM pins WHERE key = ? AND holder = ?", [(key, holder) for key in keys]
        )

    def drop_old_pins(self, now: float) -> None:
        """Remove expired pins."""
        self._write("DELETE FROM pins WHERE until <= ?", [(now,)])

    def newest_use(self) -> float | None:
        """When a block was last used, in seconds since the epoch; None in an empty store."""
        (newest,) = self._database.execute("SELECT max(last_used) FROM blocks").fetchone()
        return float(newest) if isinstance(newest, float) else None

    def entries(self, now: float, *, model: str | None = None) -> list[Entry]:
        """Return the blocks of one model (short name) or of all models, parents first.

        now: in seconds since the epoch; pins that have expired by then do not count. Raises
        DatabaseError if a checksum is wrong.
        """
        pinned_keys = {
            key for (key,) in self._database.execute("SELECT key FROM pins WHERE until > ?", (now,))
        }
        where, values = ("", ()) if model is None else ("WHERE model = ?", (model,))
        rows = self._database.execute(f"SELECT * FROM blocks {where}", values).fetchall()
        for row in rows:
            if row[_SEALED_COLUMNS] != _seal(row[:_SEALED_COLUMNS]) or not isinstance(
                row[-1], float
            ):
                raise sqlite3.DatabaseError("a row has a wrong checksum")
        entries: list[Entry] = []
        for row in rows:
            key, parent, parent_tokens, kind, start, packed, row_model, file_bytes, _, used = row
            block = Block(
                key=key,
                parent_key=parent,
                parent_tokens=parent_tokens,
                kind=kind,
                start=start,
                packed_tokens=packed,
            )
            entries.append(
                Entry(
                    block=block,
                    model=row_model,
                    file_bytes=file_bytes,
                    last_used=used,
                    pinned=key in pinned_keys,
                )
            )
        return sorted(entries, key=by_place)

    def places(self) -> dict[BlockKey, tuple[str, int]]:
        """The model (short name) and the size of the file in bytes, for every block."""
        return {
            key: (model, size)
            for key, model, size in self._database.execute(
                "SELECT key, model, file_bytes FROM blocks"
            )
        }

    def fingerprints(self) -> dict[str, str]:
        """All known fingerprints, by their short names."""
        rows = self._database.execute("SELECT model, fingerprint FROM models")
        return {str(model): str(fingerprint) for model, fingerprint in rows}

    def block_count(self) -> int:
        """The number of stored blocks of all models. Cheap, because the database maintains it."""
        return self._total("blocks")

    def stored_bytes(self) -> int:
        """The total size of all block files. Cheap, because the database maintains it."""
        return self._total("bytes")

    def _total(self, column: str) -> int:
        """A column of `totals`, which triggers keep up to date."""
        row = self._database.execute(f"SELECT {column} FROM totals").fetchone()
        if row is None or not isinstance(row[0], int):
            raise sqlite3.DatabaseError("no totals")
        return row[0]

    def recount(self) -> None:
        """Recompute the number of blocks and their total size."""
        self._write(
            "INSERT OR REPLACE INTO totals SELECT 1, count(*), coalesce(sum(file_bytes), 0) FROM "
            "blocks",
            [()],
        )

    def count_written(self, file_bytes: int, *, day: str) -> None:
        """Add to the bytes that were written on a day (UTC, as YYYY-MM-DD)."""
        self._write(_COUNT_WRITTEN, [(day, file_bytes)])

    def written_bytes(self, day: str) -> int:
        """The bytes that all processes together wrote on a day."""
        row = self._database.execute(
            "SELECT bytes FROM written WHERE day = ? AND typeof(bytes) = 'integer'", (day,)
        ).fetchone()
        return 0 if row is None else int(row[0])

    def check_invariants(self) -> None:
        """Assert that totals and checksums agree with the rows. May also raise DatabaseError."""
        with self._writing():  # prevents changes by other processes between the queries
            entries = self.entries(0.0)
            assert self.block_count() == len(entries)
            assert self.stored_bytes() == sum(entry.file_bytes for entry in entries)


_SUFFIX = f"-{INDEX_FORMAT}.sqlite"  # of the names of index files

# lost blocks with their damaged files; None: the file is missing
LostBlocks: TypeAlias = dict[BlockKey, BlockFile | None]
Result = TypeVar("Result")


class IndexSupervisor:
    """Opens the index of a folder, and rebuilds it if it is damaged. One thread only."""

    def __init__(self, folder: StoreFolder) -> None:
        self._folder = folder
        self._index: BlockIndex | None = None
        self._path = _IN_MEMORY  # path of the index that was opened last
        self._file_identity: tuple[int, int] | None = None  # device and inode of the open index
        # blocks found missing or damaged when the index was opened; `StoreMaintenance` takes them out
        self.lost_blocks: LostBlocks = {}

    def use(self, work: Callable[[BlockIndex], Result]) -> Result:
        """Call `work` with the open index.

        If the index is damaged, rebuild it and call `work` again. Raises OSError if the index
        cannot be rebuilt, if the disk is full or read-only, or if another process locks the index.
        """
        for _ in range(_ATTEMPTS):
            try:
                return work(self._current())
            except MemoryError as error:  # this is how Python reports SQLite's NOMEM
                raise OSError(errno.ENOMEM, "the index: out of memory") from error
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
        """Use an index in memory, filled from the readable files. For read-only folders."""
        self.close()
        self._path = _IN_MEMORY
        self._index = BlockIndex(self._path)
        with contextlib.suppress(OSError):
            self.lost_blocks |= reconcile(self._index, self._folder)

    def close(self) -> None:
        """Close the index. The next use opens it again."""
        if self._index is not None:
            with contextlib.suppress(*DAMAGE_SIGNS):
                self._index.close()
        self._index = self._file_identity = None

    def _current(self) -> BlockIndex:
        """The open index. Opens it first if necessary, also if another process has replaced its
        file, and makes it agree with the folder.
        """
        if self._index is not None and (
            self._path == _IN_MEMORY or _file_identity(self._path) == self._file_identity
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
            if not self._path.exists():
                self._path.touch(mode=0o600)  # SQLite gives its other files the same permissions
            for path in older:
                remove_index(path)
            self._index = BlockIndex(self._path)
            try:
                self._file_identity = _file_identity(self._path)
                self.lost_blocks |= reconcile(self._index, self._folder)
            except BaseException:
                self.close()  # the index may not agree with the files yet
                raise
        return self._index


def reconcile(index: BlockIndex, folder: StoreFolder) -> LostBlocks:
    """Make the index agree with the folder: add rows for unknown files, remove rows without a file.

    Reads only the headers of files that have no row, or one with another model or size. A file that
    cannot be read at the moment is left alone. Returns the missing and damaged blocks; the damaged
    ones with their files. Raises OSError, sqlite3.Error.
    """
    rows_without_file = index.places()  # so far: each file removes its row
    lost_keys: list[BlockKey] = []
    wrong_rows: list[BlockKey] = []
    new_entries: dict[BlockKey, Entry] = {}
    fingerprints: dict[str, str] = {}
    damaged: LostBlocks = {}
    unreadable: list[BlockUnreadable] = []
    for file in folder.block_files():
        row = rows_without_file.pop(file.key, None)
        if row == (file.model, file.file_bytes):
            continue
        try:
            block, fingerprint = _checked_header(file)
        except BlockUnreadable as failure:
            unreadable.append(failure)
            continue
        except (BlockMissing, BadBlock) as failure:
            if isinstance(failure, BadBlock):
                damaged[file.key] = file
            if row is not None:
                lost_keys.append(file.key)
            continue
        if row is not None:
            wrong_rows.append(file.key)
        # The time of the last use is unknown; the time of writing is the best substitute.
        new_entries[file.key] = Entry(
            block=block,
            model=file.model,
            file_bytes=file.file_bytes,
            last_used=file.modified,
        )
        fingerprints[file.model] = fingerprint
    lost_keys += (key for key, (_, file_bytes) in rows_without_file.items() if file_bytes > 0)
    if wrong_rows:
        index.remove_rows(wrong_rows)
    if new_entries:
        index.add(new_entries.values(), fingerprints=fingerprints)
    index.mark_lost(lost_keys)
    index.recount()
    if unreadable:
        _LOG.warning(
            "%d files of the store cannot be read and are left for the next start; the first: %s",
            len(unreadable),
            unreadable[0],
        )
    return dict.fromkeys(lost_keys) | damaged


def _checked_header(file: BlockFile) -> tuple[Block, str]:
    """The block and its model's fingerprint. Raises BlockMissing, BlockUnreadable, BadBlock."""
    block, fingerprint = read_header(file.path, file.key)
    if fingerprint_id(fingerprint) != file.model:
        raise BadBlock(file.key, "belongs to another model")
    return block, fingerprint


def index_files(folder: StoreFolder) -> list[Path]:
    """The index files in the format of this version, oldest first."""
    return sorted(
        path
        for path in folder.index_folder.glob(f"*{_SUFFIX}")
        if path.name.removesuffix(_SUFFIX).isdigit()
    )


def remove_index(path: Path) -> None:
    """Remove an index file and the files that SQLite keeps next to it. Raises OSError."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def _file_identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file; None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _raise_if_no_damage(error: sqlite3.Error | UnicodeDecodeError) -> None:
    """Raise OSError, or the error itself if it is our bug, unless it shows that the file is damaged."""
    if isinstance(error, sqlite3.ProgrammingError):
        raise error
    code = getattr(error, "sqlite_errorcode", 11) & 0xFF
    if code in _NOT_DAMAGE:
        raise OSError(
            errno.ENOSPC if code == _FULL else errno.EIO, f"the index: {error}"
        ) from error
