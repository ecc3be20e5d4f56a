"""The index: what is stored, when it was used last, what is pinned, how much was written today. SQLite, one thread per object.

It only saves reading every header at the start, and carries what files cannot (recency, pins). The files are the truth: an index
that is lost, damaged or behind is made anew from them (reconcile.py). Every row carries a checksum over what must not change, so
that a damaged row is told from a sound one.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from holdfast.store.block import Block, Entry
from holdfast.store.budget import Holding
from holdfast.store.keys import KEY_BYTES, KINDS, BlockKey, fingerprint_id, pack_tokens

INDEX_FORMAT = 1
BUSY_SECONDS = 5.0
# Python decodes SQLite's texts, messages too: those of a damaged file need not be UTF-8.
DAMAGE_SIGNS = (sqlite3.Error, UnicodeDecodeError)

_SCHEMA = """
CREATE TABLE models (model TEXT PRIMARY KEY, fingerprint TEXT NOT NULL);
CREATE TABLE blocks (
    id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, parent BLOB NOT NULL, parent_tokens INTEGER NOT NULL,
    kind INTEGER NOT NULL, start INTEGER NOT NULL, file_bytes INTEGER NOT NULL, model TEXT NOT NULL,
    created REAL NOT NULL, last_used REAL NOT NULL, seal INTEGER NOT NULL
);
CREATE INDEX blocks_of_model ON blocks (model);
CREATE TABLE tokens (id INTEGER PRIMARY KEY, packed BLOB NOT NULL);
CREATE TABLE pins (key BLOB NOT NULL, holder TEXT NOT NULL, until REAL NOT NULL, PRIMARY KEY (key, holder)) WITHOUT ROWID;
CREATE TABLE written (day TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TABLE totals (one INTEGER PRIMARY KEY CHECK (one = 1), blocks INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO totals VALUES (1, 0, 0);
CREATE TRIGGER block_added AFTER INSERT ON blocks BEGIN
    UPDATE totals SET blocks = blocks + 1, bytes = bytes + new.file_bytes;
END;
CREATE TRIGGER block_removed AFTER DELETE ON blocks BEGIN
    UPDATE totals SET blocks = blocks - 1, bytes = bytes - old.file_bytes;
    DELETE FROM tokens WHERE id = old.id;
END;
"""
# Damaged rows are left out: they could not be sorted.
_HOLDINGS = """
SELECT key, parent, start, file_bytes, last_used, kind, model FROM blocks
WHERE typeof(key) = 'blob' AND typeof(parent) = 'blob' AND typeof(start) = 'integer' AND typeof(file_bytes) = 'integer'
    AND typeof(last_used) = 'real'
"""
_SEALED = struct.Struct("<32s32sQQQQ")


class IndexDamaged(sqlite3.DatabaseError):
    """The index cannot be used as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRow:
    """All that the index keeps of one block when it is added."""

    entry: Entry
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Number and bytes of all stored blocks, of all models."""

    blocks: int
    file_bytes: int


def row_of(block: Block, *, fingerprint: str, created: float, file_bytes: int, last_used: float) -> IndexRow:
    """The row for a block that has become a file."""
    entry = Entry(
        key=block.key,
        parent_key=block.parent_key,
        parent_tokens=block.parent_tokens,
        kind=block.kind,
        start=block.start,
        packed_tokens=pack_tokens(block.token_ids),
        file_bytes=file_bytes,
        created=created,
        last_used=last_used,
    )
    return IndexRow(entry=entry, fingerprint=fingerprint)


def _seal(entry: Entry) -> int:
    fixed = _SEALED.pack(entry.key, entry.parent_key, entry.parent_tokens, KINDS.index(entry.kind), entry.start, entry.file_bytes)
    return xxhash.xxh3_64_intdigest(fixed + entry.packed_tokens) - 2**63  # SQLite's integers are signed


class BlockIndex:
    """One open index. Every method may raise sqlite3.Error: see reconcile.py for what then happens."""

    def __init__(self, path: Path | None) -> None:
        """Open the index at `path`, made if it is not there; without a path it lives in memory."""
        self.path = path
        self._database = sqlite3.connect(
            ":memory:" if path is None else path, timeout=BUSY_SECONDS, isolation_level=None, cached_statements=64
        )
        try:
            self._prepare()
        except DAMAGE_SIGNS:
            self._database.close()
            raise

    def _prepare(self) -> None:
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")  # a killed process loses nothing; files make up for a power cut
        self._database.execute("PRAGMA journal_size_limit = 4194304")
        with self._writing():
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in _statements(_SCHEMA):
                    self._database.execute(statement)
                self._database.execute(f"PRAGMA user_version = {INDEX_FORMAT}")
            elif version != INDEX_FORMAT:
                raise IndexDamaged(f"index format {version}")
        (verdict,) = self._database.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise IndexDamaged(str(verdict))

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

    def close(self) -> None:
        """Close the file; folds the write-ahead log in if nobody else has it open."""
        self._database.close()

    def add(self, rows: Iterable[IndexRow], *, written_bytes: int = 0, day: str = "") -> None:
        """Add blocks in one transaction, and count `written_bytes` for `day`. A block that is there already stays as it is."""
        with self._writing():
            for row in rows:
                self._add(row)
            if written_bytes:
                self._database.execute(
                    "INSERT INTO written VALUES (?, ?) ON CONFLICT (day) DO UPDATE SET bytes = bytes + excluded.bytes",
                    (day, written_bytes),
                )

    def _add(self, row: IndexRow) -> None:
        entry, model = row.entry, fingerprint_id(row.fingerprint)
        self._database.execute("INSERT OR IGNORE INTO models VALUES (?, ?)", (model, row.fingerprint))
        added = self._database.execute(
            "INSERT INTO blocks (key, parent, parent_tokens, kind, start, file_bytes, model, created, last_used, seal)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO NOTHING",
            (
                entry.key, entry.parent_key, entry.parent_tokens, KINDS.index(entry.kind), entry.start, entry.file_bytes,
                model, entry.created, entry.last_used, _seal(entry),
            ),
        )  # fmt: skip
        if added.rowcount == 1:
            self._database.execute("INSERT OR REPLACE INTO tokens VALUES (?, ?)", (added.lastrowid, entry.packed_tokens))

    def remove(self, keys: Iterable[BlockKey]) -> None:
        """Forget blocks, and their pins."""
        gone = [(key,) for key in keys]
        with self._writing():
            self._database.executemany("DELETE FROM blocks WHERE key = ?", gone)
            self._database.executemany("DELETE FROM pins WHERE key = ?", gone)

    def remove_rows(self, keys: Iterable[BlockKey]) -> None:
        """Forget blocks but not their pins: for rows that do not agree with the files and may be added again."""
        with self._writing():
            self._database.executemany("DELETE FROM blocks WHERE key IS ?", [(key,) for key in keys])

    def touch(self, used: Mapping[BlockKey, float]) -> None:
        """Note when blocks were used; never backwards."""
        with self._writing():
            self._database.executemany(
                "UPDATE blocks SET last_used = max(last_used, ?) WHERE key = ?", [(at, key) for key, at in used.items()]
            )

    def pin(self, keys: Iterable[BlockKey], *, holder: str, until: float) -> None:
        """Keep blocks from eviction until a time, for `holder`. Blocks that are not stored yet may be pinned."""
        with self._writing():
            self._database.executemany("INSERT OR REPLACE INTO pins VALUES (?, ?, ?)", [(key, holder, until) for key in keys])

    def unpin(self, keys: Iterable[BlockKey], *, holder: str) -> None:
        """Take back a holder's pins."""
        with self._writing():
            self._database.executemany("DELETE FROM pins WHERE key = ? AND holder = ?", [(key, holder) for key in keys])

    def drop_old_pins(self, now: float) -> None:
        """Forget pins whose time is over."""
        with self._writing():
            self._database.execute("DELETE FROM pins WHERE until <= ?", (now,))

    def holdings(self, now: float) -> list[Holding]:
        """All blocks of all models as the budget sees them."""
        pinned = {key for (key,) in self._database.execute("SELECT key FROM pins WHERE until > ?", (now,))}
        rows = self._database.execute(_HOLDINGS).fetchall()
        return [
            Holding(key, parent, start, size, used, key in pinned, kind == 1, model)
            for key, parent, start, size, used, kind, model in rows
        ]

    def entries(self, fingerprint: str) -> tuple[list[Entry], list[BlockKey]]:
        """The entries of one model, by start; and the keys of rows that are damaged, as far as they can be told."""
        rows = self._database.execute(
            "SELECT key, parent, parent_tokens, kind, start, packed, file_bytes, created, last_used, seal"
            " FROM blocks LEFT JOIN tokens USING (id) WHERE model = ?",
            (fingerprint_id(fingerprint),),
        ).fetchall()
        entries: dict[BlockKey, Entry] = {}
        damaged: list[BlockKey] = []
        for row in rows:
            entry = _sound_entry(row)
            if entry is not None:
                entries[entry.key] = entry
            elif isinstance(row[0], bytes):
                damaged.append(row[0])
        return sorted(entries.values(), key=lambda entry: (entry.start, entry.kind)), damaged

    def places(self) -> dict[BlockKey, tuple[str, int]]:
        """Model (short name) and file bytes of every block."""
        return {key: (model, size) for key, model, size in self._database.execute("SELECT key, model, file_bytes FROM blocks")}

    def fingerprints(self) -> dict[str, str]:
        """The full fingerprints by their short names, as far as known."""
        rows = self._database.execute("SELECT model, fingerprint FROM models")
        return {str(model): str(fingerprint) for model, fingerprint in rows}

    def forget_models(self, models: Iterable[str]) -> None:
        """Forget models (short names) whose blocks are gone."""
        with self._writing():
            self._database.executemany("DELETE FROM models WHERE model = ?", [(model,) for model in models])

    def pins(self, now: float) -> int:
        """How many blocks are pinned."""
        (count,) = self._database.execute("SELECT count(DISTINCT key) FROM pins WHERE until > ?", (now,)).fetchone()
        return int(count)

    def totals(self) -> Totals:
        """How much is stored; kept up to date by the database itself, so that it costs nothing to ask."""
        found = self._database.execute("SELECT blocks, bytes FROM totals").fetchone()
        if found is None or not all(isinstance(number, int) for number in found):
            raise IndexDamaged("no totals")
        return Totals(blocks=found[0], file_bytes=found[1])

    def recount(self) -> None:
        """Set the totals by counting."""
        with self._writing():
            self._database.execute("INSERT OR REPLACE INTO totals SELECT 1, count(*), coalesce(sum(file_bytes), 0) FROM blocks")

    def written_bytes(self, day: str) -> int:
        """Bytes written on a day by all processes."""
        found = self._database.execute("SELECT bytes FROM written WHERE day = ? AND typeof(bytes) = 'integer'", (day,)).fetchone()
        return 0 if found is None else int(found[0])

    def check_invariants(self) -> None:
        """Totals, tokens and seals agree with the rows. Raises AssertionError."""
        blocks, size = self._database.execute("SELECT count(*), coalesce(sum(file_bytes), 0) FROM blocks").fetchone()
        assert self.totals() == Totals(blocks=blocks, file_bytes=size)
        (tokens,) = self._database.execute("SELECT count(*) FROM tokens JOIN blocks USING (id)").fetchone()
        (all_tokens,) = self._database.execute("SELECT count(*) FROM tokens").fetchone()
        assert tokens == all_tokens == blocks
        for fingerprint in self.fingerprints().values():
            assert self.entries(fingerprint)[1] == []


def _statements(script: str) -> Iterator[str]:
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _sound_entry(row: tuple[Any, ...]) -> Entry | None:
    """The entry of a row, or None when the row is not what was once written. Damage can put any type anywhere."""
    key, parent, parent_tokens, kind, start, packed, file_bytes, created, last_used, seal = row
    if not all(isinstance(value, bytes) for value in (key, parent, packed)):
        return None
    if not all(isinstance(value, int) and value >= 0 for value in (parent_tokens, kind, start, file_bytes)):
        return None
    if not (isinstance(created, float) and isinstance(last_used, float) and kind < len(KINDS)):
        return None
    entry = Entry(
        key=key, parent_key=parent, parent_tokens=parent_tokens, kind=KINDS[kind], start=start, packed_tokens=packed,
        file_bytes=file_bytes, created=created, last_used=last_used,
    )  # fmt: skip
    return entry if len(key) == len(parent) == KEY_BYTES and len(packed) % 4 == 0 and seal == _seal(entry) else None
