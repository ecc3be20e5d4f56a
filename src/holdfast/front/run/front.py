"""The server process: builds everything from the settings and runs it. It never imports MLX.

It starts the worker first, and imports the web application while the worker loads.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvloop

from holdfast import __version__
from holdfast.config import EffectiveSettings, LogLevel, Settings
from holdfast.errors import WorkerUnavailable
from holdfast.files import (
    compiled_code_folder,
    crash_reports_folder,
    hash_cache_file,
    logs_folder,
)
from holdfast.front.fleet.catalog import Catalog, CatalogEntry, catalog_of
from holdfast.front.fleet.model_slot import ModelFiles
from holdfast.front.fleet.residency import Residency
from holdfast.front.run.ready import ReadyModel, ReadyServer, announce, lan_addresses
from holdfast.front.run.reload import Hangups, Reload, ReloadedSettings, reload_keys
from holdfast.front.run.running_servers import RunningServer, run_folder, write_server
from holdfast.front.server.access import key_file_of, read_keys
from holdfast.machine.device_memory import MemoryShare
from holdfast.models.download import resolve_model
from holdfast.models.model_folder import checked_tensor_bytes
from holdfast.store.folder import chosen_folder
from holdfast.telemetry.logs import LogFile, configure_logging, log_uncaught, open_log_file
from holdfast.wire.commands import WorkerSettings

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from holdfast.front.server.run import ServerCertificate

WANTED_OPEN_FILES = 8192  # one per client; macOS allows 256 by default
BROKEN = 1  # exit code
STOPPED_EARLY = "stopped before the model was ready"

Progress = Callable[[str, float], None]
logger = logging.getLogger("holdfast.front.run")


def run(effective: EffectiveSettings, *, progress: Progress = lambda stage, fraction: None) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code.

    progress: called with stages and fractions of loading, at last with "ready". Raises
    ModelLoadError or ConfigError (exit code 2) if the model or the address cannot be used.
    """
    started_at = time.monotonic()
    settings = _with_store_folder(effective.settings)
    hangups = Hangups()
    log_file = _log_file(settings)
    configure_logging(settings.log, file=log_file)
    signal.signal(signal.SIGTERM, _exit_at_once)
    _allow_open_files(WANTED_OPEN_FILES)
    certificate = _certificate(settings)
    _check_keys(settings)
    catalog = catalog_of(settings, os.environ)
    for each in catalog.left_out:
        if each.is_asked_for:
            logger.warning("model %s is left out (%s): %s", each.name, each.origin, each.reason)
    if catalog.at_start and not catalog.entries[0].is_pinned:
        resolve_model(catalog.entries[0].model, progress=progress)  # the only or the named one
    try:
        with (
            run_folder(os.environ) as private,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            front = Front(
                settings, catalog, progress=progress, started_at=started_at, certificate=certificate
            )
            front.describe_in(private, log_file=log_file)
            front.reloads.append(ReloadedSettings(effective, on_level=front.set_log_level).reload)
            runner.run(front.serve(lambda: hangups.reload_on(front.reloads)))
    except WorkerUnavailable as error:
        logger.error("%s", error)
        return BROKEN
    return 0


class Front:
    """One server from its start to its stop, on one asyncio loop of the main thread."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        *,
        progress: Progress,
        started_at: float,
        certificate: ServerCertificate | None = None,
    ) -> None:
        self._settings = settings
        self._started_at = started_at
        self._certificate = certificate
        self.reloads: list[Reload] = [] if certificate is None else [certificate.reload]
        self._run_folder: Path | None = None
        self._log_path = ""
        self._was_ready = False
        self._residency = Residency(
            catalog,
            settings.residency,
            fetch=self._files_of,
            worker_of=self._worker_of,
            places=settings.scheduler.max_queued + settings.scheduler.max_running,
            on_progress=lambda model, event: progress(event.stage, event.fraction),
        )

    def _files_of(self, entry: CatalogEntry) -> ModelFiles:
        return _files(entry) if len(self._residency.catalog.entries) > 1 else _folder_alone(entry)

    def _worker_of(
        self, entry: CatalogEntry, files: ModelFiles, share: MemoryShare
    ) -> WorkerSettings:
        settings = self._settings
        return WorkerSettings(
            folder=str(files.folder),
            hash_cache=hash_cache_file(os.environ),
            compiled_code=compiled_code_folder(os.environ),
            crash_reports=crash_reports_folder(os.environ),
            model=replace(entry.model, name=entry.name),
            scheduler=settings.scheduler,
            store=entry.store,
            log=settings.log,
            residency=settings.residency,
            share=share,
        )

    def set_log_level(self, level: LogLevel) -> None:
        """Change the log level of all workers."""
        self._settings = replace(self._settings, log=replace(self._settings.log, level=level))
        self._residency.set_log_level(level)

    def describe_in(self, folder: Path, *, log_file: LogFile | None) -> None:
        """Describe the server in this run folder as soon as it listens."""
        self._run_folder = folder
        self._log_path = "" if log_file is None else str(log_file.path)

    async def serve(self, on_begin: Callable[[], None] = lambda: None) -> None:
        """Start the worker, then everything else; serve until a signal; stop everything in order.

        on_begin: called in the event loop. Raises ModelLoadError, ConfigError and
        WorkerUnavailable if it cannot serve.
        """
        signals = _EarlySignals()
        on_begin()
        try:
            await self._residency.start()
            await self._serve_http(signals)
        except asyncio.CancelledError:
            if not signals.came:
                raise
        finally:
            signals.end_at_next()
            await self._residency.stop()
            if signals.came and not self._was_ready:
                logger.info(STOPPED_EARLY)

    async def _serve_http(self, signals: _EarlySignals) -> None:
        from holdfast.front.run.web import build_application
        from holdfast.front.server import run as http

        with http.listen(self._settings.server) as listener:
            app = build_application(self._settings, self._residency)
            self.reloads.append(partial(reload_keys, app.state.services.keys))
            self.reloads.append(app.state.reloaded_catalog.reload)
            if signals.came:  # during the lines above, when there was nothing to stop yet
                return
            listening = asyncio.Event()
            server = http.server(
                app, self._settings.server, on_started=listening.set, certificate=self._certificate
            )
            signals.disarm()
            serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
            await asyncio.sleep(0)  # now it handles the signals
            server.should_exit = signals.came
            host, port = listener.getsockname()[:2]
            url = http.url_of(listener, scheme=self._settings.server.scheme)
            self._describe(url, port)
            loading = asyncio.create_task(self._announce(app, listening, url, host), name="ready")
            await asyncio.wait((serving, loading), return_when=asyncio.FIRST_COMPLETED)
            if loading.done() and loading.exception() is not None:
                server.should_exit = True
            await serving
            if not loading.done():
                signals.came = True  # the HTTP server handled it
                loading.cancel()
            await asyncio.wait((loading,))
            if (traces := app.state.services.traces) is not None:
                await asyncio.to_thread(traces.close)
        if not loading.cancelled():
            loading.result()  # raises if loading failed

    def _describe(self, url: str, port: int) -> None:
        if self._run_folder is None:
            return
        server = RunningServer(
            pid=os.getpid(),
            url=url,
            port=port,
            started_at=time.time(),
            version=__version__,
            store_folder=self._settings.store.folder,
            log_file=self._log_path,
            certificate=self._settings.server.tls_cert
            and os.path.abspath(self._settings.server.tls_cert),
        )
        try:
            write_server(server, self._run_folder)
        except OSError as error:
            logger.warning("`holdfast ps` will not find this server: %s", error)

    async def _announce(
        self, app: Starlette, listening: asyncio.Event, url: str, listens_on: str
    ) -> None:
        await self._residency.wait_ready()
        await listening.wait()
        from holdfast.front.server.guard import is_loopback

        first, *_ = statuses = self._residency.statuses()
        if first.state == "ready":
            await app.state.bundles.read(first.id)  # raises if its tokenizer is broken
        figures = (await self._residency.statistics()).get(first.id)
        gc.collect()
        gc.freeze()  # later collections, which delay tokens, skip what exists now
        needs_key: bool = app.state.services.needs_key
        ready = ReadyServer(
            url=url,
            model=first.id,
            info=first.info,
            models=tuple(ReadyModel(name=status.id, state=status.state) for status in statuses),
            ready_seconds=time.monotonic() - self._started_at,
            needs_key=needs_key,
            store_folder=self._settings.store.folder,
            lan_urls=_lan_urls(listens_on, url),
            is_open=not needs_key and not is_loopback(listens_on),
            memory=None if figures is None else figures.memory,
            log_file=self._log_path,
        )
        self._was_ready = True
        announce(ready, self._settings.log)


def _files(entry: CatalogEntry) -> ModelFiles:
    """The folder and size of a model; any thread. Raises ModelLoadError."""
    folder = _folder_alone(entry).folder
    return ModelFiles(folder=folder, weight_bytes=checked_tensor_bytes(folder))


def _folder_alone(entry: CatalogEntry) -> ModelFiles:
    """Like `_files`, without the size, which matters only among several models."""
    return ModelFiles(folder=resolve_model(entry.model, progress=lambda stage, fraction: None))


class _EarlySignals:
    """SIGINT and SIGTERM before the HTTP server handles them: they cancel the current task.

    After the HTTP server has stopped, one more signal exits at once.
    """

    def __init__(self) -> None:
        self.came = False
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._armed, self._ends_at_next = True, False
        for number in (signal.SIGINT, signal.SIGTERM):
            # not add_signal_handler: uvloop would keep calling it in addition to uvicorn's
            signal.signal(number, self._cancel)

    def disarm(self) -> None:
        """Stop cancelling: the HTTP server handles signals now."""
        self._armed = False

    def end_at_next(self) -> None:
        """Exit at the next signal: only the workers are left, which flush and exit on their own."""
        self._armed, self._ends_at_next = False, True

    def _cancel(self, number: int, frame: FrameType | None) -> None:
        if self._ends_at_next:
            logger.warning("forced exit; workers flush their cache and exit on their own")
            logging.shutdown()
            os._exit(128 + number)
        self.came = True
        if self._armed:
            self._loop.call_soon_threadsafe(self._cut_short)

    def _cut_short(self) -> None:
        # checked here: the signal may have arrived while the loop was busy
        if self._armed and self._task is not None:
            self._task.cancel()


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    """SIGTERM before anything is running; an interrupted download resumes next time."""
    logger.info(STOPPED_EARLY)
    logging.shutdown()
    os._exit(0)


def _log_file(settings: Settings) -> LogFile | None:
    """The log file, if there is one. Raises ConfigError."""
    file = open_log_file(
        settings.log, folder=lambda: logs_folder(os.environ), name=f"server-{settings.server.port}"
    )
    if file is not None:
        log_uncaught()
    return file


def _lan_urls(listens_on: str, url: str) -> tuple[str, ...]:
    from holdfast.front.server.guard import is_wildcard

    if not is_wildcard(listens_on):
        return ()
    scheme, _, port = (url.partition(":")[0], *url.rpartition(":")[1:])
    return tuple(f"{scheme}://{address}:{port}" for address in lan_addresses(listens_on=listens_on))


def _certificate(settings: Settings) -> ServerCertificate | None:
    """Fail early. Raises ConfigError."""
    if not settings.server.tls_cert:
        return None
    from holdfast.front.server.run import certificate_of

    return certificate_of(settings.server)


def _check_keys(settings: Settings) -> None:
    """Fail early. Raises ConfigError."""
    if (path := key_file_of(settings.server.keys_file, os.environ)) is not None:
        read_keys(path)


def _with_store_folder(settings: Settings) -> Settings:
    return replace(
        settings, store=replace(settings.store, folder=chosen_folder(settings.store, os.environ))
    )


def _allow_open_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
