"""Times decode steps of the engine and of a bare forward pass of the same rows.

Device thread only; imports MLX.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from holdfast.config import ModelSettings
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.engine.engine import Engine, PendingStep
from holdfast.worker.engine.layouts import mlx_lm_caches
from holdfast.worker.engine.load import LoadedModel, load_model
from holdfast.worker.engine.plan import Span, StepPlan
from holdfast_bench.results import CaseResult, ContenderResult, Sample

CHUNK_TOKENS = 512  # `scheduler.step_tokens` on a CPU
_WARM_STEPS = 3
_METRICS = ("step_seconds", "step_processor_seconds")


class Stepper(Protocol):
    """Generates tokens for all of its rows, one step at a time."""

    def advance(self, steps: int) -> list[list[int]]:
        """Generate `steps` tokens per row and wait for them. Returns the tokens of each row."""
        ...


class BareForward:
    """mlx-lm's model with its own caches and all rows in one batch: one forward pass and one argmax
    per step.
    """

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], *, pipelined: bool) -> None:
        """The prompts must have equal lengths.

        pipelined: whether a step is launched before the tokens of the previous one are read.
        """
        self._model, self._pipelined = model, pipelined
        self._caches = mlx_lm_caches(model)
        ids = mx.array([list(prompt) for prompt in prompts])
        for first in range(0, ids.shape[1], CHUNK_TOKENS):
            self._draw(ids[:, first : first + CHUNK_TOKENS])
            mx.eval(self._drawn)

    def advance(self, steps: int) -> list[list[int]]:
        """One forward pass per token."""
        drawn: list[list[int]] = []
        waiting: mx.array | None = None
        for _ in range(steps):
            self._draw(self._drawn[:, None])
            if not self._pipelined:
                drawn.append(_listed(self._drawn))
                continue
            mx.async_eval(self._drawn)  # type: ignore[no-untyped-call]
            if waiting is not None:
                drawn.append(_listed(waiting))
            waiting = self._drawn
        if waiting is not None:
            drawn.append(_listed(waiting))
        return [list(row) for row in zip(*drawn, strict=True)]

    def _draw(self, ids: mx.array) -> None:
        self._drawn = mx.argmax(self._model(ids, cache=self._caches)[:, -1], axis=-1)


class EngineSteps:
    """The engine as a worker drives it: the next step is built while the current one computes."""

    def __init__(self, engine: Engine, requests: Sequence[SequenceRequest]) -> None:
        """Prefill the prompts, which must have equal lengths."""
        self._engine = engine
        self._ids = [request.request_id for request in requests]
        self._position = len(requests[0].prompt_token_ids)
        self.dispatch_seconds: list[float] = []  # to build one step
        self.collect_seconds: list[float] = []  # to wait for one and read its tokens
        for request in requests:
            engine.open(request, capacity_tokens=self._position + request.max_tokens)
            prefill(engine, request.request_id, self._position, samples=True)

    def advance(self, steps: int) -> list[list[int]]:
        """One planned step per token."""
        drawn: list[list[int]] = []
        waiting: PendingStep | None = None
        for _ in range(steps):
            following = self._dispatch()
            if waiting is not None:
                drawn.append(self._collect(waiting))
            waiting = following
        if waiting is not None:
            drawn.append(self._collect(waiting))
        return [list(row) for row in zip(*drawn, strict=True)]

    def close(self) -> None:
        """Drop the sequences."""
        for request_id in self._ids:
            self._engine.close(request_id)

    def _dispatch(self) -> PendingStep:
        began = time.perf_counter()
        spans = tuple(
            Span(request_id=request_id, start=self._position, tokens=1, samples=True)
            for request_id in self._ids
        )
        self._position += 1
        pending = self._engine.dispatch(StepPlan(spans=spans))
        self.dispatch_seconds.append(time.perf_counter() - began)
        return pending

    def _collect(self, pending: PendingStep) -> list[int]:
        began = time.perf_counter()
        results = self._engine.collect(pending)
        self.collect_seconds.append(time.perf_counter() - began)
        return [span.token_ids[0] for span in results]


def prefill(engine: Engine, request_id: str, tokens: int, *, samples: bool) -> None:
    """Prefill tokens of a prompt in chunks. samples: whether the last chunk samples a token."""
    for first in range(0, tokens, CHUNK_TOKENS):
        count = min(CHUNK_TOKENS, tokens - first)
        is_last = first + count == tokens
        span = Span(request_id=request_id, start=first, tokens=count, samples=samples and is_last)
        engine.collect(engine.dispatch(StepPlan(spans=(span,))))


def request_of(prompt: Sequence[int], *, max_tokens: int, number: int = 0) -> SequenceRequest:
    """A greedy request."""
    return SequenceRequest(
        request_id=f"row {number}",
        prompt_token_ids=TokenIds.of(prompt),
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=0.0, seed=number),
    )


def loaded_model(folder: str) -> LoadedModel:
    """The model in a folder, as a worker loads it."""
    return load_model(Path(folder), ModelSettings(), progress=lambda stage, fraction: None)


def random_tokens(count: int, model: LoadedModel, *, seed: int) -> list[int]:
    """Equal seeds give equal tokens."""
    source = random.Random(seed)
    return [source.randrange(model.vocab_size) for _ in range(count)]


def alternate(
    name: str, steppers: dict[str, Stepper], *, rounds: int, steps: int, noise_rounds: int = 2
) -> tuple[CaseResult, dict[str, list[list[int]]]]:
    """Time blocks of steps in turn (A B A B), after comparing the first stepper with itself.

    Returns the case and the tokens of each stepper. Metrics of a round are wall and CPU seconds per
    step.
    """
    began = time.perf_counter()
    for stepper in steppers.values():
        stepper.advance(_WARM_STEPS)
    first = next(iter(steppers.values()))
    noise = [[_timed(first, steps)[0] for _ in range(2)] for _ in range(noise_rounds)]
    for stepper in list(steppers.values())[1:]:
        stepper.advance(2 * noise_rounds * steps)  # so that all contexts are equally long
    tokens: dict[str, list[list[int]]] = {label: [] for label in steppers}
    results = {label: ContenderResult(label=label) for label in steppers}
    for _ in range(rounds):
        for label, stepper in steppers.items():
            metrics, drawn = _timed(stepper, steps)
            sample = Sample(metrics={name: [value] for name, value in metrics.items()})
            results[label].rounds.append(sample)
            rows = tokens[label] or [[] for _ in drawn]
            tokens[label] = [row + more for row, more in zip(rows, drawn, strict=True)]
    case = CaseResult(scenario="engine", case=name, model="", contenders=list(results.values()))
    case.noise = {name: [two[name] / one[name] for one, two in noise] for name in _METRICS}
    case.seconds = time.perf_counter() - began
    return case, tokens


def _timed(stepper: Stepper, steps: int) -> tuple[dict[str, float], list[list[int]]]:
    """The metrics per step, and the tokens."""
    began, used = time.perf_counter(), time.process_time()
    drawn = stepper.advance(steps)
    seconds = time.perf_counter() - began, time.process_time() - used
    return {name: spent / steps for name, spent in zip(_METRICS, seconds, strict=True)}, drawn


def _listed(tokens: mx.array) -> list[int]:
    found: list[int] = tokens.tolist()  # type: ignore[assignment]
    return found
