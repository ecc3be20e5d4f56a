"""What MLX compiles for a worker, kept from one worker to the next in a place that only its owner
can write.

MLX compiles fused operations (a second each on a CPU) and loads them again from `$TMPDIR/mlx` under
names that anybody can foretell. So each worker has a TMPDIR of its own. It is given copies of what
earlier workers have compiled, and what it compiled itself is taken back when it is ready and when
it has ended in order: nothing is being compiled then, so that every file is whole.
"""

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
from pathlib import Path

from holdfast.files import atomic_write

_NAME = "mlx"  # MLX's own, in the folder for temporary files
MOST_KINDS = 4  # of machines and systems; the longest unused go

logger = logging.getLogger("holdfast.front.fleet")


class WorkerTemporaries:
    """The folder for one worker's temporary files, which only we may look into.

    It lies in that of this process.
    """

    def __init__(self, kept: str) -> None:
        """kept: where compiled code is kept; empty: nowhere."""
        self._kept = Path(kept) if kept else None
        self._folder = Path(tempfile.mkdtemp(prefix="worker-"))
        if self._kept is not None:
            _lend(self._kept, self._folder)

    @property
    def environment(self) -> dict[str, str]:
        """What the worker's environment needs of it."""
        return {"TMPDIR": str(self._folder)}

    def keep_compiled(self) -> None:
        """Keep what the worker has compiled.

        Call only when it compiles nothing: files must be whole.
        """
        if self._kept is not None:
            _take_back(self._kept, self._folder)

    def remove(self) -> None:
        """Delete everything."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _lend(kept: Path, temporary: Path) -> None:
    """Copy what is kept into a worker's new folder for temporary files.

    Without it the worker compiles, which takes time only.
    """
    source = _of_this_machine(kept)
    if _is_ours_alone(kept) and source.is_dir():
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(source, temporary / _NAME, symlinks=True)


def _take_back(kept: Path, temporary: Path) -> None:
    """Keep what a worker has compiled that was not kept yet."""
    target = _of_this_machine(kept)
    try:
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours_alone(kept):
            return
        for path in sorted((temporary / _NAME).rglob("*")):
            place = target / path.relative_to(temporary / _NAME)
            if path.is_file() and not path.is_symlink() and not place.exists():
                _copy_whole(path, place)
        if target.is_dir():
            os.utime(target)
        _bound(kept)
    except OSError as error:
        logger.info("what MLX has compiled is not kept for the next start: %s", error)


def _copy_whole(path: Path, place: Path) -> None:
    """Copy a file so that it is there whole or not at all, also after a power cut: a cut library
    could never be loaded.
    """
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("rb") as file, atomic_write(place) as out:
        shutil.copyfileobj(file, out)
        out.flush()
        os.fsync(out.fileno())
        os.fchmod(out.fileno(), 0o700)


def _bound(kept: Path) -> None:
    kinds = sorted(
        (path for path in kept.iterdir() if path.is_dir()),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    for path in kinds[MOST_KINDS:]:
        shutil.rmtree(path, ignore_errors=True)


def _of_this_machine(kept: Path) -> Path:
    """The part for this machine: a home may be shared by several, and libraries are bound to
    processor and system.
    """
    machine = (sys.platform, platform.machine(), platform.node(), *platform.libc_ver())
    return kept / hashlib.blake2b("/".join(machine).encode(), digest_size=8).hexdigest()


def _is_ours_alone(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    private = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and private
