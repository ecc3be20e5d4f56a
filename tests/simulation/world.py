"""The simulated world: virtual time and a deterministic scheduler.

Every thread of the real code is a task (a greenlet), and one task runs at a time, until it waits for
a lock, a time, a message or the disk. Then the world's random generator chooses one of the ready
tasks; if none is ready, time jumps to the next timer. So the seed determines the order of events.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import greenlet

EPOCH = 1_800_000_000.0  # the wall clock when a world begins
CALL_SECONDS = 1e-6  # each reading of a clock advances it by this


class Killed(BaseException):
    """Raised in a task whose process was killed, so that it ends."""


class Stuck(AssertionError):
    """Deadlock: no task is ready and no timer is set, but the world has not ended."""


class Process:
    """Tasks that live and die together. ends: called at its end, like a kernel's cleanup."""

    def __init__(self, world: World, name: str, *, pid: int) -> None:
        self.world, self.name, self.pid = world, name, pid
        self.is_dead = False
        self.is_suspended = False
        self.exit_code: int | None = None
        self.tasks: dict[Task, None] = {}
        self.ends: list[Callable[[], None]] = []
        self._held: list[Task] = []  # that became ready while it was suspended

    def spawn(self, run: Callable[[], object], name: str, *, is_daemon: bool = False) -> Task:
        """Start a task."""
        task = Task(self, run, name, is_daemon=is_daemon)
        self.tasks[task] = None
        self.world.make_ready(task)
        return task

    def suspend(self) -> None:
        """Like SIGSTOP."""
        self.is_suspended = True

    def resume(self) -> None:
        """Like SIGCONT."""
        self.is_suspended = False
        held, self._held = self._held, []
        for task in held:
            self.world.make_ready(task)

    def hold(self, task: Task) -> None:
        """Keep a task that became ready until `resume`."""
        self._held.append(task)

    def kill(self, code: int = -9) -> None:
        """Like SIGKILL: no task runs again, and unwinding them has no effect."""
        if self.is_dead:
            return
        self.is_dead = True
        self.exit_code = code
        self.world.forget_ready(self)
        tasks = [task for task in self.tasks if task is not self.world.current]
        self.tasks.clear()
        for end in self.ends:
            end()
        for task in tasks:
            self.world.bury(task)

    def exit(self, code: int) -> None:
        """End with an exit code, as at the end of the main function."""
        self.kill(code)


class Task:
    """One thread."""

    def __init__(
        self, process: Process, run: Callable[[], object], name: str, *, is_daemon: bool
    ) -> None:
        self.process, self.name, self.is_daemon = process, name, is_daemon
        self.is_over = False
        self.is_blocked = False
        self.has_timed_out = False
        self.waits = 0  # how often it has waited; the timer of an earlier wait must not wake it
        self.joiners: list[Task] = []
        self.failure: BaseException | None = None
        self._run = run
        self.greenlet = greenlet.greenlet(self._main, parent=process.world.hub)

    def _main(self) -> None:
        try:
            if not self.process.is_dead:
                self._run()
        except (Killed, greenlet.GreenletExit) as end:
            if isinstance(end, Killed) and not self.process.is_dead:
                self.failure = AssertionError(f"{self.name} was killed, but its process lives")
        except BaseException as error:
            if not self.process.is_dead:
                self.failure = error
        finally:
            self.is_over = True
            self.process.tasks.pop(self, None)
            for joiner in self.joiners:
                self.process.world.wake(joiner)


class World:
    """One simulated world."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.hub = greenlet.getcurrent()
        self.now = 1000.0
        self.wall_shift = 0.0  # of the wall clock, in seconds
        self.events = 0
        self.current: Task | None = None
        self.processes: list[Process] = []
        self.story: list[tuple[float, str]] = []
        self.on_kill: Callable[[Process], None] = lambda process: None  # the server sends SIGKILL
        # a fault of the device or of a load happens
        self.on_fault: Callable[[Process, str], None] = lambda process, fault: None
        # the code would only log an error
        self.on_error: Callable[[BaseException], None] = lambda error: None
        self.on_delete: Callable[[Path], None] = lambda path: None  # before a file is deleted
        self.outside = Process(self, "world", pid=1)
        self.counts: Counter[str] = Counter()  # operations by kind
        self.failing: tuple[str, int] | None = None  # the operation that fails, and its number
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._orders = itertools.count()
        self._pids = itertools.count(100)
        self._trace = hashlib.blake2b(digest_size=8)

    # -- clocks

    def clock(self) -> float:
        """Seconds of the monotonic clock, strictly increasing."""
        self.now += CALL_SECONDS
        return self.now

    def wall(self) -> float:
        """Seconds since the epoch."""
        return EPOCH + self.clock() + self.wall_shift

    # -- processes and tasks

    def process(self, name: str) -> Process:
        """Start a process."""
        found = Process(self, name, pid=next(self._pids))
        self.processes.append(found)
        return found

    @property
    def here(self) -> Process:
        """The process of the running task."""
        return self.outside if self.current is None else self.current.process

    def block(self, seconds: float | None = None) -> bool:
        """Wait until `wake` is called, for at most this long. Returns False after a timeout."""
        task = self.current
        assert task is not None, "only a task can wait"
        if task.process.is_dead:
            raise Killed
        task.waits += 1
        task.is_blocked = True
        task.has_timed_out = False
        if seconds is not None:
            number = task.waits
            self.after(seconds, lambda: self._time_out(task, number))
        self._leave(task)
        return not task.has_timed_out

    def _time_out(self, task: Task, number: int) -> None:
        if task.is_blocked and task.waits == number:
            task.has_timed_out = True
            self.wake(task)

    def _leave(self, task: Task) -> None:
        self.hub.switch()
        assert self.current is task
        if task.process.is_dead:
            raise Killed

    def wake(self, task: Task) -> None:
        """Make a waiting task ready."""
        if task.is_blocked:
            task.is_blocked = False
            self.make_ready(task)

    def yield_now(self) -> None:
        """Give other ready tasks the chance to run first."""
        task = self.current
        if task is None:
            return
        if task.process.is_dead:
            raise Killed
        self.make_ready(task)
        self._leave(task)

    def make_ready(self, task: Task) -> None:
        """Add a task to the ready tasks."""
        if not task.is_over:
            self._ready.append(task)

    def forget_ready(self, process: Process) -> None:
        """Remove a process's tasks from the ready tasks."""
        self._ready = [task for task in self._ready if task.process is not process]

    def bury(self, task: Task) -> None:
        """Unwind a task of a dead process."""
        if task.is_over:
            return
        task.is_blocked = False  # so that nothing wakes it
        before = self.current
        self.current = task
        try:
            if task.greenlet:  # it has begun
                parent = task.greenlet.parent
                task.greenlet.parent = greenlet.getcurrent()
                task.greenlet.throw(Killed)
                if not task.greenlet.dead:
                    task.greenlet.parent = parent
        finally:
            self.current = before
            task.is_over, task.is_blocked = True, False

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` after this time, outside all tasks."""
        heapq.heappush(self._timers, (self.now + max(0.0, seconds), next(self._orders), act))

    # -- running

    def run(self, is_over: Callable[[], bool]) -> None:
        """Run events until `is_over`."""
        while not is_over():
            self._step()

    def _step(self) -> None:
        timers = self._timers
        if timers and (timers[0][0] <= self.now or not self._ready):
            at, _, act = heapq.heappop(timers)
            self.now = max(self.now, at)
            act()
            return
        if not self._ready:
            raise Stuck(f"nothing happens any more: {self.waiting()}")
        place = self.random.randrange(len(self._ready)) if len(self._ready) > 1 else 0
        task = self._ready.pop(place)
        if task.is_over or task.process.is_dead:
            return  # switching to a dead greenlet would run its parent
        if task.process.is_suspended:
            task.process.hold(task)
            return
        self.events += 1
        self.note(task.process.name, task.name)
        self.current = task
        try:
            task.greenlet.switch()
        finally:
            self.current = None
        if task.failure is not None:
            failure, task.failure = task.failure, None
            raise failure

    def waiting(self) -> str:
        """All living tasks, for messages."""
        return ", ".join(
            f"{process.name}/{task.name}" for process in self.processes for task in process.tasks
        )

    # -- sweeps

    def fails(self, kind: str) -> bool:
        """Count an operation of this kind that is about to begin. Returns whether it must fail."""
        self.counts[kind] += 1
        if self.failing != (kind, self.counts[kind]):
            return False
        self.on_fault(self.here, f"the planned {kind}")
        return True

    # -- trace and story

    def note(self, *words: Any) -> None:
        """Add to the trace. Two runs are the same if the hashes of their traces are."""
        self._trace.update(f"{self.now:.6f} {' '.join(map(str, words))}\n".encode())

    def tell(self, text: str) -> None:
        """Add a sentence to the story."""
        self.note(text)
        self.story.append((self.now, text))

    @property
    def trace_hash(self) -> str:
        """The hash of the trace."""
        return self._trace.hexdigest()


_world: World | None = None


def world() -> World:
    """The running world."""
    assert _world is not None, "no world runs"
    return _world


def world_or_none() -> World | None:
    """The running world, if there is one."""
    return _world


@contextmanager
def a_world(seed: int) -> Iterator[World]:
    """Create a world, and kill all its processes at the end."""
    global _world
    assert _world is None, "one world at a time"
    _world = World(seed)
    try:
        yield _world
    finally:
        for process in list(_world.processes):
            process.kill()
        _world = None
