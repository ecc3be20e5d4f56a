"""Counts the operations of a decode step in MLX's own graph, beside mlx-lm's: `python -m tools.count_operations [--layers 36]`.

The graph is counted as a GPU would get it: attention by the fused kernel, KV in one buffer. A graph node is an operation; views
(slices, reshapes, broadcasts) launch no kernel and are left out of the second figure.
"""

from __future__ import annotations

import argparse
import importlib
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from holdfast.wire.commands import SequenceRequest
from holdfast.wire.requests import SamplingParams
from holdfast.wire.token_ids import TokenIds
from holdfast.worker.engine import engine as engine_module
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.head_seam import HeadSeam
from holdfast.worker.engine.layouts import RowsRunner
from holdfast.worker.engine.plan import Span, StepPlan
from holdfast.worker.engine.sequence import Prefix
from holdfast.worker.engine.sharing import choose_sharing
from holdfast.worker.engine.views import StepContext
from holdfast.worker.kv.live import LiveBase
from tests.fakes.tiny_models import VOCAB_SIZE, make_tiny

VIEWS = set("AsStrided Broadcast Copy ExpandDims Flatten Full Reshape Slice Split Squeeze Transpose Unflatten".split())
PROMPT_TOKENS, TURN_TOKENS, STEPS = 40, 7, 4
GREEDY = SamplingParams(temperature=0.0, seed=0)


def counted(outputs: Sequence[mx.array]) -> Counter[str]:
    """How often each operation is in the graph of what is not evaluated yet."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.dot"
        mx.export_to_dot(str(file), *outputs)
        return Counter(re.findall(r'\[label ="(\w+)', file.read_text()))


@contextmanager
def as_on_a_gpu() -> Iterator[list[Counter[str]]]:
    """Run Holdfast's engine as a GPU would have it; gives the operations of each step that was launched."""
    steps: list[Counter[str]] = []
    launch = engine_module.launch

    def counting(pending: Any) -> None:
        if pending.outputs:
            steps.append(counted(pending.outputs))
        launch(pending)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "StepContext", partial(StepContext, composes_attention=False))
        patch.setattr(engine_module, "launch", counting)
        patch.setattr("holdfast.worker.engine.sampling.drawing_pays", lambda kind, vocab_size: False)
        patch.setattr("holdfast.worker.engine.sampling.scoring_pays", lambda vocab_size: False)
        yield steps


class Turns:
    """Sequences of Holdfast's engine through turns of one conversation each."""

    def __init__(self, model: Any, *, streams: int) -> None:
        runner = RowsRunner(model, HeadSeam(model))
        choose_sharing(runner, composes_attention=False)
        self.engine = Engine(runner, vocab_size=VOCAB_SIZE)
        self.streams = streams
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
                prompt_token_ids=TokenIds.of(tuple(1 + (index * 7 + stream) % 200 for index in range(tokens))),
                max_tokens=STEPS + 1,
                sampling=GREEDY,
            )
            prefix = None
            if state is not None:
                prefix = Prefix(base=LiveBase(state=state, tokens=known, use="moved"))
            self.states[stream] = self.engine.open(request, capacity_tokens=tokens + 256, prefix=prefix)
            span = Span(request_id=name, start=known, tokens=tokens - known, draws=True)
            self.engine.collect(self.engine.dispatch(StepPlan(spans=(span,))))
            positions[name] = tokens
        for step in range(STEPS):
            spans = tuple(
                Span(request_id=name, start=position + step, tokens=1, draws=True) for name, position in positions.items()
            )
            self.engine.collect(self.engine.dispatch(StepPlan(spans=spans)))
        for stream, name in enumerate(positions):
            self.engine.close(name)
            self.states[stream].rest()


def holdfast_step(model: Any, *, streams: int, turn: int) -> Counter[str]:
    """The operations of the last decode step of a turn."""
    with as_on_a_gpu() as steps:
        turns = Turns(model, streams=streams)
        for number in range(1, turn + 1):
            turns.run(number)
        return steps[-1]


@contextmanager
def counting_evaluations() -> Iterator[list[Counter[str]]]:
    """The operations of each evaluation that mlx-lm asks for and does not wait for."""
    steps: list[Counter[str]] = []

    def counting(*outputs: Any) -> None:
        arrays = [array for _, array in tree_flatten(list(outputs)) if isinstance(array, mx.array)]
        steps.append(counted(arrays))
        mx.eval(arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "async_eval", counting)
        yield steps


def generate_step(model: Any) -> Counter[str]:
    """The operations of a decode step of mlx-lm's `generate_step`."""
    generate = importlib.import_module("mlx_lm.generate")
    with counting_evaluations() as steps:
        for _ in generate.generate_step(mx.arange(1, PROMPT_TOKENS), model, max_tokens=STEPS):
            pass
        return steps[-1]


def batch_generator(model: Any, *, streams: int) -> Counter[str]:
    """The operations of a decode step of mlx-lm's `BatchGenerator`."""
    generate = importlib.import_module("mlx_lm.generate")
    with counting_evaluations() as steps:
        generator = generate.BatchGenerator(model, max_tokens=STEPS + 2)
        generator.insert([list(range(1, PROMPT_TOKENS + stream)) for stream in range(streams)])
        for _ in range(STEPS + 2):
            generator.next()
        return max(steps, key=lambda step: step["ScaledDotProductAttention"])


def _row(name: str, count: Callable[[], Counter[str]]) -> str:
    step = count()
    kernels = sum(number for operation, number in step.items() if operation not in VIEWS)
    most = ", ".join(f"{number} {operation}" for operation, number in step.most_common(7))
    return f"| {name} | {step.total():,} | {kernels:,} | {step['Concatenate']:,} | {most} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8, 16])
    options = parser.parse_args()
    model = make_tiny("qwen3", num_hidden_layers=options.layers)
    print("| decode step | graph nodes | without views | concatenations | most frequent |")
    print("|---|---:|---:|---:|---|")
    print(_row("mlx-lm, generate_step", lambda: generate_step(model)))
    for streams in options.streams:
        print(_row(f"mlx-lm, BatchGenerator, {streams}", partial(batch_generator, model, streams=streams)))
        for turn in (1, 2):
            print(_row(f"Holdfast, {streams}, turn {turn}", partial(holdfast_step, model, streams=streams, turn=turn)))


if __name__ == "__main__":
    main()
