"""Times of decoding steps: the engine against a bare forward pass of the same rows.

Device thread only; imports MLX.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from holdfast.wire.commands import SequenceRequest
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.engine.engine import Engine, PendingStep
from holdfast.worker.engine.layouts import own_caches
from holdfast.worker.engine.plan import Span, StepPlan
from holdfast_bench.results import CaseResult, ContenderResult, Sample

CHUNK_TOKENS = 256
_WARM_STEPS = 3


class Stepper(Protocol):
    """Something that can draw one token for each of its rows, again and again."""

    def advance(self, steps: int) -> list[list[int]]:
        """Draw `steps` tokens per row; everything is computed when it returns.

        Returns the tokens, row by row.
        """
        ...


class BareForward:
    """mlx-lm's model with its own caches, all rows in one batch: one forward pass and one argmax
    per step, nothing else.
    """

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], *, pipelined: bool) -> None:
        """The prompts must be of one length.

        `pipelined`: a step is launched before the tokens of the one before it are read.
        """
        self._model, self._pipelined = model, pipelined
        self._caches = own_caches(model)
        ids = mx.array([list(prompt) for prompt in prompts])
        for first in range(0, ids.shape[1], CHUNK_TOKENS):
            self._drawn = mx.argmax(
                model(ids[:, first : first + CHUNK_TOKENS], cache=self._caches)[:, -1], axis=-1
            )
            mx.eval(self._drawn)

    def advance(self, steps: int) -> list[list[int]]:
        """One forward pass per token."""
        drawn: list[list[int]] = []
        waiting: mx.array | None = None
        for _ in range(steps):
            self._drawn = mx.argmax(
                self._model(self._drawn[:, None], cache=self._caches)[:, -1], axis=-1
            )
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


class EngineSteps:
    """The engine as a worker drives it. pipelined: the next step is laid out while this one
    computes.
    """

    def __init__(
        self, engine: Engine, requests: Sequence[SequenceRequest], *, pipelined: bool = True
    ) -> None:
        """The prompts must be of one length, and be read already when this returns."""
        self._engine, self._pipelined = engine, pipelined
        self._ids = [request.request_id for request in requests]
        self._position = len(requests[0].prompt_token_ids)
        self.dispatch_seconds: list[float] = []  # laying out one step
        self.collect_seconds: list[float] = []  # waiting for one, and reading what it drew
        for request in requests:
            prompt_tokens = len(request.prompt_token_ids)
            engine.open(request, capacity_tokens=prompt_tokens + request.max_tokens)
            for first in range(0, prompt_tokens, CHUNK_TOKENS):
                tokens = min(CHUNK_TOKENS, prompt_tokens - first)
                draws = first + tokens == prompt_tokens
                span = Span(request_id=request.request_id, start=first, tokens=tokens, draws=draws)
                engine.collect(engine.dispatch(StepPlan(spans=(span,))))

    def advance(self, steps: int) -> list[list[int]]:
        """One planned step per token."""
        drawn: list[list[int]] = []
        waiting: PendingStep | None = None
        for _ in range(steps):
            following = self._dispatch()
            if waiting is not None:
                drawn.append(self._collect(waiting))
            if self._pipelined:
                waiting = following
            else:
                drawn.append(self._collect(following))
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
            Span(request_id=request_id, start=self._position, tokens=1, draws=True)
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


def requests_of(
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    name: str = "row",
    temperature: float = 0.0,
    grammar: str = "",
) -> list[SequenceRequest]:
    """One request per prompt, each with a seed of its own."""
    return [
        SequenceRequest(
            request_id=f"{name} {number}",
            prompt_token_ids=TokenIds.of(prompt),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=temperature, seed=number),
            grammar=grammar,
        )
        for number, prompt in enumerate(prompts)
    ]


def alternate(
    name: str, steppers: dict[str, Stepper], *, rounds: int, steps: int, noise_rounds: int = 2
) -> tuple[CaseResult, dict[str, list[list[int]]]]:
    """Blocks of steps in turn, A B A B; the first against itself before.

    Returns the case, and the tokens of each.

    Metric of each round: seconds per step of its block.
    """
    began = time.perf_counter()
    for stepper in steppers.values():
        stepper.advance(_WARM_STEPS)
    first = next(iter(steppers.values()))
    noise = [[_seconds(first, steps) for _ in range(2)] for _ in range(noise_rounds)]
    for stepper in list(steppers.values())[1:]:
        stepper.advance(2 * noise_rounds * steps)  # so that all have the same context behind them
    tokens: dict[str, list[list[int]]] = {label: [] for label in steppers}
    results = {label: ContenderResult(label=label) for label in steppers}
    for _ in range(rounds):
        for label, stepper in steppers.items():
            seconds, drawn = _timed(lambda stepper=stepper: stepper.advance(steps))  # type: ignore[misc]
            results[label].rounds.append(Sample(metrics={"step_seconds": [seconds / steps]}))
            rows = tokens[label] or [[] for _ in drawn]
            tokens[label] = [row + more for row, more in zip(rows, drawn, strict=True)]
    case = CaseResult(scenario="engine", case=name, model="", contenders=list(results.values()))
    case.noise = {"step_seconds": [two / one for one, two in noise]}
    case.seconds = time.perf_counter() - began
    return case, tokens


def _seconds(stepper: Stepper, steps: int) -> float:
    return _timed(lambda: stepper.advance(steps))[0]


def _timed(work: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def _listed(tokens: mx.array) -> list[int]:
    found: list[int] = tokens.tolist()  # type: ignore[assignment]
    return found
