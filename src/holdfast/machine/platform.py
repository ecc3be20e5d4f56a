"""The device that MLX computes with, and its settings. Importing this module does not import MLX.

Wired memory is never paged out. The working set is the memory that the system lets a GPU use.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from holdfast.config import DeviceChoice
from holdfast.errors import ModelLoadError
from holdfast.machine.device_memory import DeviceMemory, memory_report

# keys of `mx.device_info()`, whose names differ between backends and versions
_WORKING_SET_KEYS = ("max_recommended_working_set_size", "total_memory", "memory_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformReport:
    """Device, versions and memory."""

    device: str  # "cpu" or "gpu"
    backend: str  # "cpu", "metal" or "cuda"
    device_name: str
    mlx_version: str
    mlx_lm_version: str
    memory: DeviceMemory
    can_compile: bool  # whether mx.compile works here: on a CPU, only with g++


def report() -> PlatformReport:
    """Create the report for this process. Imports MLX; any thread."""
    mx = _mlx()
    backend = _backend(mx)
    device = "cpu" if backend == "cpu" else "gpu"
    return PlatformReport(
        device=device,
        backend=backend,
        device_name=str(mx.device_info().get("device_name", "")),
        mlx_version=_version("mlx"),
        mlx_lm_version=_version("mlx-lm"),
        memory=memory_report(working_set_bytes=working_set_bytes()),
        can_compile=backend != "cpu" or shutil.which("g++") is not None,
    )


def use_device(device: DeviceChoice) -> None:
    """Select the device for this thread.

    Raises ModelLoadError if a GPU is requested but there is none.
    """
    mx = _mlx()
    if device == "gpu" and not (mx.metal.is_available() or mx.cuda.is_available()):
        raise ModelLoadError("model.device = gpu, but MLX finds no GPU on this machine")
    if device != "auto":
        mx.set_default_device(mx.Device(getattr(mx, device)))


def wire(nbytes: int) -> None:
    """Wire up to `nbytes` bytes of existing buffers, so that they are not paged out; 0: none.

    Metal only, device thread only. Later allocations beyond the limit are not wired. The limit must
    not change during a step, so this waits for the current step.
    """
    mx = _mlx()
    if _backend(mx) != "metal":
        return
    mx.synchronize()
    # fails before macOS 15, or above the system's limit
    with contextlib.suppress(RuntimeError, ValueError):
        mx.set_wired_limit(nbytes)


def bound_memory(*, cache_bytes: int, total_bytes: int) -> None:
    """Limit MLX's cache of free buffers, and the total memory above which this cache is emptied.

    Metal only.

    By default, the cache grows to 1.5 times the working set under a steady load. CUDA keeps the
    default, because it frees buffers slowly.
    """
    mx = _mlx()
    if _backend(mx) != "metal":
        return
    mx.set_cache_limit(cache_bytes)
    mx.set_memory_limit(total_bytes)


def working_set_bytes() -> int:
    """The working set that a GPU recommends, or its memory; 0 on a CPU."""
    mx = _mlx()
    if _backend(mx) == "cpu":
        return 0
    info = mx.device_info()
    return next((int(info[key]) for key in _WORKING_SET_KEYS if info.get(key)), 0)


def taken_bytes() -> int:
    """The GPU memory that this process uses, including its cache of free buffers; 0 on a CPU.

    Device thread only.
    """
    mx = _mlx()
    return 0 if _backend(mx) == "cpu" else int(mx.get_active_memory() + mx.get_cache_memory())


def _mlx() -> Any:
    """The module `mlx.core`, imported by the first call."""
    return importlib.import_module("mlx.core")


def _backend(mx: Any) -> str:
    """What MLX computes with by default: "cpu", "metal" or "cuda"."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
