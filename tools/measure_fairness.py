"""How long one agent waits for its first token, alone and beside another key's greedy agents, on
the bundled model.

    python -m tools.measure_fairness [--agents 32] [--turns 20]

Starts a server of its own with two named keys. What is printed is of this machine as busy as it is;
say so with the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from holdfast.front.server.access import named_key, new_secret, write_keys

_WORDS = "the store keeps what was read and gives it back when somebody asks for the same beginning again ".split()
_ANSWER_TOKENS = 48


def _prompt(name: str, words: int) -> str:
    return f"{name}: " + " ".join(
        _WORDS[(len(name) + place * 7) % len(_WORDS)] for place in range(words)
    )


async def _first_token_seconds(
    client: httpx.AsyncClient, key: str, *, name: str, words: int, max_tokens: int
) -> float:
    body = {
        "prompt": _prompt(name, words),
        "max_tokens": max_tokens,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
    }
    began, first = time.perf_counter(), 0.0
    async with client.stream(
        "POST", "/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}
    ) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not first and line.startswith("data: {"):
                first = time.perf_counter() - began
    return first


async def _turns(
    client: httpx.AsyncClient, key: str, *, label: str, turns: int, words: int
) -> list[float]:
    found = []
    for turn in range(turns):
        name = f"{label} {turn} of a single agent"
        found.append(await _first_token_seconds(client, key, name=name, words=words, max_tokens=8))
        await asyncio.sleep(0.1)
    return sorted(found)


async def _greedy(client: httpx.AsyncClient, key: str, *, agent: int, words: int) -> None:
    for turn in range(10_000):
        await _first_token_seconds(
            client, key, name=f"agent {agent}, turn {turn}", words=words, max_tokens=_ANSWER_TOKENS
        )


async def _measure(
    url: str, greedy: str, single: str, *, agents: int, turns: int, words: int
) -> None:
    limits = httpx.Limits(max_connections=agents + 8)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        await _turns(client, single, label="warm-up", turns=2, words=words)
        alone = await _turns(client, single, label="alone", turns=turns, words=words)
        crowd = [
            asyncio.create_task(_greedy(client, greedy, agent=agent, words=words))
            for agent in range(agents)
        ]
        await asyncio.sleep(5)
        beside = await _turns(client, single, label="beside", turns=turns, words=words)
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
    for label, seconds in (("alone", alone), (f"beside {agents}", beside)):
        p50, p95 = (seconds[int(part * (len(seconds) - 1))] for part in (0.5, 0.95))
        print(
            f"{label:12} first token p50 {p50 * 1000:7.0f} ms   p95 {p95 * 1000:7.0f} ms   of "
            f"{len(seconds)}"
        )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agents", type=int, default=32)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--words", type=int, default=400, help="length of each prompt")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        secrets = {name: new_secret() for name in ("greedy", "single")}
        keys = [
            named_key(name, secret, is_admin=False, priority="interactive", max_requests=None)
            for name, secret in secrets.items()
        ]
        write_keys(Path(folder) / "keys.json", keys)
        command = [
            sys.executable,
            "-m",
            "holdfast.cli.main",
            "serve",
            "--port",
            "0",
            "--store",
            f"{folder}/store",
        ]
        command += ["--set", f"server.keys_file={folder}/keys.json"]
        with open(f"{folder}/log", "w", encoding="utf-8") as log:
            server = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | {"PYTHONUNBUFFERED": "1"}
            )
        try:
            url = _wait_for_url(Path(folder) / "log", server)
            sizes = {"agents": arguments.agents, "turns": arguments.turns, "words": arguments.words}
            asyncio.run(_measure(url, secrets["greedy"], secrets["single"], **sizes))
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=60)
    return 0


def _wait_for_url(log: Path, server: subprocess.Popen[bytes]) -> str:
    give_up_at = time.monotonic() + 180
    while time.monotonic() < give_up_at and server.poll() is None:
        found = re.search(r"https?://127\.0\.0\.1:[0-9]+", log.read_text(encoding="utf-8"))
        if found is not None:
            return found[0]
        time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{log.read_text(encoding='utf-8')}")


if __name__ == "__main__":
    sys.exit(main())
