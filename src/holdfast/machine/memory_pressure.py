"""How short of memory the system is, as macOS says. Imports no MLX; any thread."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable

_SYSCTL = b"kern.memorystatus_vm_pressure_level"


class Pressure(enum.IntEnum):
    """The levels of macOS. Source: xnu, bsd/sys/event.h, NOTE_MEMORYSTATUS_PRESSURE_*."""

    NORMAL = 1
    WARNING = 2
    CRITICAL = 4


def pressure_reader() -> Callable[[], Pressure] | None:
    """A function that tells the pressure at the moment; None on a system that does not tell it."""
    sysctl = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    if sysctl is None:
        return None

    def read() -> Pressure:
        level, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
        if sysctl(_SYSCTL, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
            return Pressure.NORMAL
        return pressure_of(level.value)

    return read


def pressure_of(level: int) -> Pressure:
    """The pressure that a number of the system means; one that is not known counts as the highest
    known below it.
    """
    return max((each for each in Pressure if each <= level), default=Pressure.NORMAL)
