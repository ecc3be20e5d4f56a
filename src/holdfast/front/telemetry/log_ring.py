"""The latest lines of the log in memory, for `/admin/logs`: bounded in number and in size."""

from __future__ import annotations

import logging
from collections import deque
from itertools import dropwhile
from typing import Literal, TypeAlias, get_args

import msgspec

from holdfast.front.telemetry.request_log import (
    RequestRecord,
    current_request_id,
    escaped,
    printable,
)

LevelName: TypeAlias = Literal["debug", "info", "warning", "error", "critical"]
LEVELS: tuple[LevelName, ...] = get_args(LevelName)
MOST_LINES = 2000
MOST_CHARACTERS = 1 << 20
LONGEST_LINE = 8000  # characters
_LEVEL_NUMBERS = logging.getLevelNamesMapping()


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the log.

    `number` counts the lines since the server's start, from 1. `time` is in seconds since 1970.
    `request_id` is the id of the request during which it was written, empty if none. Control
    characters in `text` are escaped, except for line breaks; prompts and answers are left out, even
    if they are logged.
    """

    number: int
    time: float
    level: LevelName
    logger: str
    request_id: str
    text: str


class LogRing(logging.Handler):
    """Keeps the latest lines. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[LogLine] = deque(maxlen=MOST_LINES)
        self._characters = 0  # in all kept lines
        self._latest_number = 0  # of the latest line
        self._formatter = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line of a record. The handler's lock is held."""
        try:
            line = self._line_of(record)
        except (TypeError, ValueError, LookupError):  # the message does not fit its arguments
            self.handleError(record)
            return
        if len(self._lines) == MOST_LINES:
            self._drop_oldest()
        self._lines.append(line)
        self._characters += len(line.text)
        while self._characters > MOST_CHARACTERS:
            self._drop_oldest()

    def lines(
        self, *, after: int = 0, level: LevelName = "debug", request_id: str = "", text: str = ""
    ) -> list[LogLine]:
        """The kept lines with a number above `after`, the oldest first.

        level: the lowest level to return. request_id: only lines of this request, or that contain
        its id. text: only lines that contain it, ignoring case.
        """
        self.acquire()
        try:
            new_lines = [*dropwhile(lambda line: line.number <= after, self._lines)]
        finally:
            self.release()
        folded_text = text.casefold()
        lowest_level = LEVELS.index(level)
        return [
            line
            for line in new_lines
            if LEVELS.index(line.level) >= lowest_level
            and (not request_id or request_id == line.request_id or request_id in line.text)
            and (not folded_text or folded_text in f"{line.logger} {line.text}".casefold())
        ]

    @property
    def latest_number(self) -> int:
        """The number of the latest line; 0 if there is none."""
        return self._latest_number

    def _line_of(self, record: logging.LogRecord) -> LogLine:
        """Convert a record, and count it. Raises if the message does not fit its arguments."""
        if isinstance(record.msg, RequestRecord):
            request_id = record.msg.request_id
            text = record.msg.line
        else:
            request_id = current_request_id()
            text = "\n".join(escaped(part) for part in record.getMessage().split("\n"))
        if record.exc_info:
            trace = self._formatter.formatException(record.exc_info)
            text = "\n".join((text, *(escaped(part) for part in trace.split("\n"))))
        if len(text) > LONGEST_LINE:
            text = f"{text[:LONGEST_LINE]}… ({len(text) - LONGEST_LINE:,} more characters)"
        self._latest_number += 1
        return LogLine(
            number=self._latest_number,
            time=record.created,
            level=_level_name(record.levelno),
            logger=record.name,
            request_id=printable(request_id),
            text=text,
        )

    def _drop_oldest(self) -> None:
        self._characters -= len(self._lines.popleft().text)


def _level_name(level: int) -> LevelName:
    """The highest level that is not above this number."""
    reached_levels = (name for name in LEVELS[::-1] if level >= _LEVEL_NUMBERS[name.upper()])
    return next(reached_levels, LEVELS[0])
