"""An asyncio event loop on virtual time: one task of the simulated world."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tests.simulation import links
from tests.simulation.world import Task, world


class SimulatedLoop(asyncio.BaseEventLoop):
    """Waits in the world instead of in `select`."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self
        self._clock_resolution = 1e-6
        self._task: Task | None = None
        self._has_news = False

    def time(self) -> float:
        return world().now

    # what BaseEventLoop needs

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
