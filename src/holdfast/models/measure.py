"""Measures this machine in processes of their own: the caller imports no MLX, and each way to set
it up starts fresh.

Run as `python -m holdfast.models.measure WHAT …`; use the functions.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from typing import TypeVar

import msgspec

from holdfast.errors import HoldfastError
from holdfast.machine import platform

_LONGEST_SECONDS = 120.0
_SIZE_ON_CPU, _SIZE_ON_GPU = 1024, 4096
_REPEATS = 4
T = TypeVar("T")


def measure_gflops(*, blas: bool, threads: int | None = None, size: int = 0) -> float:
    """Billions of float32 operations per second in a product of two square matrices, in a process
    of its own.

    `blas`: put OpenBLAS or MKL in front first; `size` 0: 1,024, on a GPU 4,096. Takes about two
    seconds. Raises HoldfastError.
    """
    return _child("gflops", str(int(blas)), str(threads or 0), str(size), kind=float)


def platform_in_subprocess(*, threads: int | None = None) -> platform.PlatformReport:
    """The platform report of a process that puts a BLAS in front, as a worker does.

    Raises HoldfastError.
    """
    return _child("platform", str(threads or 0), kind=platform.PlatformReport)


def _child(*arguments: str, kind: type[T]) -> T:
    command = [sys.executable, "-P", "-m", "holdfast.models.measure", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_LONGEST_SECONDS, check=True)
    except subprocess.TimeoutExpired:
        raise HoldfastError(
            f"measuring this machine took more than {_LONGEST_SECONDS:.0f} s"
        ) from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {error.returncode}"
        raise HoldfastError(f"measuring this machine failed: {reason}") from error
    return msgspec.json.decode(done.stdout, type=kind)


def _gflops(*, blas: bool, threads: int, size: int) -> float:
    if blas:
        platform.prepare_blas(threads)
    mx = importlib.import_module("mlx.core")
    side = size or (_SIZE_ON_CPU if platform.working_set_bytes() == 0 else _SIZE_ON_GPU)
    left, right = mx.random.normal((side, side)), mx.random.normal((side, side))
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
            platform.prepare_blas(int(threads))
            answer = platform.report()
        case _:
            raise SystemExit(
                "usage: python -m holdfast.models.measure gflops BLAS THREADS SIZE | platform "
                "THREADS"
            )
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    _main(sys.argv[1:])
