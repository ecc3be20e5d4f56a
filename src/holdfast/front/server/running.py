"""Answers that are being made and that others may follow: their events so far, and whoever waits
for more.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.errors import HoldfastError
from holdfast.store.responses import RecordKey

_MOST_UNWRITTEN = 16


class NumberedEvent(NamedTuple):
    """An event as it is sent, and its number, by which a client says how far it has read."""

    number: int
    frame: bytes


class LogCursor:
    """How far a follower of a log has read. It lives as long as the iterator that moves it."""

    __slots__ = ("__weakref__", "place")

    def __init__(self) -> None:
        self.place = 0


class EventLog:
    """The events of one answer, to be read from any place while more come. Loop's thread only."""

    def __init__(self) -> None:
        self.events: list[NumberedEvent] = []
        self.has_ended = False
        # why it broke off; None: it is complete, or has not ended
        self.error: HoldfastError | None = None
        self._freed = 0  # events that were freed; `events` begins after them
        self._cursors: weakref.WeakSet[LogCursor] = weakref.WeakSet()
        self._changed = asyncio.Event()

    def add(self, event: NumberedEvent) -> None:
        """One more, with a higher number than all before."""
        self.events.append(event)
        self._wake()

    def end(self, error: HoldfastError | None = None) -> None:
        """No more events follow. `error` is raised to everyone who follows the log to its end."""
        self.has_ended = True
        self.error = error
        self._wake()

    async def begun(self) -> None:
        """Wait for the first event."""
        while not self.events:
            await self._changed.wait()

    @property
    def has_followers(self) -> bool:
        """Whether anybody reads the log."""
        return len(self._cursors) > 0

    @property
    def next_place(self) -> int:
        """How many events there have been."""
        return self._freed + len(self.events)

    def free_read(self) -> list[NumberedEvent]:
        """Free the events that all followers have read, and return them.

        Nobody can begin to follow the log afterwards.
        """
        slowest = min((cursor.place for cursor in self._cursors), default=self.next_place)
        freed = self.events[: slowest - self._freed]
        del self.events[: slowest - self._freed]
        self._freed = slowest
        return freed

    def drop_all(self) -> None:
        """Free all events, read or not."""
        self._freed = self.next_place
        self.events.clear()

    def after(self, number: int) -> AsyncIterator[bytes]:
        """An empty opening, then the events with higher numbers, those to come too, until the end."""
        cursor = LogCursor()
        self._cursors.add(cursor)
        return self._read(cursor, number)

    async def _read(self, cursor: LogCursor, number: int) -> AsyncIterator[bytes]:
        yield b""
        while True:
            changed = self._changed
            while self._freed <= cursor.place < self.next_place:
                event = self.events[cursor.place - self._freed]
                cursor.place += 1
                if event.number > number:
                    yield event.frame
            if self.has_ended:
                if self.error is not None:
                    raise self.error
                return
            await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(slots=True)
class RunningAnswers:
    """The answers that are being made and can be named, and the tasks of those that are made in the
    background.
    """

    logs: dict[RecordKey, EventLog] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _unwritten: deque[RecordKey] = field(default_factory=lambda: deque(maxlen=_MOST_UNWRITTEN))

    def keep_unwritten(self, name: RecordKey, log: EventLog) -> None:
        """Go on to have an answer that has ended, as it could not be written to where it belongs:
        the latest of these.
        """
        if len(self._unwritten) == _MOST_UNWRITTEN:
            self.logs.pop(self._unwritten[0], None)
        self._unwritten.append(name)
        self.logs[name] = log

    async def close(self) -> None:
        """End all that run in the background, as the server's stop does; returns when they have
        said so.
        """
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)
