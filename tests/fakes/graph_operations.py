"""Counts the operations of a decode step in MLX's graph, for Holdfast's engine and for mlx-lm.

The graph is built as on a GPU: fused attention, KV in one buffer. On a CPU, MLX lacks kernels for
attention, normalization and rotary embedding, so it adds their parts to the graph as nodes; the
`gpu_` counts take each such call as one node. The kernel count ignores views (slices, reshapes,
broadcasts) and counts a concatenation once per input.
"""

from __future__ import annotations

import importlib
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from holdfast.wire.commands import SequenceRequest
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.engine import backend
from holdfast.worker.engine import engine as engine_module
from holdfast.worker.engine.backend import Backend
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.layouts import RowsRunner
from holdfast.worker.engine.mlx_lm_hooks import ProjectionHook
from holdfast.worker.engine.plan import Span, StepPlan
from holdfast.worker.kv.live import LiveBase

VIEWS = set(
    "AsStrided Broadcast Copy ExpandDims Flatten Full Reshape Slice Split Squeeze Transpose Unflatten".split()
)
VOCABULARY = 32_768
PROMPT_TOKENS, TURN_TOKENS, STEPS = 40, 7, 4
GREEDY = SamplingParams(temperature=0.0, seed=0)
FUSED = ("scaled_dot_product_attention", "rms_norm", "rope")


@dataclass(frozen=True, slots=True)
class Count:
    """Nodes of a graph, concatenations among them, and kernels, as on a GPU."""

    gpu_nodes: int
    gpu_concatenations: int
    gpu_kernels: int


def _graph(outputs: Sequence[mx.array]) -> tuple[Counter[str], int]:
    """Count each operation in the unevaluated graph, and the inputs of its concatenations."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.dot"
        mx.export_to_dot(str(file), *outputs)
        text = file.read_text()
    operations = Counter(re.findall(r'\[label ="(\w+)', text))
    joins = set(re.findall(r'(\d+) \[label ="Concatenate"', text))
    return operations, sum(text.count(f"-> {join}\n") for join in joins)


def _kernels(operations: Counter[str]) -> int:
    return sum(
        number
        for operation, number in operations.items()
        if operation not in VIEWS and operation != "Concatenate"
    )


class FusedCalls:
    """Records calls of MLX's fused operations, and the graph that each of them has on a CPU."""

    def __init__(self) -> None:
        self.calls: Counter[Any] = Counter()
        self._parts: dict[Any, tuple[Counter[str], int]] = {}

    def wrapped(self, name: str, plain: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def call(*given: Any, **options: Any) -> mx.array:
            arguments = [*given, *options.values()]
            key = (name, *map(_shape_or_value, arguments))
            self.calls[key] += 1
            if key not in self._parts:
                there = [
                    mx.zeros(each.shape, each.dtype) if isinstance(each, mx.array) else each
                    for each in arguments
                ]
                mx.eval([each for each in there if isinstance(each, mx.array)])
                named = dict(zip(options, there[len(given) :], strict=True))
                self._parts[key] = _graph([plain(*there[: len(given)], **named)])
            return plain(*given, **options)

        return call

    def counted(self, outputs: Sequence[mx.array]) -> Count:
        """Count the unevaluated graph, with each fused call since the last count as one node."""
        operations, joined = _graph(outputs)
        nodes, kernels = operations.total(), _kernels(operations) + joined
        concatenations = operations["Concatenate"]
        for key, calls in self.calls.items():
            parts, parts_joined = self._parts[key]
            nodes -= calls * (parts.total() - 1)
            kernels -= calls * (_kernels(parts) + parts_joined - 1)
            concatenations -= calls * parts["Concatenate"]
        self.calls.clear()
        return Count(nodes, concatenations, kernels)


def _shape_or_value(argument: Any) -> Any:
    return (
        (tuple(argument.shape), str(argument.dtype)) if isinstance(argument, mx.array) else argument
    )


@contextmanager
def fused_calls() -> Iterator[FusedCalls]:
    """Record the calls of fused operations."""
    calls = FusedCalls()
    with pytest.MonkeyPatch.context() as patch:
        for name in FUSED:
            patch.setattr(mx.fast, name, calls.wrapped(name, getattr(mx.fast, name)))
        yield calls


@contextmanager
def as_on_a_gpu() -> Iterator[list[Count]]:
    """Run Holdfast's engine as on a GPU; yields the operations of each launched step."""
    steps: list[Count] = []
    launch = engine_module.PendingStep.launch

    def counting(pending: Any) -> None:
        if pending.outputs:
            steps.append(calls.counted(pending.outputs))
        launch(pending)

    with fused_calls() as calls, pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_in_use", Backend())
        patch.setattr(engine_module.PendingStep, "launch", counting)
        yield steps


class Turns:
    """Runs conversations through Holdfast's engine, turn by turn."""

    def __init__(
        self,
        model: Any,
        *,
        streams: int,
        shares: bool = False,
    ) -> None:
        """shares: whether running sequences hold frozen parts, which they never do on a GPU."""
        runner = RowsRunner(model, ProjectionHook(model))
        runner.shares = shares
        self.engine = Engine(runner, vocab_size=VOCABULARY)
        self.streams = streams
        self.states: list[Any] = [None] * streams

    def run(self, turn: int) -> None:
        """Prefill the new tokens of every conversation and decode a few steps together."""
        positions: dict[str, int] = {}
        for stream in range(self.streams):
            name, state = f"{turn}/{stream}", self.states[stream]
            known = 0 if state is None else state.tokens
            tokens = known + (PROMPT_TOKENS + stream if turn == 1 else TURN_TOKENS)
            request = SequenceRequest(
                request_id=name,
                prompt_token_ids=TokenIds.of(
                    tuple(1 + (index * 7 + stream) % 200 for index in range(tokens))
                ),
                max_tokens=STEPS + 1,
                sampling=GREEDY,
            )
            base = None
            if state is not None:
                base = LiveBase(state=state, tokens=known, use="moved")
            self.states[stream] = self.engine.open(request, capacity_tokens=tokens + 256, base=base)
            span = Span(request_id=name, start=known, tokens=tokens - known, samples=True)
            self.engine.collect(self.engine.dispatch(StepPlan(spans=(span,))))
            positions[name] = tokens
        for step in range(STEPS):
            spans = tuple(
                Span(request_id=name, start=position + step, tokens=1, samples=True)
                for name, position in positions.items()
            )
            self.engine.collect(self.engine.dispatch(StepPlan(spans=spans)))
        for stream, name in enumerate(positions):
            self.engine.close(name)
            self.states[stream].park()


def decode_steps(model: Any, *, streams: int, turn: int = 1, **options: Any) -> list[Count]:
    """The operations of each decode step of a turn. options: those of `Turns`."""
    with as_on_a_gpu() as steps:
        turns = Turns(model, streams=streams, **options)
        for number in range(1, turn + 1):
            turns.run(number)
        return steps[-STEPS:]


@contextmanager
def counting_evaluations() -> Iterator[list[Count]]:
    """Yields the operations of each asynchronous evaluation of mlx-lm."""
    steps: list[Count] = []

    def counting(*outputs: Any) -> None:
        arrays = [array for _, array in tree_flatten(list(outputs)) if isinstance(array, mx.array)]
        steps.append(calls.counted(arrays))
        mx.eval(arrays)

    with fused_calls() as calls, pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "async_eval", counting)
        yield steps


def generate_step(model: Any) -> Count:
    """The operations of a greedy decode step of mlx-lm's `generate_step`."""
    generate = importlib.import_module("mlx_lm.generate")
    with counting_evaluations() as steps:
        for _ in generate.generate_step(mx.arange(1, PROMPT_TOKENS), model, max_tokens=STEPS):
            pass
        return steps[-1]
