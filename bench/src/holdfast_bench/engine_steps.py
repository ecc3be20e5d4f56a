"""Times of decoding steps: the engine against a bare forward pass of the same rows.

Device thread only; imports MLX.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from holdfast.wire.commands import SequenceRequest
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.cpu.kernels import decode_attention
from holdfast.worker.engine.engine import Engine, PendingStep
from holdfast.worker.engine.layouts import own_caches
from holdfast.worker.engine.plan import Span, StepPlan
from holdfast.worker.engine.sequence import Prefix
from holdfast.worker.kv.bits import KVBits
from holdfast.worker.kv.live import LiveBase, LiveState
from holdfast_bench.results import CaseResult, ContenderResult, Sample

CHUNK_TOKENS = 512  # `scheduler.step_tokens` on a CPU
_WARM_STEPS = 3
_METRICS = ("step_seconds", "step_processor_seconds")


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
        self,
        engine: Engine,
        requests: Sequence[SequenceRequest],
        *,
        pipelined: bool = True,
        kv_bits: KVBits = "native",
        base: LiveBase | None = None,
    ) -> None:
        """The prompts must be of one length, and are read when this returns.

        base: the state of a common prefix, in `kv_bits`, that is not read again.
        """
        self._engine, self._pipelined = engine, pipelined
        self._ids = [request.request_id for request in requests]
        self._position = len(requests[0].prompt_token_ids)
        self.dispatch_seconds: list[float] = []  # laying out one step
        self.collect_seconds: list[float] = []  # waiting for one, and reading what it drew
        prefix = None if base is None else Prefix(base=base)
        for request in requests:
            engine.open(
                request,
                capacity_tokens=self._position + request.max_tokens,
                kv_bits=kv_bits,
                prefix=prefix,
            )
            _read(engine, request.request_id, 0 if base is None else base.tokens, self._position)

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


class ReadingSteps:
    """The engine reads a long prompt: a step is a chunk of it, and draws nothing."""

    def __init__(
        self, engine: Engine, request: SequenceRequest, *, kv_bits: KVBits, base: LiveBase
    ) -> None:
        """base: the state of the first tokens of the prompt, in `kv_bits`."""
        self._engine, self._request = engine, request
        self._position = base.tokens
        prompt_tokens = len(request.prompt_token_ids)
        engine.open(
            request, capacity_tokens=prompt_tokens, kv_bits=kv_bits, prefix=Prefix(base=base)
        )

    def advance(self, steps: int) -> list[list[int]]:
        """One chunk per step."""
        end = self._position + steps * CHUNK_TOKENS
        assert end < len(self._request.prompt_token_ids), "the prompt is too short"
        _read(self._engine, self._request.request_id, self._position, end, draws=False)
        self._position = end
        return []

    def close(self) -> None:
        """Drop the sequence."""
        self._engine.close(self._request.request_id)


class WithoutKernel:
    """The same steps without the compiled attention kernel."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper

    def advance(self, steps: int) -> list[list[int]]:
        """As the other stepper, which goes on from here."""
        as_it_is = decode_attention.unavailable
        decode_attention.unavailable = lambda: "turned off"  # type: ignore[assignment]
        try:
            return self._stepper.advance(steps)
        finally:
            decode_attention.unavailable = as_it_is


def parked(engine: Engine, prompt: Sequence[int], *, kv_bits: KVBits) -> LiveState:
    """The state of a prompt that no sequence uses, so that several can start from it."""
    (request,) = requests_of([prompt], max_tokens=1, name="parked")
    live = engine.open(request, capacity_tokens=len(prompt), kv_bits=kv_bits)
    _read(engine, request.request_id, 0, len(prompt), draws=False)
    engine.close(request.request_id)
    live.park()
    mx.eval(list(live.arrays()))
    return live


def _read(engine: Engine, request_id: str, start: int, end: int, *, draws: bool = True) -> None:
    """Read the tokens from `start` to `end` of a prompt in chunks. draws: a token at the end."""
    for first in range(start, end, CHUNK_TOKENS):
        tokens = min(CHUNK_TOKENS, end - first)
        is_last = first + tokens == end
        span = Span(request_id=request_id, start=first, tokens=tokens, draws=draws and is_last)
        engine.collect(engine.dispatch(StepPlan(spans=(span,))))


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

    Metrics of each round: seconds, and processor time, per step of its block.
    """
    began = time.perf_counter()
    for stepper in steppers.values():
        stepper.advance(_WARM_STEPS)
    first = next(iter(steppers.values()))
    noise = [[_timed(first, steps)[0] for _ in range(2)] for _ in range(noise_rounds)]
    for stepper in list(steppers.values())[1:]:
        stepper.advance(2 * noise_rounds * steps)  # so that all have the same context behind them
    tokens: dict[str, list[list[int]]] = {label: [] for label in steppers}
    results = {label: ContenderResult(label=label) for label in steppers}
    for _ in range(rounds):
        for label, stepper in steppers.items():
            metrics, drawn = _timed(stepper, steps)
            results[label].rounds.append(
                Sample(metrics={name: [value] for name, value in metrics.items()})
            )
            rows = tokens[label] or [[] for _ in drawn]
            tokens[label] = [row + more for row, more in zip(rows, drawn, strict=True)]
    case = CaseResult(scenario="engine", case=name, model="", contenders=list(results.values()))
    case.noise = {name: [two[name] / one[name] for one, two in noise] for name in _METRICS}
    case.seconds = time.perf_counter() - began
    return case, tokens


def _timed(stepper: Stepper, steps: int) -> tuple[dict[str, float], list[list[int]]]:
    """The metrics per step, and the tokens."""
    began, of_processor = time.perf_counter(), time.process_time()
    drawn = stepper.advance(steps)
    ended, to_processor = time.perf_counter(), time.process_time()
    metrics = {
        "step_seconds": (ended - began) / steps,
        "step_processor_seconds": (to_processor - of_processor) / steps,
    }
    return metrics, drawn


def _listed(tokens: mx.array) -> list[int]:
    found: list[int] = tokens.tolist()  # type: ignore[assignment]
    return found
