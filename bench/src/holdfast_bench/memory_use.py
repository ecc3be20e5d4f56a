"""Memory of a server, as the operating system counts it and as the server reports it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from holdfast_bench.servers import RunningServer
from holdfast_bench.wire import get_json

_SAMPLING_SECONDS = 0.25


def resident_bytes(server: RunningServer) -> int:
    """Memory of all processes of the server; 0 if the benchmark did not start it."""
    use = server.use()
    return use.resident_bytes if use is not None else 0


async def cached_bytes(server: RunningServer) -> int | None:
    """KV that the prefix cache keeps in RAM, according to /health; None if it does not say."""
    status, body = await get_json(f"{server.target.base_url}/health", api_key=server.target.api_key)
    models = body.get("models") if status == 200 and isinstance(body, dict) else None
    memory = models[0].get("memory") if models and isinstance(models[0], dict) else None
    return int(memory["ram_bytes"]) if memory else None


@contextlib.asynccontextmanager
async def sampled_memory(server: RunningServer) -> AsyncIterator[list[int]]:
    """Sample `resident_bytes` regularly, and once more at the end."""
    seen = [resident_bytes(server)]

    async def watch() -> None:
        while True:
            await asyncio.sleep(_SAMPLING_SECONDS)
            seen.append(resident_bytes(server))

    watching = asyncio.create_task(watch())
    try:
        yield seen
    finally:
        watching.cancel()
        seen.append(resident_bytes(server))
