"""The life of a worker on its device thread, whatever builds the loop: load, report, serve, let go."""

from __future__ import annotations

import enum
import logging
import os
import time
from collections.abc import Callable

from holdfast.errors import ConfigError, ModelLoadError
from holdfast.wire.events import LoadProgress, ModelInfo, WorkerFailed, WorkerReady
from holdfast.worker.loop.inbox import Inbox
from holdfast.worker.loop.loop import WorkerLoop

PROGRESS_SECONDS = 0.1

logger = logging.getLogger("holdfast.worker")

Progress = Callable[[str, float], None]  # stage, fraction
LoopBuilder = Callable[[Inbox, Progress], tuple[WorkerLoop, ModelInfo]]


class WorkerEnd(enum.IntEnum):
    """How a worker ended; its process's exit code."""

    IN_ORDER = 0
    BROKEN = 1
    BAD_INPUT = 2


def live(inbox: Inbox, build: LoopBuilder) -> WorkerEnd:
    """Build the loop, tell the front, serve until `SHUT_DOWN`, close the inbox.

    The device is still the caller's to let go.
    """

    end = WorkerEnd.BROKEN
    try:
        loop, info = build(
            inbox,
            _seldom(
                lambda stage, fraction: inbox.send([LoadProgress(stage=stage, fraction=fraction)])
            ),
        )
        inbox.send([WorkerReady(pid=os.getpid(), model=info)])
        loop.run()
        end = WorkerEnd.IN_ORDER
    except (ModelLoadError, ConfigError) as error:
        inbox.send([WorkerFailed(message=str(error), fatal_input=True)])
        end = WorkerEnd.BAD_INPUT
    finally:
        if end is WorkerEnd.BROKEN:
            logger.exception("the worker ends: its device thread failed")
        inbox.close()
    return end


def _seldom(emit: Progress) -> Progress:
    """Progress comes per tensor; what is worth a message is a new stage, its end, and a few times a
    second in between.
    """
    last_stage, last_at = "", 0.0

    def progress(stage: str, fraction: float) -> None:
        nonlocal last_stage, last_at
        now = time.monotonic()
        if stage != last_stage or fraction >= 1.0 or now - last_at >= PROGRESS_SECONDS:
            last_stage, last_at = stage, now
            emit(stage, fraction)

    return progress
