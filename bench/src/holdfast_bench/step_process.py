"""Measures an ordinary step of the engine after a context, in a separate process: the minimum for a turn.

One sequence stays in the engine. A step prefills the next tokens of its prompt and samples one;
it does not look up, copy, store or send anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.plan import Span, StepPlan
from holdfast.worker.engine.probe import choose_layout
from holdfast_bench.engine_steps import loaded_model, prefill, random_tokens, request_of
from holdfast_bench.scenarios.next_turn import StepJob

_SPARE_TOKENS = 8192  # room for steps
_WARM_STEPS = 3


def prepared(job: str) -> Callable[[str], list[float]]:
    """Prefill the context; returns what measures steps over some tokens each."""
    wanted = msgspec.json.decode(job, type=StepJob)
    loaded = loaded_model(wanted.folder)
    runner = choose_layout(loaded.model, vocab_size=loaded.vocab_size)
    engine = Engine(runner, vocab_size=loaded.vocab_size)
    count = wanted.context_tokens + _SPARE_TOKENS
    tokens = random_tokens(count, loaded, seed=wanted.context_tokens)
    request = request_of(tokens, max_tokens=1)
    engine.open(request, capacity_tokens=count)
    prefill(engine, request.request_id, wanted.context_tokens, samples=False)
    position = wanted.context_tokens

    def seconds(tokens: int) -> float:
        nonlocal position
        time.sleep(wanted.pause_seconds)
        span = Span(request_id=request.request_id, start=position, tokens=tokens, samples=True)
        began = time.perf_counter()
        engine.collect(engine.dispatch(StepPlan(spans=(span,))))
        position += tokens
        return time.perf_counter() - began

    for warm in range(1, _WARM_STEPS + 1):
        seconds(warm)
    return lambda line: [seconds(each) for each in msgspec.json.decode(line, type=list[int])]
