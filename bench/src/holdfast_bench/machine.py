"""The machine that a run was made on, and what else it was doing."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from holdfast.worker.cpu.kernels.build import SWITCH

# as in holdfast/__init__.py, which may not be imported here: it leads to the library
DISTRIBUTION = "holdfast-mlx"
_PACKAGES = ("mlx", "mlx-lm", "xllamacpp", DISTRIBUTION)
# of variables that choose threads, instructions and kernels of what is measured
_PREFIXES = (
    *("BLIS_", "GGML_", "GOMP_", "KMP_", "MKL_", "MLX_", "OMP_", "OPENBLAS_", "VECLIB_"),
    SWITCH,
)


def machine(*, watched_seconds: float = 1.0) -> dict[str, Any]:
    """Facts for the result file.

    Looks for a while how busy the machine is before anything is started.
    """
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)
        },
        "busy_before": psutil.cpu_percent(watched_seconds) / 100,  # share of all cores, by others
        "load_average": round(os.getloadavg()[0], 2),
    }


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def holdfast_version() -> str:
    """Of the installed package."""
    return _version(DISTRIBUTION)


def commit() -> str:
    """The commit of the source tree that this runs from, with a + when there are changes; ""
    outside of one.
    """
    folder = Path(__file__).resolve().parent
    head = _git(folder, "rev-parse", "--short", "HEAD")
    return head + (
        "+" if head and _git(folder, "status", "--porcelain", "--untracked-files=no") else ""
    )


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    if facts.exists():
        names = [
            line.partition(":")[2].strip()
            for line in facts.read_text().splitlines()
            if line.startswith("model name")
        ]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
