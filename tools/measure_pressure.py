"""Puts two models under memory pressure with more clients than fit, checks every answer, and draws
the footprint.

    python -m tools.measure_pressure --seconds 600 --draw docs/pictures/memory-pressure.svg

The models are tiny and random, but a token of theirs takes 16 KiB. Their memory together is limited
to a small part of what the clients would need (`residency.memory_bytes`). An answer is right if it
is the one that the same prompt gets alone, in native form or in 8 bits. A sequence that was
quantized while it ran may give another answer, so there may be as many others as such sequences.
Exits with 1 if there are more, or after a failure other than 503.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

from holdfast_bench.charts import Chart, Line
from holdfast_bench.svg import svg as drawn
from tests.fakes.server_process import ServerProcess, running_server, until
from tests.fakes.tiny_models import write_tiny

MODELS = ("first", "second")
SHAPE = {
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
    "max_position_embeddings": 8192,
}
ANSWER_TOKENS = 60
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
    """What happened to the requests: native, quantized, other, busy (503), failed."""

    samples: list[Sample] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def prompts_of(count: int, tokens: int) -> list[str]:
    """Prompts of this many letters, each of which is a token."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz "
    return ["".join(rng.choice(letters) for _ in range(tokens)) for _ in range(count)]


def ask(url: str, model: str, prompt: str, **more: str) -> str:
    """The answer to a prompt. Raises httpx.HTTPError."""
    body = {
        "model": model,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        **more,
    }
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=600)
    response.raise_for_status()
    return str(response.json()["choices"][0]["text"])


class Client(threading.Thread):
    """Asks for one answer after the other until the time is over."""

    def __init__(
        self,
        number: int,
        url: str,
        right: Mapping[str, Mapping[str, str]],
        ends_at: float,
        tally: Tally,
    ) -> None:
        """right: for each prompt, what the answer is called, by answer."""
        super().__init__(daemon=True)
        self._number, self._url = number, url
        self._right, self._ends_at, self._tally = right, ends_at, tally

    def run(self) -> None:
        rng = random.Random(self._number)
        while time.monotonic() < self._ends_at:
            self._ask(rng.choice(list(self._right)))

    def _ask(self, prompt: str) -> None:
        model = MODELS[self._number % len(MODELS)]
        try:
            answer = ask(self._url, model, prompt)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == 503:
                self._tally.answers["busy"] += 1
                time.sleep(RETRY_SECONDS)
            else:
                self._fail(error.response.text)
        except httpx.HTTPError as error:
            self._fail(repr(error))
        else:
            self._tally.answers[self._right[prompt].get(answer, "other")] += 1

    def _fail(self, why: str) -> None:
        self._tally.answers["failed"] += 1
        self._tally.failures.append(why)


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
    model = write_tiny(folder / "model", "llama", changes=SHAPE)
    tables = [f"[models.{name}]\npath = {str(model)!r}\npin = true\n" for name in MODELS]
    (folder / "models.toml").write_text("\n".join(tables))
    return running_server(
        "--models", str(folder / "models.toml"), "--store", str(folder / "store"), *more
    )


def footprint(url: str) -> int:
    """The memory of both workers, once both have loaded."""
    until(lambda: loaded(url), "both models")
    return int(httpx.get(f"{url}/health", timeout=60).json()["memory_pressure"]["footprint_bytes"])


def loaded(url: str) -> bool:
    """Whether both models are ready, and their memory was measured."""
    health = httpx.get(f"{url}/health", timeout=60).json()
    is_ready = all(model["state"] == "ready" for model in health["models"])
    return is_ready and health["memory_pressure"]["footprint_bytes"] > 0


def main() -> int:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=2000, help="length of a prompt")
    parser.add_argument("--spare-mib", type=int, default=60, help="beyond the idle footprint")
    parser.add_argument("--queued", type=int, default=256, help="scheduler.max_queued")
    parser.add_argument("--draw", type=Path, help="file for the chart")
    parser.add_argument("--figures", type=Path, help="file for the samples, as JSON")
    arguments = parser.parse_args()
    prompts = prompts_of(arguments.prompts, arguments.tokens)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serve(folder) as server:
            limit = footprint(server.url) + arguments.spare_mib * MIB
            right = {
                each: {
                    ask(server.url, MODELS[0], each, kv_bits="8"): "quantized",
                    ask(server.url, MODELS[0], each, kv_bits="native"): "native",
                }
                for each in prompts
            }
        shutil.rmtree(folder / "store")
        settings = (f"residency.memory_bytes={limit}", f"scheduler.max_queued={arguments.queued}")
        with serve(folder, *(f"--set={setting}" for setting in settings)) as server:
            footprint(server.url)
            tally = Tally()
            ends_at = time.monotonic() + arguments.seconds
            clients = [
                Client(number, server.url, right, ends_at, tally)
                for number in range(arguments.clients)
            ]
            for client in clients:
                client.start()
            watch(server.url, tally, ends_at)
            for client in clients:
                client.join()
            metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
            log = server.log()
    quantized = report(tally, metrics, log)
    needed = arguments.clients * arguments.tokens * 16 / 1024
    print(f"{needed:.0f} MiB needed for all clients, {arguments.spare_mib} MiB there")
    if arguments.figures:
        arguments.figures.write_text(json.dumps([asdict(each) for each in tally.samples]))
    if arguments.draw:
        title = f"{arguments.clients} clients, two models, {limit / MIB:,.0f} MiB for both"
        arguments.draw.write_text(svg(tally.samples, title=title))
    return 1 if tally.answers["other"] > quantized or tally.failures else 0


def report(tally: Tally, metrics: str, log: str) -> int:
    """Print what happened; returns how many sequences were quantized while they ran."""
    levels = Counter(each.level for each in tally.samples)
    print("answers:", dict(tally.answers))
    print("samples by level:", dict(levels))
    beyond = max(each.footprint - each.second for each in tally.samples)
    most = max(each.footprint for each in tally.samples)
    print(f"footprint at most {most / MIB:.0f} MiB ({beyond / MIB:+.0f} to the second watermark)")
    wanted = ("holdfast_pressure_changes", "holdfast_worker_quantized", "holdfast_worker_preempt")
    lines = [line for line in metrics.splitlines() if line.startswith(wanted)]
    print("\n".join(lines))
    print("\n".join([line for line in log.splitlines() if "memory pressure" in line][:4]))
    print("\n".join(tally.failures[:10]))
    quantized = (line.split()[-1] for line in lines if "quantized_total{" in line)
    return int(sum(map(float, quantized)))


if __name__ == "__main__":
    sys.exit(main())
