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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeAlias

import uvloop

from holdfast import __version__
from holdfast.config import EffectiveSettings, LogLevel, Settings, value_of
from holdfast.errors import ConfigError, WorkerUnavailable
from holdfast.files import compiled_code_folder, crash_reports_folder, hash_cache_file, logs_folder
from holdfast.front.fleet.catalog import Catalog, CatalogEntry, catalog_of
from holdfast.front.fleet.residency import Residency
from holdfast.front.fleet.slot import ModelFiles
from holdfast.front.images.folder import images_folder
from holdfast.front.run.ready_message import ReadyServer, announce, lan_addresses
from holdfast.front.run.running_servers import RunningServer, run_folder, write_server
from holdfast.front.server.access import KeyRing, key_file_of, read_keys
from holdfast.front.telemetry.log_ring import LogRing
from holdfast.front.telemetry.logs import (
    LogFile,
    configure_logging,
    log_uncaught,
    open_log_file,
    set_level,
)
from holdfast.machine.device_memory import return_large_blocks
from holdfast.machine.memory_plan import MemoryShare
from holdfast.models.chat_templates import template_sources
from holdfast.models.download import resolve_model
from holdfast.models.draft_pairs import LocalModel, draft_of
from holdfast.models.tokenizer_files import read_json, recommended_sampling
from holdfast.models.weight_files import checked_tensor_bytes
from holdfast.store.folder import chosen_folder
from holdfast.wire.commands import WorkerSettings

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from holdfast.front.server.http_server import ServerCertificate

WANTED_OPEN_FILES = 8192  # one per client; macOS allows 256 by default
BROKEN = 1  # exit code if the model could not be served
STOPPED_EARLY = "stopped before the model was ready"

Progress: TypeAlias = Callable[[str, float], None]
# reloads one thing (such as the API keys) in the event loop, and logs the result in one line
Reload: TypeAlias = Callable[[], None]
logger = logging.getLogger("holdfast.front.run")


def run(
    effective: EffectiveSettings,
    *,
    progress: Progress = lambda stage, fraction: None,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code.

    Raises ModelLoadError or ConfigError (exit code 2) if the model or the address cannot be used.

    progress: called with the stage of loading and the fraction done, in the end with "ready".
    on_ready: called on a thread with the server's URL when it serves; None: nobody is told.
    """
    started_at = time.monotonic()
    settings = effective.settings
    store = replace(settings.store, folder=chosen_folder(settings.store, os.environ))
    settings = replace(settings, store=store)
    hangups = Hangups()
    log_file = _log_file(settings)
    log_ring = LogRing()
    configure_logging(settings.log, file=log_file, ring=log_ring)
    signal.signal(signal.SIGTERM, _exit_at_once)
    _allow_open_files(WANTED_OPEN_FILES)
    return_large_blocks()  # malloc would keep the memory of images
    certificate = _certificate(settings)
    if (keys_file := key_file_of(settings.server.keys_file, os.environ)) is not None:
        read_keys(keys_file)  # raises an error before the worker starts
    catalog = _checked_catalog(settings, progress)
    try:
        with (
            run_folder(os.environ) as folder_of_run,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            front = Front(
                settings,
                catalog,
                progress=progress,
                on_ready=on_ready,
                started_at=started_at,
                certificate=certificate,
                run_folder=folder_of_run,
                log_path="" if log_file is None else str(log_file.path),
                log_ring=log_ring,
            )
            front.reloads.append(ReloadedSettings(effective, on_level=front.set_log_level).reload)
            runner.run(front.serve(lambda: hangups.reload_on(front.reloads)))
    except WorkerUnavailable as error:
        logger.error("%s", error)
        return BROKEN
    return 0


def _checked_catalog(settings: Settings, progress: Progress) -> Catalog:
    """The models to serve. Downloads the only or the named model. Raises ModelLoadError if it
    cannot be used.
    """
    catalog = catalog_of(settings, os.environ)
    for excluded in catalog.excluded:
        if excluded.is_asked_for:
            logger.warning(
                "model %s is left out and not served (%s): %s",
                excluded.name,
                excluded.origin,
                excluded.reason,
            )
    if catalog.at_start and not catalog.entries[0].is_pinned:
        awaited_model = catalog.entries[0]  # the only or the named model
        folder = resolve_model(awaited_model.model, progress=progress)
        # a model that cannot draft is refused immediately
        if awaited_model.model.speculation != "auto":
            _draft_of(awaited_model, folder, catalog)
    return catalog


def _draft_of(entry: CatalogEntry, folder: Path, catalog: Catalog) -> LocalModel | None:
    """The draft model of a model in `folder`; None: none. Raises ModelLoadError if the one that the
    entry names cannot draft.
    """
    return draft_of(
        LocalModel(name=entry.name, folder=folder),
        entry.model.speculation,
        listed=[each.model for each in catalog.entries],
        environ=os.environ,
    )


class Front:
    """One server, from start to stop. It runs on one asyncio event loop in the main thread."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        *,
        progress: Progress,
        on_ready: Callable[[str], None] | None = None,
        started_at: float,
        certificate: ServerCertificate | None,
        run_folder: Path,
        log_path: str,
        log_ring: LogRing,
    ) -> None:
        """run_folder: where a description of the server is written as soon as it listens."""
        self._settings = settings
        self._started_at = started_at
        self._certificate = certificate
        self.reloads: list[Reload] = [] if certificate is None else [certificate.reload]
        self._run_folder = run_folder
        self._log_path = log_path
        self._log_ring = log_ring
        self._was_ready = False
        self._on_ready = on_ready
        self._residency = Residency(
            catalog,
            settings.residency,
            fetch=self._files_of,
            worker_of=self._worker_of,
            max_waiting_sequences=settings.scheduler.max_queued + settings.scheduler.max_running,
            on_progress=lambda model, event: progress(event.stage, event.fraction),
        )

    def _files_of(self, entry: CatalogEntry) -> ModelFiles:
        """The files of a model. Thread-safe. Raises ModelLoadError."""
        folder = resolve_model(entry.model, progress=lambda stage, fraction: None)
        entries = self._residency.catalog.entries
        draft = _draft_of(entry, folder, self._residency.catalog)
        sampling = recommended_sampling(read_json(folder / "generation_config.json"))
        has_template = bool(template_sources(folder))
        if not has_template:
            logger.warning(
                "model %s has no chat template: it is a base model, which completes text "
                "(/v1/completions); chat requests are refused",
                entry.name,
            )
        if len(entries) == 1:  # the size matters only if there are several models
            return ModelFiles(folder=folder, draft=draft, sampling=sampling, can_chat=has_template)
        weight_bytes = entry.checked_bytes(folder)
        if draft is not None:
            weight_bytes += checked_tensor_bytes(draft.folder)
        return ModelFiles(
            folder=folder,
            weight_bytes=weight_bytes,
            draft=draft,
            sampling=sampling,
            can_chat=has_template,
        )

    def _worker_of(
        self, entry: CatalogEntry, files: ModelFiles, share: MemoryShare
    ) -> WorkerSettings:
        """The settings of a worker that starts with these files and this share of the memory."""
        settings = self._settings
        return WorkerSettings(
            folder=str(files.folder),
            hash_cache=hash_cache_file(os.environ),
            compiled_code=compiled_code_folder(os.environ),
            crash_reports=crash_reports_folder(os.environ),
            images=str(images_folder(settings.store.folder)),
            model=replace(entry.model, name=entry.name),
            draft_folder=str(files.draft.folder) if files.draft else "",
            draft_name=files.draft.name if files.draft else "",
            scheduler=settings.scheduler,
            store=settings.store,
            log=settings.log,
            residency=settings.residency,
            share=share,
        )

    def set_log_level(self, level: LogLevel) -> None:
        """Change the log level of all workers."""
        self._settings = replace(self._settings, log=replace(self._settings.log, level=level))
        self._residency.set_log_level(level)

    async def serve(self, on_begin: Callable[[], None]) -> None:
        """Start the worker, then everything else; serve until a signal; stop everything in order.

        Raises ModelLoadError, ConfigError and WorkerUnavailable if the server cannot start.

        on_begin: called first, in the event loop.
        """
        signals = _EarlySignals()
        on_begin()
        try:
            await self._residency.start()
            await self._serve_http(signals)
        except asyncio.CancelledError:
            if not signals.has_come:
                raise
        finally:
            signals.exit_at_next()
            await self._residency.stop()
            if signals.has_come and not self._was_ready:
                logger.info(STOPPED_EARLY)

    async def _serve_http(self, signals: _EarlySignals) -> None:
        """Listen and serve until a signal, while the models load. Raises if a load fails."""
        gc.disable()  # looking through what is imported, all of which stays, takes 15 % longer
        from holdfast.front.run.web import build_application
        from holdfast.front.server import http_server as http

        gc.enable()
        with http.listen(self._settings.server) as listener:
            app = build_application(self._settings, self._residency, log_ring=self._log_ring)
            self.reloads.append(partial(reload_keys, app.state.services.access.keys))
            self.reloads.append(app.state.reloaded_catalog.reload)
            if signals.has_come:  # during the lines above, when nothing could be stopped yet
                return
            listening = asyncio.Event()
            server = http.HttpServer(
                app, self._settings.server, on_started=listening.set, certificate=self._certificate
            )
            signals.stop_cancelling()
            serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
            await asyncio.sleep(0)  # the HTTP server now handles the signals
            # `or`, because the HTTP server may already have handled a signal
            server.should_exit = server.should_exit or signals.has_come
            host, port = listener.getsockname()[:2]
            url = http.url_of(listener, scheme=self._settings.server.scheme)
            self._write_description(url, port)
            loading = asyncio.create_task(
                self._announce_when_ready(app, listening, url, host), name="ready"
            )
            await asyncio.wait((serving, loading), return_when=asyncio.FIRST_COMPLETED)
            if loading.done() and loading.exception() is not None:
                server.should_exit = True
            await serving
            if not loading.done():
                signals.has_come = True  # the HTTP server handled it
                loading.cancel()
            await asyncio.wait((loading,))
            if (traces := app.state.services.telemetry.traces) is not None:
                await asyncio.to_thread(traces.close)
        if not loading.cancelled():
            loading.result()  # raises the error if loading failed

    def _write_description(self, url: str, port: int) -> None:
        """Describe this server in its run folder, where `holdfast ps` and others look."""
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

    async def _announce_when_ready(
        self, app: Starlette, listening: asyncio.Event, url: str, listens_on: str
    ) -> None:
        """Wait for the models to load and the server to listen, then say that it is ready. Raises
        what `wait_ready` raises, and the error of a broken tokenizer.
        """
        await self._residency.wait_ready()
        await listening.wait()
        from holdfast.front.server.guard import is_loopback

        first_model, *_ = statuses = self._residency.statuses()
        if first_model.state == "ready":
            await app.state.bundles.read(
                first_model.id
            )  # raises an error if the tokenizer is broken
        figures = (await self._residency.statistics()).get(first_model.id)
        gc.collect()
        gc.freeze()  # later collections, which delay tokens, skip existing objects
        needs_key: bool = app.state.services.needs_key
        ready = ReadyServer(
            url=url,
            models=statuses,
            ready_seconds=time.monotonic() - self._started_at,
            needs_key=needs_key,
            store_folder=self._settings.store.folder,
            lan_urls=_lan_urls(listens_on, url),
            is_open=not needs_key and not is_loopback(listens_on),
            cache=None if figures is None else figures.cache,
            log_file=self._log_path,
        )
        self._was_ready = True
        announce(ready, self._settings.log)
        if self._on_ready is not None:
            await asyncio.to_thread(self._on_ready, url)


class _EarlySignals:
    """SIGINT and SIGTERM before the HTTP server handles them: they cancel the current task.

    After the HTTP server has stopped, one more signal exits immediately.
    """

    def __init__(self) -> None:
        self.has_come = False
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._cancels_task = True
        self._exits_at_next = False
        for number in (signal.SIGINT, signal.SIGTERM):
            # not add_signal_handler, because uvloop would keep calling that handler in addition to
            # uvicorn's
            signal.signal(number, self._on_signal)

    def stop_cancelling(self) -> None:
        """Stop cancelling: the HTTP server handles signals now."""
        self._cancels_task = False

    def exit_at_next(self) -> None:
        """Exit at the next signal.

        By then, only the workers are left; they write their cache to disk and exit on their own.
        """
        self._cancels_task = False
        self._exits_at_next = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Note the signal, and cancel the task or exit, whichever applies now."""
        if self._exits_at_next:
            logger.warning("forced exit; workers flush their cache and exit on their own")
            logging.shutdown()
            os._exit(128 + number)
        self.has_come = True
        if self._cancels_task:
            self._loop.call_soon_threadsafe(self._cancel_task)

    def _cancel_task(self) -> None:
        # checked here, because the signal may have arrived while the loop was busy
        if self._cancels_task and self._task is not None:
            self._task.cancel()


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM before anything runs. An interrupted download resumes at the next start."""
    logger.info(STOPPED_EARLY)
    logging.shutdown()
    os._exit(0)


def _log_file(settings: Settings) -> LogFile | None:
    """Open the log file; None if the settings ask for none. Raises ConfigError."""
    file = open_log_file(
        settings.log, folder=lambda: logs_folder(os.environ), name=f"server-{settings.server.port}"
    )
    if file is not None:
        log_uncaught()
    return file


def _lan_urls(listens_on: str, url: str) -> tuple[str, ...]:
    """The server's URLs for other machines; empty unless it listens on all addresses."""
    from holdfast.front.server.guard import is_wildcard

    if not is_wildcard(listens_on):
        return ()
    scheme = url.partition(":")[0]
    port = url.rpartition(":")[2]
    return tuple(f"{scheme}://{address}:{port}" for address in lan_addresses(listens_on=listens_on))


def _certificate(settings: Settings) -> ServerCertificate | None:
    """Load the TLS certificate; None if there is none. Raises ConfigError."""
    server = settings.server
    if not server.tls_cert:
        return None
    from holdfast.front.server.http_server import ServerCertificate

    return ServerCertificate(certificate=server.tls_cert, key=server.tls_key)


def _allow_open_files(wanted_files: int) -> None:
    """Raise the soft limit on open files, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted_files:
        limit = wanted_files if hard == resource.RLIM_INFINITY else min(wanted_files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class ReloadedSettings:
    """Reloads the settings. Only the log level can change; all other settings need a restart."""

    def __init__(
        self, effective: EffectiveSettings, *, on_level: Callable[[LogLevel], None]
    ) -> None:
        """on_level: called with the new log level when it has changed."""
        self._settings_at_start = effective
        self._current_settings = effective
        self._on_level = on_level

    def reload(self) -> None:
        """Read the settings again. If they are invalid, nothing changes."""
        try:
            reloaded = self._settings_at_start.read_again()
        except ConfigError as error:
            logger.error("the settings are not reloaded: %s", error)
            return
        old_level = self._current_settings.settings.log.level
        level = reloaded.settings.log.level
        set_level(reloaded.settings.log)
        if level != old_level:
            self._on_level(level)
        self._current_settings = reloaded
        level_change = ", as before" if old_level == level else f"; it was {old_level}"
        changed_keys = [
            key
            for key in reloaded.origins
            if key != "log.level"
            and value_of(reloaded.settings, key) != value_of(self._settings_at_start.settings, key)
        ]
        if changed_keys:
            pending = ", ".join(changed_keys)
            logger.warning(
                "the log level is %s%s; restart to apply %s", level, level_change, pending
            )
        else:
            logger.info("the log level is %s%s", level, level_change)


def reload_keys(keys: KeyRing) -> None:
    """Read the file of API keys again. If it is invalid, nothing changes."""
    try:
        logger.info("%s", keys.reload())
    except ConfigError as error:
        logger.error("%s", error)


class Hangups:
    """Handles SIGHUP: reloads the configuration, or stops the server if its terminal was closed."""

    def __init__(self) -> None:
        """If SIGHUP is ignored (nohup), the server outlives its terminal."""
        self._ends_with_terminal = (
            signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()
        )

    def reload_on(self, reloads: Sequence[Reload]) -> None:
        """Make SIGHUP run these reloads. Main thread only, while its event loop runs."""
        loop = asyncio.get_running_loop()

        def on_hangup(number: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self._reload_or_stop, reloads)

        signal.signal(signal.SIGHUP, on_hangup)

    def _reload_or_stop(self, reloads: Sequence[Reload]) -> None:
        """Stop if the terminal is gone, which also sends SIGHUP; otherwise reload."""
        if self._ends_with_terminal and not _has_terminal():
            logger.info("the terminal was closed")
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
