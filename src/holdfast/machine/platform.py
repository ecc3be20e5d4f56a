"""The device that MLX computes with, and its settings. Importing this module does not import MLX.

`python -m holdfast.machine.platform` measures the machine in a separate process, for callers that
must not import MLX.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import msgspec

from holdfast.config import DeviceChoice
from holdfast.errors import HoldfastError, ModelLoadError
from holdfast.machine.device_memory import DeviceMemory, memory_report
from holdfast.worker.cpu.blas import BlasReport, current_blas, prepare_blas, unused_instructions

__all__ = [
    "PlatformReport",
    "bound_memory",
    "measure_gflops",
    "platform_in_subprocess",
    "prepare_blas",
    "report",
    "use_device",
    "wire",
    "working_set_bytes",
]

_MEASURE_SECONDS = 120.0
_CPU_MATRIX = 1024  # rows and columns of the matrices to multiply on a CPU
_GPU_MATRIX = 4096
_REPEATS = 4
T = TypeVar("T")
_WORKING_SET_NAMES = ("max_recommended_working_set_size", "total_memory", "memory_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformReport:
    """Device, versions, libraries, memory, and recommendations."""

    device: str  # "cpu" or "gpu"
    backend: str  # "cpu", "metal" or "cuda"
    device_name: str
    mlx_version: str
    mlx_lm_version: str
    blas: BlasReport
    memory: DeviceMemory
    compiler: bool  # whether g++ is installed; mx.compile needs it on a CPU
    recommendations: tuple[str, ...]


def report() -> PlatformReport:
    """Create the report for this process. Imports MLX; any thread."""
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


def measure_gflops(*, blas: bool, threads: int | None = None, size: int = 0) -> float:
    """Measure the speed of matrix products in another process, in billions of float32 operations
    per second.

    blas: whether to load a faster BLAS before MLX. size: rows and columns of the matrices; 0
    means 1,024 on a CPU and 4,096 on a GPU. Takes about two seconds. Raises HoldfastError.
    """
    return _child("gflops", str(int(blas)), str(threads or 0), str(size), kind=float)


def platform_in_subprocess(*, threads: int | None = None) -> PlatformReport:
    """Create the report in another process, which loads a BLAS before MLX as a worker does.

    Raises HoldfastError.
    """
    return _child("platform", str(threads or 0), kind=PlatformReport)


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
    return next((int(info[name]) for name in _WORKING_SET_NAMES if info.get(name)), 0)


def taken_bytes() -> int:
    """The GPU memory that this process uses, including its cache of free buffers; 0 on a CPU.

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
    if backend == "cpu" and sys.platform == "linux":
        found += _recommendations_about(blas)
    if not compiler:
        found.append("install g++: MLX compiles fused operations with it")
    if backend == "cuda" and shutil.which("nvcc") is None:
        found.append("install the CUDA toolkit: MLX compiles fused operations with it")
    return found


def _recommendations_about(blas: BlasReport) -> list[str]:
    """blas: of a Linux CPU."""
    found = []
    if not blas.in_front:
        found.append(
            "install a C compiler (Debian: apt install g++), with which Holdfast uses numpy's "
            "OpenBLAS, or OpenBLAS (Debian: apt install libopenblas0-pthread): matrix products "
            "become about ten times faster"
        )
    elif not blas.few_rows:
        found.append(
            f"let Holdfast use its C kernels ({blas.no_kernel}): decoding becomes several times as "
            "fast"
        )
    unused = unused_instructions(blas.core)
    if unused:
        found.append(
            f"unset OPENBLAS_CORETYPE: it makes OpenBLAS use its kernels for {blas.core}, without "
            f"this CPU's {unused}"
        )
    return found


def _child(*arguments: str, kind: type[T]) -> T:
    command = [sys.executable, "-P", "-m", "holdfast.machine.platform", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_MEASURE_SECONDS, check=True)
    except subprocess.TimeoutExpired:
        raise HoldfastError(
            f"measuring this machine took more than {_MEASURE_SECONDS:.0f} s"
        ) from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {error.returncode}"
        raise HoldfastError(f"measuring this machine failed: {reason}") from error
    return msgspec.json.decode(done.stdout, type=kind)


def _gflops(*, blas: bool, threads: int, size: int) -> float:
    if blas:
        prepare_blas(threads)
    mx = importlib.import_module("mlx.core")
    side = size or (_CPU_MATRIX if working_set_bytes() == 0 else _GPU_MATRIX)
    left = mx.random.normal((side, side))
    right = mx.random.normal((side, side))
    mx.eval(left, right, left @ right)
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        mx.eval(left @ right)
        seconds.append(time.perf_counter() - start)
    mx.clear_streams()
    return float(2 * side**3 / min(seconds) / 1e9)


def _main(arguments: list[str]) -> None:
    match arguments:
        case ["gflops", blas, threads, size]:
            answer: object = _gflops(blas=blas == "1", threads=int(threads), size=int(size))
        case ["platform", threads]:
            prepare_blas(int(threads))
            answer = report()
        case _:
            raise SystemExit(
                "usage: python -m holdfast.machine.platform gflops BLAS THREADS SIZE | platform "
                "THREADS"
            )
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    _main(sys.argv[1:])
