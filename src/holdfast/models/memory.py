"""How much memory this process may use, and how much of it live KV may take."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from holdfast.errors import ModelLoadError

_CGROUP = Path("/sys/fs/cgroup")
_KV_SHARE = 0.6  # of what is free after the weights; the rest is for activations, snapshots and everybody else
_SMALLEST_BUDGET_BYTES = 64 << 20
_LARGEST_AUTO_BUDGET_BYTES = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Memory in bytes, limits of control groups respected.

    `working_set_bytes`: what a GPU recommends to use at most, or has; 0 without one. `unified`: it is the machine's own memory.
    """

    total_bytes: int
    available_bytes: int
    working_set_bytes: int = 0
    unified: bool = sys.platform == "darwin"


def memory_report(*, working_set_bytes: int = 0, cgroup: Path = _CGROUP) -> MemoryReport:
    """What this process may use now. `working_set_bytes` comes from the device (`platform.working_set_bytes`)."""
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    limit, used = _cgroup_memory(cgroup)
    if 0 < limit < total:
        total, available = limit, min(available, max(limit - used, 0))
    return MemoryReport(total_bytes=total, available_bytes=available, working_set_bytes=working_set_bytes)


def usable_bytes(working_set_bytes: int) -> int:
    """How much the weights of a model may take now. With a GPU what its working set holds: the system makes room for that."""
    return max(memory_report().available_bytes, working_set_bytes)


def kv_budget_bytes(requested: int, *, memory: MemoryReport, weight_bytes: int) -> int:
    """The budget for live KV. `requested` is the setting model.memory_bytes, 0 for automatic. Call it after loading.

    Automatic: a share of what is available; with a GPU of what the weights leave of its working set (the smaller of the two where
    memory is unified). Raises ModelLoadError when a requested budget is larger than all memory.
    """
    discrete = memory.working_set_bytes > 0 and not memory.unified
    total = memory.working_set_bytes if discrete else memory.total_bytes
    if requested > total:
        raise ModelLoadError(f"model.memory_bytes = {requested:,} is more than the {total:,} bytes of memory that there are")
    if requested:
        return requested
    left_of_working_set = memory.working_set_bytes - weight_bytes
    if discrete:
        free = left_of_working_set
    elif memory.working_set_bytes:
        free = min(memory.available_bytes, left_of_working_set)
    else:
        free = memory.available_bytes
    return min(max(int(free * _KV_SHARE), _SMALLEST_BUDGET_BYTES), _LARGEST_AUTO_BUDGET_BYTES)


def _cgroup_memory(root: Path) -> tuple[int, int]:
    """Limit and reclaim-free use in bytes of the control group, (0, 0) where there is no limit; version 2, then version 1."""
    for limit_file, used_file, stat_file in (
        (root / "memory.max", root / "memory.current", root / "memory.stat"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes", root / "memory/memory.stat"),
    ):
        limit, used = _number(limit_file), _number(used_file)
        if limit:
            return limit, max(used - _inactive_file_bytes(stat_file), 0)
    return 0, 0


def _number(file: Path) -> int:
    try:
        text = file.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0  # "max": no limit


def _inactive_file_bytes(stat: Path) -> int:
    """File cache that the kernel gives back when memory is asked for; a model that was just read counts mostly as that."""
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return 0
    wanted = {"inactive_file", "total_inactive_file"}
    return max(
        (int(value) for key, _, value in (line.partition(" ") for line in lines) if key in wanted and value.isdigit()), default=0
    )
