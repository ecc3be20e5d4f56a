"""Stored responses and conversations, in SQLite: one table of records, and one of their items.

A record belongs to one tenant; no other tenant can find it. Bodies and items are JSON objects that
only the caller interprets. Without a folder, everything stays in memory. A damaged file is set
aside, and an empty one takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar

import msgspec
import xxhash

from holdfast.config import DEFAULT_RESPONSES, ResponsesSettings
from holdfast.errors import ResponsesUnavailable
from holdfast.files import Claim, claim, sweep
from holdfast.machine.retention_clock import RetentionClock
from holdfast.store.block import StoreRefused
from holdfast.store.folder import MAY_PASS, StoreFolder
from holdfast.store.index import DAMAGE_SIGNS, clear_tables, make_tables, use_write_ahead_log

P = ParamSpec("P")
T = TypeVar("T")
Kind: TypeAlias = Literal["response", "conversation"]
Json: TypeAlias = Mapping[str, Any]
Item: TypeAlias = Mapping[str, Any]  # each has an `id`

_FORMAT = 1
_CLAIM_PREFIX = "run-"
_BUSY_SECONDS = 2.0
_CHECKSUM_BYTES = 8
_LONGEST_CHAIN = 100_000  # responses in a chain; only a damaged file has longer chains
# share of the limits that remains after an eviction, so that not every new response causes one
_KEPT_SHARE = 0.95
_SCHEMA = """
CREATE TABLE records (
    number INTEGER PRIMARY KEY, tenant TEXT NOT NULL, id TEXT NOT NULL, kind TEXT NOT NULL, previous TEXT, run TEXT,
    is_lost INTEGER NOT NULL DEFAULT 0, body BLOB NOT NULL, events BLOB, size INTEGER NOT NULL, used REAL NOT NULL,
    UNIQUE (tenant, id)
);
CREATE INDEX ended_by_use ON records (used, size) WHERE run IS NULL;
CREATE TABLE items (
    number INTEGER PRIMARY KEY, owner INTEGER NOT NULL REFERENCES records ON DELETE CASCADE, part TEXT NOT NULL,
    id TEXT NOT NULL, body BLOB NOT NULL
);
CREATE INDEX items_by_owner ON items (owner, part, number);
CREATE INDEX items_by_id ON items (id);
"""
# fullfsync: on macOS, fsync alone leaves data in the drive's cache; without effect elsewhere
_PRAGMAS = (
    "synchronous = NORMAL",
    "fullfsync = ON",
    "foreign_keys = ON",
    "journal_size_limit = 4194304",
)
_CHAIN_QUERY = """
WITH RECURSIVE chain (number, previous, depth) AS (
    SELECT number, previous, 0 FROM records WHERE tenant = :tenant AND id = :id AND kind = 'response' AND used > :since
    UNION ALL
    SELECT records.number, records.previous, depth + 1 FROM chain JOIN records
        ON records.tenant = :tenant AND records.id = chain.previous AND records.kind = 'response'
    LIMIT :longest
)
"""
_EVICT_STATEMENT = """
DELETE FROM records WHERE number IN (
    SELECT number FROM (
        SELECT number, sum(size) OVER latest AS bytes, count(*) OVER latest AS place FROM records WHERE run IS NULL
        WINDOW latest AS (ORDER BY used DESC, number DESC)
    ) WHERE place > 1 AND (bytes > :bytes OR place > :count)
)
"""
_REFRESH_STATEMENT = """
UPDATE records SET used = ?, size = length(body) + coalesce(length(events), 0)
    + (SELECT coalesce(sum(length(items.body)), 0) FROM items WHERE owner = records.number)
WHERE number = ?
"""

# A damaged byte may separate items from their record. Then its size is not that of its parts.
_HAS_ALL_QUERY = """
SELECT size = length(body) + coalesce(length(events), 0) + (
    SELECT coalesce(sum(length(items.body)), 0) FROM items
    WHERE owner = records.number AND part IN ('input', 'output')
) FROM records WHERE number = ?
"""

logger = logging.getLogger("holdfast.store")


class RecordKey(NamedTuple):
    """Identifies a response or a conversation of a tenant."""

    tenant: str
    id: str
    kind: Kind = "response"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRecord:
    """A response or a conversation, without its input items."""

    body: Json
    output: Sequence[Item]  # output items of a finished response
    is_running: bool
    is_lost: bool  # whether its server died before the response was finished


class RecordMissing(Exception):
    """The tenant does not have a record with this id and kind."""

    def __init__(self, record_id: str) -> None:
        super().__init__(record_id)
        self.record_id = record_id


class FileDamaged(Exception):
    """The file was damaged and was set aside. A second attempt uses a new, empty file."""


class ResponseStore:
    """Runs a `ResponseFile` on a separate thread, so that the event loop never waits for the
    disk.
    """

    def __init__(
        self, folder: Path | None = None, limits: ResponsesSettings = DEFAULT_RESPONSES
    ) -> None:
        self.limits = limits
        self._file = ResponseFile(folder, limits)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="responses")

    def call(
        self, method: Callable[Concatenate[ResponseFile, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Call a method of the file on its thread: `await store.call(ResponseFile.record, key)`.

        All calls run in order, even those that nobody awaits. The future raises what the method
        raises, and ResponsesUnavailable if the file cannot be used.
        """
        return asyncio.wrap_future(self._thread.submit(partial(self._run, method, *args, **kwargs)))

    async def close(self) -> None:
        """Finish all calls and close the file."""
        await asyncio.wrap_future(self._thread.submit(self._file.close))
        self._thread.shutdown(wait=False)

    def _run(
        self, method: Callable[Concatenate[ResponseFile, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a method of the file. If the file is damaged, call it again with a new, empty file."""
        try:
            try:
                return method(self._file, *args, **kwargs)
            except FileDamaged:
                return method(self._file, *args, **kwargs)
        except (sqlite3.Error, OSError, FileDamaged, MemoryError) as error:
            logger.warning("the file of responses cannot be used: %s", error)
            raise ResponsesUnavailable(f"stored responses cannot be used now: {error}") from error


class ResponseFile:
    """The records of all tenants, within the limits of the settings. Not thread-safe.

    folder: None keeps the records in memory. clock: seconds since the epoch; it may jump, so the
        age of a record also depends on `steady`, which does not.

    Every method may raise FileDamaged, sqlite3.Error and OSError. Methods with the key of an
    existing record raise RecordMissing if the record does not exist.
    """

    def __init__(
        self,
        folder: Path | None,
        limits: ResponsesSettings,
        *,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = clock
        self._retention = RetentionClock(wall=clock, steady=steady)
        self._database = _Database(folder, on_open=self._on_open)
        self._limits = limits

    def put(
        self,
        key: RecordKey,
        body: Json,
        *,
        items: Sequence[Item] = (),
        previous: str | None = None,
        is_running: bool = False,
    ) -> None:
        """Add a record with its input items. A running response is not evicted before `finish`."""
        run = self._database.run if is_running else None
        insert = (
            "INSERT INTO records (tenant, id, kind, run, previous, body, size, used) "
            "VALUES (?, ?, ?, ?, ?, ?, 0, 0)"
        )
        with self._changing_within_limits() as database:
            record_number = database.execute(insert, (*key, run, previous, _packed(body))).lastrowid
            assert record_number is not None
            _add_items(database, record_number, "input", items)
            self._update_size_and_use(database, record_number)

    def finish(self, key: RecordKey, body: Json, *, output: Sequence[Item], events: bytes) -> None:
        """Store the final body, the output and the events of a response that was running."""
        sealed_events = sealed(zlib.compress(events, 1)) if events else None
        update = "UPDATE records SET run = NULL, events = ?, body = ? WHERE number = ?"
        with self._changing_within_limits() as database:
            record_number = self._record_number(database, key)
            _add_items(database, record_number, "output", output)
            database.execute(update, (sealed_events, _packed(body), record_number))
            self._update_size_and_use(database, record_number)

    def change(self, key: RecordKey, body: Json) -> None:
        """Replace the body of a record."""
        with self._changing_within_limits() as database:
            record_number = self._record_number(database, key)
            database.execute(
                "UPDATE records SET body = ? WHERE number = ?", (_packed(body), record_number)
            )
            self._update_size_and_use(database, record_number)

    def append(self, key: RecordKey, items: Sequence[Item]) -> None:
        """Add items to a conversation."""
        with self._changing_within_limits() as database:
            record_number = self._record_number(database, key)
            _add_items(database, record_number, "input", items)
            self._update_size_and_use(database, record_number)

    def delete(self, key: RecordKey) -> None:
        """Delete a record and its items."""
        with self._database.changing() as database:
            record_number = self._record_number(database, key)
            database.execute("DELETE FROM records WHERE number = ?", (record_number,))

    def delete_item(self, key: RecordKey, item_id: str) -> bool:
        """Delete an item of a conversation. Returns False if there is no such item."""
        with self._database.changing() as database:
            record_number = self._record_number(database, key)
            delete = "DELETE FROM items WHERE owner = ? AND id = ?"
            if not database.execute(delete, (record_number, item_id)).rowcount:
                return False
            self._update_size_and_use(database, record_number)
        return True

    def record(self, key: RecordKey) -> StoredRecord:
        """Return a record in its last stored form."""
        select = "SELECT body, run IS NOT NULL, is_lost FROM records WHERE number = ?"
        with self._database.reading() as database:
            record_number = self._record_number(database, key)
            body, is_running, is_lost = database.execute(select, (record_number,)).fetchone()
            _check_size(database, record_number)
            return StoredRecord(
                body=_unpacked(body),
                output=_items(database, record_number, "output"),
                is_running=bool(is_running),
                is_lost=bool(is_lost),
            )

    def events(self, key: RecordKey) -> bytes:
        """The events of a finished response; empty if none were stored."""
        with self._database.reading() as database:
            record_number = self._record_number(database, key)
            select = "SELECT events FROM records WHERE number = ?"
            (sealed_events,) = database.execute(select, (record_number,)).fetchone()
            return zlib.decompress(unsealed(sealed_events)) if sealed_events is not None else b""

    def items(self, key: RecordKey) -> list[Item]:
        """All input items of a record, oldest first."""
        with self._database.reading() as database:
            record_number = self._record_number(database, key)
            _check_size(database, record_number)
            return _items(database, record_number, "input")

    def find_items(self, tenant: str, item_ids: Sequence[str]) -> dict[str, Item]:
        """Return items of any of the tenant's records, by id.

        If several items have the same id, the latest one is returned.
        """
        select = (
            "SELECT items.body FROM items JOIN records ON records.number = owner"
            " WHERE items.id = ? AND tenant = ? AND used > ? ORDER BY items.number DESC LIMIT 1"
        )
        item_by_id = {}
        with self._database.reading() as database:
            for item_id in item_ids:
                row = database.execute(select, (item_id, tenant, self._expiry_time())).fetchone()
                if row is not None:
                    item_by_id[item_id] = _unpacked(row[0])
        return item_by_id

    def chain(self, key: RecordKey) -> list[Item]:
        """Return input and output of a response and of all responses that it continues, oldest
        first.

        Counts as a use of all. RecordMissing names the latest response of the chain that no longer
        exists.
        """
        select_oldest = f"{_CHAIN_QUERY} SELECT previous FROM chain ORDER BY depth DESC LIMIT 1"
        select_items = (
            f"{_CHAIN_QUERY} SELECT body FROM chain JOIN items ON owner = chain.number "
            "ORDER BY depth DESC, items.number"
        )
        mark_used = f"{_CHAIN_QUERY} UPDATE records SET used = :now WHERE number IN (SELECT number FROM chain)"
        with self._database.changing() as database:
            parameters = {
                "tenant": key.tenant,
                "id": key.id,
                "longest": _LONGEST_CHAIN,
                "since": self._expiry_time(),
                "now": self._now(),
            }
            oldest_row = database.execute(select_oldest, parameters).fetchone()
            if oldest_row is None:
                raise RecordMissing(key.id)
            if oldest_row[0] is not None:
                raise RecordMissing(oldest_row[0])
            for (record_number,) in database.execute(
                f"{_CHAIN_QUERY} SELECT number FROM chain", parameters
            ).fetchall():
                _check_size(database, record_number)
            items = [_unpacked(body) for (body,) in database.execute(select_items, parameters)]
            database.execute(mark_used, parameters)
        return items

    def totals(self) -> tuple[int, int]:
        """Number and total size in bytes of the records that are not running."""
        with self._database.reading() as database:
            return _totals(database)

    def close(self) -> None:
        """Close the file. Idempotent. A later call opens the file again."""
        self._database.close()

    def _on_open(self, database: sqlite3.Connection) -> None:
        """Tell the clock the last uses of the records: it distrusts a wall clock that is far ahead
        of them.
        """
        last_uses = (
            each for (each,) in database.execute("SELECT used FROM records WHERE run IS NULL")
        )
        self._retention.start_from_stamps(each for each in last_uses if isinstance(each, float))

    def _expiry_time(self) -> float:
        """Records that were last used at this time or earlier have expired."""
        return self._retention() - self._limits.keep_seconds

    def _record_number(self, database: sqlite3.Connection, key: RecordKey) -> int:
        """The number of a record, which identifies its rows. Raises RecordMissing if it does not
        exist or has expired.
        """
        select = "SELECT number FROM records WHERE tenant = ? AND id = ? AND kind = ? AND used > ?"
        row = database.execute(select, (*key, self._expiry_time())).fetchone()
        if row is None:
            raise RecordMissing(key.id)
        if row[0] is None:  # the schema is damaged
            raise sqlite3.DatabaseError("a record has no number")
        return int(row[0])

    def _update_size_and_use(self, database: sqlite3.Connection, record_number: int) -> None:
        """Recompute the size of a record, and count this as a use of it."""
        database.execute(_REFRESH_STATEMENT, (self._now(), record_number))

    @contextlib.contextmanager
    def _changing_within_limits(self) -> Iterator[sqlite3.Connection]:
        """Yield the database in a transaction. At its end, records that exceed the limits are evicted.

        The least recently used ones are evicted first. Running responses are neither counted nor
        evicted.
        """
        max_count = self._limits.max_count
        max_bytes = self._limits.max_bytes
        with self._database.changing() as database:
            yield database
            delete_expired = "DELETE FROM records WHERE used <= ? AND run IS NULL"
            database.execute(delete_expired, (self._expiry_time(),))
            count, size = _totals(database)
            if count > max_count or size > max_bytes:
                delete_too_large = "DELETE FROM records WHERE size > ? AND run IS NULL"
                database.execute(delete_too_large, (max_bytes,))
                reduced_limits = {
                    "count": int(max_count * _KEPT_SHARE),
                    "bytes": int(max_bytes * _KEPT_SHARE),
                }
                database.execute(_EVICT_STATEMENT, reduced_limits)


def clear_responses(folder: Path) -> None:
    """Delete all responses and conversations in a store's folder.

    A server may have the file open. Raises OSError.
    """
    path = _path_in(folder)
    _damaged_path(path).unlink(missing_ok=True)
    clear_tables(path, "items", "records", busy_seconds=_BUSY_SECONDS)


class _Database:
    """`responses/responses-1.sqlite` in a store's folder, or a database in memory.

    Opened at its first use.

    `run` names this process in the rows of its running responses. After this process has died, the
    next process that opens the file marks these responses as lost.
    """

    def __init__(
        self, folder: Path | None, *, on_open: Callable[[sqlite3.Connection], None]
    ) -> None:
        """on_open: called with the database when it is opened."""
        self._folder = folder
        self._on_open = on_open
        self._database: sqlite3.Connection | None = None
        self._claim: Claim | None = None
        self.run = secrets.token_hex(8)

    @contextlib.contextmanager
    def changing(self) -> Iterator[sqlite3.Connection]:
        """Yield the database in a transaction. Rolls back if the block raises."""
        with self.reading() as database:
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
                database.execute("COMMIT")
            except BaseException:
                if database.in_transaction:
                    with contextlib.suppress(sqlite3.Error):
                        database.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield the open database. Sets a damaged file aside and raises FileDamaged."""
        try:
            if self._database is None:
                self._database = self._open()
            yield self._database
        except DAMAGE_SIGNS as error:
            # subclasses of DatabaseError mean that the file is full, locked or read-only
            if type(error) not in (sqlite3.DatabaseError, UnicodeDecodeError):
                raise
            self._set_aside(error)
            raise FileDamaged from error

    def close(self) -> None:
        """Close the file, and give up the folder that shows that this process lives."""
        if self._database is not None:
            self._database.close()
            self._database = None
        if self._claim is not None:
            self._claim.give_back()
            self._claim = None

    def _open(self) -> sqlite3.Connection:
        """Open the file, and create its tables if they are missing."""
        path = self._path()
        if path is not None:
            path.touch(mode=0o600)
        database = sqlite3.connect(
            path or ":memory:", timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            use_write_ahead_log(database, busy_seconds=_BUSY_SECONDS)
            for pragma in _PRAGMAS:
                database.execute(f"PRAGMA {pragma}")
            make_tables(database, _SCHEMA, version=_FORMAT)
            names = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
            if not names.issuperset({"records", "items"}):
                raise sqlite3.DatabaseError("its tables are missing")
            if path is not None:
                self._mark_lost(database, path.parent)
            self._on_open(database)
        except BaseException:
            database.close()
            raise
        return database

    def _path(self) -> Path | None:
        """The path of the file, whose folder is created; None to keep the records in memory."""
        if self._folder is None:
            return None
        path = _path_in(self._folder)
        try:
            StoreFolder(self._folder).check()
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (OSError, StoreRefused) as error:
            # another folder is not tried while this one may have responses
            if isinstance(error, OSError) and (
                error.errno in MAY_PASS or error.errno == errno.EEXIST or _may_exist(path)
            ):
                raise
            logger.warning("responses are kept in memory only: %s", error)
            self._folder = None
            return None
        return path

    def _mark_lost(self, database: sqlite3.Connection, folder: Path) -> None:
        """Mark the running responses of dead servers as lost.

        Each living server holds a locked folder with the name of its `run`.
        """
        if self._claim is None:
            sweep(folder, prefix=_CLAIM_PREFIX)
            # OSError: the file system lacks locks, so dead servers cannot be distinguished from
            # living ones
            with contextlib.suppress(OSError):
                self._claim = claim(folder, prefix=_CLAIM_PREFIX)
                self.run = self._claim.folder.name
        living_runs = {each.name for each in folder.iterdir()} | {self.run}
        recorded_runs = database.execute(
            "SELECT DISTINCT run FROM records WHERE run IS NOT NULL"
        ).fetchall()
        dead_runs = [run for run in recorded_runs if run[0] not in living_runs]
        database.executemany("UPDATE records SET run = NULL, is_lost = 1 WHERE run = ?", dead_runs)

    def _set_aside(self, error: Exception) -> None:
        """Close a damaged file, and rename it, so that a new one is created at the next use."""
        if self._database is not None:
            self._database.close()
            self._database = None
        if self._folder is None:
            return
        path = _path_in(self._folder)
        damaged_path = _damaged_path(path)
        logger.warning(
            "the file of responses is damaged (%s): set aside as %s; starting with an empty one",
            error,
            damaged_path.name,
        )
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        path.replace(damaged_path)


def _path_in(folder: Path) -> Path:
    return folder / "responses" / f"responses-{_FORMAT}.sqlite"


def _may_exist(path: Path) -> bool:
    """Whether a file exists, or cannot be checked at the moment."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _damaged_path(path: Path) -> Path:
    return path.with_name(path.name + ".damaged")


def _totals(database: sqlite3.Connection) -> tuple[int, int]:
    """Number and total size in bytes of the records that are not running."""
    select = "SELECT count(*), coalesce(sum(size), 0) FROM records WHERE run IS NULL"
    count, size = database.execute(select).fetchone()
    return int(count), int(size)


def _check_size(database: sqlite3.Connection, record_number: int) -> None:
    """Raise sqlite3.DatabaseError if a record does not have the items that it was stored with."""
    (has_all,) = database.execute(_HAS_ALL_QUERY, (record_number,)).fetchone()
    if not has_all:
        raise sqlite3.DatabaseError("the size of a record is not that of its parts")


def _items(database: sqlite3.Connection, record_number: int, part: str) -> list[Item]:
    """The items of a record, oldest first. part: "input" or "output"."""
    select = "SELECT body FROM items WHERE owner = ? AND part = ? ORDER BY number"
    return [_unpacked(body) for (body,) in database.execute(select, (record_number, part))]


def _add_items(
    database: sqlite3.Connection, record_number: int, part: str, items: Sequence[Item]
) -> None:
    """Append items to the "input" or the "output" of a record, as `part` says."""
    rows = [(record_number, part, item["id"], _packed(item)) for item in items]
    database.executemany("INSERT INTO items (owner, part, id, body) VALUES (?, ?, ?, ?)", rows)


def _packed(value: Json) -> bytes:
    return sealed(msgspec.json.encode(value))


def _unpacked(blob: object) -> Any:
    return msgspec.json.decode(unsealed(blob))


def sealed(content: bytes) -> bytes:
    """Prepend a checksum to the content, because SQLite has none."""
    return xxhash.xxh3_64_digest(content) + content


def unsealed(blob: object) -> bytes:
    """Return the content without its checksum.

    Raises sqlite3.DatabaseError if the content was changed.
    """
    if isinstance(blob, bytes):
        content = blob[_CHECKSUM_BYTES:]
        if xxhash.xxh3_64_digest(content) == blob[:_CHECKSUM_BYTES]:
            return content
    raise sqlite3.DatabaseError("a row does not match its checksum")
