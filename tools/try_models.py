"""Times a server of several models: concurrent loads, three models in two places, swaps, starts.

`python -m tools.try_models` takes a few minutes, uses the bundled models and temporary folders, and
prints a line for each figure.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from holdfast.models.download import demo_folder

NAMES = ("demo", "draft", "copy")
PROMPT_WORDS = 1500
AGENTS = 4


def say(text: str) -> None:
    """Print a line of the report."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextmanager
def served(folder: Path, catalog: str, *settings: str) -> Iterator[tuple[httpx.Client, float]]:
    """A server of a catalog, and the seconds until /health returned 200."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "models.toml").write_text(catalog)
    options = [option for setting in settings for option in ("--set", setting)]
    command = [
        sys.executable,
        "-m",
        "holdfast.cli.main",
        "serve",
        "--models",
        str(folder / "models.toml"),
        "--port",
        "18455",
    ]
    began = time.monotonic()
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [*command, "--store", str(folder / "store"), *options], stdout=log, stderr=log
        )
    try:
        with httpx.Client(
            base_url="http://127.0.0.1:18455", timeout=300, limits=httpx.Limits(max_connections=100)
        ) as client:
            while not _is_ready(client):
                assert server.poll() is None, (folder / "log").read_text()
                time.sleep(0.01)
            yield client, time.monotonic() - began
    finally:
        server.terminate()
        server.wait(60)


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def three_models(folder: Path) -> str:
    """A catalog of the bundled models and a copy."""
    copy = shutil.copytree(demo_folder(), folder / "copy")
    return f"""
[models.demo]
id = "holdfast-demo"

[models.draft]
id = "holdfast-demo-draft"

[models.copy]
path = "{copy}"
"""


def first_token_seconds(client: httpx.Client, model: str, prompt: str) -> tuple[float, int, int]:
    """The time to first token of a stream, its prompt tokens, and how many were cached."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    began, first, usage = time.monotonic(), 0.0, {}
    with client.stream(
        "POST", "/v1/completions", json={**body, "stream_options": {"include_usage": True}}
    ) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                first = first or (
                    time.monotonic() - began
                    if event["choices"] and event["choices"][0]["text"]
                    else 0.0
                )
                usage = event.get("usage") or usage
    return first, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def changes(client: httpx.Client) -> dict[str, int]:
    """The number of loads of each model."""
    lines = client.get("/metrics").text.splitlines()
    return {
        line.split('model="')[1].split('"')[0]: int(float(line.rpartition(" ")[2]))
        for line in lines
        if line.startswith('holdfast_model_changes_total{change="loaded"')
    }


def ask(client: httpx.Client, model: str, text: str) -> float:
    """Generate 16 tokens; returns the seconds."""
    began = time.monotonic()
    answer = client.post(
        "/v1/completions",
        json={"model": model, "prompt": text, "max_tokens": 16, "ignore_eos": True},
    )
    assert answer.status_code == 200, answer.text
    return time.monotonic() - began


def try_many(folder: Path) -> None:
    """30 concurrent requests to an unloaded model; 90 over three models in two places."""
    with (
        served(folder, three_models(folder), "residency.max_loaded=2") as (client, _),
        ThreadPoolExecutor(90) as threads,
    ):
        began = time.monotonic()
        list(threads.map(lambda number: ask(client, "demo", f"number {number}"), range(30)))
        say(
            f"30 concurrent requests to an unloaded model: answered in {time.monotonic() - began:.2f} s, loads "
            f"{changes(client)}"
        )
        for at_once in (90, 12):
            began = time.monotonic()
            with ThreadPoolExecutor(at_once) as few:
                took = list(
                    few.map(lambda number: ask(client, NAMES[number % 3], f"n {number}"), range(90))
                )
            say(
                f"90 over three models in two places, {at_once} at a time: answered in "
                f"{time.monotonic() - began:.1f} s, "
                f"median {statistics.median(took):.2f} s, longest {max(took):.1f} s, loads so far "
                f"{changes(client)}"
            )


def agent_prompt(number: int, *, turn: int) -> str:
    """An agent's prompt; that of the second turn extends that of the first."""
    words = [f"item {(number * 7919 + place * 31) % 9973}" for place in range(PROMPT_WORDS // 2)]
    return " ".join(words) + (" and then it went on" if turn else "")


def agents_first_tokens(
    client: httpx.Client, model: str, *, turn: int
) -> list[tuple[float, int, int]]:
    """Ask for all agents of a model concurrently."""
    with ThreadPoolExecutor(AGENTS) as threads:
        prompts = [agent_prompt(number, turn=turn) for number in range(AGENTS)]
        return list(threads.map(lambda prompt: first_token_seconds(client, model, prompt), prompts))


def try_swap(folder: Path, *, rounds: int = 5) -> None:
    """Time to first token after swapping a model out and in, compared with a load and with no swap."""
    for model in NAMES[:2]:
        other = NAMES[1] if model == NAMES[0] else NAMES[0]
        loads, kept, swapped, cached = [], [], [], []
        for number in range(rounds):
            place = folder / f"{model}-{number}"
            with served(place, three_models(place), "residency.max_loaded=1") as (client, _):
                loads.append(first_token_seconds(client, model, "a")[0])
                agents_first_tokens(client, model, turn=0)
                kept.append(
                    max(first for first, _, _ in agents_first_tokens(client, model, turn=1))
                )
                ask(client, other, "hello")
                again = agents_first_tokens(client, model, turn=1)
                swapped.append(max(first for first, _, _ in again))
                cached.append(min(known / prompt for _, prompt, known in again))
        load, never, swap = map(statistics.median, (loads, kept, swapped))
        swap_range, load_range = (
            f"{min(each):.2f} to {max(each):.2f}" for each in (swapped, loads)
        )
        say(
            f"swap {model}-{other}-{model}: slowest first token of {AGENTS} agents {swap:.2f} s "
            f"({swap_range}), load {load:.2f} s "
            f"({load_range}), never swapped {never:.3f} s: ratio {swap / (load + never):.2f}; "
            f"cached at least {min(cached):.1%}"
        )


def try_start(folder: Path, *, rounds: int = 3) -> None:
    """Start with a catalog of 200 entries and with one."""
    copies = folder / "copies"
    copies.mkdir(parents=True)
    for number in range(200):
        (copies / f"copy-{number}").symlink_to(demo_folder(), target_is_directory=True)
    many = "\n".join(
        f'[models.copy-{number}]\npath = "{copies}/copy-{number}"' for number in range(200)
    )
    pinned = many.replace("\n", "\npin = true\n", 1)
    one = "\n".join(many.splitlines()[:2])
    figures: dict[str, list[float]] = {
        "one": [],
        "200, nothing loaded": [],
        "200, the first pinned": [],
    }
    for number in range(rounds):
        for name, catalog in zip(figures, (one, many, pinned), strict=True):
            with served(folder / f"{name[:12]}-{number}", catalog) as (client, seconds):
                figures[name].append(seconds)
                _check(client.get("/health").json()["models"], 1 if name == "one" else 200)
    medians = {name: statistics.median(seconds) for name, seconds in figures.items()}
    for name, seconds in medians.items():
        say(
            f"ready with a catalog of {name}: {seconds:.2f} s, {seconds / medians['one']:.2f} of "
            "one"
        )


def _check(models: Sequence[Any], count: int) -> None:
    assert len(models) >= count, f"{len(models)} models"


def main() -> None:
    """Run all trials."""
    with tempfile.TemporaryDirectory() as folder:
        try_many(Path(folder) / "many")
        try_swap(Path(folder) / "swap")
        try_start(Path(folder) / "start")


if __name__ == "__main__":
    main()
