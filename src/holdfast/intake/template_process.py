"""Chat templates are rendered in processes of their own: they come with models from strangers, and may loop or fill the memory.

A thread cannot be ended, and no check inside an interpreter sees every operation that takes long or much memory. So a process
renders (`template_worker.py`), and is killed when it takes too long or too much. A render that behaves costs one exchange over
a pipe more than in the same process. Processes are started when they are needed, and kept for the next template of any model;
when all are busy, a further one is started, so that a template that hangs holds nobody up.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

import psutil
from jinja2 import TemplateError, TemplateSyntaxError

from holdfast.errors import TemplateOverrun
from holdfast.intake.kept_tool import KeptTool, packed_tool
from holdfast.intake.template_worker import HEAD_BYTES, MOST_MEMORY_BYTES, OUTCOMES, STARTED, Outcome, RenderTask

RENDER_SECONDS: Final = 5  # of processor time; a long conversation takes a hundredth of that
MOST_PROCESSES: Final = 8
_START_SECONDS = 20.0
_WAITED_PER_SECOND = 3.0  # of processor time that a template may take
_LOOK_SECONDS = 0.05  # between two looks at how much memory a slow process has
_PIPE_BYTES = 1 << 20


class SandboxedTemplate:
    """A chat template that is rendered elsewhere. Any thread may call it; none that may not wait for seconds."""

    def __init__(self, name: str, source: str, *, grows: bool = False) -> None:
        """grows: in the form of `growing`. Raises TemplateSyntaxError, and TemplateOverrun if compiling it takes too much."""
        self._name, self._source, self._grows = name, source, grows
        self._ask(None)

    def render(self, variables: Mapping[str, Any], **more: Any) -> str:
        """The text. Raises TemplateError when the template refuses or fails, TemplateOverrun when it takes too much."""
        tools = variables.get("tools")
        if tools is not None:
            tools = [packed_tool(tool) if isinstance(tool, KeptTool) else tool for tool in tools]
        return self._ask({**variables, **more, "tools": tools})

    def _ask(self, variables: Mapping[str, Any] | None) -> str:
        task = RenderTask(source=self._source, grows=self._grows, variables=variables, seconds=RENDER_SECONDS)
        try:
            packed = pickle.dumps(task, pickle.HIGHEST_PROTOCOL)
        except pickle.PicklingError as error:
            raise TemplateError(f"a value cannot be given to the template: {error}") from error
        try:
            outcome, answer = PROCESSES.run(packed)
        except _Overrun as error:
            raise TemplateOverrun(template=self._name, why=str(error)) from error
        text = answer.decode("utf-8", "surrogatepass")
        match outcome:
            case "text":
                return text
            case "refused":
                raise TemplateError(text)
            case "broken":
                raise TemplateSyntaxError(text, lineno=1)
            case "memory":
                raise TemplateOverrun(template=self._name, why=_TOO_MUCH_MEMORY)


_TOO_MUCH_MEMORY = f"needs more than {MOST_MEMORY_BYTES >> 20:,} MiB of memory, or writes too long a text"


class _Overrun(Exception):
    """A process was ended. The message says why, behind "the template …"."""


class _ProcessGone(Exception):
    """A process ended by itself."""


class RenderProcesses:
    """Starts and keeps processes that render. Any thread may call it."""

    def __init__(self, *, most_processes: int = MOST_PROCESSES, seconds: float = RENDER_SECONDS) -> None:
        self._seconds = seconds
        self._places = threading.BoundedSemaphore(most_processes)
        self._idle: list[_RenderProcess] = []  # the last one to be used is the first to be used again

    def run(self, task: bytes) -> tuple[Outcome, bytes]:
        """Have one process do a task. Raises _Overrun."""
        if not self._places.acquire(timeout=self._seconds):
            raise _Overrun("had to wait too long for others to be rendered")
        try:
            with contextlib.suppress(_ProcessGone):  # somebody may have ended a process that was idle
                return self._run_in(self._next(), task)
            try:
                return self._run_in(_RenderProcess(), task)
            except _ProcessGone:
                raise _Overrun("ended the process that rendered it") from None
        finally:
            self._places.release()

    def close(self) -> None:
        """End the processes that have nothing to do; the next task starts another one."""
        while self._idle:
            self._idle.pop().kill()

    def _next(self) -> _RenderProcess:
        try:
            return self._idle.pop()
        except IndexError:
            return _RenderProcess()

    def _run_in(self, process: _RenderProcess, task: bytes) -> tuple[Outcome, bytes]:
        is_fit = False
        try:
            answer = process.ask(task, seconds=self._seconds)
            is_fit = answer[0] != "memory"
        finally:
            if is_fit:
                self._idle.append(process)
            else:
                process.kill()
        return answer


class _RenderProcess:
    """One process. Used by one thread at a time; `kill` may come from any."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-m", "holdfast.intake.template_worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._tasks, self._answers = self._process.stdin, self._process.stdout
        self._readable = select.poll()
        self._readable.register(self._answers, select.POLLIN)
        self._has_started = False

    def ask(self, task: bytes, *, seconds: float) -> tuple[Outcome, bytes]:
        """Raises _ProcessGone, and _Overrun when it takes longer, or more memory than it may."""
        if not self._has_started:
            self._read(len(STARTED), seconds=_START_SECONDS)
            self._has_started = True
        try:
            for part in (len(task).to_bytes(HEAD_BYTES, "big"), task):
                _write_all(self._tasks.fileno(), part)
        except (BrokenPipeError, ValueError):
            raise _ProcessGone from None
        head = self._read(1 + HEAD_BYTES, seconds=seconds)
        return OUTCOMES[head[0]], self._read(int.from_bytes(head[1:], "big"), seconds=seconds)

    def kill(self) -> None:
        """End it at once, whatever it does."""
        self._process.kill()
        self._process.wait()
        self._tasks.close()
        self._answers.close()

    def _read(self, size: int, *, seconds: float) -> bytes:
        watched = _Watched(self._process.pid, seconds=seconds)
        parts = bytearray()
        while len(parts) < size:
            while not self._readable.poll(_LOOK_SECONDS * 1000):
                watched.check()
            part = os.read(self._answers.fileno(), min(size - len(parts), _PIPE_BYTES))
            if not part:
                raise _ProcessGone
            parts += part
        return bytes(parts)


class _Watched:
    """Whether a process has taken too much since this was made. Its clock counts least: others may keep the processor busy."""

    def __init__(self, pid: int, *, seconds: float) -> None:
        self._pid, self._seconds = pid, seconds
        self._give_up_at = time.monotonic() + _WAITED_PER_SECOND * seconds
        self._seconds_before: float | None = None  # of processor time, at the first look

    def check(self) -> None:
        """Raises _Overrun."""
        try:
            process = psutil.Process(self._pid)
            used = process.cpu_times()
            resident_bytes = process.memory_info().rss
        except psutil.Error:
            return  # it has ended, which is seen at its pipe
        used_seconds = used.user + used.system
        if self._seconds_before is None:
            self._seconds_before = used_seconds
        if resident_bytes > MOST_MEMORY_BYTES:  # not every system limits the address space
            raise _Overrun(_TOO_MUCH_MEMORY)
        if used_seconds - self._seconds_before >= self._seconds or time.monotonic() >= self._give_up_at:
            raise _Overrun(f"took longer than {self._seconds:g} s")


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


PROCESSES: Final = RenderProcesses()
atexit.register(PROCESSES.close)
