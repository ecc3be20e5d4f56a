"""The index: what is stored, when it was used last, what is pinned, how much was written today.

SQLite, one thread per object.

It only saves reading every header at the start, and carries what files cannot (recency, pins). The
files are the truth: an index that is lost, damaged or of an older format is made anew from them.
Every row carries a checksum over what must not change: SQLite has none, and a row that names other
tokens than were read would give somebody the wrong block.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import xxhash

from holdfast.store.block import Block, BlockKey, Entry
from holdfast.store.budget import by_place
from holdfast.store.tables import DAMAGE_SIGNS, make_tables, use_write_ahead_log

INDEX_FORMAT = 2
BUSY_SECONDS = 5.0

# The first eight columns of `blocks` are what its seal is over.
_SCHEMA = """
CREATE TABLE models (model TEXT PRIMARY KEY, fingerprint TEXT NOT NULL);
CREATE TABLE blocks (
    key BLOB NOT NULL, parent BLOB NOT NULL, parent_tokens INTEGER NOT NULL, kind TEXT NOT NULL, start INTEGER NOT NULL,
    packed_tokens BLOB NOT NULL, model TEXT NOT NULL, file_bytes INTEGER NOT NULL, seal INTEGER NOT NULL, last_used REAL NOT NULL
);
CREATE UNIQUE INDEX blocks_by_key ON blocks (key);
CREATE INDEX blocks_of_model ON blocks (model);
CREATE TABLE pins (key BLOB NOT NULL, holder TEXT NOT NULL, until REAL NOT NULL, PRIMARY KEY (key, holder)) WITHOUT ROWID;
CREATE TABLE written (day TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TABLE totals (one INTEGER PRIMARY KEY CHECK (one = 1), blocks INTEGER NOT NULL, bytes INTEGER NOT NULL);
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
_SEALED_COLUMNS = 8


def _seal(columns: tuple[object, ...]) -> int:
    # SQLite's integers are signed
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(columns)) - 2**63


class BlockIndex:
    """One open index. Every method may raise sqlite3.Error: see index_supervisor.py for what then
    happens.
    """

    def __init__(self, path: Path) -> None:
        """Open the index at `path`, made if it is not there. One at ":memory:" is in no file."""
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
        use_write_ahead_log(self._database, busy_seconds=BUSY_SECONDS)
        # a killed process loses nothing; files make up for a power cut
        self._database.execute("PRAGMA synchronous = NORMAL")
        self._database.execute("PRAGMA journal_size_limit = 4194304")
        if (version := make_tables(self._database, _SCHEMA, version=INDEX_FORMAT)) != INDEX_FORMAT:
            raise sqlite3.DatabaseError(f"it has format {version}, not {INDEX_FORMAT}")
        (verdict,) = self._database.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(str(verdict))

    @contextmanager
    def _writing(self) -> Iterator[None]:
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
        """Close the file; folds the write-ahead log in if nobody else has it open."""
        self._database.close()

    def add(self, entries: Iterable[Entry], *, fingerprints: Mapping[str, str]) -> None:
        """Add blocks in one transaction, and the fingerprints of their models.

        A block that is there already stays as it is.
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
                _ADD, ((*row[:-1], _seal(row[:-1]), row[-1]) for row in rows)
            )

    def remove(self, keys: Iterable[BlockKey]) -> None:
        """Take out blocks, and their pins."""
        gone = [(key,) for key in keys]
        with self._writing():
            self._database.executemany("DELETE FROM blocks WHERE key = ?", gone)
            self._database.executemany("DELETE FROM pins WHERE key = ?", gone)

    def remove_rows(self, keys: Iterable[BlockKey]) -> None:
        """Take out blocks but not their pins: for rows that do not agree with the files and may be
        added again.
        """
        self._write("DELETE FROM blocks WHERE key IS ?", [(key,) for key in keys])

    def touch(self, used: Mapping[BlockKey, float]) -> None:
        """Note when blocks were used; never backwards."""
        self._write(
            "UPDATE blocks SET last_used = max(last_used, ?) WHERE key = ?",
            [(at, key) for key, at in used.items()],
        )

    def pin(self, keys: Iterable[BlockKey], *, holder: str, until: float) -> None:
        """Keep blocks from eviction until a time, for `holder`.

        Blocks that are not stored yet may be pinned.
        """
        self._write(
            "INSERT OR REPLACE INTO pins VALUES (?, ?, ?)", [(key, holder, until) for key in keys]
        )

    def unpin(self, keys: Iterable[BlockKey], *, holder: str) -> None:
        """Take back a holder's pins."""
        self._write(
            "DELETE FROM pins WHERE key = ? AND holder = ?", [(key, holder) for key in keys]
        )

    def drop_old_pins(self, now: float) -> None:
        """Take out pins whose time is over."""
        self._write("DELETE FROM pins WHERE until <= ?", [(now,)])

    def entries(self, now: float, *, model: str | None = None) -> list[Entry]:
        """The blocks of one model (short name) or of all, parents first.

        Raises DatabaseError when a row is not as written.
        """
        pinned = {
            key for (key,) in self._database.execute("SELECT key FROM pins WHERE until > ?", (now,))
        }
        where, values = ("", ()) if model is None else ("WHERE model = ?", (model,))
        found = self._database.execute(f"SELECT * FROM blocks {where}", values).fetchall()
        for row in found:
            if row[_SEALED_COLUMNS] != _seal(row[:_SEALED_COLUMNS]) or not isinstance(
                row[-1], float
            ):
                raise sqlite3.DatabaseError("a row is not as it was written")
        entries = [
            Entry(
                block=Block(
                    key=key, parent_key=parent, parent_tokens=parent_tokens, kind=kind, start=start, packed_tokens=packed
                ),
                model=of_model, file_bytes=file_bytes, last_used=last_used, pinned=key in pinned,
            )
            for key, parent, parent_tokens, kind, start, packed, of_model, file_bytes, _, last_used in found
        ]  # fmt: skip
        return sorted(entries, key=by_place)

    def places(self) -> dict[BlockKey, tuple[str, int]]:
        """Model (short name) and file bytes of every block."""
        return {
            key: (model, size)
            for key, model, size in self._database.execute(
                "SELECT key, model, file_bytes FROM blocks"
            )
        }

    def fingerprints(self) -> dict[str, str]:
        """The full fingerprints by their short names, as far as known."""
        rows = self._database.execute("SELECT model, fingerprint FROM models")
        return {str(model): str(fingerprint) for model, fingerprint in rows}

    def remove_models(self, models: Iterable[str]) -> None:
        """Take out models (short names) whose blocks are gone."""
        self._write("DELETE FROM models WHERE model = ?", [(model,) for model in models])

    def block_count(self) -> int:
        """How many blocks are stored, of all models; kept up to date by the database itself, so
        that it costs nothing to ask.
        """
        return self._total("blocks")

    def stored_bytes(self) -> int:
        """How large all their files are; likewise."""
        return self._total("bytes")

    def _total(self, column: str) -> int:
        found = self._database.execute(f"SELECT {column} FROM totals").fetchone()
        if found is None or not isinstance(found[0], int):
            raise sqlite3.DatabaseError("no totals")
        return found[0]

    def recount(self) -> None:
        """Set the totals by counting."""
        self._write(
            "INSERT OR REPLACE INTO totals SELECT 1, count(*), coalesce(sum(file_bytes), 0) FROM "
            "blocks",
            [()],
        )

    def count_written(self, file_bytes: int, *, day: str) -> None:
        """Add to what was written on a day."""
        self._write(_COUNT_WRITTEN, [(day, file_bytes)])

    def written_bytes(self, day: str) -> int:
        """Bytes written on a day by all processes."""
        found = self._database.execute(
            "SELECT bytes FROM written WHERE day = ? AND typeof(bytes) = 'integer'", (day,)
        ).fetchone()
        return 0 if found is None else int(found[0])

    def check_invariants(self) -> None:
        """Totals and seals agree with the rows. Raises AssertionError, DatabaseError."""
        with self._writing():  # no other process changes anything between the questions
            entries = self.entries(0.0)
            assert self.block_count() == len(entries)
            assert self.stored_bytes() == sum(entry.file_bytes for entry in entries)
