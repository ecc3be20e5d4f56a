"""Runs a kernel's tests again, compiled for processors with fewer instructions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Compiled in a fraction of the time of the usual flags.
QUICKLY = "-O1"


def folder_of_kernels(config: pytest.Config, *, otherwise: Path) -> Path:
    """The folder for kernels with fewer instructions, which is kept for the next test run.

    otherwise: a folder that pytest does not keep between two runs.
    """
    cache: pytest.Cache | None = getattr(config, "cache", None)
    return otherwise if cache is None else cache.mkdir("kernels")


def assert_passes(file: str, *, less: str, folder: Path) -> None:
    """Assert that the tests of a file's kernel, except those with "processors" in their names, pass
    in another process that compiles kernels with an additional flag.

    less: the flag. folder: for caches, so that the user's compiled kernels are unchanged.
    """
    code = (
        "from holdfast.worker.cpu.kernels import build\n"
        f"build._FLAGS = (*build._FLAGS, {less!r}, {QUICKLY!r})\n"
        "import pytest, sys\n"
        f"sys.exit(pytest.main([{file!r}, '-q', '-x', '-k', 'not processors and not numpy',"
        " '-p', 'no:cacheprovider']))\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
