"""Tests of decode steps with a tiny model."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from holdfast.worker.engine.engine import Engine, PendingStep
from holdfast.worker.engine.plan import StepPlan
from holdfast.worker.engine.probe import choose_layout
from holdfast_bench import engine_steps
from holdfast_bench.comparison import changes_between
from holdfast_bench.engine_process import attention_share, drawing_seconds, parts_of
from holdfast_bench.engine_steps import BareForward, EngineSteps, alternate, request_of
from holdfast_bench.results import Results
from tests.fakes.tiny_models import VOCAB_SIZE, kept_tiny

PROMPTS = [[5, 17, 3, 99, 42, 7], [11, 12, 13, 14, 15, 16]]


class TimedEngine(Engine):
    """An engine with steps of 1 ms on a fake clock."""

    step_seconds = 0.001
    clock_seconds = 0.0

    def dispatch(self, plan: StepPlan) -> PendingStep:
        TimedEngine.clock_seconds += self.step_seconds
        return super().dispatch(plan)

    @classmethod
    def perf_counter(cls) -> float:
        return TimedEngine.clock_seconds

    @classmethod
    def process_time(cls) -> float:
        return TimedEngine.clock_seconds


class SlowerEngine(TimedEngine):
    step_seconds = 0.0011


def engine_steps_of(model: Any, engine_class: type[Engine] = Engine) -> EngineSteps:
    engine = engine_class(choose_layout(model, vocab_size=VOCAB_SIZE), vocab_size=VOCAB_SIZE)
    requests = [request_of(prompt, max_tokens=58, number=row) for row, prompt in enumerate(PROMPTS)]
    return EngineSteps(engine, requests)


def measured(engine_class: type[Engine]) -> tuple[Results, dict[str, list[list[int]]]]:
    model = kept_tiny("qwen3")
    steppers = {
        "engine": engine_steps_of(model, engine_class),
        "bare": BareForward(model, PROMPTS, pipelined=False),
        "bare, pipelined": BareForward(model, PROMPTS, pipelined=True),
    }
    case, tokens = alternate("2 streams", steppers, rounds=5, steps=1, noise_rounds=1)
    return Results(kind="engine", cases=[case]), tokens


def test_the_engine_generates_the_same_tokens_as_the_bare_forward_pass() -> None:
    results, tokens = measured(Engine)
    assert tokens["engine"] == tokens["bare"] == tokens["bare, pipelined"]
    assert [len(row) for row in tokens["engine"]] == [5, 5]
    assert all(len(each.pooled("step_seconds")) == 5 for each in results.cases[0].contenders)


def test_compare_detects_a_slower_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_steps, "time", TimedEngine)
    before, after = measured(TimedEngine)[0], measured(SlowerEngine)[0]
    (change,) = [
        change for change in changes_between(before, after) if change.metric == "step_seconds"
    ]
    assert (change.before, change.after) == pytest.approx((0.001, 0.0011))
    assert change.verdict == "worse"


def test_profiling_times_the_parts_and_restores_the_attention_function() -> None:
    model = kept_tiny("qwen3")
    ours = engine_steps_of(model)
    parts = parts_of(ours, count=3)
    assert {name: len(values) for name, values in parts.items()} == {
        "layout_seconds": 3,
        "collect_seconds": 3,
    }
    module: Any = sys.modules["mlx_lm.models.qwen3"]
    attention = module.scaled_dot_product_attention
    for stepper in (ours, BareForward(model, PROMPTS, pipelined=False)):
        share = attention_share(model, stepper, steps=2)
        assert share is not None
        assert 0.0 < share < 1.0
    assert module.scaled_dot_product_attention is attention
    assert all(seconds > 0 for seconds in drawing_seconds(rows=2, vocab_size=VOCAB_SIZE))
