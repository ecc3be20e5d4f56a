"""Builds the web application, reloads its catalog, and keeps macOS awake while requests run.

Imported while a worker loads, because importing the web framework and the tokenizer takes time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from starlette.applications import Starlette

from holdfast import __version__
from holdfast.config import Settings
from holdfast.errors import ConfigError, ModelLoadError
from holdfast.files import performance_folder
from holdfast.front.application import DIALECTS, create_application
from holdfast.front.fleet.catalog import Catalog, catalog_of
from holdfast.front.fleet.library import Library
from holdfast.front.fleet.residency import Residency
from holdfast.front.gateway import Gateway
from holdfast.front.images.folder import images_folder
from holdfast.front.images.intake import ImageIntake
from holdfast.front.prompt.tokenizer_bundle import Bundles, TokenizerBundle, load_tokenizer_bundle
from holdfast.front.records.answer_tokens import AnswerFile
from holdfast.front.records.responses import ResponseStore
from holdfast.front.server.access import KeyRing, Seal
from holdfast.front.server.dialect import Dialect
from holdfast.front.server.services import (
    Access,
    ActiveRequests,
    Answers,
    ServedModels,
    Services,
    Telemetry,
)
from holdfast.front.telemetry.history import PerformanceHistory
from holdfast.front.telemetry.history_file import SUFFIX, HistoryFile
from holdfast.front.telemetry.log_ring import LogRing
from holdfast.front.telemetry.metrics import Metrics
from holdfast.front.telemetry.traces import open_traces
from holdfast.models.download import hub_cache_folder
from holdfast.store.folder import is_folder

KEEP_AWAKE_PROGRAM = "caffeinate"  # part of macOS
# how long to stay awake after a request: an agent's next request follows soon, so that one run of
# the program lasts for a whole conversation
LINGER_SECONDS = 5.0

_log = logging.getLogger("holdfast.front.run")


class Awake:
    """Keeps macOS awake while requests run; does nothing on other systems.

    Event loop's thread only.
    """

    def __init__(
        self, *, platform: str = sys.platform, linger_seconds: float = LINGER_SECONDS
    ) -> None:
        # path of the program; None: other systems, or it does not start
        self._program = shutil.which(KEEP_AWAKE_PROGRAM) if platform == "darwin" else None
        self._linger_seconds = linger_seconds
        self._program_process: subprocess.Popen[bytes] | None = None
        self._close_timer: asyncio.TimerHandle | None = None

    def note_running(self, requests: int) -> None:
        """Keep the machine awake while `requests`, the number of running requests, is above 0."""
        if self._program is None:
            return
        if self._close_timer is not None:
            self._close_timer.cancel()
            self._close_timer = None
        if requests:
            self._keep_awake(self._program)
        elif self._program_process is not None:
            self._close_timer = asyncio.get_running_loop().call_later(
                self._linger_seconds, self.close
            )

    def close(self) -> None:
        """Let the machine sleep."""
        if self._program_process is not None:
            self._program_process.kill()
            self._program_process.wait()
            self._program_process = None

    def _keep_awake(self, program: str) -> None:
        """Start the program unless it runs."""
        if self._program_process is not None and self._program_process.poll() is None:
            return
        try:  # -i: prevents idle sleep; -w: exits with this process
            self._program_process = subprocess.Popen(
                [program, "-i", "-w", str(os.getpid())], stdin=subprocess.DEVNULL
            )
        except OSError as error:
            _log.warning("the machine may sleep while requests run: %s: %s", program, error)
            self._program = None


class ReloadedCatalog:
    """Reloads the catalog of models, on a thread, because it may search many folders."""

    def __init__(self, read_catalog: Callable[[], Catalog], residency: Residency) -> None:
        """read_catalog: may raise ConfigError and ModelLoadError."""
        self._read_catalog = read_catalog
        self._residency = residency
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def reload(self) -> None:
        """Start to read the catalog again. If it is invalid, nothing changes."""
        task = asyncio.create_task(self.reload_now(), name="catalog read again")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def reload_now(self) -> None:
        """Read the catalog again and serve it. Concurrent calls run one after another."""
        async with self._lock:
            try:
                catalog = await asyncio.to_thread(self._read_catalog)
            except (ConfigError, ModelLoadError) as error:
                _log.error("the catalog is not reloaded: %s", error)
                return
            changes = await self._residency.replace_catalog(catalog)
            _log.info("the catalog is reloaded: %s", changes)


def _begin_reading_tokenizers(bundles: Bundles, residency: Residency) -> None:
    """Begin to read the tokenizers of the models that are loaded at the start."""
    for name in residency.catalog.at_start:
        bundles.begin(name)
    first_model = residency.catalog.entries[0].name
    if first_model in residency.catalog.at_start:  # the server exits if this tokenizer is broken
        bundles.awaited.add(first_model)


def build_application(
    settings: Settings,
    residency: Residency,
    *,
    dialects: Sequence[Dialect] = DIALECTS,
    log_ring: LogRing | None = None,
) -> Starlette:
    """Build the web application that serves the models of `residency`.

    Raises ConfigError if an optional package is missing.
    """
    store = Path(settings.store.folder) if is_folder(settings.store) else None
    bundles = Bundles(
        partial(_read_bundle, residency, AnswerFile(store) if store else None),
        model_of=partial(_model_of, residency),
    )
    residency.on_changed_entry = bundles.forget
    _begin_reading_tokenizers(bundles, residency)
    reloaded_catalog = ReloadedCatalog(partial(catalog_of, settings, os.environ), residency)
    images = ImageIntake(images_folder(settings.store.folder), settings.images)
    gateway = Gateway(residency.lease, bundles, settings.limits, settings.tools, images=images)
    metrics = Metrics(loop_tick_seconds=settings.server.loop_tick_seconds)
    services = Services(
        settings=settings,
        gateway=gateway,
        models=ServedModels(
            catalog=lambda: residency.catalog,
            control=residency,
            library=Library(
                residency,
                cache=hub_cache_folder(os.environ),
                with_code=settings.model.trust_remote_code,
                reload_catalog=reloaded_catalog.reload_now,
            ),
            statuses=residency.statuses,
            statistics=residency.statistics,
            dialects=bundles.dialects,
            awaited_tokenizers=bundles.awaited,
        ),
        answers=Answers(
            active=ActiveRequests(on_change=Awake().note_running),
            responses=ResponseStore(store, settings.responses),
        ),
        access=Access(
            keys=KeyRing(settings.server.keys_file, os.environ),
            seal=Seal(store / "answers" if store else None),
        ),
        telemetry=Telemetry(
            metrics=metrics,
            log_ring=log_ring or LogRing(),
            history_file=_history_file(settings, metrics.history),
            traces=open_traces(__version__) if settings.log.traces else None,
        ),
    )
    app = create_application(services, dialects=dialects)
    app.state.bundles = bundles
    app.state.reloaded_catalog = reloaded_catalog
    return app


def _history_file(settings: Settings, history: PerformanceHistory) -> HistoryFile | None:
    """The history of performance on disk, opened. None if the user lacks a home folder, or if the
    port is random: the next server, with another port, could not find the file.
    """
    if settings.server.port == 0:
        return None
    try:
        folder = performance_folder(os.environ)
    except RuntimeError:
        return None
    file = HistoryFile(history, folder / f"server-{settings.server.port}{SUFFIX}")
    file.open()
    return file


async def _read_bundle(
    residency: Residency, answers: AnswerFile | None, model: str
) -> TokenizerBundle:
    """Read tokenizer and chat template of a model, whose files are downloaded if necessary."""
    entry = residency.entry(model)
    files = await residency.files(model)
    return await asyncio.to_thread(
        load_tokenizer_bundle,
        files.folder,
        settings=entry.model,
        answers=answers,
        sampling=entry.sampling,
        template_arguments=dict(entry.template_arguments),
    )


def _model_of(residency: Residency, name: str) -> str:
    """The model to which a name in a request refers, such as an alias; the name itself if the
    catalog does not have it.
    """
    named = residency.catalog.named(name)
    return name if named is None else named.entry.name
