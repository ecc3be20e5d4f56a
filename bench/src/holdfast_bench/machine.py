"""Describes the machine of a run, and its load."""

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

# as in holdfast/__init__.py, which is not imported here because it imports the library
DISTRIBUTION = "holdfast-mlx"
_PACKAGES = ("mlx", "mlx-lm", "xllamacpp", DISTRIBUTION)
# prefixes of variables that affect threads, instructions and kernels
_PREFIXES = (
    *("BLIS_", "GGML_", "GOMP_", "KMP_", "MKL_", "MLX_", "OMP_", "OPENBLAS_", "VECLIB_"),
    SWITCH,
)


def machine(*, watched_seconds: float = 1.0) -> dict[str, Any]:
    """Facts for the result file, including the load during `watched_seconds`."""
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
        "busy_before": psutil.cpu_percent(watched_seconds)
        / 100,  # share of all cores, used by other programs
        "load_average": round(os.getloadavg()[0], 2),
    }


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def holdfast_version() -> str:
    """The version of the installed package."""
    return _version(DISTRIBUTION)


def commit() -> str:
    """The commit of this source tree, with a + if it has changes; "" if there is none."""
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
