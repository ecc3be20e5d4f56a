"""Tests of the profile of a step."""

from __future__ import annotations

import sys

from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.probe import choose_layout
from holdfast_bench.engine_profile import attention_share, drawing_seconds, parts_of
from holdfast_bench.engine_steps import BareForward, EngineSteps, requests_of
from tests.fakes.tiny_models import VOCAB_SIZE, kept_tiny

PROMPTS = [[5, 17, 3, 99, 42, 7]]


def test_profiling_times_the_parts_and_restores_the_attention_function() -> None:
    model = kept_tiny("qwen3")
    engine = Engine(choose_layout(model, vocab_size=VOCAB_SIZE), vocab_size=VOCAB_SIZE)
    ours = EngineSteps(engine, requests_of(PROMPTS, max_tokens=58))
    parts = parts_of(ours, count=3)
    assert {name: len(values) for name, values in parts.items()} == {
        "layout_seconds": 3,
        "collect_seconds": 3,
    }
    attention = sys.modules["mlx_lm.models.qwen3"].scaled_dot_product_attention  # type: ignore[attr-defined]
    for stepper in (ours, BareForward(model, PROMPTS, pipelined=False)):
        share = attention_share(model, stepper, steps=2)
        assert share is not None
        assert 0.0 < share < 1.0
    assert sys.modules["mlx_lm.models.qwen3"].scaled_dot_product_attention is attention  # type: ignore[attr-defined]
    assert all(seconds > 0 for seconds in drawing_seconds(rows=2, vocab_size=VOCAB_SIZE))
