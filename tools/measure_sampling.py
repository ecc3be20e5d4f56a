"""What drawing a token and scoring a prompt cost on this CPU: the ways that were tried, one after
the other, in turns.

Run: `python -m tools.measure_sampling [draws] [scores] [memory] [--rounds 5] [--cpu-time]` from the
root of the repository. It prints Markdown tables with milliseconds: `draws` by vocabulary, rows,
kind of logits and sampling; `scores` log-probabilities of given tokens; `memory` the most that
scoring a prompt of 2,048 tokens over 152,064 takes. Without a name it does all three.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from holdfast.wire.requests import TokenIds
from holdfast.worker.cpu.blas import prepare_blas
from holdfast.worker.engine import seams

prepare_blas()  # before mlx is imported
seams.prepare()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402

from holdfast.wire.commands import SequenceRequest  # noqa: E402
from holdfast.wire.requests import SamplingParams  # noqa: E402
from holdfast.worker.cpu.host_sampling import (  # noqa: E402  # noqa: E402
    ManyKept,
    WeighedRow,
    draw_on_host,
    rows_of,
    score_on_host,
)
from holdfast.worker.engine.engine import Engine  # noqa: E402
from holdfast.worker.engine.plan import Span, StepPlan  # noqa: E402
from holdfast.worker.engine.probe import choose_layout  # noqa: E402
from holdfast.worker.engine.sampling_draw import draw, draw_key, draw_kind, largest  # noqa: E402
from tests.fakes.tiny_models import make_tiny  # noqa: E402

VOCABULARIES = (1_536, 32_000, 152_064)
ROWS = (1, 8, 32)
SHAPES = ("peaked", "typical", "flat")
PROMPT_TOKENS = 2_048

Row = npt.NDArray[np.float32]
Way = Callable[[mx.array, SamplingParams], object]


def make_logits(shape: str, *, rows: int, vocab: int) -> mx.array:
    """peaked: two or three tokens matter; typical: some dozens, over a bulk that weighs a
    thousandth; flat: most of them.
    """
    random = np.random.default_rng(0)
    logits = random.normal(0, 0.5 if shape == "flat" else 2.0, (rows, vocab))
    for row in logits:
        if shape == "peaked":
            row[random.integers(0, vocab, 5)] += [28, 25, 22, 21, 20]
        elif shape == "typical":
            count = min(vocab // 4, 400)
            row[random.choice(vocab, count, replace=False)] = 20 - 1.6 * np.log(
                np.arange(1, count + 1)
            )
    array = mx.array(logits.astype(np.float32))
    mx.eval(array)
    return array


def keys_of(logits: mx.array) -> list[tuple[int, int]]:
    """A random key for each row."""
    return [draw_key(seed=row, position=3) for row in range(logits.shape[0])]


def by_mlx(logits: mx.array, params: SamplingParams) -> object:
    """What a GPU does, and what every device did before: thresholds bisected over the whole
    vocabulary.
    """
    rows, vocab = logits.shape
    kind = draw_kind(params, vocab_size=vocab)
    tokens = draw(
        logits,
        kind=kind,
        params=[params] * rows,
        keys=keys_of(logits),
        peaks=mx.max(logits, axis=-1),
    )
    mx.eval(tokens)
    return tokens


def by_numpy(logits: mx.array, params: SamplingParams) -> object:
    """What the engine does on a CPU."""
    return draw_on_host(logits, params=[params] * logits.shape[0], keys=keys_of(logits))


def by_sorting(logits: mx.array, params: SamplingParams) -> object:
    """All weights, all sorted: the plain way in numpy."""

    def threshold(weights: Row) -> float:
        falling = np.sort(weights)[::-1]
        cumulated = np.cumsum(falling, dtype=np.float64)
        return float(falling[np.searchsorted(cumulated, params.top_p * cumulated[-1])])

    return _with_all_weights(logits, params, threshold)


def by_partitions(logits: mx.array, params: SamplingParams) -> object:
    """All weights; the largest 256, 4,096, 65,536 until they weigh enough."""

    def threshold(weights: Row) -> float:
        aim = params.top_p * float(weights.sum(dtype=np.float64))
        for count in (256, 4_096, 65_536, len(weights)):
            top = weights if count >= len(weights) else np.partition(weights, -count)[-count:]
            falling = np.sort(top)[::-1]
            place = int(np.searchsorted(np.cumsum(falling, dtype=np.float64), aim))
            if place < len(falling):
                return float(falling[place])
        return 0.0

    return _with_all_weights(logits, params, threshold)


def by_histogram(logits: mx.array, params: SamplingParams) -> object:
    """All weights, added up in bins by their first 16 bits; the bin at the edge is sorted."""

    def threshold(weights: Row) -> float:
        bins = weights.view(np.uint32) >> np.uint32(16)
        heavier = np.cumsum(np.bincount(bins, weights=weights)[::-1])
        edge = len(heavier) - 1 - int(np.searchsorted(heavier, params.top_p * heavier[-1]))
        inside = np.sort(weights[bins == edge])[::-1]
        before = heavier[len(heavier) - 2 - edge] if edge < len(heavier) - 1 else 0.0
        place = int(
            np.searchsorted(
                before + np.cumsum(inside, dtype=np.float64), params.top_p * heavier[-1]
            )
        )
        return float(inside[min(place, len(inside) - 1)])

    return _with_all_weights(logits, params, threshold)


def _with_all_weights(
    logits: mx.array, params: SamplingParams, threshold: Callable[[Row], float]
) -> list[int]:
    tokens = []
    with np.errstate(all="ignore"):
        for row, key in zip(rows_of(logits), keys_of(logits), strict=True):
            weights = WeighedRow(row, params).weights(row)
            tokens.append(ManyKept(weights * (weights >= np.float32(threshold(weights)))).draw(key))
    return tokens


SAMPLINGS: dict[str, tuple[SamplingParams, dict[str, Way]]] = {
    "top_p 0.95": (
        SamplingParams(top_p=0.95),
        {
            "MLX": by_mlx,
            "engine": by_numpy,
            "sorted": by_sorting,
            "partitions": by_partitions,
            "histogram": by_histogram,
        },
    ),
    "top_p 0.5": (SamplingParams(top_p=0.5), {"MLX": by_mlx, "engine": by_numpy}),
    "min_p 0.05": (SamplingParams(min_p=0.05), {"MLX": by_mlx, "engine": by_numpy}),
    "temperature 1": (SamplingParams(), {"MLX": by_mlx, "engine": by_numpy}),
    "top_k 20, top_p 0.95": (SamplingParams(top_k=20, top_p=0.95), {"MLX": by_mlx}),
}
WAYS = ("MLX", "engine", "sorted", "partitions", "histogram")


def milliseconds(
    ways: Sequence[Callable[[], object]], *, rounds: int, clock: Callable[[], float]
) -> list[float]:
    """Median of each, in turns, after one round that does not count."""
    taken: list[list[float]] = [[] for _ in ways]
    for number in range(rounds + 1):
        for way, times in zip(ways, taken, strict=True):
            start = clock()
            way()
            if number:
                times.append((clock() - start) * 1000)
    return [statistics.median(times) for times in taken]


def print_draws(**measured: Any) -> None:
    """One row per vocabulary, number of rows, kind of logits and sampling."""
    print(
        "\n| vocabulary | rows | logits | sampling | "
        + " | ".join(WAYS)
        + " |\n|---:|---:|---|---|"
        + "---:|" * len(WAYS)
    )
    for vocab in VOCABULARIES:
        for rows in ROWS:
            for shape in SHAPES:
                logits = make_logits(shape, rows=rows, vocab=vocab)
                for name, (params, ways) in SAMPLINGS.items():
                    runs = [partial(way, logits, params) for way in ways.values()]
                    found = dict(zip(ways, milliseconds(runs, **measured), strict=True))
                    cells = " | ".join(f"{found[way]:.2f}" if way in found else "" for way in WAYS)
                    print(f"| {vocab:,} | {rows} | {shape} | {name} | {cells} |", flush=True)


def print_scores(**measured: Any) -> None:
    """Log-probabilities of 8 rows' tokens, with 5 of the likeliest."""
    print("\n| vocabulary | MLX | engine |\n|---:|---:|---:|")
    for vocab in VOCABULARIES:
        logits = make_logits("typical", rows=8, vocab=vocab)
        tokens = mx.arange(8)

        def score_by_mlx(logits: mx.array = logits, tokens: mx.array = tokens) -> None:
            total = mx.logsumexp(logits, axis=-1, keepdims=True)
            mx.eval(
                mx.take_along_axis(logits, tokens[:, None], axis=-1) - total,
                largest(logits, count=5),
            )

        ways = [
            score_by_mlx,
            lambda logits=logits, tokens=tokens: score_on_host(logits, tokens, top_logprobs=5),
        ]
        print(
            f"| {vocab:,} | "
            + " | ".join(f"{each:.2f}" for each in milliseconds(ways, **measured))
            + " |"
        )


def print_memory() -> None:
    """A prompt read plainly and one that is scored, with a tiny model that has a large vocabulary."""
    vocab = VOCABULARIES[-1]
    engine = Engine(
        choose_layout(make_tiny("llama", vocab_size=vocab), vocab_size=vocab), vocab_size=vocab
    )
    prompt = tuple(index * 37 % vocab for index in range(PROMPT_TOKENS))
    print("\n| prompt of 2,048 | seconds | largest MB of arrays |\n|---|---:|---:|")
    for name, scored in (("read", False), ("scored, with 5 of the likeliest", True)):
        sampling = SamplingParams(temperature=0.0, seed=0)
        request = SequenceRequest(
            request_id="a",
            prompt_token_ids=TokenIds.of(prompt),
            max_tokens=1,
            sampling=sampling,
            want_prompt_logprobs=scored,
            top_logprobs=5 if scored else 0,
        )
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        start = time.perf_counter()
        engine.open(request, capacity_tokens=PROMPT_TOKENS + 1)
        engine.collect(
            engine.dispatch(
                StepPlan(spans=(Span(request_id="a", start=0, tokens=PROMPT_TOKENS, draws=True),))
            )
        )
        seconds = time.perf_counter() - start
        print(f"| {name} | {seconds:.2f} | {(mx.get_peak_memory() - before) / 1e6:.0f} |")
        engine.close("a")


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", choices=["draws", "scores", "memory", []], default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="of this process, not the clock's: on a machine that is shared",
    )
    given = parser.parse_args()
    measured = {
        "rounds": given.rounds,
        "clock": time.process_time if given.cpu_time else time.perf_counter,
    }
    wanted = given.what or ["draws", "scores", "memory"]
    if "draws" in wanted:
        print_draws(**measured)
    if "scores" in wanted:
        print_scores(**measured)
    if "memory" in wanted:
        print_memory()


if __name__ == "__main__":
    main()
