"""An asyncio event loop on virtual time: one task of the simulated world."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from tests.simulation import links
from tests.simulation.world import Task, world

_hashes = itertools.count(1)


class _Future(asyncio.Future[Any]):
    """With a deterministic hash, so that sets have the same order in every process."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._hash = next(_hashes)

    def __hash__(self) -> int:
        return self._hash


class _Task(asyncio.Task[Any]):
    """With a deterministic hash, too."""

    def __init__(self, coroutine: Any, **more: Any) -> None:
        self._hash = next(_hashes)  # before the base class registers the task
        super().__init__(coroutine, **more)

    def __hash__(self) -> int:
        return self._hash


class SimulatedLoop(asyncio.BaseEventLoop):
    """Blocks in the world instead of in `select`."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self
        self._clock_resolution = 1e-6
        self._task: Task | None = None
        self._has_news = False
        self.set_task_factory(lambda loop, coroutine, **more: _Task(coroutine, loop=loop, **more))

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def time(self) -> float:
        return world().now

    # the interface that BaseEventLoop needs

    def select(self, timeout: float | None) -> list[Any]:
        found = world()
        self._task = found.current
        if self._has_news or (timeout is not None and timeout <= 0):
            found.yield_now()
        else:
            found.block(timeout)
        self._has_news = False
        return []

    def _process_events(self, event_list: object) -> None:
        pass

    def _write_to_self(self) -> None:
        self._has_news = True
        if self._task is not None:
            world().wake(self._task)

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        links.add_reader(fd, lambda: self.call_soon_threadsafe(callback, *args) and None)

    def remove_reader(self, fd: Any) -> bool:
        return links.remove_reader(fd)
