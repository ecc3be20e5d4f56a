"""What `holdfast doctor` reports about the machine: the device, the BLAS, and the speed of products.

MLX is imported only in another process, `python -m holdfast.cli.machine_report`.
"""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import sys
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.machine import platform
from holdfast.machine.child_process import answer_of
from holdfast.machine.platform import PlatformReport
from holdfast.worker.cpu.blas import BlasReport, current_blas, prepare_blas, unused_instructions

_MEASURE_SECONDS = 120.0
_CPU_MATRIX = 1024  # rows and columns of the matrices to multiply on a CPU
_GPU_MATRIX = 4096
_REPEATS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport(PlatformReport):
    """The platform, the BLAS that MLX uses, and recommendations."""

    blas: BlasReport
    recommendations: tuple[str, ...]


def measure_gflops(*, blas: bool, threads: int | None = None, size: int = 0) -> float:
    """Measure the speed of matrix products in another process, in billions of float32 operations
    per second.

    blas: whether to load a faster BLAS before MLX. size: rows and columns of the matrices; 0
    means 1,024 on a CPU and 4,096 on a GPU. Takes about two seconds. Raises HoldfastError.
    """
    speed: float = _run_in_child_process(
        "gflops", str(int(blas)), str(threads or 0), str(size), answer_type=float
    )
    return speed


def machine_report(*, threads: int | None = None) -> MachineReport:
    """Create the report in another process, which loads a BLAS before MLX as a worker does.

    Raises HoldfastError.
    """
    report: MachineReport = _run_in_child_process(
        "report", str(threads or 0), answer_type=MachineReport
    )
    return report


def _create_report() -> MachineReport:
    """Create the report for this process. Imports MLX."""
    platform_report = platform.report()
    blas = current_blas()
    return MachineReport(
        **{
            member.name: getattr(platform_report, member.name)
            for member in dataclasses.fields(platform_report)
        },
        blas=blas,
        recommendations=tuple(
            _recommendations(platform_report.backend, blas, platform_report.can_compile)
        ),
    )


def _recommendations(backend: str, blas: BlasReport, can_compile: bool) -> list[str]:
    """What the user can install or change so that models run faster."""
    texts = []
    if backend == "cpu" and sys.platform == "linux":
        texts += _blas_recommendations(blas)
    if not can_compile:
        texts.append("install g++: MLX compiles fused operations with it")
    if backend == "cuda" and shutil.which("nvcc") is None:
        texts.append("install the CUDA toolkit: MLX compiles fused operations with it")
    return texts


def _blas_recommendations(blas: BlasReport) -> list[str]:
    """Recommend a faster BLAS, or settings with which it is used. For Linux on a CPU."""
    texts = []
    if not blas.in_front:
        texts.append(
            "install a C compiler (Debian: apt install g++), with which Holdfast uses numpy's "
            "OpenBLAS, or OpenBLAS (Debian: apt install libopenblas0-pthread): matrix products "
            "become about ten times faster"
        )
    elif not blas.few_rows:
        texts.append(
            f"let Holdfast use its C kernels ({blas.no_kernel}): decoding becomes several times as "
            "fast"
        )
    unused = unused_instructions(blas.core)
    if unused:
        texts.append(
            f"unset OPENBLAS_CORETYPE: it makes OpenBLAS use its kernels for {blas.core}, without "
            f"this CPU's {unused}"
        )
    return texts


def _run_in_child_process(*arguments: str, answer_type: Any) -> Any:
    """Run this module with these arguments, and return its answer. Raises HoldfastError."""
    return answer_of(
        "holdfast.cli.machine_report",
        *arguments,
        answer_type=answer_type,
        doing="measuring this machine",
        limit_seconds=_MEASURE_SECONDS,
    )


def _measured_gflops(*, blas: bool, threads: int, size: int) -> float:
    """Measure in this process: the best of several products. size: 0: by device."""
    if blas:
        prepare_blas(threads)
    mx = importlib.import_module("mlx.core")
    side = size or (_CPU_MATRIX if platform.working_set_bytes() == 0 else _GPU_MATRIX)
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
    """The child process: measure or report, and print the answer as JSON."""
    match arguments:
        case ["gflops", blas, threads, size]:
            answer: object = _measured_gflops(
                blas=blas == "1", threads=int(threads), size=int(size)
            )
        case ["report", threads]:
            prepare_blas(int(threads))
            answer = _create_report()
        case _:
            raise SystemExit(
                "usage: python -m holdfast.cli.machine_report gflops BLAS THREADS SIZE | report THREADS"
            )
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    _main(sys.argv[1:])
