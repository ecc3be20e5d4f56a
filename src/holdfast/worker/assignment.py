"""What a worker process is told at its start, over its standard input: one JSON document, nothing in the process list."""

from __future__ import annotations

import msgspec

from holdfast.config import LogSettings, ModelSettings, SchedulerSettings, StoreSettings


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """One model to serve, and where to be reached. The front has resolved the model to a local folder."""

    folder: str
    hash_cache: str  # file in which hashes of model files are kept for the next start; empty: nowhere
    endpoint: str
    heartbeat_endpoint: str
    heartbeat_seconds: float
    parent_pid: int
    model: ModelSettings
    scheduler: SchedulerSettings
    store: StoreSettings
    log: LogSettings
