"""Counts the operations of a decode step in MLX's own graph, beside mlx-lm's: `python -m
tools.count_operations [--layers 36]`.

The graph is laid out as a GPU would get it: attention by the fused kernel, KV in one buffer. A CPU
has no kernels for attention, normalization and rotation, and MLX gives it their parts as graph
nodes; the columns "on a GPU" count each such call as one node. Kernels leave out views (slices,
reshapes, broadcasts) and count a concatenation once for each of its inputs.
"""

from __future__ import annotations

import argparse
import importlib
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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
from holdfast.worker.engine.plan import Span, StepPlan
from holdfast.worker.engine.seams import HeadSeam
from holdfast.worker.engine.sequence import Prefix
from holdfast.worker.kv.live import LiveBase
from tests.fakes.tiny_models import make_tiny

VIEWS = set(
    "AsStrided Broadcast Copy ExpandDims Flatten Full Reshape Slice Split Squeeze Transpose Unflatten".split()
)
VOCABULARY = 32_768
PROMPT_TOKENS, TURN_TOKENS, STEPS = 40, 7, 4
GREEDY = SamplingParams(temperature=0.0, seed=0)
SAMPLINGS = {
    "greedy": GREEDY,
    "temperature": SamplingParams(temperature=0.8, seed=1),
    "top-p": SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    "top-k and top-p": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=1),
    "penalties": SamplingParams(
        temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1, seed=0
    ),
}
FUSED = ("scaled_dot_product_attention", "rms_norm", "rope")


@dataclass(frozen=True, slots=True)
class Count:
    """The nodes of a graph as MLX gives it to a CPU; and how many nodes, concatenations among them,
    and kernels on a GPU.
    """

    cpu_nodes: int
    gpu_nodes: int
    gpu_concatenations: int
    gpu_kernels: int


def _graph(outputs: Sequence[mx.array]) -> tuple[Counter[str], int]:
    """How often each operation is in the graph of what is not evaluated yet, and how many inputs
    its concatenations have.
    """
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
    """Calls of MLX's fused operations, each with what it is made of on a CPU: laid out once more
    over arrays that are there.
    """

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
        """What is not evaluated yet, with the fused calls since the last count as one node each."""
        operations, joined = _graph(outputs)
        nodes, kernels = operations.total(), _kernels(operations) + joined
        concatenations = operations["Concatenate"]
        for key, calls in self.calls.items():
            parts, parts_joined = self._parts[key]
            nodes -= calls * (parts.total() - 1)
            kernels -= calls * (_kernels(parts) + parts_joined - 1)
            concatenations -= calls * parts["Concatenate"]
        self.calls.clear()
        return Count(operations.total(), nodes, concatenations, kernels)


def _shape_or_value(argument: Any) -> Any:
    return (
        (tuple(argument.shape), str(argument.dtype)) if isinstance(argument, mx.array) else argument
    )


@contextmanager
def fused_calls() -> Iterator[FusedCalls]:
    """Notes the calls of fused operations."""
    calls = FusedCalls()
    with pytest.MonkeyPatch.context() as patch:
        for name in FUSED:
            patch.setattr(mx.fast, name, calls.wrapped(name, getattr(mx.fast, name)))
        yield calls


@contextmanager
def as_on_a_gpu() -> Iterator[list[Count]]:
    """Run Holdfast's engine as a GPU would have it; gives the operations of each step that was
    launched.
    """
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
    """Sequences of Holdfast's engine through turns of one conversation each."""

    def __init__(
        self,
        model: Any,
        *,
        streams: int,
        sampling: SamplingParams = GREEDY,
        want_logprobs: bool = False,
        shares: bool = False,
    ) -> None:
        """shares: let running sequences hold frozen parts, which a GPU's do not."""
        runner = RowsRunner(model, HeadSeam(model))
        runner.shares = shares
        self.engine = Engine(runner, vocab_size=VOCABULARY)
        self.streams, self.sampling, self.want_logprobs = streams, sampling, want_logprobs
        self.states: list[Any] = [None] * streams

    def run(self, turn: int) -> None:
        """Read what is new of every conversation and decode some steps together."""
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
                sampling=self.sampling,
                want_logprobs=self.want_logprobs,
                top_logprobs=5 if self.want_logprobs else 0,
            )
            prefix = None
            if state is not None:
                prefix = Prefix(base=LiveBase(state=state, tokens=known, use="moved"))
            self.states[stream] = self.engine.open(
                request, capacity_tokens=tokens + 256, prefix=prefix
            )
            span = Span(request_id=name, start=known, tokens=tokens - known, draws=True)
            self.engine.collect(self.engine.dispatch(StepPlan(spans=(span,))))
            positions[name] = tokens
        for step in range(STEPS):
            spans = tuple(
                Span(request_id=name, start=position + step, tokens=1, draws=True)
                for name, position in positions.items()
            )
            self.engine.collect(self.engine.dispatch(StepPlan(spans=spans)))
        for stream, name in enumerate(positions):
            self.engine.close(name)
            self.states[stream].park()


def decode_steps(model: Any, *, streams: int, turn: int = 1, **options: Any) -> list[Count]:
    """The operations of each decode step of a turn. options: as of `Turns`."""
    with as_on_a_gpu() as steps:
        turns = Turns(model, streams=streams, **options)
        for number in range(1, turn + 1):
            turns.run(number)
        return steps[-STEPS:]


def holdfast_step(model: Any, *, streams: int, turn: int = 1, **options: Any) -> Count:
    """Those of the last one."""
    return decode_steps(model, streams=streams, turn=turn, **options)[-1]


@contextmanager
def counting_evaluations() -> Iterator[list[Count]]:
    """The operations of each evaluation that mlx-lm asks for and does not wait for."""
    steps: list[Count] = []

    def counting(*outputs: Any) -> None:
        arrays = [array for _, array in tree_flatten(list(outputs)) if isinstance(array, mx.array)]
        steps.append(calls.counted(arrays))
        mx.eval(arrays)

    with fused_calls() as calls, pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "async_eval", counting)
        yield steps


def _mlx_lm_sampling(params: SamplingParams) -> tuple[Any, list[Any]]:
    """mlx-lm's sampler and logits processors for the same parameters."""
    sample_utils = importlib.import_module("mlx_lm.sample_utils")
    sampler = sample_utils.make_sampler(
        temp=params.temperature, top_p=params.top_p, top_k=params.top_k
    )
    penalties = sample_utils.make_logits_processors(
        repetition_penalty=params.repetition_penalty if params.repetition_penalty != 1.0 else None,
        presence_penalty=params.presence_penalty or None,
        frequency_penalty=params.frequency_penalty or None,
    )
    return sampler, penalties


def generate_step(model: Any, *, sampling: SamplingParams = GREEDY) -> Count:
    """The operations of a decode step of mlx-lm's `generate_step`."""
    generate = importlib.import_module("mlx_lm.generate")
    sampler, processors = _mlx_lm_sampling(sampling)
    options = {"max_tokens": STEPS, "sampler": sampler, "logits_processors": processors or None}
    with counting_evaluations() as steps:
        for _ in generate.generate_step(mx.arange(1, PROMPT_TOKENS), model, **options):
            pass
        return steps[-1]


def batch_generator(model: Any, *, streams: int, sampling: SamplingParams = GREEDY) -> Count:
    """The operations of a decode step of mlx-lm's `BatchGenerator`."""
    generate = importlib.import_module("mlx_lm.generate")
    sampler, processors = _mlx_lm_sampling(sampling)
    with counting_evaluations() as steps:
        generator = generate.BatchGenerator(model, max_tokens=STEPS + 2)
        generator.insert(
            [list(range(1, PROMPT_TOKENS + stream)) for stream in range(streams)],
            samplers=[sampler] * streams if sampling != GREEDY else None,
            logits_processors=[processors] * streams if processors else None,
        )
        for _ in range(STEPS + 2):
            generator.next()
        by_size = sorted(steps, key=lambda step: step.gpu_nodes)
        # those that join sequences are larger, those that read prompts may be smaller
        return by_size[len(by_size) // 2]


def _row(name: str, count: Callable[[], Count]) -> str:
    step = count()
    return (
        f"| {name} | {step.gpu_nodes:,} | {step.gpu_concatenations:,} | {step.gpu_kernels:,} | "
        f"{step.cpu_nodes:,} |"
    )


def _print_steps(model: Any, streams: Sequence[int]) -> None:
    print("| decode step | nodes on a GPU | concatenations | kernels on a GPU | nodes on a CPU |")
    print("|---|---:|---:|---:|---:|")
    print(_row("mlx-lm, generate_step", lambda: generate_step(model)))
    for number in streams:
        print(
            _row(
                f"mlx-lm, BatchGenerator, {number}", partial(batch_generator, model, streams=number)
            )
        )
        for turn in (1, 2):
            print(
                _row(
                    f"Holdfast, {number}, turn {turn}",
                    partial(holdfast_step, model, streams=number, turn=turn),
                )
            )


def _print_sampling(model: Any, streams: Sequence[int]) -> None:
    """What each way to draw adds to a greedy step."""
    print("| sampling, beyond a greedy step | nodes on a GPU | kernels on a GPU |")
    print("|---|---:|---:|")
    for number in streams:
        for side, step in (("mlx-lm", batch_generator), ("Holdfast", holdfast_step)):
            greedy = step(model, streams=number)
            counts = {
                name: step(model, streams=number, sampling=params)
                for name, params in SAMPLINGS.items()
            }
            if side == "Holdfast":
                counts["5 log-probabilities"] = holdfast_step(
                    model, streams=number, want_logprobs=True
                )
            for name, count in counts.items():
                nodes, kernels = (
                    count.gpu_nodes - greedy.gpu_nodes,
                    count.gpu_kernels - greedy.gpu_kernels,
                )
                print(f"| {side}, {number}, {name} | {nodes:,} | {kernels:,} |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8, 16])
    options = parser.parse_args()
    _print_steps(
        make_tiny("qwen3", num_hidden_layers=options.layers, vocab_size=VOCABULARY), options.streams
    )
    print()
    _print_sampling(make_tiny("qwen3", num_hidden_layers=1, vocab_size=VOCABULARY), options.streams)


if __name__ == "__main__":
    main()
