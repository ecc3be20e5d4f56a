"""What a worker serves, and what its process is told at its start: one struct, from the front's
settings to the device thread.
"""

from __future__ import annotations

import sys

import msgspec

from holdfast.config import (
    LogSettings,
    ModelSettings,
    ResidencySettings,
    SchedulerSettings,
    StoreSettings,
)
from holdfast.machine.device_memory import ALL_OF_IT, MemoryShare

# -P: nothing in the working folder can pose as a module
WORKER_COMMAND = (sys.executable, "-P", "-m", "holdfast.worker")


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One model to serve, resolved to a local folder, and all settings that its worker goes by."""

    folder: str
    # file in which hashes of model files are kept for the next start; empty: nowhere
    hash_cache: str = ""
    # folder in which what MLX compiles is kept for the next start; empty: nowhere
    compiled_code: str = ""
    crash_reports: str = ""  # folder for what is told of workers that died; empty: nowhere
    model: ModelSettings
    scheduler: SchedulerSettings
    store: StoreSettings
    log: LogSettings = LogSettings()
    share: MemoryShare = ALL_OF_IT  # of the memory that is left
    residency: ResidencySettings = ResidencySettings()
    command: tuple[str, ...] = WORKER_COMMAND  # that starts its process


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process reads from its standard input: one JSON document, nothing in the
    process list.
    """

    settings: WorkerSettings
    endpoint: str
    heartbeat_endpoint: str
    parent_pid: int
