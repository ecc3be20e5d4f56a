"""How much memory this process may use, and how much of it live KV may take."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import ModelLoadError

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_KV_SHARE = 0.6  # of what is free after the weights; the rest is for activations, snapshots and everybody else
_SMALLEST_BUDGET_BYTES = 64 << 20
_LARGEST_AUTO_BUDGET_BYTES = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShare:
    """What a worker may take of the memory that is left, beside other workers."""

    parts: int = 1  # its KV may take one of so many
    promised_bytes: int = 0  # that others may yet take
    taken_bytes: int = 0  # that others have; for devices that tell only what they have in all


ALL_OF_IT = MemoryShare()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory in bytes; limits of control groups and of the process itself (`ulimit -v`, `ulimit -d`) are respected.

    `working_set_bytes`: what a GPU recommends to use at most, or has; 0 without one. `unified`: it is the machine's own memory.
    """

    total_bytes: int
    available_bytes: int
    working_set_bytes: int = 0
    unified: bool = sys.platform == "darwin"


def memory_report(*, working_set_bytes: int = 0, cgroup: Path = _CGROUP, own_cgroups: Path = _OWN_CGROUPS) -> DeviceMemory:
    """What this process may use now. `working_set_bytes` comes from the device (`platform.working_set_bytes`)."""
    import psutil  # takes 10 ms, which the start of a server need not wait for

    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    for most_bytes, used_bytes in (*_cgroup_limits(cgroup, own_cgroups), *_process_limits()):
        total, available = min(total, most_bytes), min(available, max(most_bytes - used_bytes, 0))
    return DeviceMemory(total_bytes=total, available_bytes=available, working_set_bytes=working_set_bytes)


def usable_bytes(working_set_bytes: int) -> int:
    """How much the weights of a model may take now. With a GPU what its working set holds: the system makes room for that."""
    return max(memory_report().available_bytes, working_set_bytes)


def kv_budget_bytes(requested: int | None, *, memory: DeviceMemory, weight_bytes: int, share: MemoryShare = ALL_OF_IT) -> int:
    """The budget for live KV. `requested` is the setting model.memory_bytes, None for automatic. Call it after loading.

    Automatic: a share of what is available; with a GPU of what the weights leave of its working set (the smaller of the two where
    memory is unified), without what is others'. Raises ModelLoadError when a requested budget is larger than all memory.
    """
    discrete = memory.working_set_bytes > 0 and not memory.unified
    total = memory.working_set_bytes if discrete else memory.total_bytes
    if requested is not None and requested > total:
        raise ModelLoadError(f"model.memory_bytes = {requested:,} is more than the {total:,} bytes of memory that there are")
    if requested is not None:
        return requested
    left_of_working_set = memory.working_set_bytes - weight_bytes - share.taken_bytes
    if discrete:
        free = left_of_working_set
    elif memory.working_set_bytes:
        free = min(memory.available_bytes, left_of_working_set)
    else:
        free = memory.available_bytes
    free = (free - share.promised_bytes) // share.parts
    return min(max(int(free * _KV_SHARE), _SMALLEST_BUDGET_BYTES), _LARGEST_AUTO_BUDGET_BYTES)


# A limit is a pair of bytes: what may be used at most, and what of it is used and cannot be given back.


def _process_limits() -> Iterator[tuple[int, int]]:
    """Limits that the process was started with. Linux only: macOS takes them and does not enforce them."""
    if sys.platform != "linux":
        return
    import psutil

    used = psutil.Process().memory_info()
    for kind, used_bytes in ((resource.RLIMIT_AS, used.vms), (resource.RLIMIT_DATA, used.data)):
        most_bytes, _ = resource.getrlimit(kind)
        if most_bytes != resource.RLIM_INFINITY:
            yield most_bytes, used_bytes


def _cgroup_limits(root: Path, own_cgroups: Path) -> Iterator[tuple[int, int]]:
    """Limits of the control groups that this process is in: its own and those above, version 2 and version 1."""
    for folder in _own_and_above(root, own_cgroups, ""):
        yield from _limit_of(folder, "memory.max", "memory.current")
    for folder in _own_and_above(root / "memory", own_cgroups, "memory"):
        yield from _limit_of(folder, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _own_and_above(root: Path, own_cgroups: Path, controller: str) -> list[Path]:
    """Folders from the process's own group up to `root`. Source: cgroups(7), /proc/[pid]/cgroup."""
    try:
        lines = [line.split(":", 2) for line in own_cgroups.read_text().splitlines()]
    except OSError:
        lines = []
    own = next((line[2] for line in lines if len(line) == 3 and controller in line[1].split(",")), "/")
    parts = [part for part in own.split("/") if part]
    if ".." in parts:  # outside of what this container may see
        parts = []
    return [root.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _limit_of(folder: Path, most: str, used: str) -> Iterator[tuple[int, int]]:
    if most_bytes := _number(folder / most):
        used_bytes = max(_number(folder / used) - _inactive_file_bytes(folder / "memory.stat"), 0)
        yield most_bytes, used_bytes


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
