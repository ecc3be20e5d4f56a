"""Times a server of several models: loads for many at once, requests over three models on two
places, swaps, starts.

`python -m tools.try_models`: a few minutes, on the bundled models, in folders of its own. Prints a
line for each figure.
"""

from __future__ import annotations

import json
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

from holdfast.models.download import DEMO_IDS, demo_folder

NAMES = ("demo", "draft", "window")
PROMPT_WORDS = 1500
AGENTS = 4


def say(text: str) -> None:
    """One line of the report."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextmanager
def served(folder: Path, catalog: str, *settings: str) -> Iterator[tuple[httpx.Client, float]]:
    """A server of a catalog, and the seconds until /health said 200."""
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


def three_models() -> str:
    """The bundled models."""
    return "\n".join(
        f'[models.{name}]\nid = "{model}"' for name, model in zip(NAMES, DEMO_IDS, strict=True)
    )


def first_token_seconds(client: httpx.Client, model: str, prompt: str) -> tuple[float, int, int]:
    """Time to the first token of a streamed answer; tokens of its prompt, and how many of them were
    cached.
    """
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
    """How often models were loaded, by name."""
    lines = client.get("/metrics").text.splitlines()
    return {
        line.split('model="')[1].split('"')[0]: int(float(line.rpartition(" ")[2]))
        for line in lines
        if line.startswith('holdfast_model_changes_total{change="loaded"')
    }


def ask(client: httpx.Client, model: str, text: str) -> float:
    """Have an answer of 16 tokens made; returns the seconds that it took."""
    began = time.monotonic()
    answer = client.post(
        "/v1/completions",
        json={"model": model, "prompt": text, "max_tokens": 16, "ignore_eos": True},
    )
    assert answer.status_code == 200, answer.text
    return time.monotonic() - began


def try_many(folder: Path) -> None:
    """30 at once to a cold model; 90 over three models on two places, 30 at a time."""
    with (
        served(folder, three_models(), "residency.max_loaded=2") as (client, _),
        ThreadPoolExecutor(90) as threads,
    ):
        began = time.monotonic()
        list(threads.map(lambda number: ask(client, "demo", f"number {number}"), range(30)))
        say(
            f"30 at once to a cold model: all answered in {time.monotonic() - began:.2f} s, loads "
            f"{changes(client)}"
        )
        for at_once in (90, 12):
            began = time.monotonic()
            with ThreadPoolExecutor(at_once) as few:
                took = list(
                    few.map(lambda number: ask(client, NAMES[number % 3], f"n {number}"), range(90))
                )
            say(
                f"90 over three models on two places, {at_once} at a time: all answered in "
                f"{time.monotonic() - began:.1f} s, "
                f"median {statistics.median(took):.2f} s, longest {max(took):.1f} s, loads so far "
                f"{changes(client)}"
            )


def agent_prompt(number: int, *, turn: int) -> str:
    """The prompt of an agent; that of the second turn begins with that of the first."""
    words = [f"item {(number * 7919 + place * 31) % 9973}" for place in range(PROMPT_WORDS // 2)]
    return " ".join(words) + (" and then it went on" if turn else "")


def agents_first_tokens(
    client: httpx.Client, model: str, *, turn: int
) -> list[tuple[float, int, int]]:
    """All agents of a model at once."""
    with ThreadPoolExecutor(AGENTS) as threads:
        prompts = [agent_prompt(number, turn=turn) for number in range(AGENTS)]
        return list(threads.map(lambda prompt: first_token_seconds(client, model, prompt), prompts))


def try_swap(folder: Path, *, rounds: int = 5) -> None:
    """First tokens of A's agents when A was swapped for B and back, against a load and the same
    without a swap.
    """
    for model in NAMES[:2]:
        other = NAMES[1] if model == NAMES[0] else NAMES[0]
        loads, kept, swapped, cached = [], [], [], []
        for number in range(rounds):
            with served(folder / f"{model}-{number}", three_models(), "residency.max_loaded=1") as (
                client,
                _,
            ):
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
            f"swap {model}-{other}-{model}: last first token of {AGENTS} agents {swap:.2f} s "
            f"({swap_range}), load {load:.2f} s "
            f"({load_range}), never swapped {never:.3f} s: ratio {swap / (load + never):.2f}; "
            f"cached at least {min(cached):.1%}"
        )


def try_start(folder: Path, *, rounds: int = 3) -> None:
    """Ready with a catalog of 200 entries, against one."""
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
    """All of it."""
    with tempfile.TemporaryDirectory() as folder:
        try_many(Path(folder) / "many")
        try_swap(Path(folder) / "swap")
        try_start(Path(folder) / "start")


if __name__ == "__main__":
    main()
