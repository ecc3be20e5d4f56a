"""Opens the cache of a worker: its index in RAM, and the store on disk if a folder is set.

Device thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from holdfast.config import StoreSettings
from holdfast.errors import ConfigError
from holdfast.store.block import StoreRefused
from holdfast.store.settings import store_limits
from holdfast.store.store import BlockStore
from holdfast.wire.assignment import WorkerSettings
from holdfast.worker.engine.engine import KVCosts
from holdfast.worker.engine.fingerprint import is_outdated, model_fingerprint
from holdfast.worker.engine.load import LoadedModel
from holdfast.worker.engine.mlx_lm_import import mlx_lm_version
from holdfast.worker.kv.codec import can_keep
from holdfast.worker.prefix.cache import PrefixCache
from holdfast.worker.prefix.index import PrefixIndex
from holdfast.worker.sessions.service import SessionService

logger = logging.getLogger("holdfast.cache")


def open_cache(
    loaded: LoadedModel,
    costs: KVCosts,
    *,
    hashes: Mapping[str, str],
    settings: WorkerSettings,
    ram_tier_bytes: int,
) -> PrefixCache | None:
    """The cache of a model; None for a layout whose state cannot be kept.

    Raises ConfigError for a bad folder of the store.

    hashes: of all files that count (`fingerprint.files_of_identity`). ram_tier_bytes: for blocks
    that are kept in RAM.
    """
    if costs.form is None:
        return None  # the probe has warned of it
    store = settings.store
    codec = store.codec
    if not can_keep(costs.form, codec):
        logger.warning(
            "store.codec = %s needs head dimensions that are multiples of 64; this model's KV is "
            "kept as it is",
            codec,
        )
        codec = "native"
    fingerprint = model_fingerprint(
        Path(settings.folder),
        hashes,
        computed_as=f"{loaded.compute_dtype} {loaded.note} {codec}",
        versions=(loaded.platform.mlx_version, mlx_lm_version()),
    )
    blocks = (
        _open_store(store, fingerprint, served_as=settings.model.name) if store.folder else None
    )
    index = PrefixIndex(fingerprint=fingerprint, ram_budget_bytes=ram_tier_bytes, disk=blocks)
    return PrefixCache(
        index, store=blocks, form=costs.form, codec=codec, most_parked_bytes=store.ram_bytes
    )


def open_sessions(
    memory: PrefixCache, store: StoreSettings, *, context_tokens: int
) -> SessionService:
    """The sessions of a model; those of an earlier worker on the same store are there again."""
    return SessionService(
        memory,
        most=store.max_sessions,
        ttl_seconds=store.session_seconds,
        pinned_percent=store.pinned_percent,
        context_tokens=context_tokens,
    )


def _open_store(store: StoreSettings, fingerprint: str, *, served_as: str) -> BlockStore:
    limits = store_limits(store)
    try:
        return BlockStore(
            Path(store.folder),
            fingerprint=fingerprint,
            served_as=served_as,
            limits=limits,
            is_outdated=is_outdated,
        )
    except StoreRefused as refusal:
        raise ConfigError(f"store.folder = {store.folder!r}: {refusal}") from refusal
