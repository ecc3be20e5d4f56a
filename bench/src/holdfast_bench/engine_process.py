"""Measures the engine in a separate process, and shows where the time of a decode step goes: graph
building in Python, attention, sampling.

Attention is timed by a wrapper around the model's attention function that evaluates everything
before and after. This makes the whole step slower, so attention is relative to a step that was
timed in the same way.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import msgspec

from holdfast.worker.cpu.blas import current_blas
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.load import LoadedModel
from holdfast.worker.engine.probe import choose_layout
from holdfast.worker.engine.sampling import row_state, sample
from holdfast_bench.comparison import agreement
from holdfast_bench.engine import EngineJob
from holdfast_bench.engine_steps import (
    BareForward,
    EngineSteps,
    Stepper,
    alternate,
    loaded_model,
    random_tokens,
    request_of,
)
from holdfast_bench.results import CaseResult

_SPARE_TOKENS = 64
_PROFILE_STEPS = 8
_REPEATS = 12
_ATTENTION = "scaled_dot_product_attention"


def prepared(job: str) -> Callable[[str], list[CaseResult]]:
    """Load the model; returns what measures the cases."""
    wanted = msgspec.json.decode(job, type=EngineJob)
    loaded = loaded_model(wanted.folder)
    runner = choose_layout(loaded.model, vocab_size=loaded.vocab_size)
    return lambda line: [_case(wanted, loaded, runner, streams) for streams in wanted.streams]


def _case(job: EngineJob, loaded: LoadedModel, runner: Any, streams: int) -> CaseResult:
    prompts = [
        random_tokens(job.context_tokens, loaded, seed=1000 * streams + row)
        for row in range(streams)
    ]
    most_tokens = (job.rounds + 6) * job.steps + 4 * _PROFILE_STEPS + _SPARE_TOKENS
    requests = [
        request_of(prompt, max_tokens=most_tokens, number=row) for row, prompt in enumerate(prompts)
    ]
    ours = EngineSteps(Engine(runner, vocab_size=loaded.vocab_size), requests)
    bare = BareForward(loaded.model, prompts, pipelined=False)
    pipelined = BareForward(loaded.model, prompts, pipelined=True)
    steppers: dict[str, Stepper] = {"engine": ours, "bare": bare, "bare, pipelined": pipelined}
    name = f"{streams} stream{'s' if streams > 1 else ''}"
    case, tokens = alternate(name, steppers, rounds=job.rounds, steps=job.steps)
    texts = {label: [" ".join(map(str, row)) for row in rows] for label, rows in tokens.items()}
    for each in case.contenders[1:]:
        each.agreement = agreement(texts["engine"], texts[each.label], cut=str.split)
    case.settings = {
        "streams": streams,
        "context_tokens": job.context_tokens,
        "steps_per_round": job.steps,
        "layout": runner.name,
        "parameters": loaded.parameters,
        "compute_dtype": str(loaded.compute_dtype).removeprefix("mlx.core."),
        "blas": str(current_blas()),
    }
    _add_profile(case, loaded, ours, bare)
    ours.close()
    return case


def _add_profile(case: CaseResult, loaded: LoadedModel, ours: EngineSteps, bare: Stepper) -> None:
    engine, bare_result, _ = case.contenders
    step = statistics.median(engine.pooled("step_seconds"))
    metrics = engine.rounds[-1].metrics
    metrics |= parts_of(ours, count=_PROFILE_STEPS)
    rows = case.settings["streams"]
    metrics["drawing_seconds"] = drawing_seconds(rows=rows, vocab_size=loaded.vocab_size)
    for part in ("layout", "drawing"):
        metrics[f"{part}_share"] = [statistics.median(metrics[f"{part}_seconds"]) / step]
    for result, stepper in ((engine, ours), (bare_result, bare)):
        share = attention_share(loaded.model, stepper, steps=_PROFILE_STEPS)
        if share is not None:
            result.rounds[-1].metrics["attention_share"] = [share]


def parts_of(steps: EngineSteps, *, count: int) -> dict[str, list[float]]:
    """Seconds per step for building and for collecting, pipelined as in the worker."""
    steps.dispatch_seconds.clear()
    steps.collect_seconds.clear()
    steps.advance(count)
    return {
        "layout_seconds": list(steps.dispatch_seconds),
        "collect_seconds": list(steps.collect_seconds),
    }


def drawing_seconds(*, rows: int, vocab_size: int) -> list[float]:
    """Seconds to sample one greedy token per row from computed logits."""
    requests = [request_of((1,), max_tokens=1, number=row) for row in range(rows)]
    states = [row_state(each, generated=(), vocab_size=vocab_size) for each in requests]
    logits = mx.random.normal((rows, vocab_size))
    mx.eval(logits)
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        mx.eval(sample(logits, states).tokens)
        seconds.append(time.perf_counter() - began)
    return seconds


def attention_share(model: Any, stepper: Stepper, *, steps: int) -> float | None:
    """Attention relative to a step that is evaluated part by part; None if the model's attention
    cannot be wrapped.
    """
    stepper.advance(1)
    with _timed_attention(model) as spent:
        began = time.perf_counter()
        stepper.advance(steps)
        whole = time.perf_counter() - began
    return sum(spent) / whole if spent else None


@contextmanager
def _timed_attention(model: Any) -> Iterator[list[float]]:
    """The seconds of each call of the attention function of the model's modules."""
    names = {type(part).__module__ for _, part in model.named_modules()}
    originals = {
        sys.modules[name]: getattr(sys.modules[name], _ATTENTION)
        for name in names
        if hasattr(sys.modules.get(name), _ATTENTION)
    }
    spent: list[float] = []
    for module, original in originals.items():
        setattr(module, _ATTENTION, _timing(original, spent))
    try:
        yield spent
    finally:
        for module, original in originals.items():
            setattr(module, _ATTENTION, original)


def _timing(original: Callable[..., mx.array], spent: list[float]) -> Callable[..., mx.array]:
    def attention(
        queries: mx.array, keys: Any, values: Any, *arguments: Any, **named: Any
    ) -> mx.array:
        mx.eval(queries, _inputs(keys), _inputs(values))
        began = time.perf_counter()
        result = original(queries, keys, values, *arguments, **named)
        mx.eval(result)
        spent.append(time.perf_counter() - began)
        return result

    return attention


def _inputs(part: Any) -> list[mx.array]:
    """The arrays among attention's inputs, or in the view over live layers that it reads."""
    if isinstance(part, mx.array):
        return [part]
    return [array for layer in getattr(part, "_layers", ()) for array in layer.arrays()]
