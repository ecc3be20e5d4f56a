"""Work that ends when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` to its end, or cancel it when the client goes away first.

    Returns whether it ended; raises its error.
    """
    return await unless_first(disconnected(receive), work)


async def unless_first(other: Coroutine[Any, Any, None], work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` to its end, or cancel it when `other` ends first.

    Returns whether it ended; raises its error.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(other)
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait((working, watching))


async def disconnected(receive: Receive) -> None:
    """Wait until the connection is closed."""
    while (await receive())["type"] != "http.disconnect":
        pass
