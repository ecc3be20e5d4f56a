"""The log in a file of its own, which is set aside when it is large enough; so many of these are
kept, and the oldest goes.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging.handlers
import os
import stat
import sys
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import TextIO

from holdfast.config import LogSettings
from holdfast.errors import ConfigError
from holdfast.files import expanded

LOG_SUFFIX = ".log"  # those that were set aside end with a number more: server-8321.log.1
AUTO, OFF, BACKGROUND = "auto", "off", "background"
_MOST_AT_ONCE = 100  # servers that would write the same file


class LogFile(logging.handlers.RotatingFileHandler):
    """Writes a log file that only its owner may read and that no other process writes, and sets it
    aside when it is full.
    """

    def __init__(self, path: Path, settings: LogSettings) -> None:
        """Raises OSError, and BlockingIOError when another process writes that file."""
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
        """The file that is being written."""
        return Path(self.baseFilename)

    def close(self) -> None:
        """Close it; another process may write it from now on."""
        super().close()
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return TextIOWrapper(
            os.fdopen(os.open(self.baseFilename, flags, 0o600), "ab"), encoding="utf-8"
        )


def open_log_file(
    settings: LogSettings, *, folder: Callable[[], Path], name: str
) -> LogFile | None:
    """The file that the settings ask for; None: none. folder, name: of the one that `auto` means.

    Raises ConfigError.
    """
    if settings.file in ("", OFF) or (settings.file == BACKGROUND and _is_read(sys.stderr)):
        return None
    if settings.file not in (AUTO, BACKGROUND):
        return _opened(expanded(settings.file), settings)
    try:
        for number in range(1, _MOST_AT_ONCE):
            with contextlib.suppress(BlockingIOError):
                return LogFile(
                    folder() / f"{name}{'' if number == 1 else f'-{number}'}{LOG_SUFFIX}", settings
                )
    except (OSError, RuntimeError) as error:  # or a user without a home
        if settings.file == BACKGROUND:  # nobody asked for it
            logging.getLogger(__name__).warning("there is no place for a log file: %s", error)
            return None
        raise ConfigError(f"log.file: there is no place for a log: {error}") from None
    raise ConfigError(
        "log.file: too many servers write a log at this port already; name another file"
    )


def _is_read(stream: TextIO | None) -> bool:
    """Whether somebody reads a stream: a person at a terminal, or the program at the other end of a
    pipe or socket.
    """
    try:
        mode = os.fstat(stream.fileno()).st_mode if stream is not None else 0
    except (OSError, ValueError):  # it is closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or (stream is not None and stream.isatty())


def _opened(path: Path, settings: LogSettings) -> LogFile:
    try:
        return LogFile(path, settings)
    except BlockingIOError:
        raise ConfigError(
            f"log.file: another server writes {path} already; name another file"
        ) from None
    except OSError as error:
        raise ConfigError(f"log.file: {path}: {error.strerror or error}") from None


def log_uncaught() -> None:
    """Have what ends this process unforeseen written into the log as well, where nobody may see its
    standard error.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, Exception):
            logging.getLogger("holdfast").critical(
                "the server ends: an error that nobody foresaw", exc_info=(kind, error, trace)
            )
        else:
            before(kind, error, trace)

    sys.excepthook = hook
