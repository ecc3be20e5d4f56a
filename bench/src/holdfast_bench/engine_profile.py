"""Shows where the time of a decode step goes: graph building in Python, attention, sampling.

Imports MLX.

Attention is timed by a wrapper around the model's attention function that evaluates everything
before and after. This makes the whole step slower, so attention is relative to a step that was
timed in the same way.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from holdfast.wire.commands import SequenceRequest
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.engine.sampling import row_state, sample
from holdfast_bench.engine_steps import EngineSteps, Stepper

_ATTENTION = "scaled_dot_product_attention"
_REPEATS = 12


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
    states = [
        row_state(
            SequenceRequest(
                request_id=str(row),
                prompt_token_ids=TokenIds.of((1,)),
                max_tokens=1,
                sampling=SamplingParams(temperature=0.0, seed=row),
            ),
            generated=(),
            vocab_size=vocab_size,
        )
        for row in range(rows)
    ]
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
    spent: list[float] = []
    with _timed_attention(model, spent) as wrapped:
        if not wrapped:
            return None
        began = time.perf_counter()
        stepper.advance(steps)
        whole = time.perf_counter() - began
    return sum(spent) / whole if spent else None


@contextmanager
def _timed_attention(model: Any, spent: list[float]) -> Iterator[bool]:
    modules = [
        sys.modules[name]
        for name in {type(part).__module__ for _, part in model.named_modules()}
        if name in sys.modules
    ]
    held = [module for module in modules if hasattr(module, _ATTENTION)]
    originals = [getattr(module, _ATTENTION) for module in held]
    for module, original in zip(held, originals, strict=True):
        setattr(module, _ATTENTION, _timing(original, spent))
    try:
        yield bool(held)
    finally:
        for module, original in zip(held, originals, strict=True):
            setattr(module, _ATTENTION, original)


def _inputs(part: Any) -> list[mx.array]:
    """The arrays among attention's inputs, or in the view over live layers that it reads."""
    if isinstance(part, mx.array):
        return [part]
    return [array for layer in getattr(part, "_layers", ()) for array in layer.arrays()]


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
