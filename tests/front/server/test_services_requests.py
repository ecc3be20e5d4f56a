from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.front.server.services import unless_disconnected


class Client:
    """The receiving side of one exchange: an empty body, then nothing until the client leaves."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()
        self._has_sent = False

    async def receive(self) -> Any:
        if not self._has_sent:
            self._has_sent = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.leaves.wait()
        return {"type": "http.disconnect"}


async def test_work_that_ends_first_is_done() -> None:
    done: list[int] = []

    async def work() -> None:
        done.append(1)

    assert await unless_disconnected(Client().receive, work())
    assert done == [1]


async def test_work_whose_client_leaves_is_cancelled() -> None:
    client, cancelled = Client(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    asyncio.get_running_loop().call_soon(client.leaves.set)
    assert not await unless_disconnected(client.receive, work())
    assert cancelled.is_set()


async def test_an_exception_of_the_work_is_raised() -> None:
    async def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await unless_disconnected(Client().receive, work())
