"""Measures an ordinary step of the engine after a context: the minimum for a turn.

Imports MLX.

One sequence stays in the engine. A step prefills the next tokens of its prompt and samples one;
it does not look up, copy, store or send anything.
"""

from __future__ import annotations

import importlib
import random
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from holdfast.config import ModelSettings
from holdfast.worker.cpu.blas import prepare_blas
from holdfast_bench.scenarios.next_turn import StepJob

_SPARE_TOKENS = 8192  # room for steps
_CHUNK_TOKENS = 512
_WARM_STEPS = 3


class _LiveSequence:
    def __init__(self, job: StepJob) -> None:
        prepare_blas(job.threads)  # before the first import of MLX
        importlib.import_module("holdfast.worker.loop.device").use_device("auto")
        load = importlib.import_module("holdfast.worker.engine.load")
        probe = importlib.import_module("holdfast.worker.engine.probe")
        loaded = load.load_model(
            Path(job.folder), ModelSettings(), progress=lambda stage, fraction: None
        )
        runner = probe.choose_layout(loaded.model, vocab_size=loaded.vocab_size)
        self._plan = importlib.import_module("holdfast.worker.engine.plan")
        self._engine = importlib.import_module("holdfast.worker.engine.engine").Engine(
            runner, vocab_size=loaded.vocab_size
        )
        source = random.Random(job.context_tokens)
        count = job.context_tokens + _SPARE_TOKENS
        self._request = _request([source.randrange(loaded.vocab_size) for _ in range(count)])
        self._engine.open(self._request, capacity_tokens=count)
        self._position = 0
        while self._position < job.context_tokens:
            self.seconds(min(_CHUNK_TOKENS, job.context_tokens - self._position), samples=False)
        for tokens in range(1, _WARM_STEPS + 1):
            self.seconds(tokens)

    def seconds(self, tokens: int, *, samples: bool = True) -> float:
        """Seconds of one step over the next tokens."""
        span = self._plan.Span(
            request_id=self._request.request_id,
            start=self._position,
            tokens=tokens,
            samples=samples,
        )
        plan = self._plan.StepPlan(spans=(span,))
        began = time.perf_counter()
        self._engine.collect(self._engine.dispatch(plan))
        ended = time.perf_counter()
        self._position += tokens
        return ended - began


def _request(tokens: list[int]) -> Any:
    commands = importlib.import_module("holdfast.wire.commands")
    requests = importlib.import_module("holdfast.wire.requests")
    return commands.SequenceRequest(
        request_id="live",
        prompt_token_ids=commands.TokenIds.of(tokens),
        max_tokens=1,
        sampling=requests.SamplingParams(temperature=0.0, seed=0),
    )


def _main() -> None:
    job = msgspec.json.decode(sys.argv[1], type=StepJob)
    sequence = _LiveSequence(job)
    _say("ready")
    for line in sys.stdin:
        seconds = []
        for count in msgspec.json.decode(line, type=list[int]):
            time.sleep(job.pause_seconds)
            seconds.append(sequence.seconds(count))
        _say(msgspec.json.encode(seconds).decode())
    importlib.import_module("mlx.core").clear_streams()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _main()
