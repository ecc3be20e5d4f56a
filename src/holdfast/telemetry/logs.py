"""How log lines look. Called once per process, by whoever starts it."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from holdfast.config import LogSettings
from holdfast.telemetry.log_file import LogFile
from holdfast.telemetry.printable import escaped
from holdfast.telemetry.request_log import RequestRecord

_DIM, _RED, _GREEN, _YELLOW = "2", "31", "32", "33"
_LEVEL_COLOURS = {
    logging.DEBUG: _DIM,
    logging.WARNING: _YELLOW,
    logging.ERROR: _RED,
    logging.CRITICAL: _RED,
}
_CONTINUATION = "\n    "  # no line but the first of a message may look like one of ours


class JsonLines(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, the fields of a request, the
    traceback if there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line."""
        line = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
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
    """Lines for people: time, level, logger and message, a request without the logger; coloured
    where that is wished.
    """

    def __init__(self, *, coloured: bool, dated: bool = False) -> None:
        super().__init__(datefmt="%Y-%m-%d %H:%M:%S" if dated else "%H:%M:%S")
        self._coloured = coloured

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line, or several that are indented."""
        time_of_day = self._painted(self.formatTime(record, self.datefmt), _DIM)
        level = self._painted(f"{record.levelname:7}", _LEVEL_COLOURS.get(record.levelno, ""))
        line = f"{time_of_day} {level} {self._message(record)}"
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            line = "\n".join((line, *(escaped(each) for each in trace.split("\n"))))
        return line

    def _message(self, record: logging.LogRecord) -> str:
        if isinstance(record.msg, RequestRecord):
            return self._request(record.msg)
        text = _CONTINUATION.join(escaped(part) for part in record.getMessage().split("\n"))
        return f"{self._painted(record.name + ':', _DIM)} {text}"

    def _request(self, line: RequestRecord) -> str:
        if not self._coloured:
            return str(line)
        colour = _GREEN if line.status < 400 else _YELLOW if line.status < 500 else _RED
        rest = str(line).removeprefix(f"{line.head} {line.status}")
        return f"{line.head} {self._painted(str(line.status), colour)}{rest}"

    def _painted(self, text: str, colour: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._coloured and colour else text


def configure_logging(
    settings: LogSettings,
    *,
    stream: TextIO | None = None,
    environ: Mapping[str, str] | None = None,
    file: LogFile | None = None,
) -> None:
    """Send all logs to `stream` (standard error) in the wished form, and to a file, instead of what
    was set up before.

    Text is coloured on a terminal, unless `environ` (this process') has NO_COLOR or a TERM that
    knows no colours.
    """
    out = stream or sys.stderr
    handler = logging.StreamHandler(out)
    text = TextLines(
        coloured=out.isatty() and _may_be_coloured(os.environ if environ is None else environ)
    )
    handler.setFormatter(JsonLines() if settings.format == "json" else text)
    handlers: list[logging.Handler] = [handler]
    if file is not None:
        file.setFormatter(
            JsonLines() if settings.format == "json" else TextLines(coloured=False, dated=True)
        )
        handlers.append(file)
    logging.basicConfig(handlers=handlers, force=True)
    set_level(settings)


def set_level(settings: LogSettings) -> None:
    """From now on log what is severe enough by these settings."""
    logging.getLogger().setLevel(settings.level.upper())
    for noisy in ("uvicorn.error", "httpx", "httpx2", "filelock", "urllib3"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))


def _may_be_coloured(environ: Mapping[str, str]) -> bool:
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
