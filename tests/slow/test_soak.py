"""Minutes of load from sixteen clients, many of which leave at any moment: nothing may be left
behind or grow.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest

from tests.fakes.server_process import ServerProcess, served_model_folder, until

SECONDS = float(os.environ.get("SOAK_SECONDS", "300"))
WARM_UP_SECONDS = 15.0
POOL_THREADS = (os.cpu_count() or 1) + 4  # as asyncio limits its default executor
CLIENTS = 16
LEAVING_SHARE = 0.3
# of clients that leave: in the queue, during the prefill, or in the middle of the answer
LONGEST_STAY_SECONDS = 2.0
LOOK_SECONDS = 0.5
# small enough to fill within seconds, so that the cache's size is constant from then on
KEPT_BYTES = 32 << 20
GROWTH_SHARE, GROWTH_BYTES = 1.03, 6 << 20  # what the allocator may still do in the second half

log = logging.getLogger(__name__)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    limit = f"store.ram_bytes={KEPT_BYTES}"
    server = ServerProcess(
        str(served_model_folder()), "--name", "demo", "--set", limit, "--log-level", "warning"
    )
    server.wait_ready()
    yield server
    server.stop()


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + WARM_UP_SECONDS + 300)
async def test_leaving_clients_leave_nothing_behind(server: ServerProcess) -> None:
    processes = {
        "front": psutil.Process(server.process.pid),
        "worker": psutil.Process(server.model()["pid"]),
    }
    # Resources of the first requests are not a leak: thread pools, the file of past answers.
    await _load(server.url, _Tally(), time.monotonic() + WARM_UP_SECONDS)
    _wait_for_idle(server)
    resting = {name: _descriptors_and_threads(process) for name, process in processes.items()}

    tally = _Tally()
    memory: dict[str, list[int]] = {name: [] for name in processes}
    ends_at = time.monotonic() + SECONDS
    await asyncio.gather(
        _watch(processes, memory, ends_at),
        _load(server.url, tally, ends_at),
    )
    log.info(
        "%s; MB at most: %s", tally, {name: max(sizes) >> 20 for name, sizes in memory.items()}
    )

    _wait_for_idle(server)
    assert tally.answered > 2 * CLIENTS
    assert tally.left > 0
    figures = _figures(server)
    assert figures["holdfast_worker_kv_reserved_bytes"] == 0
    assert figures["holdfast_worker_failed_total"] == 0
    assert figures["holdfast_worker_rejected_total"] == 0
    assert figures["holdfast_worker_cancelled_total"] > 0
    for name, process in processes.items():
        _wait_for_rest(name, process, resting[name])
        _check_flat(name, memory[name])
    assert server.stop() == 0
    assert server.log() == ""


@dataclass(slots=True)
class _Tally:
    answered: int = 0
    left: int = 0
    tokens: int = 0
    longest_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Descriptors and threads of a process; a pool of threads may still grow to its bound."""

    descriptors: int
    threads: int

    def __le__(self, other: _Held) -> bool:
        most_threads = other.threads + POOL_THREADS
        return self.descriptors <= other.descriptors and self.threads <= most_threads


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    path: str
    body: dict[str, Any]

    @property
    def choices(self) -> int:
        return int(self.body.get("n", 1))


@dataclass(slots=True)
class _Stream:
    """The outcome of a streamed answer."""

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    is_done: bool = False

    def take(self, line: str) -> None:
        if not line.startswith("data: "):
            assert line == "" or line.startswith(":"), line
            return
        assert not self.is_done
        if line == "data: [DONE]":
            self.is_done = True
            return
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        self.usage = event["usage"] or self.usage
        for choice in event["choices"]:
            index = choice["index"]
            assert index not in self.reasons, "text after the end of a choice"
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            self.texts[index] = self.texts.get(index, "") + text
            if choice["finish_reason"] is not None:
                self.reasons[index] = choice["finish_reason"]


def _request(dice: random.Random) -> _Request:
    # equally many between 20 and 170 as between 170 and 1,500
    tokens = int(20 * (1500 / 20) ** dice.random())
    body: dict[str, Any] = {
        "model": "demo",
        "max_tokens": dice.randrange(1, 80),
        "temperature": dice.choice([0.0, 0.7, 1.0]),
        "n": dice.choice([1, 1, 1, 2]),
        "ignore_eos": dice.random() < 0.5,
    }
    if dice.random() < 0.3:
        body["stop"] = dice.choice(["e", " a", ["\n", "the "]])
    if dice.random() < 0.5:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if dice.random() < 0.5:
        words = " ".join(
            dice.choice(("the", "box", "holds", "seven", "é", "日本", "🙂", "pens"))
            for _ in range(tokens // 3)
        )
        return _Request(path=CHAT, body={**body, "messages": [{"role": "user", "content": words}]})
    prompt = [dice.randrange(10, 1000) for _ in range(tokens)]
    return _Request(path=COMPLETIONS, body={**body, "prompt": prompt})


async def _client(url: str, dice: random.Random, tally: _Tally, ends_at: float) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        while (now := time.monotonic()) < ends_at:
            request = _request(dice)
            if dice.random() < LEAVING_SHARE:
                with suppress(TimeoutError):
                    async with asyncio.timeout(dice.random() ** 2 * LONGEST_STAY_SECONDS):
                        await _ask(client, request, tally)
                        continue
                tally.left += 1
            else:
                await _ask(client, request, tally)
            tally.longest_seconds = max(tally.longest_seconds, time.monotonic() - now)


async def _ask(client: httpx.AsyncClient, request: _Request, tally: _Tally) -> None:
    if request.body.get("stream"):
        stream = _Stream()
        async with client.stream("POST", request.path, json=request.body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                stream.take(line)
        usage = _check_stream(request, stream)
    else:
        response = await client.post(request.path, json=request.body)
        assert response.status_code == 200, response.text
        usage = _check_whole(request, response.json())
    tally.answered += 1
    tally.tokens += usage["total_tokens"]


def _check_stream(request: _Request, stream: _Stream) -> dict[str, Any]:
    assert stream.is_done
    assert stream.usage is not None
    _check_choices(request, stream.texts, stream.reasons, stream.usage)
    return stream.usage


def _check_whole(request: _Request, answer: dict[str, Any]) -> dict[str, Any]:
    texts = {
        c["index"]: c["text"] if "text" in c else c["message"]["content"] for c in answer["choices"]
    }
    reasons = {choice["index"]: choice["finish_reason"] for choice in answer["choices"]}
    usage: dict[str, Any] = answer["usage"]
    _check_choices(request, texts, reasons, usage)
    return usage


def _check_choices(
    request: _Request, texts: dict[int, str], reasons: dict[int, str], usage: dict[str, Any]
) -> None:
    body, choices = request.body, request.choices
    assert sorted(texts) == sorted(reasons) == list(range(choices))
    assert set(reasons.values()) <= {"stop", "length"}
    most = choices * body["max_tokens"]
    assert 0 < usage["completion_tokens"] <= most
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    if set(reasons.values()) == {"length"}:
        assert usage["completion_tokens"] == most
    if body["ignore_eos"] and "stop" not in body:
        assert set(reasons.values()) == {"length"}
    stops = body.get("stop", [])
    assert not [
        stop
        for stop in ([stops] if isinstance(stops, str) else stops)
        for text in texts.values()
        if stop in text
    ]


async def _load(url: str, tally: _Tally, ends_at: float) -> None:
    clients = (_client(url, random.Random(number), tally, ends_at) for number in range(CLIENTS))
    await asyncio.gather(*clients)


def _wait_for_idle(server: ServerProcess) -> None:
    until(
        lambda: server.model()["running"] == server.model()["queued"] == 0,
        "no request is left in the worker",
    )


async def _watch(
    processes: dict[str, psutil.Process], memory: dict[str, list[int]], ends_at: float
) -> None:
    while time.monotonic() < ends_at:
        for name, process in processes.items():
            memory[name].append(process.memory_info().rss)
        await asyncio.sleep(LOOK_SECONDS)


def _check_flat(name: str, sizes: list[int]) -> None:
    # The allocator takes a minute or two of load to come to its plateau: the two last quarters tell
    # whether it stays there.
    quarter = len(sizes) // 4
    before, after = (
        statistics.median(sizes[-2 * quarter : -quarter]),
        statistics.median(sizes[-quarter:]),
    )
    log.info(
        "%s: %.1f MB in the third quarter, %.1f MB in the last", name, before / 1e6, after / 1e6
    )
    assert after <= before * GROWTH_SHARE + GROWTH_BYTES, (
        f"{name} grew from {before / 1e6:.1f} MB to {after / 1e6:.1f} MB"
    )


def _wait_for_rest(name: str, process: psutil.Process, resting: _Held) -> None:
    until(
        lambda: _descriptors_and_threads(process) <= resting,
        f"{name} holds no more than {resting} again",
    )


def _descriptors_and_threads(process: psutil.Process) -> _Held:
    return _Held(descriptors=process.num_fds(), threads=process.num_threads())


def _figures(server: ServerProcess) -> dict[str, float]:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return {
        line.partition("{")[0]: float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("holdfast_worker_")
    }
