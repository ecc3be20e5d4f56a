"""Ends engines of the library before the interpreter waits for their threads, when nobody has
closed them.
"""

from __future__ import annotations

import threading

from holdfast.library.in_process import InProcessClient

_open: set[InProcessClient] = set()
_lock = threading.Lock()
_watch: threading.Thread | None = None


def close_before_exit(engine: InProcessClient) -> None:
    """Close the engine when the main thread ends, unless `closed` comes first.

    Device threads are not daemons (MLX aborts when they are), so the interpreter waits for them
    before it runs any exit handler. The watch is one: it touches no device, and there is nothing to
    wait for once the main thread is gone and all is closed.
    """
    global _watch
    with _lock:
        _open.add(engine)
        if _watch is None:
            _watch = threading.Thread(
                target=_close_all_at_the_end, name="holdfast-at-exit", daemon=True
            )
            _watch.start()


def closed(engine: InProcessClient) -> None:
    """Close the engine now; nothing is left to be done at the end."""
    engine.close()
    with _lock:
        _open.discard(engine)


def _close_all_at_the_end() -> None:
    threading.main_thread().join()
    for engine in tuple(_open):
        engine.close()
