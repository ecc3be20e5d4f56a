"""Renders untrusted chat templates in other processes, which are killed when they use too much time
or memory.

A template may loop forever or fill the memory. Python cannot end a thread, and no check within an
interpreter detects every expensive operation. So a separate process (`template_worker.py`) renders
templates, with limits on time and memory. This costs one exchange over a pipe. A process is started
when none is idle, and can render the templates of any model.

Only a few renders of one template run concurrently, so a template that hangs delays conversations
that use the same template, but no others (unless templates hang in all processes). A
render that has to wait too long fails with an error that tells the client to try again.
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
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import psutil
from jinja2 import TemplateError, TemplateSyntaxError

from holdfast.errors import RenderingUnavailable, TemplateOverrun
from holdfast.front.prompt.template_worker import (
    HEAD_BYTES,
    MAX_MEMORY_BYTES,
    OUTCOMES,
    RENDER_ERRORS,
    STARTED,
    Outcome,
    RenderTask,
)
from holdfast.front.prompt.tool_definitions import KeptPart, packed_tool

RENDER_SECONDS: Final = 5  # limit of processor time; a long conversation takes 0.05 s
MAX_PROCESSES: Final = 8
MAX_PER_TEMPLATE: Final = 2
# A template that is being rendered gets another process only while fewer than this many run; the
# others are reserved for templates that are not being rendered yet.
_SHARED_PROCESSES = MAX_PROCESSES // 2
_IDLE_SECONDS = 60.0  # an idle process is ended after this time, unless it is the last idle one
_START_SECONDS = 20.0
_WALL_PER_CPU_SECOND = 3.0  # allows for other processes that keep the processor busy
_POLL_SECONDS = 0.05  # time between two checks of a slow process
_PIPE_BYTES = 1 << 20


class SandboxedTemplate:
    """A chat template that is rendered in another process. Thread-safe; may block for seconds."""

    def __init__(self, name: str, source: str) -> None:
        """Compile the template.

        Raises TemplateSyntaxError, TemplateOverrun and RenderingUnavailable.
        """
        self._name = name
        self._source = source
        self._run_in_process(None)

    def render(self, variables: Mapping[str, Any]) -> str:
        """Render the template.

        Raises TemplateError if the template refuses or fails, TemplateOverrun if it takes too much
        time or memory, and RenderingUnavailable if no process can render it now.
        """
        return self._run_in_process(variables)

    def _run_in_process(self, variables: Mapping[str, Any] | None) -> str:
        """Render the template; without variables, only compile it, which returns an empty text."""
        try:
            task = self._packed(variables)
        except (pickle.PicklingError, *RENDER_ERRORS) as error:
            raise TemplateError(f"a value cannot be passed to the template: {error}") from error
        try:
            outcome, answer = PROCESSES.run(task, source=self._source)
        except _Overrun as error:
            raise TemplateOverrun(template=self._name, why=str(error)) from error
        except _Unavailable as error:
            raise RenderingUnavailable(template=self._name, why=str(error)) from error
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

    def _packed(self, variables: Mapping[str, Any] | None) -> bytes:
        """The task that renders the template with these variables, as bytes for the other process."""
        if variables is not None and variables.get("tools") is not None:
            tools = [
                packed_tool(tool) if isinstance(tool, KeptPart) else tool
                for tool in variables["tools"]
            ]
            variables = {**variables, "tools": tools}
        task = RenderTask(source=self._source, variables=variables, seconds=RENDER_SECONDS)
        return pickle.dumps(task, pickle.HIGHEST_PROTOCOL)


_TOO_MUCH_MEMORY = (
    f"needs more than {MAX_MEMORY_BYTES >> 20:,} MiB of memory, or writes a text that is too long"
)


class _Overrun(Exception):
    """A template used too much time or memory.

    The message is the predicate of a sentence about the template, such as "took longer than 5 s".
    """


class _Unavailable(Exception):
    """Rendering could not start, for the reason in the message. The template is not to blame."""


class _ProcessGone(Exception):
    """The process ended on its own, or was stopped."""


class RenderProcesses:
    """Starts, reuses and ends the processes that render. Thread-safe."""

    def __init__(
        self, *, cpu_seconds: float = RENDER_SECONDS, idle_seconds: float = _IDLE_SECONDS
    ) -> None:
        self._cpu_seconds = cpu_seconds
        self._idle_seconds = idle_seconds
        self._changed = threading.Condition()  # guards the fields below
        self._running: Counter[str] = Counter()  # number of renders by template source
        self._idle: list[_RenderProcess] = []  # most recently used last
        self._cleanup: threading.Timer | None = None

    def run(self, task: bytes, *, source: str) -> tuple[Outcome, bytes]:
        """Run a task for the template with this source. Raises _Overrun and _Unavailable."""
        with self._slot(source):
            with self._changed:
                process = self._idle.pop() if self._idle else None
            if process is not None:
                with contextlib.suppress(_ProcessGone):  # it may be dead or stopped
                    return self._run_task_in(process, task)
            try:
                return self._run_task_in(_RenderProcess(), task)
            except _ProcessGone:
                raise _Overrun("ended the process that rendered it") from None

    def close(self) -> None:
        """End the idle processes. Later tasks start new processes."""
        with self._changed:
            unused = list(self._idle)
            self._idle.clear()
            if self._cleanup is not None:
                self._cleanup.cancel()
                self._cleanup = None
        for process in unused:
            process.kill()

    @contextlib.contextmanager
    def _slot(self, source: str) -> Iterator[None]:
        """Wait until the render may start, and count it while it runs."""
        timeout_seconds = _WALL_PER_CPU_SECOND * self._cpu_seconds
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._has_free_slot(source), timeout=timeout_seconds
            ):
                raise _Unavailable(
                    f"other conversations were being rendered for {timeout_seconds:g} s "
                    f"({MAX_PER_TEMPLATE} renders of one template and {MAX_PROCESSES} in all run "
                    "at once)"
                )
            self._running[source] += 1
        try:
            yield
        finally:
            with self._changed:
                self._running[source] -= 1
                self._running += Counter()  # drops zeros
                self._changed.notify_all()

    def _has_free_slot(self, source: str) -> bool:
        """Whether the limits allow one more render of the template with this source."""
        running = self._running.total()
        if source not in self._running:
            return running < MAX_PROCESSES
        return running < _SHARED_PROCESSES and self._running[source] < MAX_PER_TEMPLATE

    def _run_task_in(self, process: _RenderProcess, task: bytes) -> tuple[Outcome, bytes]:
        """Run a task in a process, and then keep the process for later tasks, unless it failed."""
        is_reusable = False
        try:
            answer = process.run_task(task, cpu_seconds=self._cpu_seconds)
            is_reusable = answer[0] != "memory"
        finally:
            if is_reusable:
                process.last_used = time.monotonic()
                with self._changed:
                    self._idle.append(process)
                    self._schedule_cleanup()
            else:
                process.kill()
        return answer

    def _schedule_cleanup(self) -> None:
        """Plan to end processes that stay idle, if there are several. The caller holds the lock."""
        if len(self._idle) > 1 and self._cleanup is None:
            self._cleanup = threading.Timer(self._idle_seconds, self._end_unused)
            self._cleanup.daemon = True
            self._cleanup.start()

    def _end_unused(self) -> None:
        """End the processes that have been idle for long, except the most recently used one."""
        unused_since = time.monotonic() - self._idle_seconds
        with self._changed:
            self._cleanup = None
            unused = [process for process in self._idle[:-1] if process.last_used <= unused_since]
            self._idle = [process for process in self._idle if process not in unused]
            self._schedule_cleanup()
        for process in unused:
            process.kill()


class _RenderProcess:
    """A process that renders, for one thread at a time."""

    def __init__(self) -> None:
        """Raises _Unavailable when the process cannot be started."""
        # -P: a module in the current folder must not shadow a standard library module.
        command = (sys.executable, "-P", "-m", "holdfast.front.prompt.template_worker")
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
        except OSError as error:
            raise _Unavailable(
                f"no process to render it could be started ({error.strerror})"
            ) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._tasks = self._process.stdin
        self._answers = self._process.stdout
        self._readable = select.poll()
        self._readable.register(self._answers, select.POLLIN)
        os.set_blocking(self._tasks.fileno(), False)
        self._writable = select.poll()
        self._writable.register(self._tasks, select.POLLOUT)
        self._has_started = False  # `STARTED` was read
        self.last_used = time.monotonic()  # to end the processes that are idle

    def run_task(self, task: bytes, *, cpu_seconds: float) -> tuple[Outcome, bytes]:
        """Run a task.

        Raises _ProcessGone, _Unavailable, and _Overrun when it takes too much time or memory.
        """
        if not self._has_started:
            self._await_start()
        self._write(len(task).to_bytes(HEAD_BYTES, "big") + task, cpu_seconds=cpu_seconds)
        head = self._read(1 + HEAD_BYTES, cpu_seconds=cpu_seconds)
        return OUTCOMES[head[0]], self._read(
            int.from_bytes(head[1:], "big"), cpu_seconds=cpu_seconds
        )

    def kill(self) -> None:
        """End the process immediately, even in the middle of a render."""
        self._process.kill()
        self._process.wait()
        self._tasks.close()
        self._answers.close()

    def _await_start(self) -> None:
        """Wait until the process can take tasks. Raises _Unavailable if it does not start."""
        try:
            self._read(len(STARTED), cpu_seconds=_START_SECONDS)
        except (_ProcessGone, _Overrun) as error:
            raise _Unavailable("the process that should render it did not start") from error
        self._has_started = True

    def _write(self, data: bytes, *, cpu_seconds: float) -> None:
        """Write bytes to the process. Raises _ProcessGone and _Overrun."""
        limits = _LimitCheck(self._process.pid, cpu_seconds=cpu_seconds)
        remaining = memoryview(data)
        while remaining:
            while not self._writable.poll(_POLL_SECONDS * 1000):
                limits.check()
            try:
                remaining = remaining[os.write(self._tasks.fileno(), remaining) :]
            except (BrokenPipeError, ValueError):
                raise _ProcessGone from None

    def _read(self, size: int, *, cpu_seconds: float) -> bytes:
        """Read this number of bytes from the process. Raises _ProcessGone and _Overrun."""
        limits = _LimitCheck(self._process.pid, cpu_seconds=cpu_seconds)
        received = bytearray()
        while len(received) < size:
            while not self._readable.poll(_POLL_SECONDS * 1000):
                limits.check()
            part = os.read(self._answers.fileno(), min(size - len(received), _PIPE_BYTES))
            if not part:
                raise _ProcessGone
            received += part
        return bytes(received)


class _LimitCheck:
    """Checks the memory of a process, and the time it has used since this object was created.

    cpu_seconds: limit of processor time. A limit of real time, a few times as long, applies, too.
    """

    def __init__(self, pid: int, *, cpu_seconds: float) -> None:
        self._pid = pid
        self._cpu_seconds = cpu_seconds
        self._deadline = time.monotonic() + _WALL_PER_CPU_SECOND * cpu_seconds
        self._cpu_seconds_before: float | None = None  # processor time at the first check

    def check(self) -> None:
        """Raise _Overrun if a limit is exceeded, and _ProcessGone if the process is stopped."""
        try:
            process = psutil.Process(self._pid)
            cpu_times = process.cpu_times()
            resident_bytes = process.memory_info().rss
            is_stopped = process.status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return  # the process has ended; reading from its pipe will show that
        if is_stopped:  # by a signal; it may never be continued
            raise _ProcessGone
        used_cpu_seconds = cpu_times.user + cpu_times.system
        if self._cpu_seconds_before is None:
            self._cpu_seconds_before = used_cpu_seconds
        # needed where the system cannot limit the address space of a process
        if resident_bytes > MAX_MEMORY_BYTES:
            raise _Overrun(_TOO_MUCH_MEMORY)
        if (
            used_cpu_seconds - self._cpu_seconds_before >= self._cpu_seconds
            or time.monotonic() >= self._deadline
        ):
            raise _Overrun(f"took longer than {self._cpu_seconds:g} s")


PROCESSES: Final = RenderProcesses()
atexit.register(PROCESSES.close)
