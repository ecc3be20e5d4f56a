"""A process that measures something when it is told to: a job as its argument, one line in and one
line out for each time.
"""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType

import msgspec

from holdfast.errors import HoldfastError

READY = b"ready\n"  # the first line that it writes


class MeasuringProcess:
    """`python -m MODULE JOB`, with the job as JSON; what it imports (MLX) is not imported here."""

    def __init__(self, module: str, job: msgspec.Struct) -> None:
        """Waits until it is ready. Raises HoldfastError."""
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
        """End it, when it has answered what it was told last."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def measure(self, line: str = "") -> bytes:
        """Have it measure once; returns its line. Raises HoldfastError when it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise HoldfastError(f"the process that measures ended with code {self._process.wait()}")
        return line
