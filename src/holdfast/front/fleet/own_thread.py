"""Blocking work that may take hours, on a thread that nobody waits for when the process ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from holdfast.errors import HoldfastError, ModelLoadError

T = TypeVar("T")


def on_own_thread(work: Callable[[], T], *, name: str) -> asyncio.Future[T]:
    """Begin some work; the future has its result, or the HoldfastError that it failed by.

    Not on the loop's own threads: when the server ends, it would wait for a download.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(results: list[T], failure: HoldfastError) -> None:
        if answer.done():
            return
        if results:
            answer.set_result(results[0])
        else:
            answer.set_exception(failure)
            answer.exception()  # it may be that nobody waits for it any more

    def run() -> None:
        results: list[T] = []
        failure: HoldfastError = ModelLoadError(
            "its files could not be looked at; the server's log has the details"
        )
        try:
            results.append(work())
        except (HoldfastError, OSError) as error:
            failure = error if isinstance(error, HoldfastError) else ModelLoadError(str(error))
        finally:
            with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
                loop.call_soon_threadsafe(settle, results, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer
