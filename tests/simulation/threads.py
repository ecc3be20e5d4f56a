"""Simulated threads, locks, clocks and random bytes, in place of Python's.

`install` replaces them for the whole interpreter, before anything else is imported. Outside a
world, the clocks are real and locks never block.
"""

from __future__ import annotations

import itertools
import os
import queue
import random
import secrets
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.simulation.world import Killed, Task, world, world_or_none

_REAL_MONOTONIC = time.monotonic
_REAL_TIME = time.time
_REAL_URANDOM = os.urandom


class Lock:
    """In place of `threading.Lock`: tasks wait for it in virtual time."""

    def __init__(self) -> None:
        self._is_locked = False
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        found = world_or_none()
        if found is not None and found.current is not None and found.here.is_dead:
            raise Killed
        if not self._is_locked:
            self._is_locked = True
            return True
        if not blocking:
            return False
        assert found is not None and found.current is not None, "nobody could release this lock"
        ends_at = None if timeout < 0 else found.now + timeout
        while self._is_locked:
            left = None if ends_at is None else ends_at - found.now
            if left is not None and left <= 0:
                return False
            self._waiting.append(found.current)
            try:
                found.block(left)
            finally:
                if found.current in self._waiting:
                    self._waiting.remove(found.current)
        self._is_locked = True
        return True

    def release(self) -> None:
        found = world_or_none()
        if not self._is_locked:
            if found is not None and found.here.is_dead:
                return  # a killed task could not reacquire it
            raise RuntimeError("release unlocked lock")
        self._is_locked = False
        while found is not None and self._waiting:
            task = self._waiting.popleft()
            if not task.process.is_dead:
                found.wake(task)
                break

    def locked(self) -> bool:
        return self._is_locked

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self.__init__()  # type: ignore[misc]


class RLock:
    """In place of `threading.RLock`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: object = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = _me()
        if self._owner is not me or not self._count:
            if not self._lock.acquire(blocking, timeout):
                return False
            self._owner = me
        self._count += 1
        return True

    def release(self) -> None:
        if self._owner is not _me() or not self._count:
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # the interface that Condition uses

    def _is_owned(self) -> bool:
        return self._count > 0 and self._owner is _me()

    def _release_save(self) -> tuple[int, object]:
        state = (self._count, self._owner)
        self._count, self._owner = 0, None
        self._lock.release()
        return state

    def _acquire_restore(self, state: tuple[int, object]) -> None:
        self._lock.acquire()
        self._count, self._owner = state


def _me() -> object:
    found = world_or_none()
    return None if found is None else found.current


class Thread:
    """In place of `threading.Thread`: a task of the process that starts it."""

    _numbers = itertools.count(1)
    _hashes = itertools.count(1)

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self.name = name or f"Thread-{next(self._numbers)}"
        self.daemon = bool(daemon)
        self.ident: int | None = None
        self._task: Task | None = None
        self._hash = next(self._hashes)

    def __hash__(self) -> int:
        return self._hash  # deterministic, so that sets have the same order in every process

    def start(self) -> None:
        self.ident = id(self)
        process = world().here
        if process.is_dead:
            raise Killed
        self._task = process.spawn(self._main, self.name, is_daemon=self.daemon)

    def _main(self) -> None:
        self.run()

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_over

    def join(self, timeout: float | None = None) -> None:
        found = world_or_none()
        if found is None or self._task is None or found.current is None:
            return
        ends_at = None if timeout is None else found.now + timeout
        while not self._task.is_over:
            left = None if ends_at is None else ends_at - found.now
            if left is not None and left <= 0:
                return
            self._task.joiners.append(found.current)
            found.block(left)


class Timer(Thread):
    """In place of `threading.Timer`."""

    def __init__(
        self,
        interval: float,
        function: Callable[..., object],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(target=function, args=args or (), kwargs=kwargs)
        self._interval = interval
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True

    def run(self) -> None:
        sleep(self._interval)
        if not self._is_cancelled:
            super().run()


def monotonic() -> float:
    """In place of `time.monotonic` and similar clocks."""
    found = world_or_none()
    return _REAL_MONOTONIC() if found is None else found.clock()


def wall_time() -> float:
    """In place of `time.time`."""
    found = world_or_none()
    return _REAL_TIME() if found is None else found.wall()


def sleep(seconds: float) -> None:
    """In place of `time.sleep`."""
    found = world_or_none()
    if found is not None and found.current is not None:
        ends_at = found.now + seconds
        while (left := ends_at - found.now) > 0:
            found.block(left)


def urandom(size: int) -> bytes:
    """In place of `os.urandom`."""
    found = world_or_none()
    return _REAL_URANDOM(size) if found is None else found.random.randbytes(size)


_REAL_GMTIME = time.gmtime
_REAL_LOCALTIME = time.localtime


def _gmtime(seconds: float | None = None) -> time.struct_time:
    return _REAL_GMTIME(wall_time() if seconds is None else seconds)


def _localtime(seconds: float | None = None) -> time.struct_time:
    return _REAL_GMTIME(wall_time() if seconds is None else seconds)


def _number_futures() -> None:
    """Give futures deterministic hashes instead of their addresses."""
    from concurrent.futures import Future

    begin, hashes = Future.__init__, itertools.count(1)

    def numbered(self: Any) -> None:
        self._hash = next(hashes)
        begin(self)

    Future.__init__ = numbered  # type: ignore[method-assign]
    Future.__hash__ = lambda self: self._hash  # type: ignore[assignment, method-assign, attr-defined]


def install() -> None:
    """Replace Python's threads, locks, clocks and random bytes."""
    for name in ("monotonic", "perf_counter", "process_time", "thread_time"):
        setattr(time, name, monotonic)
    for name in ("monotonic_ns", "perf_counter_ns"):
        setattr(time, name, lambda: int(monotonic() * 1e9))
    time.clock_gettime = lambda _: monotonic()  # type: ignore[assignment]
    time.time = wall_time
    time.time_ns = lambda: int(wall_time() * 1e9)
    time.gmtime, time.localtime = _gmtime, _localtime  # type: ignore[assignment]
    time.sleep = sleep
    threading.Lock = threading._allocate_lock = Lock  # type: ignore[misc, assignment, attr-defined]
    threading.RLock = RLock  # type: ignore[misc, assignment]
    threading.Thread = Thread  # type: ignore[misc, assignment]
    threading.Timer = Timer  # type: ignore[misc, assignment]
    threading._time = monotonic  # type: ignore[attr-defined]
    queue.time = monotonic  # type: ignore[attr-defined]
    queue.SimpleQueue = queue._PySimpleQueue  # type: ignore[misc, attr-defined]
    os.urandom = urandom
    random._urandom = urandom  # type: ignore[attr-defined]
    secrets.token_bytes = lambda nbytes=None: urandom(32 if nbytes is None else nbytes)
    uuid._generate_time_safe = None  # type: ignore[attr-defined]
    _number_futures()
