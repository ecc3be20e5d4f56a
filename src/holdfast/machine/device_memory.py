"""Measures the memory of processes and machine, and reads memory pressure."""

from __future__ import annotations

import ctypes
import enum
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_TRIM_THRESHOLD = -1  # options of mallopt, as in malloc.h
_MMAP_THRESHOLD = -3
_LARGE_BYTES = 2048 << 10
_SYSCTL = b"kern.memorystatus_vm_pressure_level"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory in bytes, within the limits of control groups and of the process (`ulimit -v`, `-d`).

    working_set_bytes: the working set that a GPU recommends, or its memory; 0 without a GPU.

    unified: whether the GPU shares the machine's memory.
    """

    total_bytes: int
    available_bytes: int
    working_set_bytes: int = 0
    unified: bool = sys.platform == "darwin"


def memory_report(
    *, working_set_bytes: int = 0, cgroup: Path = _CGROUP, own_cgroups: Path = _OWN_CGROUPS
) -> DeviceMemory:
    """Measure the memory that this process may use now.

    working_set_bytes: from `platform.working_set_bytes`.
    """
    import psutil  # the import takes 10 ms, which a starting server should not spend

    machine = psutil.virtual_memory()
    total = int(machine.total)
    available = int(machine.available)
    for most_bytes, used_bytes in (*_cgroup_limits(cgroup, own_cgroups), *_process_limits()):
        total = min(total, most_bytes)
        available = min(available, max(most_bytes - used_bytes, 0))
    return DeviceMemory(
        total_bytes=total, available_bytes=available, working_set_bytes=working_set_bytes
    )


def usable_bytes(working_set_bytes: int) -> int:
    """How much memory the weights of a model may use now.

    With a GPU, this is its whole working set.
    """
    return max(memory_report().available_bytes, working_set_bytes)


# In the following, a limit is a pair of numbers in bytes: how much may be used, and how much is
# used and cannot be reclaimed.


def _process_limits() -> Iterator[tuple[int, int]]:
    """The limits of this process. Linux only, because macOS does not enforce them."""
    if sys.platform != "linux":
        return
    import psutil

    usage = psutil.Process().memory_info()
    for limit, used_bytes in ((resource.RLIMIT_AS, usage.vms), (resource.RLIMIT_DATA, usage.data)):
        most_bytes, _ = resource.getrlimit(limit)
        if most_bytes != resource.RLIM_INFINITY:
            yield most_bytes, used_bytes


def _cgroup_limits(root: Path, own_cgroups: Path) -> Iterator[tuple[int, int]]:
    """The limits of this process's control groups and of those above them, for versions 2 and 1."""
    for folder in _own_and_above(root, own_cgroups, ""):
        yield from _limit_of(folder, "memory.max", "memory.current")
    for folder in _own_and_above(root / "memory", own_cgroups, "memory"):
        yield from _limit_of(folder, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _own_and_above(root: Path, own_cgroups: Path, controller: str) -> list[Path]:
    """The folders from the process's own control group up to `root`. controller: the name under which
    version 1 lists the group; empty for version 2.

    Source: cgroups(7), /proc/[pid]/cgroup.
    """
    try:
        lines = [line.split(":", 2) for line in own_cgroups.read_text().splitlines()]
    except OSError:
        lines = []
    own_group = next(
        (line[2] for line in lines if len(line) == 3 and controller in line[1].split(",")), "/"
    )
    parts = [part for part in own_group.split("/") if part]
    if ".." in parts:  # the group is not visible in this container
        parts = []
    return [root.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _limit_of(folder: Path, limit_file: str, usage_file: str) -> Iterator[tuple[int, int]]:
    """The limit of one control group, if it has one, from these two files in its folder."""
    if most_bytes := _number(folder / limit_file):
        used_bytes = max(
            _number(folder / usage_file) - _inactive_file_bytes(folder / "memory.stat"), 0
        )
        yield most_bytes, used_bytes


def _number(file: Path) -> int:
    """The number in a file of a control group; 0 if there is none."""
    try:
        text = file.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0  # the text "max" means no limit


def _inactive_file_bytes(stat: Path) -> int:
    """The size of the reclaimable file cache. Most of a model that was just read is in there."""
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return 0
    counter_names = {"inactive_file", "total_inactive_file"}
    return max(
        (
            int(value)
            for key, _, value in (line.partition(" ") for line in lines)
            if key in counter_names and value.isdigit()
        ),
        default=0,
    )


def process_footprint(pid: int) -> int:
    """How much memory a process takes: on macOS its physical footprint, which includes GPU buffers
    and compressed pages, elsewhere its resident memory. 0 if the process is gone. Any thread.
    """
    if sys.platform == "darwin":
        return _physical_footprint(pid)
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _physical_footprint(pid: int) -> int:
    """The memory that macOS charges to a process, in bytes; 0 if the process is gone.

    Source: xnu, bsd/sys/resource.h, struct rusage_info_v0; libproc.h, proc_pid_rusage.
    """
    usage = _ResourceUsage()
    proc_pid_rusage = ctypes.CDLL(None).proc_pid_rusage
    return 0 if proc_pid_rusage(pid, 0, ctypes.byref(usage)) != 0 else int(usage.phys_footprint)


class _ResourceUsage(ctypes.Structure):
    """macOS's `struct rusage_info_v0`."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        ("user_time", ctypes.c_uint64),
        ("system_time", ctypes.c_uint64),
        ("idle_wakeups", ctypes.c_uint64),
        ("interrupt_wakeups", ctypes.c_uint64),
        ("pageins", ctypes.c_uint64),
        ("wired_size", ctypes.c_uint64),
        ("resident_size", ctypes.c_uint64),
        ("phys_footprint", ctypes.c_uint64),
        ("started_at", ctypes.c_uint64),
        ("exited_at", ctypes.c_uint64),
    )


class Pressure(enum.IntEnum):
    """A level of memory pressure, reported by macOS or derived from the memory of all workers.

    Source of the values: xnu, bsd/sys/event.h, NOTE_MEMORYSTATUS_PRESSURE_*.
    """

    NORMAL = 1
    WARNING = 2
    CRITICAL = 4


def pressure_reader() -> Callable[[], Pressure] | None:
    """Return a function that reads the current pressure on any thread; None except on macOS."""
    sysctl = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    if sysctl is None:
        return None

    def read() -> Pressure:
        level = ctypes.c_int(0)
        size = ctypes.c_size_t(ctypes.sizeof(level))
        if sysctl(_SYSCTL, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
            return Pressure.NORMAL
        return pressure_of(level.value)

    return read


def pressure_of(level: int) -> Pressure:
    """Convert a level to a pressure. An unknown level counts as the next lower known one."""
    return max((each for each in Pressure if each <= level), default=Pressure.NORMAL)


def return_large_blocks() -> None:
    """Make this process return freed blocks of 2 MiB or more to the system immediately (glibc).

    By default, glibc keeps freed blocks of up to 32 MiB in per-thread heaps once it has freed one
    of that size. After some requests with images, a front kept 90 MB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if sys.platform == "linux" and mallopt is not None:
        for option, value in ((_MMAP_THRESHOLD, _LARGE_BYTES), (_TRIM_THRESHOLD, 4 * _LARGE_BYTES)):
            mallopt(option, value)
