"""Minutes of load with many disconnects: nothing may be left behind."""

from __future__ import annotations

import asyncio
import os
import random
import time

import httpx
import openai
import psutil
import pytest

from tests.fakes.server_process import ServerProcess, until

CLIENTS = 16
SECONDS = float(os.environ.get("SOAK_SECONDS", "300"))
WARM_UP_SHARE = 0.3


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 120)
async def test_sixteen_clients_with_disconnects_leave_memory_flat_and_no_request_behind(server: ServerProcess) -> None:
    ends_at = time.monotonic() + SECONDS
    resident: list[tuple[float, int]] = []
    finished = left = 0

    async def client(number: int, openai_client: openai.AsyncOpenAI) -> None:
        nonlocal finished, left
        dice = random.Random(number)
        while time.monotonic() < ends_at:
            leaves_after = dice.randrange(1, 40) if dice.random() < 0.3 else None
            stream = await openai_client.completions.create(
                model="demo",
                prompt=" ".join(["word"] * dice.randrange(1, 400)),
                max_tokens=dice.randrange(1, 80),
                temperature=dice.choice([0.0, 1.0]),
                stream=True,
                extra_body={"ignore_eos": True},
            )
            pieces = 0
            async for _ in stream:
                pieces += 1
                if pieces == leaves_after:
                    await stream.close()
                    left += 1
                    break
            else:
                finished += 1

    async def watch() -> None:
        pids = (server.process.pid, server.model()["pid"])
        while time.monotonic() < ends_at:
            resident.append((time.monotonic(), sum(psutil.Process(pid).memory_info().rss for pid in pids)))
            await asyncio.sleep(1)

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as openai_client:
        await asyncio.gather(watch(), *(client(number, openai_client) for number in range(CLIENTS)))
    assert finished > left > 0
    until(lambda: server.model()["running"] == server.model()["queued"] == 0, "no request is left in the worker")
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'holdfast_worker_failed_total{model="demo"} 0.0' in metrics
    assert 'holdfast_worker_kv_reserved_bytes{model="demo"} 0.0' in metrics
    warm = [size for at, size in resident if at > ends_at - SECONDS * (1 - WARM_UP_SHARE)]
    early, late = max(warm[: len(warm) // 3]), max(warm[-len(warm) // 3 :])
    assert late < early * 1.1 + 10e6, f"{early / 1e6:.0f} MB became {late / 1e6:.0f} MB"
