"""Real problems with volumes, for tests: small ones, read-only ones.

The test is skipped if the system does not allow it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def _mount(*words: str) -> None:
    try:
        done = subprocess.run(["mount", *words], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode != 0:
        pytest.skip(f"mounting is not allowed here: {done.stderr.decode().strip()}")


@contextmanager
def small_volume(path: Path, *, size_bytes: int) -> Iterator[Path]:
    """A separate file system of this size."""
    path.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path))
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    """Makes everything below `path` read-only, even for root."""
    if os.geteuid() != 0:
        mode = path.stat().st_mode
        folders = [path, *(child for child in path.rglob("*") if child.is_dir())]
        for folder in folders:
            folder.chmod(0o500)
        try:
            yield
        finally:
            for folder in folders:
                folder.chmod(mode)
        return
    _mount("--bind", str(path), str(path))
    try:
        _mount("-o", "remount,ro,bind", str(path))
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
