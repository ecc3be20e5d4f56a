"""Excess requests are refused immediately with a retry time and leave no trace."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.fakes.server_process import ServerProcess, until

RUNNING, QUEUED = 4, 10  # the strict server's capacity
LONG = {"prompt": "once", "max_tokens": 20_000, "ignore_eos": True}
SHORT = {"prompt": "once", "max_tokens": 5, "ignore_eos": True}


@pytest.fixture
async def client(strict_server: ServerProcess) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=f"{strict_server.url}/v1", timeout=60, limits=limits
    ) as client:
        yield client
    until(lambda: _load(strict_server) == (0, 0), "nothing is left in the worker")


@pytest.mark.slow
async def test_a_full_queue_refuses_with_retry_after(
    strict_server: ServerProcess, client: httpx.AsyncClient
) -> None:
    async with _Filled(strict_server, client):
        for more in ({}, {"stream": True}, {"n": 3}, {"prompt": ["a", "b"]}):
            response = await client.post("/completions", json={**SHORT, **more})
            assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_full")
            assert int(response.headers["retry-after"]) >= 1
        assert _load(strict_server) == (RUNNING, QUEUED)


async def test_more_sequences_than_the_queue_holds_are_refused_permanently(
    strict_server: ServerProcess, client: httpx.AsyncClient
) -> None:
    response = await client.post("/completions", json={**SHORT, "prompt": ["a"] * 50})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    response = await client.post("/completions", json=SHORT)
    assert response.status_code == 200


@pytest.mark.slow
async def test_leaving_the_queue_frees_a_place(
    strict_server: ServerProcess, client: httpx.AsyncClient
) -> None:
    async with _Filled(strict_server, client, streams=False):
        assert (await client.post("/completions", json=SHORT)).status_code == 503
    until(lambda: _load(strict_server) == (0, 0), "the work of those who left has stopped")
    assert (await client.post("/completions", json=SHORT)).status_code == 200


async def test_the_server_survives_a_storm_of_disconnects(
    strict_server: ServerProcess, client: httpx.AsyncClient
) -> None:
    dice = random.Random(7)

    async def visit(number: int) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(dice.random() * 0.3):
                await client.post("/completions", json={**LONG, "stream": number % 2 == 0})

    await asyncio.gather(*(visit(number) for number in range(60)))
    until(lambda: _load(strict_server) == (0, 0), "the work of those who left has stopped")
    assert (await client.post("/completions", json=SHORT)).status_code == 200


class _Filled:
    """While it lasts, one client occupies all places of the server."""

    def __init__(
        self, server: ServerProcess, client: httpx.AsyncClient, *, streams: bool = True
    ) -> None:
        self._server, self._client, self._streams = server, client, streams
        self._task: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._fill())
        await asyncio.to_thread(
            until,
            lambda: _load(self._server) == (RUNNING, QUEUED),
            "all places are taken",
        )

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _fill(self) -> None:
        bodies = [{**LONG, "n": choices, "stream": self._streams} for choices in (RUNNING, QUEUED)]
        first = asyncio.create_task(self._client.post("/completions", json=bodies[0]))
        try:
            await asyncio.to_thread(
                until, lambda: _load(self._server)[0] == RUNNING, "the first are running"
            )
            await self._client.post("/completions", json=bodies[1])
        finally:
            first.cancel()
            await asyncio.wait([first])


def _load(server: ServerProcess) -> tuple[int, int]:
    model = server.model()
    return model["running"], model["queued"]
