"""Puts two models under memory pressure with more clients than fit, checks every answer, and draws
the footprint.

    python -m tools.measure_pressure --seconds 600 --draw docs/pictures/memory-pressure.svg

Each client asks for a code in notes of several thousand tokens, over and over, in a conversation
that grows. The memory of both models together is limited to a small part of what the clients would
need (`residency.memory_bytes`). An answer counts as right if it has the code that the same question
gets alone, without pressure; questions that the model does not answer right then are not asked.
Exits with 1 after a wrong answer, or after a failure other than 503.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

from holdfast.models.download import demo_folder
from holdfast_bench.charts import Chart, Line
from holdfast_bench.svg import svg as drawn
from tests.fakes.server_process import ServerProcess, running_server, until

MODELS = ("first", "second")
THINGS = ("shed", "boat", "gate", "cellar", "office", "garage", "attic", "safe", "kitchen", "tower")
FILLER = (
    "The ferry leaves at noon.",
    "The tide is low in the morning.",
    "The harbour office opens at nine.",
    "The nets are dried on the east pier.",
)
SAMPLE_SECONDS = 0.5
RETRY_SECONDS = 0.5
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What /health said at a moment. Times in seconds since the beginning, sizes in bytes."""

    at: float
    level: str
    footprint: int
    first: int
    second: int


@dataclass(slots=True)
class Tally:
    """What happened to the requests."""

    samples: list[Sample] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)  # right, wrong, busy, failed
    mistakes: list[str] = field(default_factory=list)


def question(seed: int, words: int) -> tuple[str, str, str]:
    """Notes of about this many words, a question, and the code that answers it."""
    rng = random.Random(seed)
    code = str(rng.randrange(1000, 10_000))
    thing = rng.choice(THINGS)
    lines = [f"- {rng.choice(FILLER)}" for _ in range(words // 7)]
    lines.insert(len(lines) - rng.randrange(20), f"- The code of the {thing} is {code}.")
    return f"Notes {seed}:\n" + "\n".join(lines), f"What is the code of the {thing}?", code


def ask(url: str, model: str, messages: Sequence[dict[str, str]]) -> str:
    """The answer to a conversation. Raises httpx.HTTPStatusError."""
    body = {
        "model": model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": 24,
        "reasoning_effort": "none",
    }
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600)
    response.raise_for_status()
    return str(response.json()["choices"][0]["message"]["content"])


def answerable(url: str, *, seeds: Iterator[int], count: int, words: int) -> list[int]:
    """The seeds of questions that the model answers right, alone and without pressure."""
    found: list[int] = []
    for seed in seeds:
        notes, text, code = question(seed, words)
        if code in ask(url, MODELS[0], conversation(notes, text)):
            found.append(seed)
        if len(found) == count:
            break
    return found


def conversation(notes: str, text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": notes}, {"role": "user", "content": text}]


class Client(threading.Thread):
    """Asks one question after the other until the time is over."""

    def __init__(
        self, number: int, url: str, seeds: Sequence[int], words: int, ends_at: float, tally: Tally
    ) -> None:
        super().__init__(daemon=True)
        self._number, self._url, self._words = number, url, words
        self._seeds, self._ends_at, self._tally = seeds, ends_at, tally

    def run(self) -> None:
        rng = random.Random(self._number)
        while time.monotonic() < self._ends_at:
            notes, text, code = question(rng.choice(self._seeds), self._words)
            self._ask(conversation(notes, text), code)

    def _ask(self, messages: list[dict[str, str]], code: str) -> None:
        model = MODELS[self._number % len(MODELS)]
        try:
            answer = ask(self._url, model, messages)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == 503:
                self._tally.answers["busy"] += 1
                time.sleep(RETRY_SECONDS)
                return
            self._fail("failed", error.response.text)
        except httpx.HTTPError as error:
            self._fail("failed", repr(error))
        else:
            if code in answer:
                self._tally.answers["right"] += 1
            else:
                self._fail("wrong", f"{answer!r} instead of {code}")

    def _fail(self, what: str, why: str) -> None:
        self._tally.answers[what] += 1
        self._tally.mistakes.append(why)


def watch(url: str, tally: Tally, ends_at: float) -> None:
    """Note the footprint and its watermarks until the time is over."""
    began = time.monotonic()
    while time.monotonic() < ends_at:
        state = httpx.get(f"{url}/health", timeout=60).json()["memory_pressure"]
        sample = Sample(
            at=round(time.monotonic() - began, 2),
            level=state["level"],
            footprint=state["footprint_bytes"],
            first=state["first_watermark_bytes"],
            second=state["second_watermark_bytes"],
        )
        tally.samples.append(sample)
        time.sleep(SAMPLE_SECONDS)


def svg(samples: Sequence[Sample], *, title: str) -> str:
    """The footprint over time, with its watermarks."""

    def line(label: str, sizes: Sequence[int]) -> Line:
        points = zip((each.at for each in samples), (size / MIB for size in sizes), strict=True)
        return Line(label=label, points=tuple(points))

    chart = Chart(
        name="memory-pressure",
        title=title,
        x_label="seconds",
        y_label="MiB",
        lines=(
            line("memory of both workers", [each.footprint for each in samples]),
            line("first watermark", [each.first for each in samples]),
            line("second watermark", [each.second for each in samples]),
        ),
        kind="steps",
    )
    return drawn(chart)


def serve(folder: Path, *more: str) -> AbstractContextManager[ServerProcess]:
    """A server of both models, with a store in this folder."""
    tables = [f"[models.{name}]\npath = {str(demo_folder())!r}\npin = true\n" for name in MODELS]
    (folder / "models.toml").write_text("\n".join(tables))
    return running_server(
        "--models", str(folder / "models.toml"), "--store", str(folder / "store"), *more
    )


def footprint(url: str) -> int:
    """The memory of both workers, once both have loaded."""
    until(lambda: loaded(url), "both models")
    return int(httpx.get(f"{url}/health", timeout=60).json()["memory_pressure"]["footprint_bytes"])


def loaded(url: str) -> bool:
    health = httpx.get(f"{url}/health", timeout=60).json()
    is_ready = all(model["state"] == "ready" for model in health["models"])
    return is_ready and health["memory_pressure"]["limit_bytes"] > 0


def main() -> int:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--words", type=int, default=3000, help="length of the notes")
    parser.add_argument("--spare-mib", type=int, default=120, help="beyond the idle footprint")
    parser.add_argument("--queued", type=int, default=256, help="scheduler.max_queued")
    parser.add_argument("--draw", type=Path, help="file for the chart")
    parser.add_argument("--figures", type=Path, help="file for the samples, as JSON")
    arguments = parser.parse_args()
    words = arguments.words
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serve(folder) as server:
            limit = footprint(server.url) + arguments.spare_mib * MIB
            seeds = answerable(
                server.url, seeds=itertools.count(), count=arguments.questions, words=words
            )
        shutil.rmtree(folder / "store")
        settings = (f"residency.memory_bytes={limit}", f"scheduler.max_queued={arguments.queued}")
        with serve(folder, *(f"--set={setting}" for setting in settings)) as server:
            footprint(server.url)
            tally = Tally()
            ends_at = time.monotonic() + arguments.seconds
            clients = [
                Client(number, server.url, seeds, words, ends_at, tally)
                for number in range(arguments.clients)
            ]
            for client in clients:
                client.start()
            watch(server.url, tally, ends_at)
            for client in clients:
                client.join()
            metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
            log = server.log()
    report(tally, metrics, log)
    if arguments.figures:
        arguments.figures.write_text(json.dumps([asdict(each) for each in tally.samples]))
    if arguments.draw:
        title = f"{arguments.clients} clients, two models, {limit / MIB:,.0f} MiB for both"
        arguments.draw.write_text(svg(tally.samples, title=title))
    return 1 if tally.answers["wrong"] or tally.answers["failed"] else 0


def report(tally: Tally, metrics: str, log: str) -> None:
    """Print what happened."""
    levels = Counter(each.level for each in tally.samples)
    print("answers: ", dict(tally.answers))
    print("samples by level: ", dict(levels))
    sizes = [each.footprint for each in tally.samples]
    beyond = [each.footprint - each.second for each in tally.samples]
    print(f"footprint at most {max(sizes) / MIB:.0f} MiB, {max(beyond) / MIB:+.0f} MiB from the ")
    print("second watermark")
    wanted = ("holdfast_pressure_changes", "holdfast_worker_quantized", "holdfast_worker_preempt")
    print("\n".join(line for line in metrics.splitlines() if line.startswith(wanted)))
    print("\n".join([line for line in log.splitlines() if "memory pressure" in line][:6]))
    print("\n".join(tally.mistakes[:10]))


if __name__ == "__main__":
    sys.exit(main())
