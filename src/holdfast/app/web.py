"""Puts the HTTP front together. Imported while the worker loads: the web framework and the tokenizer take their time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from starlette.applications import Starlette

from holdfast import __version__
from holdfast.app.awake import Awake
from holdfast.config import Settings
from holdfast.http.application import DIALECTS, create_application
from holdfast.http.server.active import ActiveRequests
from holdfast.http.server.dialect import Dialect
from holdfast.http.server.key_ring import KeyRing
from holdfast.http.server.sealing import Seal
from holdfast.http.server.services import Services
from holdfast.intake import session_commands
from holdfast.intake.gateway import Gateway
from holdfast.intake.tokenizer_bundle import load_tokenizer_bundle
from holdfast.residency.catalog import Catalog, CatalogEntry
from holdfast.residency.residency import Residency
from holdfast.store.answers import AnswerFile
from holdfast.store.response_thread import ResponseStore
from holdfast.store.settings import is_folder
from holdfast.telemetry.metrics import Metrics
from holdfast.telemetry.traces import open_traces


def build_application(
    settings: Settings, folders: dict[str, Path], residency: Residency, *, dialects: Sequence[Dialect] = DIALECTS
) -> Starlette:
    """The application over the models in `folders`, by served id. Raises ModelLoadError when a tokenizer is missing or broken,
    ConfigError when what it is told to use is not installed.
    """
    store = Path(settings.store.folder) if is_folder(settings.store) else None
    answers = AnswerFile(store) if store else None
    bundles = {model: load_tokenizer_bundle(path, settings=settings.model, answers=answers) for model, path in folders.items()}
    gateway = Gateway(residency.client, bundles, settings.limits, settings.tools)
    catalog = Catalog(
        entries=tuple(
            CatalogEntry(name=model, model=settings.model, store=settings.store, origin=str(path))
            for model, path in folders.items()
        )
    )
    services = Services(
        generate=gateway.generate,
        encode=gateway.encode,
        embed=gateway.embed,
        rank=gateway.rank,
        tokenizer_of=gateway.tokenizer_of,
        sessions=partial(session_commands.carry_out, residency.client),
        catalog=lambda: catalog,
        statuses=residency.statuses,
        statistics=residency.statistics,
        dialects={model: bundle.dialect_report for model, bundle in bundles.items()},
        server=settings.server,
        limits=settings.limits,
        metrics=Metrics(),
        version=__version__,
        log=settings.log,
        traces=open_traces(__version__) if settings.log.traces else None,
        responses=ResponseStore(store, settings.responses),
        active=ActiveRequests(on_change=Awake().running),
        store=settings.store,
        keys=KeyRing(settings.server.keys_file, os.environ),
        seal=Seal(store / "answers" if store else None),
    )
    return create_application(services, dialects=dialects)
