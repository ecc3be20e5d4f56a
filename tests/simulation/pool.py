"""Processes that run simulated worlds, as many at once as the machine has cores."""

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
# of the caller's environment, what a process needs to start; nothing else may reach a world
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH")
_SET = {
    "PYTHONHASHSEED": "0",  # the order of sets is a part of what happens
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MLX_ENABLE_TF32": "0",
    "TZ": "UTC",
}


class Worlds:
    """Runs worlds in other processes. A context manager."""

    def __init__(self, processes: int | None = None, *, folder: Path | None = None) -> None:
        """processes: at once; None: as many as there are cores. folder: for the files of worlds;
        None: in memory, if the system has a place for that.
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
        """Run a world; None if it was given up before its end."""
        return self._threads.submit(self._run, task)

    def run(self, task: Task) -> Result:
        """Run a world and wait for it."""
        result = self.submit(task).result()
        assert result is not None
        return result

    def give_up(self) -> None:
        """End the worlds that run, and let no other begin."""
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
