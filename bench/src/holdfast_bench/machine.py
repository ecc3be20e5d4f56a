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
from holdfast_bench.results import Results

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
        # share of all cores, used by other programs
        "busy_before": psutil.cpu_percent(watched_seconds) / 100,
        "load_average": round(os.getloadavg()[0], 2),
    }


def new_results(command: str, *, kind: str = "scenarios") -> Results:
    """Results without cases, with the time and the version of Holdfast."""
    return Results(
        kind=kind,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        version=_version(DISTRIBUTION),
        commit=_commit(),
        command=command,
    )


def _commit() -> str:
    """The commit of this source tree, with a + if it has changes; "" if there is none."""
    describe = ("describe", "--always", "--exclude=*", "--dirty=+")
    command = ["git", "-C", str(Path(__file__).resolve().parent), *describe]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
