"""A process that measures on request: it takes a job as its argument, and answers each line with a
line.
"""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType

import msgspec

from holdfast.errors import HoldfastError

READY = b"ready\n"  # its first line


class MeasuringProcess:
    """Runs `python -m MODULE JOB`, with the job as JSON. Only that process imports MLX."""

    def __init__(self, module: str, job: msgspec.Struct) -> None:
        """Wait until it is ready. Raises HoldfastError."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, msgspec.json.encode(job).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._answer()

    def __enter__(self) -> MeasuringProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

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
