"""A process that measures on a device on request. It takes a job as its argument, and answers each
line with a line.

Only that process imports MLX, after it has loaded a BLAS: `python -m holdfast_bench.measuring_process
MODULE JOB` imports the module and calls its function `prepared(job)`, whose result measures.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable

import msgspec

from holdfast.errors import HoldfastError
from holdfast.worker.cpu.blas import prepare_blas

Measure = Callable[[str], msgspec.Struct | list[msgspec.Struct] | list[float]]
_READY = "ready"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. folder: of the model. threads: of the BLAS; 0: one per core."""

    folder: str
    threads: int


class MeasuringProcess:
    """Runs `holdfast_bench.MODULE` with a job in another process."""

    def __init__(self, module: str, job: Job) -> None:
        """Wait until it is ready. Raises HoldfastError."""
        arguments = (__name__, f"holdfast_bench.{module}", msgspec.json.encode(job).decode())
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._answer()

    def close(self) -> None:
        """End it after its last answer."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def measure(self, line: str = "") -> bytes:
        """Measure once; returns the line. Raises HoldfastError if the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise HoldfastError(f"the measuring process ended with code {self._process.wait()}")
        return line


def _main(module: str, job: str) -> None:
    prepare_blas(msgspec.json.decode(job, type=Job).threads)  # before the first import of MLX
    importlib.import_module("holdfast.worker.loop.device").use_device("auto")
    measure: Measure = importlib.import_module(module).prepared(job)
    _say(_READY)
    for line in sys.stdin:
        _say(msgspec.json.encode(measure(line)).decode())
    importlib.import_module("mlx.core").clear_streams()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
