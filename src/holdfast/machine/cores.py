"""How many cores this process may really use."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(*, cpus: Path = _CPUS, cgroup: Path = _CGROUP) -> int:
    """Physical cores that the scheduler and the control group leave to this process, at least 1.

    Two hardware threads of one core count once: matrix products gain nothing from the second.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        cores = len({_core_of(cpu, cpus) for cpu in allowed})
    else:
        cores = os.cpu_count() or 1
    quota = _cpu_quota(cgroup)
    return max(1, min(cores, math.ceil(quota)) if quota else cores)


def _core_of(cpu: int, cpus: Path) -> tuple[str, ...]:
    topology = cpus / f"cpu{cpu}" / "topology"
    try:
        return (topology / "physical_package_id").read_text().strip(), (
            topology / "core_id"
        ).read_text().strip()
    except OSError:
        return (str(cpu),)  # unknown: each one counts


def _cpu_quota(cgroup: Path) -> float:
    """CPUs that the control group grants, 0 without a limit; version 2, then version 1."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return 0.0 if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int((cgroup / "cpu/cpu.cfs_quota_us").read_text())
        return max(quota_us, 0) / int((cgroup / "cpu/cpu.cfs_period_us").read_text())
    except (OSError, ValueError, ZeroDivisionError):
        return 0.0
