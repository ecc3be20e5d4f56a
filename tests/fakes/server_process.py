"""A real `holdfast serve` in a separate process, on a free port."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import httpx
import psutil

from holdfast.models.download import demo_folder

LIMIT_SECONDS = 180.0
_READY = re.compile(r"is ready at (https?://\S+)")
_tick = threading.Event()  # never set: waiting for it is a short pause between two polls


def served_model_folder() -> Path:
    """The bundled model, or the one in the variable (one that is still in training, for instance)."""
    named = os.environ.get("TEST_MODEL_FOLDER")
    return Path(named) if named else demo_folder()


def until(condition: Callable[[], bool], what: str) -> None:
    """Poll until a condition holds; fails after a time that no healthy machine needs."""
    give_up_at = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < give_up_at, f"waited {LIMIT_SECONDS:.0f} s for: {what}"
        _tick.wait(0.01)


def children_running(program: str, parent: psutil.Process | None = None) -> list[psutil.Process]:
    """The child processes with this text in an argument, except those that end during the search."""
    running = []
    for child in (parent or psutil.Process()).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it is gone, or a zombie
            if any(program in argument for argument in child.cmdline()):
                running.append(child)
    return running


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "holdfast.cli.main", "serve", *arguments]


_SOURCE = str(Path(__file__).parents[2] / "src")


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of the server's process. changes: an empty value removes a variable."""
    own = {"PYTHONPATH": _SOURCE, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    changed = {**os.environ, **own, **(changes or {})}
    return {name: value for name, value in changed.items() if value or name not in (changes or {})}


def python_output(code: str, **variables: str) -> str:
    """The output of code in a new Python process. variables: an empty value removes one."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=environment(variables), capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@functools.cache
def _full_speed_file() -> Path:
    """While this file exists, `slow_steps` slows nothing down."""
    return Path(tempfile.mkdtemp(prefix="holdfast-tests-")) / "full-speed"


def slow_steps() -> dict[str, str]:
    """Changes to the environment with which every step of a worker takes longer, except within
    `steps_at_full_speed`.
    """
    folder = Path(__file__).parent / "slow_steps"
    return {"PYTHONPATH": f"{_SOURCE}:{folder}", "SLOW_STEPS_UNTIL": str(_full_speed_file())}


@contextlib.contextmanager
def steps_at_full_speed() -> Iterator[None]:
    """The servers with `slow_steps` are as fast as others during the block."""
    _full_speed_file().touch()
    try:
        yield
    finally:
        _full_speed_file().unlink()


def _reading(pipe: IO[str], lines: list[str]) -> threading.Thread:
    """A thread that has begun to read the lines of a pipe."""
    thread = threading.Thread(target=lines.extend, args=(pipe,), daemon=True)
    thread.start()
    return thread


class ServerProcess:
    """Starts immediately; `wait_ready` returns when the model is ready."""

    def __init__(
        self,
        *arguments: str,
        port: int = 0,
        start_new_session: bool = False,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """environ: changes to the environment; an empty value removes a variable."""
        self._arguments = arguments
        self._start_new_session = start_new_session
        self._environ = environment(environ)
        self._start(port)

    def _start(self, port: int) -> None:
        self._lines: list[str] = []
        self.url = ""
        self.process = subprocess.Popen(
            command(*self._arguments, "--port", str(port)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environ,
            start_new_session=self._start_new_session,
        )
        self._log: list[str] = []
        assert self.process.stderr is not None
        self._log_reader = _reading(self.process.stderr, self._log)

    def restart(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it with a signal, and start it again on its port; returns when the model serves."""
        port = int(self.url.rpartition(":")[2])
        code = self.stop(number)
        assert code == (0 if number is signal.SIGTERM else -number), self.log()
        self._start(port)
        self.wait_ready()

    def wait_ready(self) -> None:
        """Read the standard output up to the line with the server's address."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            if found := _READY.search(line):
                self.url = found[1]
                self._reader = _reading(self.process.stdout, self._lines)
                return
        raise AssertionError(f"the server ended with {self.process.wait()}: {self.log()}")

    def output(self) -> str:
        """Its standard output so far; complete once the process has ended."""
        if self.process.poll() is not None:
            self._reader.join()
        return "".join(self._lines)

    def log(self) -> str:
        """Its standard error so far; complete once the process has ended."""
        if self.process.poll() is not None:
            self._log_reader.join()
        return "".join(self._log)

    def model(self, *, key: str = "none") -> dict[str, Any]:
        """The model's entry in /health."""
        headers = {"Authorization": f"Bearer {key}"}
        (model,) = httpx.get(f"{self.url}/health", headers=headers, timeout=60).json()["models"]
        return dict(model)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        assert any(name in line for line in lines), f"there is no metric {name}"
        samples = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(line.rpartition(" ")[2])
            for line in samples
            if all(each in line for each in wanted)
        )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(LIMIT_SECONDS)


def unused_port() -> int:
    """An unused loopback port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running_server(
    *arguments: str, port: int = 0, environ: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """A ready server that ends in order when told to."""
    server = ServerProcess(*arguments, port=port, environ=environ)
    try:
        server.wait_ready()
        yield server
        assert server.stop() == 0, server.log()
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
