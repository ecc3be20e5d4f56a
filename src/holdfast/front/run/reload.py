"""SIGHUP: what a running server reloads. A closed terminal sends the same signal."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, TypeAlias

from holdfast.config import EffectiveSettings, LogLevel, value_of
from holdfast.errors import ConfigError, ModelLoadError
from holdfast.telemetry.logs import set_level

if TYPE_CHECKING:
    from holdfast.front.fleet.catalog import Catalog
    from holdfast.front.fleet.residency import Residency
    from holdfast.front.server.access import KeyRing

# reloads one thing, in the event loop, and logs the result in one line
Reload: TypeAlias = Callable[[], None]

_LEVEL = "log.level"
_log = logging.getLogger("holdfast.front.run")


class ReloadedSettings:
    """Reloads the settings. Only the log level can change; all others need a restart."""

    def __init__(
        self, effective: EffectiveSettings, *, on_level: Callable[[LogLevel], None]
    ) -> None:
        """on_level: called with a changed log level."""
        self._at_start = self._current = effective
        self._on_level = on_level

    def reload(self) -> None:
        """Read the settings again; if they are invalid, nothing changes."""
        try:
            read = self._at_start.read_again()
        except ConfigError as error:
            _log.error("the settings are not reloaded: %s", error)
            return
        before, level = self._current.settings.log.level, read.settings.log.level
        set_level(read.settings.log)
        if level != before:
            self._on_level(level)
        self._current = read
        change = ", as before" if before == level else f"; it was {before}"
        changed = [
            key
            for key in read.origins
            if key != _LEVEL
            and value_of(read.settings, key) != value_of(self._at_start.settings, key)
        ]
        if changed:
            pending = ", ".join(changed)
            _log.warning("the log level is %s%s; after a restart: %s", level, change, pending)
        else:
            _log.info("the log level is %s%s", level, change)


def reload_keys(keys: KeyRing) -> None:
    """Read the file of API keys again; if it is invalid, nothing changes."""
    try:
        _log.info("%s", keys.reload())
    except ConfigError as error:
        _log.error("%s", error)


class ReloadedCatalog:
    """Reloads the catalog of models, on a thread, since it may search many folders."""

    def __init__(self, read: Callable[[], Catalog], residency: Residency) -> None:
        """read: may raise ConfigError and ModelLoadError."""
        self._read, self._residency = read, residency
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def reload(self) -> None:
        """Start to read the catalog again; if it is invalid, nothing changes."""
        task = asyncio.create_task(self.take_in(), name="catalog read again")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def take_in(self) -> None:
        """Read the catalog again and serve it. Calls run one after another."""
        async with self._lock:
            try:
                catalog = await asyncio.to_thread(self._read)
            except (ConfigError, ModelLoadError) as error:
                _log.error("the catalog is not reloaded: %s", error)
                return
            changes = await self._residency.take_catalog(catalog)
            _log.info("the catalog is reloaded: %s", changes)


class Hangups:
    """What SIGHUP does: it reloads, or stops the server if its terminal was closed."""

    def __init__(self) -> None:
        """If SIGHUP is ignored (nohup), the server outlives its terminal."""
        self._ends_with_terminal = (
            signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()
        )

    def reload_on(self, reloads: Sequence[Reload]) -> None:
        """Make SIGHUP run these. Main thread, in the event loop."""
        loop = asyncio.get_running_loop()

        def hung_up(number: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self._hung_up, reloads)

        signal.signal(signal.SIGHUP, hung_up)

    def _hung_up(self, reloads: Sequence[Reload]) -> None:
        if self._ends_with_terminal and not _has_terminal():
            _log.info("the terminal was closed")
            os.kill(os.getpid(), signal.SIGTERM)
            return
        for reload in reloads:
            reload()


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
