"""Files that workers leave on disk: code compiled by MLX (for later workers) and crash reports."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import stat
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.files import atomic_write

MOST_REPORTS = 20  # of crash reports; the oldest are deleted
MOST_REQUESTS = 20  # listed in one report
# combinations of machine and system whose compiled code is kept; those unused for longest are
# deleted
MOST_KINDS = 4
_REPORT_SUFFIX = ".crash.json"
_LIBRARIES = ("holdfast-mlx", "mlx", "mlx-lm", "mlx-cuda-12", "mlx-metal")
_MLX_FOLDER = "mlx"  # MLX's own name for its folder in the folder for temporary files

logger = logging.getLogger("holdfast.front.fleet")


class WorkerTemporaries:
    """A private folder for one worker's temporary files, with copies of the code compiled by
    earlier workers.

    MLX compiles fused operations (a second each on a CPU) and loads the libraries again from
    `$TMPDIR/mlx`, under predictable names. So each worker gets its own TMPDIR, with copies of the
    files that earlier workers compiled. New libraries are collected when the worker is ready, and
    again when it has exited cleanly. The worker compiles nothing at these times, so no file is
    partial.
    """

    def __init__(self, code_folder: str) -> None:
        """code_folder: where compiled code is kept for later workers; empty: nowhere."""
        self._code_folder = Path(code_folder) if code_folder else None
        self._folder = Path(tempfile.mkdtemp(prefix="worker-"))
        if self._code_folder is None or not _is_ours_alone(self._code_folder):
            return
        source = machine_subfolder(self._code_folder)
        if source.is_dir():
            # without the copies the worker compiles everything itself, which only takes time
            with contextlib.suppress(OSError, shutil.Error):
                shutil.copytree(source, self._folder / _MLX_FOLDER, symlinks=True)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the worker."""
        return {"TMPDIR": str(self._folder)}

    def keep_compiled(self) -> None:
        """Copy the code that the worker has compiled to the folder for compiled code.

        Call this only while the worker compiles nothing.
        """
        if self._code_folder is None:
            return
        compiled = self._folder / _MLX_FOLDER
        target_folder = machine_subfolder(self._code_folder)
        try:
            self._code_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_ours_alone(self._code_folder):
                return
            for path in sorted(compiled.rglob("*")):
                target_file = target_folder / path.relative_to(compiled)
                if path.is_file() and not path.is_symlink() and not target_file.exists():
                    _copy_whole(path, target_file)
            if target_folder.is_dir():
                os.utime(target_folder)
            _delete_unused(self._code_folder)
        except OSError as error:
            logger.info("the code compiled by MLX is not kept for the next start: %s", error)

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _copy_whole(path: Path, target: Path) -> None:
    """Copy a file completely or not at all, even if the power fails: half a library could never be
    loaded.
    """
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("rb") as file, atomic_write(target) as copy:
        shutil.copyfileobj(file, copy)
        copy.flush()
        os.fsync(copy.fileno())
        os.fchmod(copy.fileno(), 0o700)


def _delete_unused(code_folder: Path) -> None:
    """Delete the compiled code of the machines that have not used it for longest."""
    machine_folders = [path for path in code_folder.iterdir() if path.is_dir()]
    machine_folders.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in machine_folders[MOST_KINDS:]:
        shutil.rmtree(path, ignore_errors=True)


def machine_subfolder(code_folder: Path) -> Path:
    """The subfolder for this machine.

    Several machines may share a home directory, and libraries depend on processor and system.
    """
    machine = (sys.platform, platform.machine(), platform.node(), *platform.libc_ver())
    return code_folder / hashlib.blake2b("/".join(machine).encode(), digest_size=8).hexdigest()


def _is_ours_alone(folder: Path) -> bool:
    """Whether only this user can write to the folder, so that its libraries are safe to load."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    is_private = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and is_private


class RequestAtCrash(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a worker that died. Contains counts, never content."""

    prompt_tokens: int
    generated_tokens: int  # by this worker
    is_constrained: bool = False  # by a grammar or a reasoning budget


class CrashReport(msgspec.Struct, frozen=True, kw_only=True):
    """A report about the end of one worker."""

    at: str  # ISO 8601, UTC
    model: str
    cause: Literal["died", "hung"]
    how: str  # the signal or exit code, or how it hung, in words
    pid: int
    served_seconds: float | None  # None: it died while loading
    requests: tuple[RequestAtCrash, ...] = ()  # the oldest requests, up to MOST_REQUESTS
    more_requests: int = 0  # number of those that are not listed
    # ids of requests that ran alone when it died; they are not tried again
    refused: tuple[str, ...] = ()
    # the last figures that the worker reported
    running: int = 0
    queued: int = 0
    steps: int = 0
    resident_bytes: int = 0
    kv_reserved_bytes: int = 0
    log: tuple[str, ...] = ()  # the last lines of the worker's log, with the traceback of a fault
    versions: Mapping[str, str] = {}  # of Python, the system and packages, by name


def write_report(folder: str, report: CrashReport) -> None:
    """Write a report and delete the oldest ones. A failure is only logged."""
    if not folder:
        return
    reports_folder = Path(folder)
    try:
        reports_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{report.at.replace(':', '-')}-{report.pid}{_REPORT_SUFFIX}"
        with atomic_write(reports_folder / name) as file:
            file.write(msgspec.json.format(msgspec.json.encode(report), indent=2))
        for path in _report_files(reports_folder)[:-MOST_REPORTS]:
            path.unlink(missing_ok=True)  # another server may have deleted it
    except OSError as error:
        logger.warning("cannot write the crash report: %s", error)


def last_report(folder: str) -> CrashReport | None:
    """The newest readable crash report; None if there is none."""
    for path in reversed(_report_files(Path(folder))) if folder else ():
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(path.read_bytes(), type=CrashReport)
    return None


def _report_files(folder: Path) -> list[Path]:
    """Return the reports, oldest first. Their names begin with the time."""
    return sorted(folder.glob(f"*{_REPORT_SUFFIX}"))


def installed_versions() -> dict[str, str]:
    """Versions of Python, of the system, and of the libraries that may cause a crash."""
    system = os.uname()
    versions = {"python": platform.python_version(), "system": f"{system.sysname} {system.release}"}
    for library in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[library] = metadata.version(library)
    return versions
