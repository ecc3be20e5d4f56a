"""The device thread: everything that touches MLX happens on it, from the first import to `mx.clear_streams()`."""

from __future__ import annotations

import gc
from functools import partial

from holdfast.config import ModelSettings, SchedulerSettings, StoreSettings
from holdfast.models import platform
from holdfast.worker.inbox import Inbox
from holdfast.worker.lifecycle import WorkerEnd, live
from holdfast.worker.pulse import Pulse


def serve_model(
    inbox: Inbox,
    *,
    folder: str,
    hash_cache: str,
    model: ModelSettings,
    scheduler: SchedulerSettings,
    store: StoreSettings,
    pulse: Pulse | None = None,
) -> WorkerEnd:
    """Load the model in `folder` and serve the inbox until Shutdown. Call on a thread that lives as long as the model.

    hash_cache: file in which hashes of model files are kept for the next start; empty: nowhere.
    pulse: where to show what the thread is at; None where nobody looks.
    """
    platform.prepare_blas(model.threads)  # has to come before the first import of mlx.core
    from holdfast.worker import serving

    try:
        build = partial(
            serving.build_loop,
            folder=folder,
            hash_cache=hash_cache,
            model=model,
            scheduler=scheduler,
            store=store,
            pulse=pulse or Pulse(),
        )
        return live(inbox, build)
    finally:
        gc.collect()  # arrays in reference cycles must go while this thread can still let go of them
        serving.let_go_of_device()
