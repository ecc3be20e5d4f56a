"""What this machine computes with, and what has to be set before it does.

Importing this module imports no MLX.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from holdfast.config import DeviceChoice
from holdfast.errors import ModelLoadError
from holdfast.machine.blas import BlasReport, current_blas, prepare_blas
from holdfast.machine.device_memory import DeviceMemory, memory_report

__all__ = [
    "PlatformReport",
    "bound_memory",
    "prepare_blas",
    "report",
    "use_device",
    "wire",
    "working_set_bytes",
]

_NAMES_OF_WORKING_SET = ("max_recommended_working_set_size", "total_memory", "memory_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformReport:
    """Device, versions, libraries, memory, and what would make it faster."""

    device: str  # "cpu" or "gpu"
    backend: str  # "cpu", "metal" or "cuda"
    device_name: str
    mlx_version: str
    mlx_lm_version: str
    blas: BlasReport
    memory: DeviceMemory
    compiler: bool  # whether g++ is there, which mx.compile needs on a CPU
    recommendations: tuple[str, ...]


def report() -> PlatformReport:
    """The report for this process. Imports MLX; any thread."""
    mx = _mlx()
    backend = _backend(mx)
    device = "cpu" if backend == "cpu" else "gpu"
    blas = current_blas()
    compiler = backend != "cpu" or shutil.which("g++") is not None
    return PlatformReport(
        device=device,
        backend=backend,
        device_name=str(mx.device_info().get("device_name", "")),
        mlx_version=_version("mlx"),
        mlx_lm_version=_version("mlx-lm"),
        blas=blas,
        memory=memory_report(working_set_bytes=working_set_bytes()),
        compiler=compiler,
        recommendations=tuple(_recommendations(backend, blas, compiler)),
    )


def use_device(device: DeviceChoice) -> None:
    """Compute on this device from now on, in this thread.

    Raises ModelLoadError where there is no GPU.
    """
    mx = _mlx()
    if device == "gpu" and not (mx.metal.is_available() or mx.cuda.is_available()):
        raise ModelLoadError("model.device = gpu, but MLX finds no GPU on this machine")
    if device != "auto":
        mx.set_default_device(mx.Device(getattr(mx, device)))


def wire(nbytes: int) -> None:
    """Keep so many bytes of the buffers that are there from being paged out; 0: none.

    Metal only, device thread only.

    What is allocated later and does not fit is not wired. The limit must not change while a step
    runs, so it waits for that.
    """
    mx = _mlx()
    if _backend(mx) != "metal":
        return
    mx.synchronize()
    # before macOS 15, or more than the system grants
    with contextlib.suppress(RuntimeError, ValueError):
        mx.set_wired_limit(nbytes)


def bound_memory(*, cache_bytes: int, total_bytes: int) -> None:
    """Bound MLX's cache of free buffers, and from where on it is emptied before more is allocated.

    Metal only.

    By default the cache grows to 1.5 times the working set under a steady load. CUDA frees buffers
    slowly and keeps the default.
    """
    mx = _mlx()
    if _backend(mx) != "metal":
        return
    mx.set_cache_limit(cache_bytes)
    mx.set_memory_limit(total_bytes)


def working_set_bytes() -> int:
    """How much memory a GPU recommends to use, or has; 0 on a CPU."""
    mx = _mlx()
    if _backend(mx) == "cpu":
        return 0
    info = mx.device_info()
    return next((int(info[name]) for name in _NAMES_OF_WORKING_SET if info.get(name)), 0)


def taken_bytes() -> int:
    """How much memory of a GPU this process has, what it keeps for the next arrays too; 0 on a CPU.

    Device thread only.
    """
    mx = _mlx()
    return 0 if _backend(mx) == "cpu" else int(mx.get_active_memory() + mx.get_cache_memory())


def _mlx() -> Any:
    return importlib.import_module("mlx.core")


def _backend(mx: Any) -> str:
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _recommendations(backend: str, blas: BlasReport, compiler: bool) -> list[str]:
    found = []
    if backend == "cpu" and sys.platform == "linux" and not blas.in_front:
        found.append(
            "install OpenBLAS (Debian: apt install libopenblas0-pthread): matrix products become "
            "about ten times faster"
        )
    if not compiler:
        found.append("install g++: MLX compiles fused operations with it")
    if backend == "cuda" and shutil.which("nvcc") is None:
        found.append("install the CUDA toolkit: MLX compiles fused operations with it")
    return found
