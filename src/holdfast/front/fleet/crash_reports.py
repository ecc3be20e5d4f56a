"""What is written down when a worker dies: how, what ran (counts, never content), its last lines.

Files, bounded in number.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import logging
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.files import atomic_write
from holdfast.wire.events import WorkerStatistics

MOST_REPORTS = 20  # the oldest go
MOST_REQUESTS = 20  # that one report tells of
_LIBRARIES = ("holdfast-mlx", "mlx", "mlx-lm", "mlx-cuda-12", "mlx-metal")
_SUFFIX = ".crash.json"

logger = logging.getLogger("holdfast.front.fleet")


class RequestAtCrash(msgspec.Struct, frozen=True, kw_only=True):
    """One request that a worker had when it died. Counts only."""

    prompt_tokens: int
    drawn_tokens: int
    is_constrained: bool = False  # by a grammar or a budget for its thoughts


class CrashReport(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one worker."""

    at: str  # ISO 8601, UTC
    model: str
    cause: Literal["died", "hung"]
    how: str  # the signal or exit code, or how it hung, in words
    pid: int
    served_seconds: float | None  # None: it died while it loaded
    requests: tuple[RequestAtCrash, ...] = ()  # the first of them
    more_requests: int = 0
    # ids of requests that are not tried again, for it died of them alone
    refused: tuple[str, ...] = ()
    running: int = 0  # as it told last
    queued: int = 0
    steps: int = 0
    resident_bytes: int = 0
    kv_reserved_bytes: int = 0
    log: tuple[str, ...] = ()  # the last lines that it wrote; the traceback of a fault among them
    versions: Mapping[str, str] = {}


def report_of(
    model: str,
    *,
    cause: Literal["died", "hung"],
    how: str,
    pid: int,
    served_seconds: float | None,
    figures: WorkerStatistics,
    log: tuple[str, ...],
    requests: tuple[RequestAtCrash, ...] = (),
    refused: tuple[str, ...] = (),
) -> CrashReport:
    """The report of what has just happened."""
    shown = requests[:MOST_REQUESTS]
    return CrashReport(
        at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        model=model,
        cause=cause,
        how=how,
        pid=pid,
        served_seconds=None if served_seconds is None else round(served_seconds, 3),
        requests=shown,
        more_requests=len(requests) - len(shown),
        refused=refused,
        running=figures.running,
        queued=figures.queued,
        steps=figures.steps,
        resident_bytes=figures.resident_bytes,
        kv_reserved_bytes=figures.kv_reserved_bytes,
        log=log,
        versions=_versions(),
    )


def write_report(folder: str, report: CrashReport) -> None:
    """Keep a report, and the newest others.

    What cannot be written is told in the log, and costs nothing else.
    """
    if not folder:
        return
    place = Path(folder)
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_write(place / f"{report.at.replace(':', '-')}-{report.pid}{_SUFFIX}") as file:
            file.write(msgspec.json.format(msgspec.json.encode(report), indent=2))
        for path in _reports(place)[:-MOST_REPORTS]:
            with contextlib.suppress(FileNotFoundError):  # another server has just done so
                path.unlink()
    except OSError as error:
        logger.warning("the crash report could not be kept: %s", error)


def last_report(folder: str) -> CrashReport | None:
    """The newest report that can be read; None when there is none."""
    for path in reversed(_reports(Path(folder))) if folder else ():
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(path.read_bytes(), type=CrashReport)
    return None


def _reports(folder: Path) -> list[Path]:
    """Oldest first: their names begin with the time."""
    return sorted(folder.glob(f"*{_SUFFIX}"))


def _versions() -> dict[str, str]:
    versions = {
        "python": platform.python_version(),
        "system": f"{os.uname().sysname} {os.uname().release}",
    }
    for library in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[library] = importlib.metadata.version(library)
    return versions
