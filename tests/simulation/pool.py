"""A pool of processes that run simulated worlds, by default one per core."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from tests.simulation.outcomes import BEGAN, FORKS, Failure, Result, Task

_ROOT = Path(__file__).parents[2]
_MEMORY = Path("/dev/shm")
# the variables that a process needs to start; no others may affect a world
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH")
_SET = {
    "PYTHONHASHSEED": "0",  # the order of sets must be deterministic
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MLX_ENABLE_TF32": "0",
    "TZ": "UTC",
}


class Worlds:
    """Runs worlds in other processes. A context manager."""

    def __init__(self, processes: int | None = None, *, folder: Path | None = None) -> None:
        """processes: how many; None: one per core. folder: for the files of worlds; None: in memory,
        if the system has a memory file system.
        """
        self.processes = processes or os.cpu_count() or 1
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes] | None] = queue.SimpleQueue()
        for _ in range(self.processes):
            self._idle.put(None)  # it starts when it is needed
        self._living: set[subprocess.Popen[bytes]] = set()
        self._threads = ThreadPoolExecutor(self.processes, thread_name_prefix="world")
        self._is_over = False
        if folder is None and _MEMORY.is_dir():
            folder = _MEMORY
        self._folder = tempfile.TemporaryDirectory(prefix="simulation-", dir=folder)

    def submit(self, task: Task) -> Future[Result | None]:
        """Run a world; the result is None if the pool was stopped before its end."""
        return self._threads.submit(self._run, task)

    def run(self, task: Task) -> Result:
        """Run a world and wait for it."""
        result = self.submit(task).result()
        assert result is not None
        return result

    def give_up(self) -> None:
        """Kill the running worlds, and start no others."""
        self._is_over = True
        for process in list(self._living):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _run(self, task: Task) -> Result | None:
        process = self._idle.get()
        if process is None:
            process = self._start()
        result = None if self._is_over else self._ask(process, task)
        self._idle.put(process if FORKS and process.poll() is None else None)
        return result

    def _ask(self, process: subprocess.Popen[bytes], task: Task) -> Result | None:
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump(task, process.stdin)
            process.stdin.flush()
            result: Result = pickle.load(process.stdout)
            return result
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            code = process.wait()
            if self._is_over:
                return None
            return Result(failures=(Failure("no crash", f"ended with {code}", at=BEGAN),))

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.simulation.worlds"],
            cwd=_ROOT,
            env=environment | _SET | {"TMPDIR": self._folder.name},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # to be killed together with its forks
        )
        self._living.add(process)
        return process

    def __enter__(self) -> Worlds:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.give_up()
        self._threads.shutdown(cancel_futures=True)
        for process in self._living:
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
            process.wait()
        self._folder.cleanup()
