"""What a server holds: by what the system says of its processes, and by what it says itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from holdfast_bench.servers import RunningServer
from holdfast_bench.wire import Call, get_json, split_answer

_SAMPLING_SECONDS = 0.25
Seen = TypeVar("Seen")
# of sequences that run, and that have ended
_LIVE = ("holdfast_worker_kv_reserved_bytes", "holdfast_prefix_cache_parked_bytes")


class ToldMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What the server itself says of the first model."""

    ram_bytes: int = 0  # KV that is kept for the next request
    # reserved by sequences that run, or kept as they were of those that have ended
    live_bytes: int = 0
    kv_bytes_per_token: int = 0
    fixed_bytes_per_sequence: int = 0


async def told_memory(server: RunningServer, *, with_live: bool = False) -> ToldMemory | None:
    """None for servers that say nothing of that kind. with_live: what live states take is asked for
    too.
    """
    status, body = await get_json(f"{server.target.base_url}/health", api_key=server.target.api_key)
    models = body.get("models") if status == 200 and isinstance(body, dict) else None
    model: dict[str, Any] = models[0] if models and isinstance(models[0], dict) else {}
    if not model.get("memory"):
        return None
    values = await metric_values(server) if with_live else {}
    return ToldMemory(
        ram_bytes=int(model["memory"]["ram_bytes"]),
        live_bytes=int(sum(values.get(name, 0.0) for name in _LIVE)),
        kv_bytes_per_token=int(model.get("kv_bytes_per_token") or 0),
        fixed_bytes_per_sequence=int(model.get("fixed_bytes_per_sequence") or 0),
    )


async def metric_values(server: RunningServer) -> dict[str, float]:
    """Its /metrics: by name without labels, the sum over those. Empty when it has none."""
    target = server.target
    raw = await Call(
        url=f"{target.base_url}/metrics", body=None, api_key=target.api_key, timeout_seconds=10.0
    ).run()
    status, content = split_answer(raw.content())
    found: dict[str, float] = {}
    for line in content.decode(errors="replace").splitlines() if status == 200 else ():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            with contextlib.suppress(ValueError):
                bare = name.partition("{")[0]
                found[bare] = found.get(bare, 0.0) + float(value)
    return found


async def resident_bytes(server: RunningServer) -> int:
    """Memory of all its processes; 0 for a server that was not started here."""
    use = server.use()
    return use.resident_bytes if use is not None else 0


@contextlib.asynccontextmanager
async def sampled(
    look: Callable[[], Awaitable[Seen]], *, seconds: float = _SAMPLING_SECONDS
) -> AsyncIterator[list[Seen]]:
    """What `look` gives at the beginning, every so often, and at the end."""
    seen = [await look()]

    async def watch() -> None:
        while True:
            await asyncio.sleep(seconds)
            seen.append(await look())

    watching = asyncio.create_task(watch())
    try:
        yield seen
    finally:
        watching.cancel()
        seen.append(await look())
