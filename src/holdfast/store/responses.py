"""Responses and conversations that clients come back to, kept beside the blocks, with the items
that went in and came out.

A record belongs to a tenant, and nobody else finds it. Bodies and items are JSON objects whose
meaning is the caller's. Without a folder all of it is kept in memory. A file that is damaged is set
aside and begun anew.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from holdfast.config import ResponsesSettings
from holdfast.store.response_database import ResponseDatabase, sealed, unsealed

_LONGEST_CHAIN = 100_000  # records; only a damaged file has more
_CHAIN = """
WITH RECURSIVE chain (number, previous, depth) AS (
    SELECT number, previous, 0 FROM records WHERE tenant = :tenant AND id = :id AND kind = 'response' AND used > :since
    UNION ALL
    SELECT records.number, records.previous, depth + 1 FROM chain JOIN records
        ON records.tenant = :tenant AND records.id = chain.previous AND records.kind = 'response'
    LIMIT :longest
)
"""
# of the bounds stays when they are exceeded, so that not every response makes room for itself
_SPARE = 0.95
_BEYOND_THE_BOUNDS = """
DELETE FROM records WHERE number IN (
    SELECT number FROM (
        SELECT number, sum(size) OVER latest AS bytes, count(*) OVER latest AS place FROM records WHERE run IS NULL
        WINDOW latest AS (ORDER BY used DESC, number DESC)
    ) WHERE place > 1 AND (bytes > :bytes OR place > :count)
)
"""

Kind: TypeAlias = Literal["response", "conversation"]
Part: TypeAlias = Literal["input", "output"]
Json: TypeAlias = Mapping[str, Any]
Item: TypeAlias = Mapping[str, Any]  # has its `id`


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRecord:
    """A response or a conversation, without its items of input."""

    id: str
    body: Json
    output: Sequence[Item] = ()  # of a response that has ended
    is_running: bool = False
    is_lost: bool = False  # it was running when its server died


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemPage:
    """Some of a record's items, in the order that was asked for."""

    items: Sequence[Item]
    has_more: bool


class RecordMissing(Exception):
    """There is no such record for this tenant; or no such item, where one is named."""

    def __init__(self, record_id: str, *, item_id: str = "") -> None:
        super().__init__(item_id or record_id)
        self.record_id, self.item_id = record_id, item_id


class ResponseFile:
    """All records of all tenants, within the bounds of the settings. One thread at a time.

    Every method may raise FileDamaged, sqlite3.Error and OSError, as ResponseDatabase does.
    """

    def __init__(
        self,
        folder: Path | None,
        limits: ResponsesSettings,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database, self._limits, self._clock = ResponseDatabase(folder), limits, clock

    def put(
        self,
        tenant: str,
        record: StoredRecord,
        *,
        kind: Kind,
        previous: str | None = None,
        items: Sequence[Item] = (),
    ) -> None:
        """Keep a new record with its items of input; that which is running until `finish` is told
        of its end.
        """
        body, run = _packed(record.body), self._database.run if record.is_running else None
        with self._growing() as database:
            values = (tenant, record.id, kind, run, previous, body, len(body), self._clock())
            row = (
                "INSERT INTO records (tenant, id, kind, run, previous, body, size, used) VALUES "
                "(?, ?, ?, ?, ?, ?, ?, ?)"
            )
            number = database.execute(row, values).lastrowid
            assert number is not None
            self._add(database, number, "input", items)

    def finish(self, tenant: str, record: StoredRecord, *, events: bytes = b"") -> bool:
        """Keep the end of a response: what came out, and the events that said so.

        False when it was deleted meanwhile.
        """
        body, log = _packed(record.body), sealed(zlib.compress(events, 1)) if events else None
        with self._growing() as database:
            number = self._find(database, tenant, record.id, "response")
            if number is None:
                return False
            self._add(database, number, "output", record.output)
            grown = len(body) + len(log or b"")
            row = (
                "UPDATE records SET run = NULL, events = ?, size = size - length(body) + ?, body = "
                "?, used = ? WHERE number = ?"
            )
            database.execute(row, (log, grown, body, self._clock(), number))
        return True

    def change(self, tenant: str, record: StoredRecord, *, kind: Kind) -> None:
        """Give a record another body. Raises RecordMissing."""
        body = _packed(record.body)
        with self._growing() as database:
            number = self._there(database, tenant, record.id, kind)
            row = (
                "UPDATE records SET size = size - length(body) + ?, body = ?, used = ? WHERE "
                "number = ?"
            )
            database.execute(row, (len(body), body, self._clock(), number))

    def append(self, tenant: str, record_id: str, items: Sequence[Item]) -> None:
        """Add items to a conversation. Raises RecordMissing."""
        with self._growing() as database:
            number = self._there(database, tenant, record_id, "conversation")
            self._add(database, number, "input", items)
            database.execute(
                "UPDATE records SET used = ? WHERE number = ?", (self._clock(), number)
            )

    def delete(self, tenant: str, record_id: str, *, kind: Kind) -> None:
        """Forget a record and its items. Raises RecordMissing."""
        with self._database.changing() as database:
            number = self._there(database, tenant, record_id, kind)
            database.execute("DELETE FROM records WHERE number = ?", (number,))

    def delete_item(self, tenant: str, record_id: str, item_id: str) -> None:
        """Take an item out of a conversation. Raises RecordMissing."""
        with self._database.changing() as database:
            number = self._there(database, tenant, record_id, "conversation")
            which, values = "FROM items WHERE owner = ? AND id = ?", (number, item_id)
            (freed,) = database.execute(f"SELECT sum(length(body)) {which}", values).fetchone()
            if freed is None:
                raise RecordMissing(record_id, item_id=item_id)
            database.execute(f"DELETE {which}", values)
            database.execute("UPDATE records SET size = size - ? WHERE number = ?", (freed, number))

    def record(self, tenant: str, record_id: str, *, kind: Kind) -> StoredRecord:
        """A record as it was put last. Raises RecordMissing."""
        with self._database.reading() as database:
            number = self._there(database, tenant, record_id, kind)
            row = "SELECT body, run IS NOT NULL, is_lost FROM records WHERE number = ?"
            body, is_running, is_lost = database.execute(row, (number,)).fetchone()
            output = self._items(database, number, "output")
            return StoredRecord(
                id=record_id,
                body=_unpacked(body),
                output=output,
                is_running=bool(is_running),
                is_lost=bool(is_lost),
            )

    def events(self, tenant: str, record_id: str) -> bytes:
        """The events of a response that has ended; empty when there are none. Raises RecordMissing."""
        with self._database.reading() as database:
            number = self._there(database, tenant, record_id, "response")
            (log,) = database.execute(
                "SELECT events FROM records WHERE number = ?", (number,)
            ).fetchone()
            return zlib.decompress(unsealed(log)) if log is not None else b""

    def items(self, tenant: str, record_id: str, *, kind: Kind) -> list[Item]:
        """All items of input of a record. Raises RecordMissing."""
        with self._database.reading() as database:
            return self._items(database, self._there(database, tenant, record_id, kind), "input")

    def item(self, tenant: str, record_id: str, item_id: str) -> Item:
        """One item of a conversation. Raises RecordMissing."""
        with self._database.reading() as database:
            number = self._there(database, tenant, record_id, "conversation")
            row = "SELECT body FROM items WHERE owner = ? AND id = ? ORDER BY number DESC LIMIT 1"
            found = database.execute(row, (number, item_id)).fetchone()
            if found is None:
                raise RecordMissing(record_id, item_id=item_id)
            item: Item = _unpacked(found[0])
            return item

    def page(
        self,
        tenant: str,
        record_id: str,
        *,
        kind: Kind,
        limit: int,
        newest_first: bool,
        after: str | None = None,
    ) -> ItemPage:
        """Up to `limit` of its items of input, those behind the item `after`. Raises RecordMissing."""
        # none comes twice, none forever
        end, order, place = ("min", "DESC", "<") if newest_first else ("max", "ASC", ">")
        with self._database.reading() as database:
            number = self._there(database, tenant, record_id, kind)
            begin = 0 if not newest_first else (1 << 62)
            if after is not None:
                row = (
                    f"SELECT {end}(number) FROM items WHERE owner = ? AND part = 'input' AND id = ?"
                )
                (begin,) = database.execute(row, (number, after)).fetchone()
                if begin is None:
                    raise RecordMissing(record_id, item_id=after)
            row = (
                f"SELECT body FROM items WHERE owner = ? AND part = 'input' AND number {place} ? "
                f"ORDER BY number {order} LIMIT ?"
            )
            found = [
                _unpacked(body) for (body,) in database.execute(row, (number, begin, limit + 1))
            ]
        return ItemPage(items=found[:limit], has_more=len(found) > limit)

    def find_items(self, tenant: str, item_ids: Sequence[str]) -> dict[str, Item]:
        """Items of any of the tenant's records, by id; of several of one id the latest."""
        row = (
            "SELECT items.body FROM items JOIN records ON records.number = owner"
            " WHERE items.id = ? AND tenant = ? AND used > ? ORDER BY items.number DESC LIMIT 1"
        )
        found = {}
        with self._database.reading() as database:
            for item_id in item_ids:
                if (
                    match := database.execute(row, (item_id, tenant, self._since())).fetchone()
                ) is not None:
                    found[item_id] = _unpacked(match[0])
        return found

    def chain(self, tenant: str, record_id: str) -> list[Item]:
        """What went into and came out of a response and all that it continues, oldest first.

        It counts as a use of all of them.

        Raises RecordMissing, which names the first that is not there any more.
        """
        named = {
            "tenant": tenant,
            "id": record_id,
            "longest": _LONGEST_CHAIN,
            "since": self._since(),
            "now": self._clock(),
        }
        with self._database.changing() as database:
            end = database.execute(
                f"{_CHAIN} SELECT previous FROM chain ORDER BY depth DESC LIMIT 1", named
            ).fetchone()
            if end is None or end[0] is not None:
                raise RecordMissing(record_id if end is None else end[0])
            row = (
                f"{_CHAIN} SELECT body FROM chain JOIN items ON owner = chain.number ORDER BY "
                "depth DESC, items.number"
            )
            found = [_unpacked(body) for (body,) in database.execute(row, named)]
            database.execute(
                f"{_CHAIN} UPDATE records SET used = :now WHERE number IN (SELECT number FROM "
                "chain)",
                named,
            )
        return found

    def totals(self) -> tuple[int, int]:
        """How many records there are, and their bytes; without those that run."""
        with self._database.reading() as database:
            number, size = database.execute("SELECT count, bytes FROM totals").fetchone()
            return int(number), int(size)

    def close(self) -> None:
        """Close the file. May be called twice; whatever comes later opens it again."""
        self._database.close()

    def _since(self) -> float:
        return self._clock() - self._limits.keep_seconds

    def _find(
        self, database: sqlite3.Connection, tenant: str, record_id: str, kind: Kind
    ) -> int | None:
        row = "SELECT number FROM records WHERE tenant = ? AND id = ? AND kind = ? AND used > ?"
        found = database.execute(row, (tenant, record_id, kind, self._since())).fetchone()
        return None if found is None else int(found[0])

    def _there(self, database: sqlite3.Connection, tenant: str, record_id: str, kind: Kind) -> int:
        number = self._find(database, tenant, record_id, kind)
        if number is None:
            raise RecordMissing(record_id)
        return number

    def _items(self, database: sqlite3.Connection, owner: int, part: Part) -> list[Item]:
        row = "SELECT body FROM items WHERE owner = ? AND part = ? ORDER BY number"
        return [_unpacked(body) for (body,) in database.execute(row, (owner, part))]

    def _add(
        self, database: sqlite3.Connection, owner: int, part: Part, items: Sequence[Item]
    ) -> None:
        rows = [(owner, part, item["id"], _packed(item)) for item in items]
        database.executemany("INSERT INTO items (owner, part, id, body) VALUES (?, ?, ?, ?)", rows)
        database.execute(
            "UPDATE records SET size = size + ? WHERE number = ?",
            (sum(len(row[3]) for row in rows), owner),
        )

    @contextlib.contextmanager
    def _growing(self) -> Iterator[sqlite3.Connection]:
        """A transaction after which the bounds hold: what was used longest ago goes.

        What runs counts from its end on.
        """
        most_count, most_bytes = self._limits.max_count, self._limits.max_bytes
        with self._database.changing() as database:
            yield database
            database.execute(
                "DELETE FROM records WHERE used <= ? AND run IS NULL", (self._since(),)
            )
            count, size = database.execute("SELECT count, bytes FROM totals").fetchone()
            if count > most_count or size > most_bytes:
                database.execute(
                    "DELETE FROM records WHERE size > ? AND run IS NULL", (most_bytes,)
                )
                spared = {"count": int(most_count * _SPARE), "bytes": int(most_bytes * _SPARE)}
                database.execute(_BEYOND_THE_BOUNDS, spared)


def _packed(value: Json) -> bytes:
    return sealed(msgspec.json.encode(value))


def _unpacked(blob: object) -> Any:
    return msgspec.json.decode(unsealed(blob))
