"""The cores that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")  # a CPU is a hardware thread of a core
_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(*, cpus: Path = _CPUS, cgroup: Path = _CGROUP) -> int:
    """Count the physical cores that the scheduler and the control group allow this process; at
    least 1.

    Two hardware threads of a core count once, because the second one does not make matrix products
    faster.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed_cpus = sorted(os.sched_getaffinity(0))
        cores = len({_core_of(cpu, cpus) for cpu in allowed_cpus})
    else:
        cores = os.cpu_count() or 1
    quota = _cpu_quota(cgroup)
    if quota:
        cores = min(cores, math.ceil(quota))
    return max(1, cores)


def _core_of(cpu: int, cpus: Path) -> tuple[str, ...]:
    """Identifies the core to which a CPU belongs: its socket and its number there."""
    topology = cpus / f"cpu{cpu}" / "topology"
    try:
        return (topology / "physical_package_id").read_text().strip(), (
            topology / "core_id"
        ).read_text().strip()
    except OSError:
        return (str(cpu),)  # its core is unknown: count each CPU as one


def _cpu_quota(cgroup: Path) -> float:
    """Return the CPUs granted by the control group (version 2 or 1); 0 without a limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return 0.0 if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass  # not version 2
    try:
        quota_us = int((cgroup / "cpu/cpu.cfs_quota_us").read_text())
        return max(quota_us, 0) / int((cgroup / "cpu/cpu.cfs_period_us").read_text())
    except (OSError, ValueError, ZeroDivisionError):
        return 0.0
