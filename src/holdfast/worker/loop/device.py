"""The device thread: everything that touches MLX happens on it, from the first import to
`mx.clear_streams()`.
"""

from __future__ import annotations

import gc
from functools import partial

from holdfast.machine import platform
from holdfast.wire.commands import WorkerSettings
from holdfast.worker.loop.inbox import Inbox
from holdfast.worker.loop.lifecycle import WorkerEnd, live
from holdfast.worker.loop.pulse import Pulse


def serve_model(inbox: Inbox, settings: WorkerSettings, pulse: Pulse | None = None) -> WorkerEnd:
    """Load the model and serve the inbox until `SHUT_DOWN`.

    Call on a thread that lives as long as the model.

    pulse: where to show what the thread is at; None where nobody looks.
    """
    platform.prepare_blas(settings.model.threads)  # has to come before the first import of mlx.core
    from holdfast.worker.loop import serving

    try:
        return live(inbox, partial(serving.build_loop, settings=settings, pulse=pulse or Pulse()))
    finally:
        # arrays in reference cycles must go while this thread can still let go of them
        gc.collect()
        serving.let_go_of_device()
