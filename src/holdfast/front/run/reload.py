"""SIGHUP: what a running server takes in anew, each with one line in the log; and the terminal
whose end sends it too.
"""

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

# takes in one thing anew, in the loop, and says in one line of the log what came of it
Reload: TypeAlias = Callable[[], None]

_LEVEL = "log.level"
_log = logging.getLogger("holdfast.front.run")


class ReloadedSettings:
    """The settings, read again from where they came from.

    Of these the level of the log can change; all others need a restart.
    """

    def __init__(
        self, effective: EffectiveSettings, *, on_level: Callable[[LogLevel], None]
    ) -> None:
        """on_level: told the level of the log when that has changed."""
        self._at_start = self._current = effective
        self._on_level = on_level

    def reload(self) -> None:
        """Read them again; if they cannot be used, all stays as it is."""
        try:
            read = self._at_start.read_again()
        except ConfigError as error:
            _log.error("the settings stay as they are: %s", error)
            return
        before, level = self._current.settings.log.level, read.settings.log.level
        set_level(read.settings.log)
        if level != before:
            self._on_level(level)
        self._current = read
        said = f"the level of the log is {level}" + (
            ", as before" if before == level else f"; it was {before}"
        )
        changed = [
            key
            for key in read.origins
            if key != _LEVEL
            and value_of(read.settings, key) != value_of(self._at_start.settings, key)
        ]
        needs = f"; changed, but only after a restart: {', '.join(changed)}" if changed else ""
        _log.warning("%s%s", said, needs) if changed else _log.info("%s", said)


def reload_keys(keys: KeyRing) -> None:
    """Read the file of API keys again; if it cannot be used, they stay as they are."""
    try:
        _log.info("%s", keys.reload())
    except ConfigError as error:
        _log.error("%s", error)


class ReloadedCatalog:
    """The catalog of models, read again on a thread: there may be many folders to be looked
    through.
    """

    def __init__(self, read: Callable[[], Catalog], residency: Residency) -> None:
        """read: raises ConfigError and ModelLoadError for what cannot be used."""
        self._read, self._residency = read, residency
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def reload(self) -> None:
        """Begin to read it again; if it cannot be used, all stays as it is."""
        task = asyncio.create_task(self.take_in(), name="catalog read again")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def take_in(self) -> None:
        """Read it again and serve what it says. One after another."""
        async with self._lock:
            try:
                catalog = await asyncio.to_thread(self._read)
            except (ConfigError, ModelLoadError) as error:
                _log.error("the catalog stays as it is: %s", error)
                return
            _log.info(
                "the catalog has been read again: %s", await self._residency.take_catalog(catalog)
            )


class Hangups:
    """What SIGHUP does: it reloads, or ends the server as SIGTERM does when it means that its
    terminal was closed.
    """

    def __init__(self) -> None:
        """Where SIGHUP is ignored (nohup), the end of the terminal ends nothing."""
        self._ends_with_terminal = (
            signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()
        )

    def reload_on(self, reloads: Sequence[Reload]) -> None:
        """From now on SIGHUP does all of this. On the main thread, in the loop."""
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
    """Whether this process has a terminal that controls it."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
