"""The index: what is stored, when it was last used, what is pinned, how much was written today.

SQLite, one thread per object.

It saves reading every header at the start, and holds what files cannot (recency, pins). The files
are the truth: an index that is lost, damaged or of an older format is rebuilt from them. Every row
has a checksum over its immutable columns: SQLite has none, and a row with the wrong tokens would
return the wrong block.
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

# `seal` is a checksum of the first eight columns of `blocks`.
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
_SEALED_COLUMNS = 8


def _seal(columns: tuple[object, ...]) -> int:
    # SQLite's integers are signed
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(columns)) - 2**63


class BlockIndex:
    """One open index. Every method may raise sqlite3.Error, which `IndexSupervisor` handles."""

    def __init__(self, path: Path) -> None:
        """Open the index at `path`; creates it if need be. ":memory:" uses no file."""
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
        # a killed process loses nothing; after a power cut, the files are the truth
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
        """Close the file; merges the write-ahead log if no other process has it open."""
        self._database.close()

    def add(self, entries: Iterable[Entry], *, fingerprints: Mapping[str, str]) -> None:
        """Add blocks and the fingerprints of their models in one transaction.

        Existing rows are left alone.
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
        """Remove blocks and their pins."""
        gone = [(key,) for key in keys]
        with self._writing():
            self._database.executemany("DELETE FROM blocks WHERE key = ?", gone)
            self._database.executemany("DELETE FROM pins WHERE key = ?", gone)

    def remove_rows(self, keys: Iterable[BlockKey]) -> None:
        """Remove blocks but not their pins: rows that differ from the files may be added again."""
        self._write("DELETE FROM blocks WHERE key IS ?", [(key,) for key in keys])

    def touch(self, used: Mapping[BlockKey, float]) -> None:
        """Record when blocks were used; never moves a time backwards."""
        self._write(
            "UPDATE blocks SET last_used = max(last_used, ?) WHERE key = ?",
            [(at, key) for key, at in used.items()],
        )

    def pin(self, keys: Iterable[BlockKey], *, holder: str, until: float) -> None:
        """Keep blocks, stored or not yet, from eviction for `holder` until a time."""
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

    def entries(self, now: float, *, model: str | None = None) -> list[Entry]:
        """The blocks of one model (short name) or of all, parents first.

        Raises DatabaseError if a checksum is wrong.
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
                raise sqlite3.DatabaseError("a row has a wrong checksum")
        entries: list[Entry] = []
        for row in found:
            key, parent, parent_tokens, kind, start, packed, of_model, file_bytes, _, used = row
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
                    model=of_model,
                    file_bytes=file_bytes,
                    last_used=used,
                    pinned=key in pinned,
                )
            )
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
        """The known fingerprints by their short names."""
        rows = self._database.execute("SELECT model, fingerprint FROM models")
        return {str(model): str(fingerprint) for model, fingerprint in rows}

    def remove_models(self, models: Iterable[str]) -> None:
        """Remove models (short names) whose blocks are gone."""
        self._write("DELETE FROM models WHERE model = ?", [(model,) for model in models])

    def block_count(self) -> int:
        """The number of stored blocks of all models; the database maintains it, so it is cheap."""
        return self._total("blocks")

    def stored_bytes(self) -> int:
        """The bytes of all their files; cheap, too."""
        return self._total("bytes")

    def _total(self, column: str) -> int:
        found = self._database.execute(f"SELECT {column} FROM totals").fetchone()
        if found is None or not isinstance(found[0], int):
            raise sqlite3.DatabaseError("no totals")
        return found[0]

    def recount(self) -> None:
        """Recompute the totals."""
        self._write(
            "INSERT OR REPLACE INTO totals SELECT 1, count(*), coalesce(sum(file_bytes), 0) FROM "
            "blocks",
            [()],
        )

    def count_written(self, file_bytes: int, *, day: str) -> None:
        """Add to the bytes written on a day."""
        self._write(_COUNT_WRITTEN, [(day, file_bytes)])

    def written_bytes(self, day: str) -> int:
        """Bytes written on a day by all processes."""
        found = self._database.execute(
            "SELECT bytes FROM written WHERE day = ? AND typeof(bytes) = 'integer'", (day,)
        ).fetchone()
        return 0 if found is None else int(found[0])

    def check_invariants(self) -> None:
        """Assert that totals and checksums agree with the rows; may also raise DatabaseError."""
        with self._writing():  # no other process may change anything between the queries
            entries = self.entries(0.0)
            assert self.block_count() == len(entries)
            assert self.stored_bytes() == sum(entry.file_bytes for entry in entries)
