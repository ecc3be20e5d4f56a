"""Logging: lines for people or as JSON, on standard error and in a rotating file.

Only one server at a time writes a log file: it holds a lock on the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import logging.handlers
import os
import stat
import sys
import time
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import TextIO

from holdfast.config import LogSettings
from holdfast.errors import ConfigError
from holdfast.files import expanded
from holdfast.front.telemetry.log_ring import LogRing
from holdfast.front.telemetry.request_log import RequestRecord, escaped

LOG_SUFFIX = ".log"  # in rotated files, a number follows: server-8321.log.1
AUTO, OFF, BACKGROUND = "auto", "off", "background"
_MAX_FILES_PER_NAME = 100
_DIM, _RED, _GREEN, _YELLOW = "2", "31", "32", "33"
_LEVEL_COLOURS = {
    logging.DEBUG: _DIM,
    logging.WARNING: _YELLOW,
    logging.ERROR: _RED,
    logging.CRITICAL: _RED,
}
_CONTINUATION = "\n    "  # a message must not contain a line that looks like a log line


class LogFile(logging.handlers.RotatingFileHandler):
    """A rotating log file that only its owner can read and only this process writes."""

    def __init__(self, path: Path, settings: LogSettings) -> None:
        """Open the file at `path`.

        Raises OSError, and BlockingIOError if another process writes the file.
        """
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_file = os.open(
            path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            super().__init__(
                path, maxBytes=settings.file_bytes, backupCount=settings.old_files, encoding="utf-8"
            )
        except BaseException:
            os.close(self._lock_file)
            raise

    @property
    def path(self) -> Path:
        """The path of the current file."""
        return Path(self.baseFilename)

    def close(self) -> None:
        """Close the file, so that another process can write it."""
        super().close()
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1

    def _open(self) -> TextIOWrapper:
        """Open the current file, which only its owner can read. Logging also calls this to rotate."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return TextIOWrapper(
            os.fdopen(os.open(self.baseFilename, flags, 0o600), "ab"), encoding="utf-8"
        )


def open_log_file(
    settings: LogSettings, *, folder: Callable[[], Path], name: str
) -> LogFile | None:
    """Open the log file that the settings ask for. Returns None if they ask for none.

    folder, name: the folder and the name of the file if the setting is `auto`. Raises ConfigError.
    """
    if settings.file in ("", OFF) or (settings.file == BACKGROUND and _may_be_read(sys.stderr)):
        return None
    if settings.file not in (AUTO, BACKGROUND):
        return _open_named_file(expanded(settings.file), settings)
    try:
        for number in range(1, _MAX_FILES_PER_NAME):
            with contextlib.suppress(BlockingIOError):
                return LogFile(
                    folder() / f"{name}{'' if number == 1 else f'-{number}'}{LOG_SUFFIX}", settings
                )
    except (OSError, RuntimeError) as error:  # RuntimeError: the user lacks a home folder
        if settings.file == BACKGROUND:  # the default
            logging.getLogger(__name__).warning("no log file can be created: %s", error)
            return None
        raise ConfigError(f"log.file: no log file can be created: {error}") from None
    raise ConfigError(
        "log.file: too many servers already write a log for this port; name another file"
    )


def _may_be_read(stream: TextIO | None) -> bool:
    """Whether the stream is a terminal, a pipe or a socket, where somebody may read it."""
    try:
        mode = os.fstat(stream.fileno()).st_mode if stream is not None else 0
    except (OSError, ValueError):  # the stream is closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or (stream is not None and stream.isatty())


def _open_named_file(path: Path, settings: LogSettings) -> LogFile:
    """Open a file that the setting names. Raises ConfigError."""
    try:
        return LogFile(path, settings)
    except BlockingIOError:
        raise ConfigError(
            f"log.file: another server already writes {path}; name another file"
        ) from None
    except OSError as error:
        raise ConfigError(f"log.file: {path}: {error.strerror or error}") from None


def log_uncaught() -> None:
    """Make Python also log uncaught exceptions, because nobody may be reading standard error."""
    original_hook = sys.excepthook

    def hook(
        error_type: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if issubclass(error_type, Exception):
            logging.getLogger("holdfast").critical(
                "unexpected error; the server exits", exc_info=(error_type, error, trace)
            )
        else:
            original_hook(error_type, error, trace)

    sys.excepthook = hook


class JsonLines(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, request fields, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as one line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if isinstance(record.msg, RequestRecord):
            line |= record.msg.fields
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextLines(logging.Formatter):
    """Lines for people: time, level, logger (not for requests) and message, optionally coloured."""

    def __init__(self, *, coloured: bool, dated: bool = False) -> None:
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S" if dated else "%H:%M:%S")
        self._coloured = coloured

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as a line. Further lines of the message are indented."""
        time_of_day = self._coloured_text(self.formatTime(record, self.datefmt), _DIM)
        level = self._coloured_text(f"{record.levelname:7}", _LEVEL_COLOURS.get(record.levelno, ""))
        line = f"{time_of_day} {level} {self._message_text(record)}"
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            line = "\n".join((line, *(escaped(each) for each in trace.split("\n"))))
        return line

    def _message_text(self, record: logging.LogRecord) -> str:
        """The text after time and level: a request's line, or the logger and its message."""
        if isinstance(record.msg, RequestRecord):
            return self._request_text(record.msg)
        text = _CONTINUATION.join(escaped(part) for part in record.getMessage().split("\n"))
        return f"{self._coloured_text(record.name + ':', _DIM)} {text}"

    def _request_text(self, request: RequestRecord) -> str:
        """The line of a request, with its status coloured by the kind of status."""
        if not self._coloured:
            return str(request)
        colour = _GREEN if request.status < 400 else _YELLOW if request.status < 500 else _RED
        after_status = str(request).removeprefix(f"{request.head} {request.status}")
        return f"{request.head} {self._coloured_text(str(request.status), colour)}{after_status}"

    def _coloured_text(self, text: str, colour: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._coloured and colour else text


def configure_logging(
    settings: LogSettings, *, file: LogFile | None = None, ring: LogRing | None = None
) -> None:
    """Send all logs to standard error, to a file, and into memory. Replaces earlier handlers.

    Text is coloured on a terminal, unless NO_COLOR is set or TERM is dumb.
    """
    is_json = settings.format == "json"
    terminal = logging.StreamHandler(sys.stderr)
    coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    coloured = coloured and os.environ.get("TERM") != "dumb"
    terminal.setFormatter(JsonLines() if is_json else TextLines(coloured=coloured))
    handlers: list[logging.Handler] = [terminal]
    if file is not None:
        file.setFormatter(JsonLines() if is_json else TextLines(coloured=False, dated=True))
        handlers.append(file)
    if ring is not None:
        handlers.append(ring)
    logging.basicConfig(handlers=handlers, force=True)
    set_level(settings)


def set_level(settings: LogSettings) -> None:
    """Apply the log level of these settings."""
    logging.getLogger().setLevel(settings.level.upper())
    for noisy in ("uvicorn.error", "httpx", "httpx2", "filelock", "urllib3"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))
