"""Measures and ends a process with all its children."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_GONE = (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeUse:
    """Resources of a process and its children. Shared memory is counted once on Linux."""

    processes: int
    resident_bytes: int
    cpu_seconds: float


def tree_use(pid: int) -> TreeUse:
    """Resources of `pid` and its children; zeros if it has ended."""
    resident, cpu, count = 0, 0.0, 0
    for process in _tree(pid):
        with contextlib.suppress(*_GONE):
            times = process.cpu_times()
            resident += _resident_bytes(process)
            cpu += times.user + times.system
            count += 1
    return TreeUse(processes=count, resident_bytes=resident, cpu_seconds=cpu)


def end_tree(pid: int, *, patience_seconds: float, kill: bool = False) -> None:
    """Terminate the process, wait, and kill it and its children if they still run.

    kill: without terminating first.
    """
    processes = list(_tree(pid))
    if not kill and processes:
        with contextlib.suppress(*_GONE):
            processes[0].terminate()
        _, processes = psutil.wait_procs(processes, timeout=patience_seconds)
    for process in processes:
        with contextlib.suppress(*_GONE):
            process.kill()
    psutil.wait_procs(processes, timeout=patience_seconds)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in the folder and its subfolders."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # files may disappear while the server runs
            total += file.stat().st_size if file.is_file() else 0
    return total


def _tree(pid: int) -> Iterator[psutil.Process]:
    try:
        root = psutil.Process(pid)
        children = root.children(recursive=True)
    except _GONE:
        return
    yield root
    yield from children


def _resident_bytes(process: psutil.Process) -> int:
    try:
        full = process.memory_full_info()
    except (*_GONE, NotImplementedError):
        return int(process.memory_info().rss)
    return int(getattr(full, "pss", 0) or process.memory_info().rss)
