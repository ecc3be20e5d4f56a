"""Where damaged files go: kept for a look, bounded, never read again."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

from holdfast.store.block import BadBlock

SUFFIX = ".bad"
_OTHER = re.compile(r"[^a-z0-9]+")


def quarantine(path: Path, bad: BadBlock, *, folder: Path) -> None:
    """Move a damaged file, if it is still there, into the quarantine folder, under a name that says
    why. Raises OSError.
    """
    reason = _OTHER.sub("-", bad.reason.lower()).strip("-")[:40]
    folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.replace(path, folder / f"{time.time_ns():020d}.{bad.key.hex()}.{reason}{SUFFIX}")


def bound_quarantine(folder: Path, *, most_bytes: int, most_files: int) -> int:
    """Delete the oldest files beyond the bounds. Returns how many files are left. Raises OSError."""
    kept, kept_bytes = 0, 0
    for path in reversed(quarantined_files(folder)):
        kept_bytes += path.lstat().st_size
        if kept < most_files and kept_bytes <= most_bytes:
            kept += 1
        else:
            path.unlink(missing_ok=True)
    return kept


def quarantined_files(folder: Path) -> list[Path]:
    """The files in quarantine, oldest first."""
    return sorted(
        path for path in folder.glob(f"*{SUFFIX}") if path.is_file() and not path.is_symlink()
    )
