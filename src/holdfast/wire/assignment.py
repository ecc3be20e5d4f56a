"""What a worker serves, and what its process is told at its start: one struct, from the front's
settings to the device thread.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import msgspec

from holdfast.config import (
    LogSettings,
    ModelSettings,
    ResidencySettings,
    SchedulerSettings,
    StoreSettings,
)
from holdfast.errors import InvalidRequest
from holdfast.machine.device_memory import ALL_OF_IT, MemoryShare

# -P: nothing in the working folder can pose as a module
WORKER_COMMAND = (sys.executable, "-P", "-m", "holdfast.worker")
MOST_STEP_TOKENS = 1 << 20


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


def checked_limits(
    settings: SchedulerSettings, *, max_running: int, step_tokens: int
) -> SchedulerSettings:
    """The settings with other limits. Raises InvalidRequest for what they may not be."""
    if max_running < 1:
        raise InvalidRequest(
            f"`max_running`: at least 1 has to run, got {max_running}", field="max_running"
        )
    least = max(settings.min_chunk_tokens, max_running)
    if not least <= step_tokens <= MOST_STEP_TOKENS:
        why = (
            f"max_running = {max_running}, scheduler.min_chunk_tokens = {settings.min_chunk_tokens}"
        )
        message = (
            f"`step_tokens`: a step has to read {least:,} to {MOST_STEP_TOKENS:,} tokens ({why}), "
            f"got {step_tokens:,}"
        )
        raise InvalidRequest(message, field="step_tokens")
    return replace(settings, max_running=max_running, step_tokens=step_tokens)
